"""A federation on this machine for a notebook or a test: real processes, keys, TLS and ledgers."""

import atexit
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..algorithms.data.dataset import Dataset
from ..algorithms.job.job import Job
from ..algorithms.partition.options import KINDS, deal
from ..bundle.frames import LoadedModel, load_model
from ..commands.federation import local_federation
from ..commands.federation.processes import ChildProcess
from ..errors import AbortedError, LocalError
from ..files.documents import validate
from ..files.tagged import of_kind
from .operator import OperatorClient
from .partitions import Dirichlet
from .records import records_of

TIMING = {"admission_seconds": 120, "beat_seconds": 2, "hold_seconds": 10}
START_SECONDS = 120.0
SETTINGS: Mapping[str, Any] = {
    "version": 1,
    "seed": 1,
    "purpose": "Try on one machine how silos train together",
    "rounds": 5,
    "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
}


class Federation:
    """A coordinator, silos and an operator on this machine, in one folder.

    End it with ``close``, or use it as a context manager; it also ends with the program.
    """

    def __init__(self, folder: Path, records: Mapping[str, Dataset]) -> None:
        self.records = dict(records)
        self._made = local_federation.make(folder, tuple(records))
        self._jobs: list[Job] = []
        self._daemons: list[ChildProcess] = []
        self._address, self._configured = "127.0.0.1:0", ""
        self._operator: OperatorClient | None = None
        atexit.register(self.close)

    @classmethod
    def local(
        cls,
        silos: int | Sequence[str] = 4,
        *,
        data: Any,
        partition: Mapping[str, Any] | None = None,
        folder: Path | str | None = None,
    ) -> Self:
        """Make keys, a signed roster and the silos' records; processes begin with the first job.

        ``data`` are records as ``Experiment`` takes them, dealt out by ``partition`` (default:
        ``Dirichlet(0.5, silos)``), or a dictionary of records by silo. ``folder`` is new or empty;
        left out, it is a temporary one.
        """
        place = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="staddle-federation-"))
        if isinstance(data, Mapping):
            return cls(place, {name: records_of(own) for name, own in data.items()})
        names = silos if not isinstance(silos, int) else [f"silo-{n + 1}" for n in range(silos)]
        whole = records_of(data)
        given = {"kind": "dirichlet", **(partition or Dirichlet(0.5, silos=len(names)))}
        table: Any = validate(given, type(of_kind(given, KINDS)), "partition")
        parts = deal(table, whole.y.numpy(), whole.sources)
        if len(parts) != len(names):
            raise LocalError(f"partition: deals out {len(parts)} shares to {len(names)} silos")
        return cls(place, dict(zip(names, map(whole.take, parts.values()), strict=True)))

    @property
    def folder(self) -> Path:
        """All that the federation has: keys, configurations, ledgers, models (docs/operate.md)."""
        return self._made.folder

    @property
    def silos(self) -> tuple[str, ...]:
        """Their ids."""
        return self._made.silos

    @property
    def operator(self) -> OperatorClient:
        """The operator's client; LocalError before the first job."""
        if self._operator is None:
            raise LocalError("no process runs before the first job: call submit")
        return self._operator

    def submit(self, name: str, *, method: Any, model: Any, **settings: Any) -> "RunningJob":
        """Sign a job and submit it; each silo's policy is drafted to allow what it needs.

        ``method`` and ``model`` are names or tables, ``settings`` other keys of a job file, such as
        ``rounds``, ``training``, ``security`` and ``privacy``. LocalError says what is wrong.
        """
        document = {**SETTINGS, "name": name, "silos": list(self.silos), **settings}
        for key, given in {"method": method, "model": model}.items():
            document[key] = {"name": given} if isinstance(given, str) else dict(given)
        self._jobs.append(local_federation.sign_job(self._made, document))
        self._configure()
        signed = self._made.folder / "jobs" / f"{name}.json"
        self.operator.submit(signed)
        return RunningJob(self, name)

    def model(self, job: str, silo: str, packages: Sequence[str] | None = ()) -> LoadedModel:
        """The model that a silo kept when a job ended."""
        return load_model(self._made.state(silo) / "jobs" / job / "model", packages)

    def check(self) -> None:
        """AbortedError, with the end of its log, if a process has ended on its own."""
        for daemon in self._daemons:
            daemon.check()

    def close(self) -> None:
        """End all processes; the folder stays."""
        atexit.unregister(self.close)
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self) -> None:
        """Begin the processes, or begin them again where the new job needs another policy."""
        wanted = local_federation.policy_text(self._jobs)
        if wanted == self._configured:
            return
        self._stop()
        local_federation.write_coordinator(self._made, (), TIMING, self._address)
        coordinator = self._begun("coordinator", self._made.coordinator_config)
        self._address = str(coordinator.wait_for("listening", START_SECONDS)["address"])
        for silo, own in self.records.items():
            local_federation.write_silo(self._made, silo, self._address, own, self._jobs)
            self._begun(silo, self._made.silo_config(silo))
        self._operator = OperatorClient(local_federation.write_operator(self._made, self._address))
        self._configured = wanted

    def _begun(self, name: str, config: Path) -> ChildProcess:
        program = "staddle.coordinator" if name == "coordinator" else "staddle.silo"
        daemon = ChildProcess(name, ("-m", program), config)
        self._daemons.append(daemon)
        return daemon

    def _stop(self) -> None:
        if self._operator is not None:
            self._operator.close()
            self._operator = None
        for daemon in self._daemons:
            daemon.stop()
        self._daemons.clear()
        self._configured = ""


class RunningJob:
    """A job of a local federation."""

    def __init__(self, federation: Federation, name: str) -> None:
        self.federation, self.name = federation, name
        self.model = partial(federation.model, name)

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Each round as it closes, with what was measured; returns once the job has ended.

        AbortedError where it failed.
        """
        for report in self.federation.operator.watch(self.name):
            yield from report["closed"]
        if report["outcome"] != "completed":
            raise AbortedError(f"job {self.name} {report['outcome']}: {report['reason']}")

    def wait(self) -> list[dict[str, Any]]:
        """All rounds, once the job has ended."""
        return list(self.rounds())

    def status(self) -> dict[str, Any]:
        """What the coordinator says of it."""
        return self.federation.operator.show(self.name)
