from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from staddle.algorithms.data import Dataset
from staddle.algorithms.job import Job
from staddle.commands import local_federation
from staddle.commands.local_federation import LocalFederation
from staddle.security import policy as policies
from staddle.security import roster as rosters
from staddle.security.identity import Keys, load_keys
from staddle.security.roster import Roster

SILOS = ("silo-a", "silo-b", "silo-c")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def records(n=40, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
    return Dataset(torch.from_numpy(x), torch.from_numpy(rng.integers(0, classes, n)))


@dataclass
class Made:
    """A federation's files, and what a test reads of them."""

    files: LocalFederation
    roster: Roster
    coordinator: Keys
    jobs: dict[str, Job] = field(default_factory=dict)

    def job(self, name, method="fedper", silos=SILOS, options=None, **changes) -> Job:
        """A job that the operator has signed."""
        document = {
            "version": 1,
            "name": name,
            "seed": 3,
            "rounds": 4,
            "silos": list(silos),
            **changes,
            "method": {"name": method, "options": options or ({"rho": 0.5} if method == "pfedsim" else {})},
            "model": {"name": "cnn-digits", "classes": 3},
            "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        }
        self.jobs[name] = local_federation.sign_job(self.files, document)
        return self.jobs[name]

    def signed(self, name) -> bytes:
        """The job file that the operator signed."""
        return (self.files.folder / "jobs" / f"{name}.json").read_bytes()

    def policy(self, *jobs, **replaced):
        """A policy that allows what these jobs give; ``replaced`` changes pieces of its text."""
        text = local_federation.policy_text(jobs)
        for old, new in replaced.pop("replace", {}).items():
            assert old in text, old
            text = text.replace(old, new)
        return policies.parse(text.encode(), "policy.toml")


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    files = local_federation.make(tmp_path_factory.mktemp("federation") / "local", SILOS)
    roster = rosters.load(files.folder / "roster.json")
    federation = Made(files, roster, load_keys(files.folder / "coordinator" / "keys"))
    federation.job("simple")
    federation.job("phases", "pfedsim")
    return federation


@pytest.fixture
def data_file(tmp_path) -> Path:
    path = tmp_path / "data.npz"
    local_federation.save_npz(path, records())
    return path
