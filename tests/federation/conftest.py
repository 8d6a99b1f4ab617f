"""A federation on loopback: real processes, real TLS."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from staddle.algorithms.data import Dataset, digits
from staddle.algorithms.job import Job
from staddle.algorithms.partition import dirichlet
from staddle.commands import local_federation
from staddle.commands.local_federation import LocalFederation
from staddle.commands.processes import Daemon

TIMING = {"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5}


def job_document(name: str, silos: Sequence[str], method: str = "fedavg", **changes: Any) -> dict[str, Any]:
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


def shards(silos: Sequence[str]) -> dict[str, Dataset]:
    records = digits()
    parts = dirichlet(records.y.numpy(), len(silos), 0.3, 3, minimum=20)
    return {silo: records.take(part) for silo, part in zip(silos, parts, strict=True)}


class Running:
    """A federation whose daemons the test starts; all are stopped at its end."""

    def __init__(self, folder: Path, silos: Sequence[str]) -> None:
        self.federation: LocalFederation = local_federation.make(folder, silos)
        self.data = shards(silos)
        self.daemons: dict[str, Daemon] = {}
        self.jobs: list[Job] = []
        self.address = ""

    def job(self, document: dict[str, Any]) -> Job:
        job = local_federation.sign_job(self.federation, document)
        self.jobs.append(job)
        return job

    def start_coordinator(self, **timing: float) -> Daemon:
        names = [job.name for job in self.jobs]
        local_federation.write_coordinator(self.federation, names, {**TIMING, **timing})
        return self.restart_coordinator()

    def restart_coordinator(self) -> Daemon:
        daemon = Daemon("coordinator", ("-m", "staddle.coordinator"), self.federation.coordinator_config)
        self.daemons["coordinator"] = daemon
        self.address = str(daemon.wait_for("listening", 60)["address"])
        return daemon

    def write_silo(self, silo: str) -> None:
        local_federation.write_silo(self.federation, silo, self.address, self.data[silo], self.jobs)

    def start_silo(self, silo: str) -> Daemon:
        daemon = Daemon(silo, ("-m", "staddle.silo"), self.federation.silo_config(silo))
        self.daemons[silo] = daemon
        return daemon

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.stop()


@pytest.fixture
def start(tmp_path: Path) -> Any:
    made: list[Running] = []

    def begin(*silos: str) -> Running:
        running = Running(tmp_path / "federation", silos)
        made.append(running)
        return running

    yield begin
    for running in made:
        running.stop()


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return job_document
