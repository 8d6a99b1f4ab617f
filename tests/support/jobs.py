"""A small job and records for it, as most tests of algorithms want them."""

import numpy as np
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.security.blind.plan import simulated

TRAINING = {"epochs": 1, "batch_size": 8, "lr": 0.1}


def make_job(method="local", options=None, model=None, training=None, folder=None, **fields):
    document = {"version": 1, "name": "test", "seed": 7, "rounds": 4, "silos": ["a", "b", "c"]}
    document |= {"method": {"name": method, "options": options or {}}}
    document |= {"model": {"name": "cnn-digits", "classes": 3, **(model or {})}}
    document |= {"training": {**TRAINING, **(training or {})}, **fields}
    return Job.from_file(JobFile.model_validate(document), "job.toml", folder)


def make_data(n, seed=0, classes=3, shape=(1, 8, 8)):
    """Noise that is brighter the later the class."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    x = rng.normal(size=(n, *shape)) + y.reshape(-1, *(1 for _ in shape))
    return Dataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64)))


def run_private(job, shards, random):
    """A blind private job, simulated; ``random`` is the randomness of all silos and steps."""
    return simulate(
        job,
        shards,
        private=lambda _: PrivateSilo(MemoryAccount(job), lambda: random),
        exchanges=simulated(job),
    )


def make_shards(job, n=24):
    """n records at the first silo to train on, five more at each next."""
    return {
        silo: (make_data(n + 5 * i, i), make_data(12, 100 + i)) for i, silo in enumerate(job.silos)
    }
