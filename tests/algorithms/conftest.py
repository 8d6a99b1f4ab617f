import numpy as np
import pytest
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.job import Job, JobFile

TRAINING = {"epochs": 1, "batch_size": 8, "lr": 0.1}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_job():
    def make(method="local", options=None, model=None, training=None, **fields):
        document = {
            "version": 1,
            "name": "test",
            "seed": 7,
            "rounds": 4,
            "silos": ["a", "b", "c"],
            "method": {"name": method, "options": options or {}},
            "model": {"name": "cnn-digits", "classes": 3, **(model or {})},
            "training": {**TRAINING, **(training or {})},
            **fields,
        }
        return Job.from_file(JobFile.model_validate(document), "job.toml")

    return make


@pytest.fixture
def make_data():
    def make(n, seed=0, classes=3, shape=(1, 8, 8)):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, classes, n)
        x = rng.normal(size=(n, *shape)) + y.reshape(-1, *(1 for _ in shape))
        return Dataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64)))

    return make


@pytest.fixture
def make_shards(make_data):
    def make(job, n=24):
        return {
            silo: (make_data(n + 5 * i, i), make_data(12, 100 + i))
            for i, silo in enumerate(job.silos)
        }

    return make
