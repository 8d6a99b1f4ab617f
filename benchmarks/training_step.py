"""Measures a silo's training step against a hand-written PyTorch loop.

``python benchmarks/training_step.py [--epochs 5] [--threads 1] [MODEL:OPTIMISER …]``

Both train the same model from the same values on the same batches of random records, epoch by
epoch in turn, and must be alike after the first. The loop is what one would write: ``zero_grad``,
``backward``, ``step`` of torch.optim, and the losses read once per epoch. Prints the median seconds
of an epoch of each, and their ratio.
"""

import argparse
import statistics
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from staddle.algorithms.course import Parts, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.exchange.parts import Tensors
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.models.build import build, input_shape
from staddle.algorithms.training.loop import PLAIN, batches, train

CASES = ("lenet5:sgd", "lenet5:adam", "mlp:sgd", "mlp:adamw", "cnn-digits:sgd", "resnet18:sgd")
NORMS = {"resnet18": "batch"}
RECORDS, BATCH = 960, 32
OWN = {
    "sgd": ({"momentum": 0.9, "weight_decay": 1e-4}, torch.optim.SGD),
    "adam": ({"weight_decay": 1e-4}, torch.optim.Adam),
    "adamw": ({"weight_decay": 1e-2}, torch.optim.AdamW),
}


def job_of(model: str, optimiser: str) -> Job:
    """A job whose silos train so."""
    fields = {"optimiser": optimiser, "lr": 1e-3, "batch_size": BATCH, **OWN[optimiser][0]}
    document = {
        "version": 1,
        "name": "step",
        "seed": 1,
        "rounds": 1,
        "silos": ["a", "b"],
        "method": {"name": "local"},
        "model": {"name": model, "classes": 10, "norm": NORMS.get(model, "none")},
        "training": fields,
    }
    return Job.from_file(JobFile.model_validate(document), "benchmark")


def cross_entropy(parts: Parts, x: Tensor, y: Tensor, _: Tensors) -> Tensor:
    """The loss of each record."""
    logits = parts["classifier"](parts["extractor"](x))
    return nn.functional.cross_entropy(logits, y, reduction="none")


def measured(model: str, optimiser: str, epochs: int) -> tuple[float, float]:
    """Median seconds of an epoch: ours, and the loop's."""
    job = job_of(model, optimiser)
    rng = np.random.default_rng(0)
    shape = (RECORDS, *input_shape(job.model))
    data = Dataset(
        torch.from_numpy(rng.normal(size=shape).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 10, RECORDS)),
    )
    ours, parts = build(job.model, job.root), build(job.model, job.root)
    theirs = nn.Sequential(parts["extractor"], parts["classifier"])
    fields, kind = OWN[optimiser]
    stage = Stage(("extractor", "classifier"), 1, cross_entropy, job.training.rule)
    seconds: tuple[list[float], list[float]] = ([], [])
    for epoch in range(epochs):
        began = time.perf_counter()
        train(ours, stage, data, BATCH, np.random.default_rng(epoch), PLAIN)
        middle = time.perf_counter()
        # A stage begins with a fresh optimiser.
        step = kind(theirs.parameters(), lr=1e-3, **fields)
        theirs.train()
        losses = []
        for index in batches(RECORDS, BATCH, np.random.default_rng(epoch), wrap=False):
            x, y = data.x[torch.from_numpy(index)], data.y[torch.from_numpy(index)]
            step.zero_grad()
            loss = nn.functional.cross_entropy(theirs(x), y)
            loss.backward()
            step.step()
            losses.append(loss.detach())
        torch.stack(losses).tolist()
        # The first epoch sets things up.
        if epoch:
            seconds[0].append(middle - began)
            seconds[1].append(time.perf_counter() - middle)
        else:
            # Later, differences in the last bits grow, most of all those of Adam.
            flat = nn.utils.parameters_to_vector
            own = flat(p for part in ours.values() for p in part.parameters())
            apart = (own - flat(theirs.parameters())).norm()
            if not apart < 0.01 * own.norm():
                raise SystemExit(f"the two differ by {float(apart)}; no comparison")
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="MODEL:OPTIMISER")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for case in given.cases:
        ours, theirs = measured(*case.split(":"), given.epochs)
        sys.stdout.write(f"{case:<16} {ours:.3f} s  {theirs:.3f} s  {ours / theirs:.2f}\n")


if __name__ == "__main__":
    main()
