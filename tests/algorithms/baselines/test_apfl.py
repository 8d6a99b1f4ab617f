from math import log

import pytest
import torch
from support.two_row_model import HALF, LINEAR, ONE, gradient_of, line, played, same_model
from support.whole_jobs import check_tensors

from staddle.algorithms.baselines.apfl import Mixture
from staddle.algorithms.course import Change, Facts, SiloState, Survey
from staddle.algorithms.methods.common.second_model import MODEL


def parts_of(v, w=(0.0, 0.0), alpha=0.5):
    return {**line(*w), **line(*v, name="own_"), "mixture": Mixture(alpha)}


def test_the_gradients_of_both_models_by_hand(make_job):
    """w = (0, 0), v = (2a, -2a), α = 1/2: v̄ = (a, -a), where the gradient is (-1/4, 1/4).

    Of it v takes a half.
    """
    parts = parts_of((2 * HALF, -2 * HALF))
    method = make_job("apfl").method()
    losses = method.both(parts, *ONE, {})
    assert losses.tolist() == pytest.approx([log(2) + log(4 / 3)])
    assert gradient_of(losses, parts["classifier"]) == pytest.approx([-1 / 2, 1 / 2])
    losses = method.both(parts, *ONE, {})
    assert gradient_of(losses, parts["own_classifier"]) == pytest.approx([-1 / 8, 1 / 8])
    assert method.predict(parts, ONE[0]).flatten().tolist() == pytest.approx([HALF, -HALF])


@pytest.mark.parametrize(("lr", "expected"), [(0.1, 0.5 + 0.1 * HALF), (10.0, 1.0)])
def test_a_step_of_alpha_by_hand(make_job, lr, expected):
    """⟨(-1/4, 1/4), (2a, -2a)⟩ = -a for each of two records: α rises by lr a, and never above 1."""
    method = make_job("apfl", training={"lr": lr}).method()
    parts = parts_of((2 * HALF, -2 * HALF))
    x, y = torch.ones(2, 1), torch.tensor([0, 0])
    survey, change, both = method.stages(SiloState({}), Facts("a", 0, 2, torch.tensor([2, 0])))
    assert isinstance(survey, Survey)
    assert isinstance(change, Change)
    with torch.no_grad():
        sums = {name: value.double() for name, value in survey.measure(parts, x, y).items()}
    assert sums["slope"].item() == pytest.approx(-2 * HALF)
    state = SiloState({"mixture": dict(parts["mixture"].state_dict())})
    after = change.change(state, Facts("a", 0, 2, torch.tensor([2, 0]), sums)).parts["mixture"][
        "alpha"
    ]
    assert after.item() == pytest.approx(expected)
    assert after.dtype == torch.float32
    assert "mixture" not in both.trains


@pytest.mark.parametrize("alpha", [0, 1])
def test_at_alpha_0_it_is_fedavg_and_at_1_local_training_bit_for_bit(make_job, make_shards, alpha):
    jobs = [
        make_job(method, options, {"norm": "batch"}, rounds=2)
        for method, options in (
            ("fedavg", {}),
            ("local", {}),
            ("apfl", {"alpha": alpha, "adaptive": False}),
        )
    ]
    (average, shared), (local, _), (states, last) = (played(job, make_shards(job)) for job in jobs)
    for silo in jobs[0].silos:
        assert same_model(states[silo], average[silo])  # whatever α is
        assert same_model(last[silo], shared[silo])
        if alpha:
            own = {part: states[silo].parts[f"own_{part}"] for part in MODEL}
            check_tensors(own, local[silo].parts)


@pytest.mark.parametrize(
    ("options", "rounds", "expected"),
    [({}, 1, {0.5}), ({"adaptive": False, "alpha": 0.25}, 2, {0.25}), ({}, 3, None)],
)
def test_alpha_goes_its_own_way_at_each_silo_and_stays_there(
    make_job, make_shards, options, rounds, expected
):
    """In the first round both models are one, and α stays."""
    job = make_job("apfl", options, LINEAR, rounds=rounds)
    assert job.method().up(0) == make_job("fedavg", {}, LINEAR).method().up(0)
    states, _ = played(job, make_shards(job))
    found = {state.parts["mixture"]["alpha"].item() for state in states.values()}
    assert found == expected if expected else len(found) == 3
    assert all(0 < alpha < 1 for alpha in found)


def test_running_statistics_of_w_and_of_the_mixture_are_their_own(make_job, make_shards):
    job = make_job("apfl", {"adaptive": False}, {"norm": "batch"}, rounds=1)
    states, _ = played(job, make_shards(job))
    of_w, of_mixture = (states["a"].parts[f"{p}extractor"] for p in ("", "own_"))
    # batches of 24 records
    assert of_w["norm1.num_batches_tracked"] == of_mixture["norm1.num_batches_tracked"] == 3
    assert not torch.equal(of_w["norm2.running_mean"], of_mixture["norm2.running_mean"])
