"""Measures the cost of a private step.

``python benchmarks/private_training.py [--models lenet5 resnet18] [--batches 32 128]``

For LeNet-5 and ResNet-18 on 3x32x32, both with group norm, one step of SGD on a batch whose records
are all in memory at a time, in three ways that take turns, step by step, in one process:

- *plain*: the step of a job without [privacy];
- *bare Opacus*: module and optimiser as ``PrivacyEngine.make_private`` gives them, with noise of
  torch's generator;
- *private*: the step of a private job, with noise that no seed makes again.

CPU milliseconds of the process, least and median of the repeats; what of them is noise, cutting and
adding up, and the optimiser's own rule (the rest is the loss and the gradients by record); ratios
of the least. Then by how much the resident set grows at its peak while a step is taken, in a fresh
process that holds the model already and has taken a step before.
"""

import argparse
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from clock import Clock, extra_memory
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.training import dp_sgd
from staddle.algorithms.training import loop as training
from staddle.algorithms.training.clipped_sum import ClippedSum
from staddle.algorithms.training.dp_sgd import Mechanism, Private
from staddle.algorithms.training.loop import PLAIN, Modules, Stepper
from staddle.security.dp.noise import Randomness

SIGMA, CLIP, LR, MOMENTUM = 1.0, 1.0, 0.05, 0.9
CLASSES = 10
PARTS = {  # what is measured within a step, and where it is called
    "noise": ((DPOptimizer, "add_noise"), (ClippedSum, "noisy")),
    "clip": ((DPOptimizer, "clip_and_accumulate"), (ClippedSum, "add")),
    "rule": (
        (torch.optim.SGD, "step"),
        (dp_sgd._Rule, "__call__"),  # noqa: SLF001 what is measured
        (training, "apply"),
    ),
}

OneStep = Callable[[Tensor, Tensor], None]


class Timed:
    """Clocks of the steps: the parts of a step are added to that of the step that is taken."""

    def __init__(self) -> None:
        self.clock = Clock()
        for name, places in PARTS.items():
            for owner, attribute in places:
                setattr(owner, attribute, self._around(getattr(owner, attribute), name))

    def _around(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.clock.of(name):
                return real(*args, **kwargs)

        return call


def model(name: str) -> dict[str, nn.Module]:
    """Extractor and classifier, in training mode."""
    parts = build(ModelOptions(name=name, classes=CLASSES, norm="group", input=(3, 32, 32)), 0)
    return {part: module.train() for part, module in parts.items()}


def loss(parts: Any, x: Tensor, y: Tensor, _: object) -> Tensor:
    """Cross-entropy by record."""
    return nn.functional.cross_entropy(
        parts["classifier"](parts["extractor"](x)), y, reduction="none"
    )


def ours(modules: Modules, way: Stepper) -> OneStep:
    """A step of a job, over all records of a batch."""
    stage = Stage(("extractor", "classifier"), 1, loss, Optimiser(LR, momentum=MOMENTUM))
    step = way.begin(modules, stage)
    rng = np.random.default_rng(0)

    def take(x: Tensor, y: Tensor) -> None:
        for index in way.batches(stage, len(x), len(x), rng, wrap=False):
            step(x[index], y[index])

    return take


def plain_step(name: str, _: int) -> OneStep:
    """Without privacy."""
    return ours(model(name), PLAIN)


def private_step(name: str, batch: int) -> OneStep:
    """As a private job takes it."""
    how = Mechanism(
        clip=CLIP, sigma=SIGMA, whole_sigma=SIGMA, q=1.0, divisor=batch, physical_batch=batch
    )
    return ours(model(name), Private(how, Randomness, lambda _: None))


def opacus_step(name: str, batch: int) -> OneStep:
    """As Opacus's manual takes it."""
    module: Any = nn.Sequential(*model(name).values()).train()
    records = TensorDataset(torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its generator is not a secure one
        module, optimiser, _ = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), LR, MOMENTUM),
            data_loader=DataLoader(records, batch),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            poisson_sampling=False,
        )

    def take(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()

    return take


WAYS = {"plain": plain_step, "bare Opacus": opacus_step, "private": private_step}


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Records of noise."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 32, 32, generator=random), torch.randint(
        CLASSES, (size,), generator=random
    )


def grown(way: str, name: str, batch: int, threads: int) -> int:
    """Bytes by which this process grows at the peak of a step."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    step, records = WAYS[way](name, batch), batch_of(batch)
    few = 0 if way == "private" else 2  # of which a private step would make a whole call
    step(*(tensor[:few] for tensor in records))  # momentum, and what torch sets up once
    return extra_memory(lambda: step(*records))


def alone(*args: Any) -> int:
    """A result from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        return other.submit(grown, *args).result()


def measure(timed: Timed, name: str, batch: int, repeats: int, threads: int) -> None:
    """Print one table."""
    steps, records = {way: make(name, batch) for way, make in WAYS.items()}, batch_of(batch)
    clocks: dict[str, list[Clock]] = {way: [] for way in WAYS}
    for step in steps.values():
        step(*records)  # what torch sets up once
    for _ in range(repeats):
        for way, step in steps.items():
            timed.clock = Clock()
            with timed.clock.of("step"):
                step(*records)
            clocks[way].append(timed.clock)
    least = {
        way: {part: least_of(found, part) for part in ("step", *PARTS)}
        for way, found in clocks.items()
    }
    size = sum(p.numel() for part in model(name).values() for p in part.parameters())
    tell(
        f"{name}, {size:,} parameters, batch {batch}; CPU ms of {repeats} steps, {threads} threads"
    )
    show("", *(f"{title:>9}" for title in ("least", "median", *PARTS, "rest", "MB more")))
    for way, found in least.items():
        median = statistics.median(clock.spent["step"] for clock in clocks[way]) * 1e3
        rest = found["step"] - sum(found[part] for part in PARTS)
        row = [
            found["step"],
            median,
            *(found[part] for part in PARTS),
            rest,
            alone(way, name, batch, threads) / 1e6,
        ]
        show(way, *(f"{value:>9.1f}" for value in row))
    step = {way: found["step"] for way, found in least.items()}
    more = (step["private"] - step["bare Opacus"]) / step["bare Opacus"]
    noise = (least["private"]["noise"] - least["bare Opacus"]["noise"]) / step["bare Opacus"]
    tell(
        f"  private {step['private'] / step['plain']:.2f} times plain; bare Opacus"
        f" {step['bare Opacus'] / step['plain']:.2f} times; private against bare Opacus"
        f" {more:+.1%}, of which its noise is {noise:+.1%}"
    )


def show(title: str, *columns: str) -> None:
    """A line of the table."""
    tell(f"  {title:<14}" + "".join(columns))


def tell(line: str) -> None:
    """Print it at once."""
    print(line, flush=True)  # noqa: T201 its output is its purpose


def least_of(clocks: list[Clock], part: str) -> float:
    """Milliseconds."""
    return min(clock.spent[part] for clock in clocks) * 1e3


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["lenet5", "resnet18"])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument(
        "--repeats", type=int, default=10, help="steps of each way; ten times as many for lenet5"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    timed = Timed()
    tell(f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}")
    for name in options.models:
        repeats = options.repeats * (10 if name == "lenet5" else 1)
        for batch in options.batches:
            measure(timed, name, batch, repeats, options.threads)


if __name__ == "__main__":
    main()
