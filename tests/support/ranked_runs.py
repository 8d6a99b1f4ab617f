"""A program that torchrun starts twice, at each process the same: ``ranked_runs.py ORDERS RESULT``.

It computes the orders in a folder, then trains every method by both processes and by one, and
writes how far what is held in the end lies apart (tests/silo/training/test_ranks.py).
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import torch
from support.banded_records import banded_shards
from support.jobs import make_job
from support.ordered import Direct
from support.texts import texts
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.numerics.ranks import ALONE
from staddle.algorithms.numerics.sharded_weight import ShardedWeight
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.algorithms.training.data_parallel import plain_on
from staddle.algorithms.training.dp_sgd import Mechanism, Private
from staddle.algorithms.training.loop import train
from staddle.errors import LocalError
from staddle.security.blind.plan import simulated
from staddle.silo.training import order, serving
from staddle.silo.training.ranks import FirstsRandom, joined
from staddle.silo.training.still_values import completed, moved, shared_out
from staddle.silo.training.trainer import TrainingDevice

BATCH_NORM = {"classes": 3, "name": "cnn-digits", "input": [1, 8, 8], "norm": "batch"}
ADAM = {"epochs": 1, "batch_size": 16, "lr": 0.01, "optimiser": "adamw", "clip": 0.5}
# beside those of every method
FURTHER = {
    "batch norm": {"model": {**BATCH_NORM, "buffers": "global"}},
    "batch norm of own statistics": {"model": BATCH_NORM},
    "in pieces": {"training": {"epochs": 1, "batch_size": 16, "lr": 0.1, "physical_batch": 3}},
    "adamw, clipped": {"training": ADAM},
}
# Weights of 128 x 128 numbers are the smallest that are sharded.
ADAPTED_TEXT = {"name": "text-transformer", "norm": "group", "classes": 3, "input": [12]}
ADAPTED_TEXT["options"] = {"tokens": 130, "width": 128, "heads": 4, "hidden": 130, "blocks": 2}
ADAPTED_TEXT["lora"] = {"rank": 4}
# In pieces of four, 17 records are 9 and 8, which take three calls and two.
ADAPTED_TRAINING = {"epochs": 1, "physical_batch": 4, "batch_size": 18, "lr": 0.03}
PRIVACY = {"epsilon": 60.0, "delta": 1e-5, "clip": 0.5, "sample_rate": 0.25, "sigma": "0.8"}
PRIVACY["histogram_sigma"] = 0.5
WHOLE = {"unit": "silo", "noise": "shared", "epsilon": 20.0, "delta": 0.01, "sample_rate": 1.0}
WHOLE["sigma"] = "2.5"


class Seeded:
    """Random numbers that no two steps share, and that another run draws again."""

    number = count()

    def __init__(self):
        self.random = np.random.default_rng(next(Seeded.number))

    def normal(self, count):
        return self.random.normal(size=count)

    def discrete_gaussian(self, count, variance):
        return np.rint(self.random.normal(size=count) * variance**0.5).astype(np.int64)

    def drawn(self, records, q):
        return np.flatnonzero(self.random.uniform(size=records) < q)


class Sharing(Direct):
    """Trains by processes that hold pieces of what stands still, as a trainer does it."""

    ranks = ALONE
    held = None  # bytes of such weights that this process holds, and of all

    def outcome(self, asked):
        own = shared_out(asked, self.ranks)
        tensors = [t for t in own.state.flat.values() if isinstance(t, ShardedWeight)]
        Sharing.held = [sum(t.piece.values.nbytes for t in tensors), sum(t.nbytes for t in tensors)]
        outcome = TrainingDevice(ranks=self.ranks).outcome(own)
        return replace(outcome, state=completed(asked, moved(own, outcome.state)))


def held_by_pieces(job, ranks):
    """All that silos and the coordinator hold in the end, where weights are shared out."""
    Sharing.ranks = ranks
    records = {silo: Records(texts(17 + 6 * i, i), texts(8)) for i, silo in enumerate(job.silos)}
    return run(job, Sharing(job, records), PLAIN)


def held(job, ranks):
    """All that silos and the coordinator hold in the end."""
    if job.model.lora is not None:
        return held_by_pieces(job, ranks)
    Seeded.number = count()
    # The last batches have 1, 7 and 13 records: one that cannot be shared, and unequal shares.
    shards = {silo: Records(*own) for silo, own in banded_shards(job.silos, n=17).items()}
    paying = None
    if job.privacy is not None:
        fresh = Seeded if ranks is ALONE else partial(FirstsRandom, ranks, Seeded)
        paying = {s: PrivateSilo(MemoryAccount(job), fresh, ranks) for s in job.silos}
    exchanges = simulated(job) if job.security.required else PLAIN
    return run(job, Serial(job, shards, paying, way=plain_on(ranks)), exchanges)


def run(job, engine, exchanges):
    simulation = Simulation(job, engine, exchanges=exchanges)
    while simulation.round < job.length:
        simulation.step()
    simulation.finish(simulation.look())
    states = [simulation.states[silo].flat for silo in job.silos]
    return [
        value.double()
        for own in (*states, simulation.coordinator)
        for _, value in sorted(own.items())
    ]


def jobs():
    """By name; of each method that can be, a private one, too."""
    from algorithms.test_every_method import BLIND, CASES, make  # noqa: PLC0415 it may train

    less = {"training": {"epochs": 1, "batch_size": 16, "lr": 0.1}}
    for name, case in CASES.items():
        few = {"silos": list("abc")} | case.fields | less
        yield name, make(name, **few)
        if name in ("fedaims", "fedsimsup", "fedssa", "pfedsim", "ppfl"):
            yield f"{name}, private", make(name, privacy=PRIVACY, **few)
    for name, fields in FURTHER.items():
        yield name, make("fedavg", silos=list("abc"), **less | fields)
    own = {"silos": list("abc"), "rounds": 3, "training": ADAPTED_TRAINING}
    yield "sharded", make_job("fedavg", model=ADAPTED_TEXT, **own)
    yield "whole silos", make("fedavg", privacy=WHOLE, security=BLIND, **less)


def main(orders, result):
    torch.set_num_threads(1)
    for folder in sorted(orders.iterdir()):
        serving.main([str(folder), serving.TIED])
    found = {}
    with joined(result.parent, "cpu") as ranks:
        found["listens"] = [
            own.laddr.ip for own in psutil.Process().net_connections() if own.status == "LISTEN"
        ]
        together = {name: held(job, ranks) for name, job in jobs()}
        found["held"] = Sharing.held
        # Each computes half of what one process alone would hold.
        alone = {name: held(job, ALONE) for name, job in [*jobs()][ranks.rank :: ranks.size]}
        found["apart"] = {
            name: max(float((a - b).abs().max()) for a, b in zip(own, together[name], strict=True))
            for name, own in alone.items()
        }
        found["noise"], found["apart ways"] = noise(ranks), refusal_of_apart_ways(ranks)
    result.with_suffix(f".{ranks.rank}").write_text(json.dumps(found))


def refusal_of_apart_ways(ranks):
    """What is said where the second process gathers another weight than the first."""
    ranks.gathered(torch.zeros(9), 1 + ranks.rank)
    try:
        ranks.add([torch.zeros(1)])
    except LocalError as error:
        return str(error)


def noise(ranks):
    """Standard deviation and kurtosis of a step's noise, in those of one process."""
    fresh = partial(FirstsRandom, ranks, Seeded)
    modules = {"only": nn.Linear(200, 200)}
    how = Mechanism(clip=0.5, sigma=3.0, whole_sigma=3.0, q=0.25, divisor=4.0, physical_batch=4)
    loss = lambda parts, x, *_: parts["only"](x).sum(1) * 0
    stage = Stage(("only",), 1, loss, Optimiser(lr=1.0))
    private = Private(how, fresh, lambda _: None, ranks)
    begun = modules["only"].weight.detach().clone()
    train(modules, stage, Dataset(torch.zeros(9, 200), torch.zeros(9)), 1, None, private)
    moved = (modules["only"].weight.detach() - begun) / (3.0 * 0.5 / 4.0 * how.steps**0.5)
    return float(moved.std()), float((moved / moved.std()).pow(4).mean())


if __name__ == "__main__":
    order.Randomness = Seeded
    main(*map(Path, sys.argv[1:]))
