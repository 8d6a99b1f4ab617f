from pathlib import Path

import numpy as np
import pytest
import torch
from support.recording_gate import Made, make_federation

from staddle.algorithms.data.dataset import Dataset
from staddle.commands.federation import local_federation

SILOS = ("silo-a", "silo-b", "silo-c")


def records(n=40, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
    return Dataset(torch.from_numpy(x), torch.from_numpy(rng.integers(0, classes, n)))


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    return make_federation(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def data_file(tmp_path) -> Path:
    path = tmp_path / "data.npz"
    local_federation.save_npz(path, records())
    return path
