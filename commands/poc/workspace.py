"""The folder of ``staddle poc``: that of a local federation, with what it takes to come back to it.

::
    <folder>/poc.json              how it was made; written last
    <folder>/jobs/local.toml       each silo on its own, and
    <folder>/jobs/first.toml       the first federated job: what ``poc run`` runs
    <folder>/coordinator/coordinator.log, <silo>/<silo>.log
    <folder>/<silo>/data.csv       a copy of the silo's records, or data.npz
    <folder>/<silo>/exported.toml  in place of silo.toml, once the silo has moved to another machine
"""

import os
import re
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...algorithms.data.dataset import Dataset, digits, save_npz
from ...algorithms.job.job import Job
from ...algorithms.partition.draw import dirichlet
from ...coordinator import config as coordinator_configs
from ...errors import LocalError, check_local
from ...files.documents import (
    Strict,
    canonical_json,
    parse_canonical,
    read_bytes,
    write_all,
    write_atomic,
)
from ...security.identity.keys import ID_PATTERN
from ...security.log.lock import claimed
from ...silo.check import check
from ..federation import local_federation
from ..federation.background import BackgroundDaemon
from ..federation.demo import ALPHA, SEED, TIMING, TRAINING
from ..federation.local_federation import LocalFederation
from ..silo.data import Contract
from ..terminal.job_example import MODEL
from .tables import SiloTable, SiloTables, TableForm, read_table

RECORD = "poc.json"
EXPORTED = "exported.toml"
BASELINE, FIRST = "local", "first"
METHODS: Mapping[str, str] = {BASELINE: "local", FIRST: "pfedsim"}
ROUNDS = 20
SILOS = 4
SPARE = 2  # shares of the digits for silos that are added later
PORTS = range(7443, 7543)  # below those that systems give to connections
HOLD_SECONDS = 2  # of a poll, between which agents look whether their files have changed
TAKEN_NAMES = {"founder", "operator", "coordinator", "jobs"}  # folders next to the silos'


class Choices(TableForm):
    """What ``poc up`` was asked for, with paths as texts."""

    silos: int = SILOS
    data: tuple[str, ...] = ()
    port: int = 0  # the first free one


class WorkspaceRecord(Strict):
    """The file ``poc.json``; ``records`` has the number of each silo's records."""

    version: Literal[1] = 1
    choices: Choices
    records: dict[str, int]


@dataclass(frozen=True)
class Workspace:
    """A federation that ``poc up`` made."""

    federation: LocalFederation
    record: WorkspaceRecord

    @property
    def choices(self) -> Choices:
        """What ``poc up`` was asked for when it made it."""
        return self.record.choices

    @property
    def folder(self) -> Path:
        """All that it has."""
        return self.federation.folder

    @property
    def address(self) -> str:
        """Where the coordinator listens: host:port."""
        return coordinator_configs.load(self.federation.coordinator_config).listen

    @property
    def operator(self) -> Path:
        """The operator's configuration."""
        return self.folder / "operator.toml"

    @property
    def here(self) -> list[str]:
        """The silos that were not exported."""
        silos = self.federation.silos
        return [silo for silo in silos if self.federation.silo_config(silo).exists()]

    @property
    def coordinator(self) -> BackgroundDaemon:
        """The coordinator's daemon."""
        config = self.federation.coordinator_config
        return BackgroundDaemon(
            "coordinator", "staddle.coordinator", "listening", config, config.parent / "state"
        )

    def agent(self, silo: str) -> BackgroundDaemon:
        """A silo's agent."""
        config = self.federation.silo_config(silo)
        return BackgroundDaemon(
            silo, "staddle.silo", "connected", config, self.federation.state(silo)
        )

    @property
    def daemons(self) -> list[BackgroundDaemon]:
        """All that run here, in the order in which they start and stop."""
        return [self.coordinator, *map(self.agent, self.here)]

    @property
    def _drafted(self) -> list[Path]:
        """All drafted job files; those for more silos end in the version of their roster."""
        return [
            path
            for path in (self.folder / "jobs").iterdir()
            if re.fullmatch(rf"({BASELINE}|{FIRST})(-\d+)?\.toml", path.name)
        ]

    @property
    def jobs(self) -> dict[str, Path]:
        """The newest drafted job files, by what they are of: BASELINE and FIRST."""
        newest = sorted(self._drafted, key=lambda path: int(path.stem.partition("-")[2] or 0))
        found = {path.stem.partition("-")[0]: path for path in newest}
        return {kind: found[kind] for kind in METHODS}

    def sign(self, source: Path) -> Job:
        """Have the operator sign a job file; LocalError if a silo here would decline it."""
        job = local_federation.sign_file(self.federation, source)
        signed = source.with_suffix(".json")
        for silo in self.here:
            report = check(self.federation.silo_config(silo), [signed])
            faults = [f"{one.name}: {one.text}" for one in report.findings if not one.ok]
            advice = (
                f"What may leave is for you to say, in {self.folder / silo}/policy.toml; --allow"
                " drafts the policies here again, to allow this job"
            )
            said = [f"{silo} would decline {source}, or is not ready", *faults, advice]
            check_local(not faults, "\n".join(said))
        return job

    def write_record(self) -> None:
        """Write ``poc.json``: whoever finds it finds all else."""
        document = canonical_json(self.record.model_dump(mode="json"))
        write_atomic(self.folder / RECORD, document + b"\n")

    def draft_jobs(self, described: Mapping[str, Any], end: str = "") -> None:
        """Write the job files of all silos, blind where that can be.

        ``described`` has the tables that say what a record is; ``end`` is the end of the names.
        """
        records = list(self.record.records.values())
        for name, method in METHODS.items():
            document = {
                "version": 1,
                "name": f"{name}{end}",
                "seed": SEED,
                "rounds": ROUNDS,
                "silos": list(self.federation.silos),
                "purpose": "Try on one machine what these silos gain when they train together",
                "method": {"name": method},
                "training": dict(TRAINING),
                **described,
            }
            local_federation.write_job(
                self.federation,
                local_federation.blind_with_private_weights(document, records),
            )

    def place(self, silo: str, own: SiloTable | Dataset, contract: Contract) -> None:
        """Put records into a silo's folder, and configure it for them and the drafted jobs."""
        folder = self.folder / silo
        if isinstance(own, Dataset):
            save_npz(folder / "data.npz", own)
            self._configure(silo, {"file": "data.npz"})
            return
        copy = folder / f"data{own.path.suffix}"
        # For its owner alone, before a record is in it.
        copy.touch(0o600)
        shutil.copyfile(own.path, copy)
        self._configure(silo, own.data(self.choices, contract, copy.name))

    def policy(self, more: Iterable[Path] = ()) -> str:
        """A policy that allows the drafted jobs and ``more`` job files, and nothing else."""
        files = sorted({*self._drafted, *more})
        return local_federation.policy_text(
            [Job.from_toml(path).for_federation() for path in files]
        )

    def policy_file(self, silo: str) -> Path:
        """A silo's policy."""
        return self.folder / silo / "policy.toml"

    def renew_policies(self, text: str, silos: Iterable[str]) -> None:
        """Write silos' policies, and return once each agent that runs decides by them."""
        data = text.encode()
        changed = [silo for silo in silos if self.policy_file(silo).read_bytes() != data]
        watched = [self.agent(silo).watch() for silo in changed]
        write_all([(self.policy_file(silo), data) for silo in changed], 0o600)
        for each in filter(None, watched):
            each.wait_for("policy.reloaded")

    def _configure(self, silo: str, data: Mapping[str, Any]) -> None:
        """Write a silo's configuration, and a policy that allows the drafted jobs."""
        local_federation.configure_silo(self.federation, silo, self.address, data, self.policy())


def opened(folder: Path) -> Workspace:
    """The workspace in a folder; LocalError for anything else."""
    record = folder / RECORD
    check_local(
        record.is_file(),
        f"{folder}: no workspace of staddle poc up, which has a file {RECORD}; choose another"
        " folder, or make one with: staddle poc up",
    )
    # Whoever owns the folder says in it which process is to be stopped.
    own = folder.stat().st_uid == os.getuid()
    check_local(own, f"{folder}: belongs to another user; work with it as that user")
    document = parse_canonical(read_bytes(record), WorkspaceRecord, str(record))
    return Workspace(local_federation.opened(folder), document)


@contextmanager
def alone(folder: Path) -> Iterator[Workspace]:
    """The workspace, on which no other command of ``staddle poc`` works while the block runs."""
    opened(folder)
    with claimed(folder):
        yield opened(folder)


def make(folder: Path, choices: Choices) -> tuple[Workspace, list[str]]:
    """Make a workspace in an empty folder; it, and what to look at in the files of records.

    Nothing is left in the folder if that fails.
    """
    new = folder / ".new"
    # Left by a command that was killed here: we hold the folder.
    shutil.rmtree(new, ignore_errors=True)
    check_local(
        not any(folder.iterdir()),
        f"{folder}: not empty, and no workspace of staddle poc up, which has a file {RECORD};"
        " choose a new or an empty folder",
    )
    # What is wrong with the records shows before anything is made.
    tables = read_tables(choices)
    try:
        _fill(new, choices, tables)
        # Whoever finds the record finds all others.
        for path in sorted(new.iterdir(), key=lambda path: path.name == RECORD):
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return opened(folder), list(tables.notes() if tables else ())


def read_tables(choices: Choices) -> SiloTables | None:
    """The files of records, by silo; None for the digits. LocalError if they do not go together."""
    if not choices.data:
        return None
    files = {path.stem.lower().replace("_", "-"): path for path in map(Path, choices.data)}
    distinct = len(files) == len(choices.data)
    check_local(distinct, "--data: two files have one name; a silo is named after its file")
    check_local(len(files) > 1, "--data: one file; a federation has two silos or more")
    target = bool(choices.target)
    check_local(target, "--data: give --target COLUMN, which has what is to be predicted")
    tables = SiloTables(choices, {silo: read_table(own, choices) for silo, own in files.items()})
    check_names(files)
    tables.check()
    return tables


def check_names(silos: Collection[str]) -> None:
    """LocalError for a name that no silo can have, or whose folder would be another's."""
    wrong = ", ".join(sorted(name for name in silos if not re.fullmatch(ID_PATTERN, name)))
    rule = "a silo is named by 1 to 64 of a-z, 0-9 and '-'"
    check_local(not wrong, f"{wrong}: {rule}; rename it, or its file")
    taken = ", ".join(sorted(TAKEN_NAMES & set(silos)))
    check_local(not taken, f"a silo cannot be called {taken}, as a folder here is; rename its file")


def _fill(folder: Path, choices: Choices, tables: SiloTables | None) -> None:
    silos = [f"silo-{n + 1}" for n in range(choices.silos)]
    described, contract = {"model": dict(MODEL)}, Contract()
    own: Mapping[str, SiloTable | Dataset]
    if tables:
        own, described, contract = tables.tables, tables.described, tables.contract
    else:
        own = dict(zip(silos, digit_shards(choices), strict=False))

    records = {silo: len(each) for silo, each in own.items()}
    federation = local_federation.make(folder, list(records))
    workspace = Workspace(federation, WorkspaceRecord(choices=choices, records=records))
    address = f"127.0.0.1:{choices.port or _free_port()}"
    timing = {**TIMING, "hold_seconds": HOLD_SECONDS}
    local_federation.write_coordinator(federation, (), timing, address)
    local_federation.write_operator(federation, address)
    local_federation.write_operator(federation, address, "founder")
    workspace.draft_jobs(described)
    for silo, each in own.items():
        workspace.place(silo, each, contract)
    workspace.write_record()


def digit_shards(choices: Choices) -> list[Dataset]:
    """The digits' shares of the first silos, and ``SPARE`` more for silos that are added."""
    records = digits()
    # At least 20 records each: some are held out for the test.
    parts = dirichlet(records.y.numpy(), choices.silos + SPARE, ALPHA, SEED, minimum=20)
    return [records.take(part) for part in parts]


def _free_port() -> int:
    for port in PORTS:
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise LocalError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free; give --port")
