"""A federation on loopback: real processes, real TLS."""

import base64
import errno
import json
import re
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from federation.fork_server import ForkServer
from support.ledgers import stored
from support.split_keys import fix_split

from staddle.algorithms.course import SiloState
from staddle.algorithms.data.dataset import Dataset, digits, split
from staddle.algorithms.engines.simulation import SimulationResult
from staddle.algorithms.job.job import Job
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.commands.federation import local_federation
from staddle.commands.federation.local_federation import LocalFederation
from staddle.commands.federation.operator_client import connected
from staddle.commands.federation.processes import ChildProcess, Launcher, launched
from staddle.commands.ledger.reconcile import compare
from staddle.security.identity import roster as rosters
from staddle.security.identity.roster import Roster
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.log.head import own_log_key
from staddle.silo.job_folder import JobFolder, split_key

# below those of ip_local_port_range (ip(7)), from which connections and port 0 are served
PORTS = range(12_000, 32_000)
TAKEN: list[socket.socket] = []
TIMING = {"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5}
MODEL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
KEPT = re.compile("after COMMIT of [^ ]+ ended ")
CRASHING = str(Path(__file__).with_name("crashing.py"))


def job_document(
    name: str, silos: Sequence[str], method: str = "fedavg", **changes: Any
) -> dict[str, Any]:
    options, model = changes.pop("options", None), changes.pop("model", "cnn-digits")
    training = {"epochs": 1, "lr": 0.05, **changes.pop("training", {})}
    table = {"name": model} if isinstance(model, str) else model
    return {
        "version": 1,
        "name": name,
        "seed": 11,
        "purpose": "For a test",
        "rounds": 2,
        "silos": list(silos),
        "round_timeout": 60,
        **changes,
        "method": {"name": method, **({"options": options} if options else {})},
        "model": {**table, "classes": 10},
        "training": training,
    }


def small_document(
    name: str, silos: Sequence[str], method: str = "fedavg", **changes: Any
) -> dict[str, Any]:
    """A job whose model, where no other is named, takes little time.

    A step of a perceptron takes a seventh of that of a small network with convolutions. But its
    classifier is twice as wide, and the rotation that hides one for pFedSim takes the square of the
    width.
    """
    model = "digits-cnn-a" if method == "pfedsim" else MODEL
    return job_document(name, silos, method, **{"model": model, **changes})


@cache
def records() -> Dataset:
    return digits()


def shards(silos: Sequence[str], alpha: float = 0.3, minimum: int = 20) -> dict[str, Dataset]:
    parts = dirichlet(records().y.numpy(), len(silos), alpha, 3, minimum=minimum)
    return {silo: records().take(part) for silo, part in zip(silos, parts, strict=True)}


def secrets_of(folder: Path) -> Iterator[str]:
    """The private keys and split keys below a folder, as they might be written in a log."""
    for path in folder.rglob("*.key"):
        data = path.read_bytes()
        yield from (
            data.hex(),
            base64.b64encode(data).decode(),
            base64.urlsafe_b64encode(data).decode(),
        )
        yield from (line for line in data.decode(errors="replace").split() if len(line) >= 32)


def check_logs(folder: Path) -> None:
    """No log holds a key, nor anything that could be a tensor: lists of floats, floats but times,
    long runs of text.
    """
    secrets = list(secrets_of(folder))
    for path in folder.rglob("*.log"):
        text = path.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], f"{path} holds a key"
        assert not re.search(r"[A-Za-z0-9+]{65,}|(?:-?\d+\.\d+(?:e-?\d+)?[\s,]+){3}", text), (
            f"{path} holds values"
        )
        for line in text.splitlines():
            fields = json.loads(line) if line.startswith("{") else {}
            floats = [name for name, value in fields.items() if isinstance(value, float)]
            assert set(floats) <= {"seconds"}, line
            lists = [value for value in fields.values() if isinstance(value, list)]
            assert all(isinstance(item, str | int) for value in lists for item in value), line


def free_port() -> int:
    """A port for a daemon that dies and listens again, of no other test of this machine.

    The kernel gives none of these to a connection: one that began while nobody listens would keep
    the port from who comes back.
    """
    for port in PORTS:
        # an abstract name (unix(7)) is ours until this process ends, and no file is left
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0staddle-test-port-{port}")
            with socket.socket() as found:
                found.bind(("127.0.0.1", port))
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            TAKEN.append(name)
            return port
    raise AssertionError(f"no port of {PORTS} is free")


class Running:
    """A federation whose daemons the test starts; all are stopped at its end."""

    def __init__(self, folder: Path, silos: Sequence[str], launch: Launcher) -> None:
        self.launcher = launch
        self.federation: LocalFederation = local_federation.make(folder, silos)
        self.data = shards(silos)
        self.daemons: dict[str, ChildProcess] = {}
        self.jobs: list[Job] = []
        self.address = ""

    def job(self, document: dict[str, Any]) -> Job:
        job = local_federation.sign_job(self.federation, document)
        self.jobs.append(job)
        return job

    def start_coordinator(self, **timing: float) -> ChildProcess:
        names = [job.name for job in self.jobs]
        local_federation.write_coordinator(self.federation, names, {**TIMING, **timing})
        return self.restart_coordinator()

    def launch(self, name: str, program: Sequence[str], config: Path) -> ChildProcess:
        self.daemons[name] = ChildProcess(name, program, config, self.launcher)
        return self.daemons[name]

    def restart_coordinator(self) -> ChildProcess:
        daemon = self.start_daemon("coordinator")
        self.address = str(daemon.wait_for("listening", 60)["address"])
        return daemon

    def write_silo(self, silo: str) -> None:
        """The configuration, and a fixed split."""
        local_federation.write_silo(self.federation, silo, self.address, self.data[silo], self.jobs)
        self.fix_split(silo)

    def fix_split(self, silo: str) -> None:
        fix_split(self.federation.state(silo), silo)

    def start_silo(self, silo: str) -> ChildProcess:
        return self.start_daemon(silo)

    def start_daemon(self, name: str, plan: str = "never") -> ChildProcess:
        """The coordinator, without waiting for it, or a silo; by a plan of ``crashing.py`` it
        dies.
        """
        role, config = "silo", self.federation.silo_config(name)
        if name == "coordinator":
            role, config = name, self.federation.coordinator_config
        if plan == "never":
            return self.launch(name, ("-m", f"staddle.{role}"), config)
        return self.launch(name, (CRASHING, role, plan), config)

    def start_silos(self, *silos: str) -> None:
        for silo in silos or self.data:
            self.write_silo(silo)
            self.start_silo(silo)

    def start_all(
        self, timing: Mapping[str, float], plans: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """All daemons, by their plans, at an address that stays."""
        self.configure(timing)
        for name in ("coordinator", *self.data):
            self.start_daemon(name, plans.get(name, "never"))

    def configure(self, timing: Mapping[str, float], jobs: Sequence[str] | None = None) -> None:
        """All configurations, for an address that stays."""
        self.address = f"127.0.0.1:{free_port()}"
        names = [job.name for job in self.jobs] if jobs is None else jobs
        local_federation.write_coordinator(self.federation, names, timing, self.address)
        for silo in self.data:
            self.write_silo(silo)

    # Its end, and what it leaves behind.

    def withdrawn(self, job: Job, *silos: str) -> None:
        """Wait until these silos have declined a job, in whichever order, and withdraw it.

        Until its admission is over it would pend, since their policies may change.
        """
        coordinator, left = self.daemons["coordinator"], set(silos)
        while left:
            declined = coordinator.wait_for("job.declined", 60)
            assert declined["job"] == job.name, declined
            left.remove(declined["silo"])
        with connected(local_federation.write_operator(self.federation, self.address)) as operator:
            operator.withdraw(job.name)
        assert coordinator.wait_for("job.ended", 60)["job"] == job.name

    def completed(self, seconds: float = 120, then: Callable[[Job], Any] = lambda _: None) -> None:
        """Wait until all jobs have ended well at the coordinator; ``then`` look at each."""
        left = {job.name: job for job in self.jobs}
        while left:
            ended = self.daemons["coordinator"].wait_for("job.ended", seconds)
            assert (ended["outcome"], ended["reason"]) == ("completed", ""), ended
            then(left.pop(ended["job"]))

    def finished(self, name: str, silos: Sequence[str] = ()) -> None:
        """Wait until these silos, or all, have the end of a job."""
        for silo in silos or self.data:
            daemon = self.daemons[silo]
            while (ended := daemon.event(150) or {}).get("event", "job.finished") != "job.finished":
                self.daemons["coordinator"].check()
            assert (ended.get("job"), ended.get("completed")) == (name, True), daemon.tail()

    def ended(self) -> None:
        """Wait until the coordinator has kept the job's end; it may have died before it said so."""
        coordinator, event = self.daemons["coordinator"], None
        while not (event and (event["event"] == "job.ended" or KEPT.search(str(event)))):
            event = coordinator.event(60)
            assert event, coordinator.tail()

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """What a daemon has logged, and ``crashing.py`` of its deaths; or events of these kinds."""
        lines = self.daemons[name].log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in found if not kinds or event["event"] in kinds]

    def killed(self, name: str) -> list[list[str]]:
        """The steps at which a daemon died, death by death."""
        return [event["at"] for event in self.events(name, "killed")]

    @property
    def roster(self) -> Roster:
        return rosters.load(self.federation.folder / "roster.json")

    @property
    def kept(self) -> Path:
        """The coordinator's state."""
        return self.federation.state("coordinator")

    def rows(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.kept / "coordinator.sqlite")) as database, database:
            return database.execute(query).fetchall()

    def job_folder(self, job: Job, silo: str) -> Path:
        return self.federation.state(silo) / "jobs" / job.name

    def shards(self, silos: Sequence[str] = ()) -> dict[str, tuple[Dataset, Dataset]]:
        """Records of each silo, as it splits them."""
        keys = {silo: split_key(self.federation.state(silo)) for silo in silos or self.data}
        return {silo: split(self.data[silo], key, 0.25) for silo, key in keys.items()}

    def model(self, job: Job, silo: str) -> SiloState:
        return state_from_bytes(JobFolder(self.job_folder(job, silo)).values.read_bytes())

    def check_models(self, job: Job, expected: SimulationResult, silos: Sequence[str] = ()) -> None:
        """Every silo of a job has what the simulation says, bit for bit."""
        for silo in silos or job.silos:
            found = self.model(job, silo)
            for part, tensors in expected.states[silo].parts.items():
                for name, value in tensors.items():
                    assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)

    def check_reports(self, job: Job, expected: SimulationResult) -> None:
        """Every silo of a job tells of its models what the simulation does."""
        for silo in job.silos:
            report = json.loads((self.job_folder(job, silo) / "report.json").read_text())
            last = expected.history[silo][-1]
            assert report["final"]["score_delivered"] == last.delivered.score
            assert report["final"]["score_trained"] == last.trained.score

    def records(self, silo: str, *types: str) -> list[dict[str, Any]]:
        """Records of a silo's ledger, or those of these types."""
        return stored(ledger_folder(self.federation.state(silo)), *types)

    def check_ledgers(self, silos: Sequence[str] = ()) -> None:
        """Those of the silos hold, and none contradicts the coordinator's."""
        for silo in silos or self.data:
            path = ledger_folder(self.federation.state(silo))
            key = own_log_key(self.federation.name, self.federation.keys(silo))
            assert verify(path, key=key).ok
            assert compare(path, self.kept / "ledger", self.roster).differences == ()

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.stop()
        check_logs(self.federation.folder)


@contextmanager
def running(folder: Path, silos: Sequence[str], launch: Launcher) -> Iterator[Running]:
    """A federation in a new folder, whose daemons are stopped at the end of the block."""
    made = Running(folder / "federation", silos, launch)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def start(tmp_path: Path, fork_server: ForkServer) -> Any:
    """Makes a federation; ``shipped``: its daemons are the commands as a user starts them, not
    forked.
    """
    with ExitStack() as stack:
        yield lambda *silos, shipped=False: stack.enter_context(
            running(tmp_path, silos, launched if shipped else fork_server.launch)
        )


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return small_document
