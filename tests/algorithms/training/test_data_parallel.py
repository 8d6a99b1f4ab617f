"""Which records each of several processes trains on, and what it draws.

That they train as one does, silo/training/test_ranks.py says of real ones.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.jobs import make_job
from torch import nn

from staddle.algorithms.models.foreign import TRAITS, Traits
from staddle.algorithms.numerics.ranks import ALONE
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.training.data_parallel import DataParallel, plain_on
from staddle.algorithms.training.loop import PLAIN


@dataclass(frozen=True)
class One:
    """One of three processes, which adds nothing up."""

    rank: int
    size: int = 3

    def add(self, tensors):
        """Nothing."""


def rng():
    return stream(0, "a", 0, "train/0")


def begun(couples=False, **fields):
    """The three in a stage of ten records in batches of four: what each does in it."""
    stage = replace(make_job("fedavg").method().stage("only"), **fields)
    modules = {"only": nn.Linear(2, 2)}
    setattr(modules["only"], TRAITS, Traits(couples=couples))
    ways = [DataParallel(One(rank)) for rank in range(3)]
    for way in ways:
        way.begin(modules, stage)
    shares = [way.batches(stage, 10, 4, rng(), wrap=False) for way in ways]
    return ways, shares, PLAIN.batches(stage, 10, 4, rng(), wrap=False)


def test_each_record_of_a_batch_is_trained_on_once():
    _, shares, whole = begun()
    for *own, batch in zip(*shares, whole, strict=True):
        if len(batch) == 2:  # fewer records than processes
            assert all(np.array_equal(one, batch) for one in own)
        else:
            assert [len(one) for one in own] == [2, 1, 1]
            assert sorted(np.concatenate(own)) == sorted(batch)


@pytest.mark.parametrize("fields", [{"coupled": True}, {"couples": True}])
def test_coupled_batches_are_computed_whole_by_each(fields):
    ways, shares, whole = begun(**fields)
    for own in shares:
        assert all(map(np.array_equal, own, whole))
    # and alike, though something draws
    assert len({way.draws(rng()).integers(2**62) for way in ways}) == 1


def test_batches_of_which_not_all_have_as_many_calls_are_computed_whole():
    """By one record per call, four records are two calls of the first process, one of others."""
    _, shares, whole = begun(rows=1)
    for own in shares:
        assert all(map(np.array_equal, own, whole))
    _, shares, whole = begun(rows=2)
    assert not np.array_equal(shares[0][0], whole[0])


def test_processes_that_share_a_batch_draw_apart():
    ways, _, _ = begun()
    drawn = [way.draws(rng()).integers(2**62, size=3) for way in ways]
    assert len(set(np.concatenate(drawn))) == 9
    assert np.array_equal(drawn[0], rng().integers(2**62, size=3))


def test_a_round_that_failed_leaves_nothing_to_the_next():
    """Its batches were planned, and not taken."""
    ways, _, _ = begun()
    stage = make_job("fedavg").method().stage("only")
    modules = {"only": nn.Linear(2, 2)}
    loss = replace(stage, loss=lambda parts, x, *_: parts["only"](x).square().sum(1))
    step = ways[0].begin(modules, loss)
    ways[0].batches(loss, 2, 2, rng(), wrap=False)  # one, which is whole
    x = torch.ones(2, 2)
    expected = modules["only"](x).square().sum(1).mean() / 3
    assert step(x, torch.zeros(2)) == pytest.approx(expected.item(), rel=1e-6)


def test_one_process_trains_as_ever():
    assert plain_on(ALONE) is PLAIN
    assert isinstance(plain_on(One(1)), DataParallel)
