"""What stands still next to adapters is shared out, and does not come back."""

from dataclasses import replace

import torch
from support.jobs import make_data, make_job
from support.pieces import Played

from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.sharded_weight import ShardedWeight
from staddle.silo.training.order import OrderedRecords
from staddle.silo.training.still_values import completed, moved, shared_out, still_names
from staddle.silo.training.trainer import SiloRound

MODEL = {"name": "mlp", "input": [1, 8, 8], "options": {"widths": [300, 12]}, "lora": {"rank": 2}}


def asked(**changes):
    job = make_job("fedavg", model=MODEL | changes)
    of = OrderedRecords(job, make_data(20), make_data(8, 1))
    return SiloRound(of, "a", 0, initial_state(job.method(), "a"), {})


def held(state):
    return {name for name, value in state.flat.items() if isinstance(value, ShardedWeight)}


class Knowing(Played):
    """It is given the values as the round has them."""

    def __init__(self, state, names):
        super().__init__(size=2)
        for number, name in enumerate(sorted(names), 1):
            self.shard(state.flat[name], number)


def test_large_values_that_stand_still_are_shared_out():
    own = asked()
    still = still_names(own.of.job, "a")
    assert still == {name for name in own.state.flat if "extractor" in name and "lora" not in name}
    found = shared_out(own, Knowing(own.state, still)).state
    assert held(found) == {name for name in still if own.state.flat[name].numel() >= 2**14}
    assert held(found)


def test_without_adapters_nothing_is():
    own = asked(lora=None)
    assert held(shared_out(own, Played()).state) == set()


def test_values_that_stand_still_do_not_come_back():
    """The agent has them."""
    own = asked()
    still = still_names(own.of.job, "a")
    shared = shared_out(own, Knowing(own.state, still))
    back = moved(shared, shared.state)
    assert back.flat.keys() == own.state.flat.keys() - still
    assert held(back) == set()
    found = completed(own, back).flat
    assert found.keys() == own.state.flat.keys()
    assert all(torch.equal(found[name], value) for name, value in own.state.flat.items())


def test_a_value_that_a_method_moves_all_the_same_comes_back_whole():
    own = asked()
    shared = shared_out(own, Knowing(own.state, still_names(own.of.job, "a")))
    name = min(held(shared.state)).removeprefix("part/extractor/")
    value = shared.state.parts["extractor"][name]
    parts = {**shared.state.parts, "extractor": {**shared.state.parts["extractor"], name: -value}}
    later = replace(shared.state, parts=parts, extra={"before": value})
    found = completed(own, moved(shared, later)).flat
    assert held(replace(later, parts={}, extra={"found": found["extra/before"]})) == set()
    before = own.state.flat[f"part/extractor/{name}"]
    assert torch.equal(found[f"part/extractor/{name}"], -before)
    assert torch.equal(found["extra/before"], before)
