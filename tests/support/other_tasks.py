"""Records, and tables of a job file, for tasks other than classification."""

import numpy as np
import torch

from staddle.algorithms.data.dataset import Dataset

FEATURES = 6
SIDES = (8, 6)  # of an image
SEGMENTED = {
    "name": "unet",
    "input": [1, *SIDES],
    "options": {"widths": [8, 8]},
    "classes": 3,
}
TASKS = {
    "regression": {"kind": "regression", "range": [0.0, 40.0], "unit": "days"},
    "multilabel": {"kind": "multilabel"},
    "survival": {"kind": "survival", "cuts": [1.0, 2.0, 4.0]},
    "segmentation": {"kind": "segmentation"},
}
MODELS = {
    "regression": {"outputs": 1},
    "multilabel": {"classes": 3},
    "survival": {"outputs": 3},
    "segmentation": SEGMENTED,
}
METRICS = {
    "regression": {"targets": True},
    "multilabel": {"confusion": True, "score_bins": 8},
    "survival": {"risk_bins": 16},
    "segmentation": {},
}
SILOS = ("a", "b", "c", "d")


def records(kind, n, seed):
    """``n`` records whose truth a small model can learn, at each silo with another offset."""
    rng = np.random.default_rng(seed)
    if kind == "segmentation":
        return images(n, rng, 0.2 * (seed % 5))
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


def images(n, rng, offset):
    """Three classes by brightness, each a region of its own, in some noise."""
    z = rng.normal(size=(n, 2, 2)).repeat(SIDES[0] // 2, 1).repeat(SIDES[1] // 2, 2)
    y = torch.from_numpy(np.digitize(z, (0.3, 1.2)).astype(np.uint8))
    x = 3 * z + 0.1 * rng.normal(size=z.shape) + offset
    return Dataset(torch.from_numpy(x.astype(np.float32))[:, None], y)


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
        "purpose": "For a test",
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
