"""Measures training on records that are read when they are used, against a hand-written loop.

``python benchmarks/larger_than_memory.py [--gigabytes 2] [--side 224] [--workers 2] [--ours]``

Images [3, side, side] of 32-bit numbers are made as they are read, so no disk takes part. Both
sides train the same network on the same batches for an epoch, each in a process of its own: ours by
``LazyRecords`` and ``training.train``, the other by torch's DataLoader over the same images and
torch.optim. Prints seconds and the peak of resident memory, this process's and all of its workers'
together (proportional, so that shared pages count once), and the ratio of the seconds. ``--ours``
leaves the other side out.
"""

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from staddle.algorithms.course import Optimiser, Parts, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.lazy import LazyRecords, Reader
from staddle.algorithms.exchange.parts import Tensors
from staddle.algorithms.training.loop import batches, train

BATCH, LR = 32, 1e-4
SIDES = ("ours", "loop")


class Made(TorchDataset[tuple[Tensor, int]]):
    """Images that are made from their number."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        drawn = torch.Generator().manual_seed(number)
        return torch.rand(3, self.side, self.side, generator=drawn), number % 2


def reader(count: int, side: int) -> Reader:
    """What reads the images for us."""
    made = Made(count, side)
    return lambda number: (made[number][0],)


def network() -> dict[str, nn.Module]:
    """A small network for images of any size."""
    torch.manual_seed(0)
    return {
        "extractor": nn.Sequential(
            nn.AvgPool2d(8), nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        ),
        "classifier": nn.Linear(64, 2),
    }  # fmt: skip


def loss(parts: Parts, x: Tensor, y: Tensor, _: Tensors) -> Tensor:
    """The loss of each record."""
    logits = parts["classifier"](parts["extractor"](x))
    return nn.functional.cross_entropy(logits, y, reduction="none")


def ours(count: int, side: int, workers: int) -> None:
    """An epoch by ``train``."""
    x = LazyRecords.of(partial(reader, count, side), count, (3, side, side), workers, "images")
    stage = Stage(trains=("extractor", "classifier"), epochs=1, loss=loss, optimiser=Optimiser(LR))
    data = Dataset(x, torch.arange(count) % 2)
    train(network(), stage, data, BATCH, np.random.default_rng(0))


def loop(count: int, side: int, workers: int) -> None:
    """An epoch as one would write it."""
    parts = nn.Sequential(*network().values())
    optimiser = torch.optim.SGD(parts.parameters(), lr=LR)
    drawn = batches(count, BATCH, np.random.default_rng(0), wrap=False)
    loader = DataLoader(
        Made(count, side),
        batch_sampler=[own.tolist() for own in drawn],
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )
    for x, y in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(parts(x), y).backward()
        optimiser.step()


def resident() -> int:
    """Bytes of this process and all below it, shared pages counted once."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            rollup = (process / "smaps_rollup").read_text()
            for thread in (process / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        # It has ended meanwhile.
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in rollup.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def measured(answer: Any, side: str, count: int, pixels: int, workers: int) -> None:
    """Runs one side and sends seconds and bytes; in a process of its own."""
    torch.set_num_threads(1)
    works: dict[str, Callable[[int, int, int], None]] = {"ours": ours, "loop": loop}
    # Both begin with torch loaded in the server that forks the workers.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    peak, ended = [resident()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    works[side](count, pixels, workers)
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    answer.send((seconds, max(peak)))


def say(line: str) -> None:
    """A line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """What the module's text says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ours", action="store_true", help="leave the hand-written loop out")
    given = parser.parse_args()
    count = int(given.gigabytes * 1e9 / (3 * given.side**2 * 4))
    say(f"{count:,} images [3, {given.side}, {given.side}], {given.workers} workers")
    context, found = multiprocessing.get_context("spawn"), {}
    for side in SIDES[: 1 if given.ours else 2]:
        ours_end, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=measured, args=(theirs, side, count, given.side, given.workers)
        )
        process.start()
        theirs.close()
        found[side] = ours_end.recv()
        process.join()
        seconds, peak = found[side]
        rate = given.gigabytes / seconds
        say(f"{side}: {seconds:.1f} s, {rate:.2f} GB/s, peak {peak / 1e9:.2f} GB")
    if len(found) == 2:
        say(f"ratio of the seconds: {found['ours'][0] / found['loop'][0]:.3f}")


if __name__ == "__main__":
    main()
