"""A federation on loopback: real processes, real TLS."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from federation.fork_server import ForkServer
from support.split_keys import fix_split

from staddle.algorithms.data.dataset import Dataset, digits
from staddle.algorithms.job.job import Job
from staddle.algorithms.partition.draw import dirichlet
from staddle.commands.federation import local_federation
from staddle.commands.federation.local_federation import LocalFederation
from staddle.commands.federation.processes import ChildProcess, Launcher, launched

TIMING = {"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5}
CRASHING = str(Path(__file__).with_name("crashing.py"))


def job_document(
    name: str, silos: Sequence[str], method: str = "fedavg", **changes: Any
) -> dict[str, Any]:
    options, model = changes.pop("options", None), changes.pop("model", "cnn-digits")
    return {
        "version": 1,
        "name": name,
        "seed": 11,
        "rounds": 2,
        "silos": list(silos),
        "round_timeout": 60,
        **changes,
        "method": {"name": method, **({"options": options} if options else {})},
        "model": {"name": model, "classes": 10},
        "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
    }


@cache
def records() -> Dataset:
    return digits()


def shards(silos: Sequence[str]) -> dict[str, Dataset]:
    parts = dirichlet(records().y.numpy(), len(silos), 0.3, 3, minimum=20)
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
        assert not re.search(r"[A-Za-z0-9+=]{65,}|(?:-?\d+\.\d+(?:e-?\d+)?[\s,]+){3}", text), (
            f"{path} holds values"
        )
        for line in text.splitlines():
            fields = json.loads(line) if line.startswith("{") else {}
            floats = [name for name, value in fields.items() if isinstance(value, float)]
            assert set(floats) <= {"seconds"}, line
            lists = [value for value in fields.values() if isinstance(value, list)]
            assert all(isinstance(item, str | int) for value in lists for item in value), line


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

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.stop()
        check_logs(self.federation.folder)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("fork_server") / "log")
    yield server
    server.close()


@pytest.fixture
def start(tmp_path: Path, fork_server: ForkServer) -> Any:
    """Makes a federation; ``shipped``: its daemons are the commands as a user starts them, not
    forked.
    """
    made: list[Running] = []

    def begin(*silos: str, shipped: bool = False) -> Running:
        running = Running(
            tmp_path / "federation", silos, launched if shipped else fork_server.launch
        )
        made.append(running)
        return running

    yield begin
    for running in made:
        running.stop()


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return job_document
