from dataclasses import replace

import pytest
import torch
from support.banded_records import banded_shards
from support.whole_jobs import check_states, check_tensors

from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state

FACTS = Facts("a", 0, 5, torch.tensor([2, 2, 1]))
SMALL = {"name": "digits-cnn-c", "input": [1, 8, 8]}


def objective(method, z, near, far, logits, y):
    """ℓ of records whose features and logits are these."""
    given = {"extractor": z, "delivered": near, "previous": far, "classifier": logits}
    parts = {name: lambda _, rows=rows: torch.tensor(rows) for name, rows in given.items()}
    return method.objective(parts, torch.zeros(len(y), 1), torch.tensor(y), {}).tolist()


def test_eqs_3_and_4_by_hand(make_job):
    """cos(z, z_glob) = 24/25, cos(z, z_prev) = 4/5: ℓ_con = log(1 + exp((0.8 - 0.96) / 0.5)) =
    log(1 + e^-0.32).

    ℓ_sup = log 4 of the logits (0, log 3) and y = 0. The second record is the other way round:
    log(1 + e^0.32).
    """
    near, far = [[4.0, 3.0], [0.0, 5.0]], [[0.0, 5.0], [8.0, 6.0]]
    rows = ([[3.0, 4.0]] * 2, near, far, [[0.0, 1.0986123]] * 2)
    found = objective(make_job("moon", {"mu": 2}).method(), *rows, [0, 0])
    assert found == pytest.approx([1.386294 + 2 * 0.545893, 1.386294 + 2 * 0.865893], abs=1e-5)
    found = objective(make_job("moon", {"mu": 2, "temperature": 0.16}).method(), *rows, [0, 0])
    # log(1 + e^∓1)
    assert found == pytest.approx([1.386294 + 2 * 0.313262, 1.386294 + 2 * 1.313262], abs=1e-5)


def filled(method, state, value):
    """The state with all parameters of the model set to a number."""
    parts = {
        part: {name: torch.full_like(tensor, value) for name, tensor in state.parts[part].items()}
        for part in ("extractor", "classifier")
    }
    return replace(state, parts={**state.parts, **parts})


def came(method, value):
    (part,) = method.down(1)
    return {"model": {spec.name: torch.full(spec.shape, value) for spec in part.tensors}}


def held(state):
    """The one number that fills each extractor."""
    return [set(torch.cat([t.flatten() for t in state.parts[p].values()]).tolist()) for p in FROZEN]


FROZEN = ("extractor", "delivered", "previous")


@pytest.mark.parametrize("round_", [1, 3])
def test_the_first_time_the_delivered_model_stands_for_the_previous_one(make_job, round_):
    method = make_job("moon").method()
    state = method.deliver(
        initial_state(method, "a"), came(method, 2.0), replace(FACTS, round=round_)
    )
    assert held(state) == [{2.0}, {2.0}, {2.0}]
    state = method.deliver(
        filled(method, state, 3.0), came(method, 4.0), replace(FACTS, round=round_ + 1)
    )
    assert held(state) == [{4.0}, {4.0}, {3.0}]  # trained to 3
    state = method.deliver(
        filled(method, state, 5.0), came(method, 6.0), replace(FACTS, round=round_ + 2)
    )
    assert held(state) == [{6.0}, {6.0}, {5.0}]


def test_before_the_first_average_the_initial_model_is_the_delivered_one(make_job):
    method = make_job("moon").method()
    start = initial_state(method, "a")
    state = method.deliver(start, {}, FACTS)
    for part in FROZEN:
        assert torch.equal(state.parts[part]["fc1.weight"], start.parts["extractor"]["fc1.weight"])
    assert not start.extra["began"]  # states are values


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_running_statistics_of_the_delivered_model_follow_the_policy(make_job, buffers):
    method = make_job("moon", model={"norm": "batch", "buffers": buffers}).method()
    before = filled(method, initial_state(method, "a"), 3.0)
    state = method.deliver(before, came(method, 2.0), FACTS)
    kept = 3.0 if buffers == "local" else 2.0
    for part in FROZEN:
        assert state.parts[part]["norm1.weight"][0] == 2.0
        assert state.parts[part]["norm1.running_mean"][0] == kept


def test_without_mu_it_is_fedavg_to_the_bit(make_job):
    jobs = [make_job(*given, SMALL, rounds=2) for given in (("moon", {"mu": 0}), ("fedavg", {}))]
    mine, theirs = (simulate(job, banded_shards(job.silos)) for job in jobs)
    assert mine.history == theirs.history
    check_states(mine.states, theirs.states)


def test_the_first_round_is_fedavgs_and_later_ones_are_not(make_job):
    """Where both frozen models are one, ℓ_con is log 2 and its gradient 0."""
    furthest = []
    for rounds in (1, 2):
        jobs = [
            make_job(*own, SMALL, rounds=rounds) for own in (("moon", {"mu": 5}), ("fedavg", {}))
        ]
        moon, fedavg = (
            simulate(job, banded_shards(job.silos)).states["a"].parts["extractor"] for job in jobs
        )
        furthest.append([(moon[name] - value).abs().max() for name, value in fedavg.items()])
    assert max(furthest[0]) < 1e-6
    assert min(furthest[1]) > 1e-4


def test_it_learns_one_model(make_job):
    model = {**SMALL, "name": "cnn-digits", "norm": "group"}
    job = make_job("moon", {}, model, {"epochs": 2}, rounds=3)
    result = simulate(job, banded_shards(job.silos))
    assert min(result.scores("delivered").values()) > 0.9
    shared = {n: t for n, t in result.states["b"].flat.items() if "previ" not in n}
    check_tensors(result.states["a"].flat, shared)
