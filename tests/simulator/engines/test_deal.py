import random
from functools import partial
from types import SimpleNamespace

from staddle.algorithms.engines.engine import Records, SiloWork
from staddle.simulator.engines.deal import Costs, shares


def works(count):
    return [SiloWork(f"silo-{number}", {}, {}) for number in range(count)]


def test_shares_take_about_as_long_and_hold_each_silo_once():
    draws = random.Random(1)
    for _ in range(200):
        work = works(draws.randint(1, 30))
        taking = {one.silo: draws.choice([1, 10, draws.randint(1, 1000)]) for one in work}
        cost, count = (lambda one, taking=taking: taking[one.silo]), draws.randint(1, 9)
        dealt = shares(work, cost, count)
        assert len(dealt) == min(count, len(work))
        assert all(dealt)
        assert sorted(one.silo for share in dealt for one in share) == sorted(taking)
        loads = [sum(map(cost, share)) for share in dealt]
        assert max(loads) - min(loads) <= max(taking.values())
        again = shares(work, cost, count)
        assert [[*map(id, share)] for share in again] == [[*map(id, share)] for share in dealt]


def test_a_silo_costs_what_its_steps_and_its_tests_take():
    """A step is three forward passes; two models are tested."""
    train, test, validation = map(range, (10, 4, 3))
    records = {"silo-0": Records(train, test, validation), "silo-1": Records(train, test)}
    job = SimpleNamespace(training=SimpleNamespace(epochs=2, batch_size=5))
    cost = partial(Costs(records).of, job)
    one, other = works(2)
    assert cost("train", one) == cost("train", other) == 3 * 20 + 2 * 4
    assert (cost("look", one), cost("look", other)) == (2 * 7, 2 * 4)
    assert cost("train", SiloWork("silo-1", {}, {}, most_steps=3)) == 3 * 15 + 2 * 4
    assert cost("train", SiloWork("silo-1", {}, {}, most_steps=9)) == 3 * 20 + 2 * 4
