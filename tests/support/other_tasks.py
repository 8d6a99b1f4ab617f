"""Records, and tables of a job file, for tasks other than classification."""

import numpy as np
import torch

from staddle.algorithms.data.dataset import Dataset

FEATURES = 6
TASKS = {
    "regression": {"kind": "regression", "range": [0.0, 40.0], "unit": "days"},
    "multilabel": {"kind": "multilabel"},
    "survival": {"kind": "survival", "cuts": [1.0, 2.0, 4.0]},
}
MODELS = {
    "regression": {"outputs": 1},
    "multilabel": {"classes": 3},
    "survival": {"outputs": 3},
}
METRICS = {
    "regression": {"targets": True},
    "multilabel": {"confusion": True, "score_bins": 8},
    "survival": {"risk_bins": 16},
}
SILOS = ("a", "b", "c", "d")


def records(kind, n, seed):
    """``n`` records whose truth a linear model can learn, at each silo with another offset."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FEATURES))
    directions = np.random.default_rng(1).normal(size=(FEATURES, 3)) / FEATURES**0.5
    z = x @ directions + rng.normal(size=(n, 3)) * 0.1 + 0.2 * (seed % 5)
    match kind:
        case "regression":
            y = np.clip(20 + 6 * z[:, 0], 0, 40).astype(np.float32)
        case "multilabel":
            y = (z > 0.3).astype(np.int64)
        case "survival":
            time = rng.exponential(2.5 * np.exp(-z[:, 0])) + 1e-3
            y = np.stack([time.clip(max=6), time < 6], axis=1).astype(np.float32)
    return Dataset(torch.from_numpy(x.astype(np.float32))[:, None, None], torch.from_numpy(y))


def shards(kind, silos=SILOS, n=24):
    """Training and test records by silo; sizes differ."""
    return {
        silo: (records(kind, n + 5 * i, 10 + i), records(kind, 15 + i, 50 + i))
        for i, silo in enumerate(silos)
    }


def document(kind, **fields):
    """A job file of the task, with all that [metrics] can add."""
    return {
        "version": 1,
        "name": "other",
        "seed": 7,
        "rounds": 3,
        "silos": list(SILOS),
        "min_cohort": 3,
        "method": {"name": "fedavg"},
        "model": {"name": "mlp", "input": [1, 1, FEATURES], **MODELS[kind]},
        "task": TASKS[kind],
        "training": {"epochs": 2, "batch_size": 8, "lr": 0.1},
        "metrics": METRICS[kind],
        **fields,
    }
