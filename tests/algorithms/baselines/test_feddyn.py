"""FedDyn: Eqs. 1 to 4 by hand, and what must hold of h in any job."""

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import trained

from staddle.algorithms.course import Facts, SiloState
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT, Sum
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.build import build
from staddle.algorithms.training.silo_round import local_round

FACTS = Facts("a", 1, 5, torch.tensor([2, 2, 1]))
BIAS = "classifier.bias"


@pytest.fixture
def method(make_job):
    return make_job("feddyn", {"alpha": 0.5}).method()


def at(method, value):
    """The silo's state with this classifier bias."""
    state = initial_state(method, "a")
    classifier = {**state.parts["classifier"], "bias": torch.tensor(value)}
    return SiloState({**state.parts, "classifier": classifier}, state.extra)


def test_eq_2_by_hand_at_the_next_delivery(method):
    state = at(method, [3.0, 1.0, 0.0])  # θ_k, as trained
    held = {f"theta.{BIAS}": torch.tensor([1.0, 1.0, 2.0]), f"h.{BIAS}": torch.tensor([0.5, 0, 0])}
    extra = {**state.extra, **held}
    flat = {
        name: value + 1 for name, value in method.flat(state, "extractor", "classifier").items()
    }
    after = method.deliver(SiloState(state.parts, extra), {"corrected": flat}, FACTS)
    # h − α (θ_k − θ) = (.5, 0, 0) − .5 · (2, 0, −2)
    assert after.extra[f"h.{BIAS}"].tolist() == [-0.5, 0.0, 1.0]
    assert after.parts["classifier"]["bias"].tolist() == [4.0, 2.0, 1.0]
    assert after.extra[f"theta.{BIAS}"].tolist() == [4.0, 2.0, 1.0]
    assert torch.equal(
        after.extra["theta.extractor.conv1.bias"], state.parts["extractor"]["conv1.bias"] + 1
    )


def test_the_first_round_begins_with_no_h_and_the_common_model(method):
    state = initial_state(method, "b")
    after = method.deliver(state, {}, FACTS)
    assert not any(tensor.any() for name, tensor in after.extra.items() if name.startswith("h."))
    assert torch.equal(after.extra[f"theta.{BIAS}"], state.parts["classifier"]["bias"])


def test_the_penalty_of_eq_1_by_hand(method):
    names = [f"{part}.{name}" for part, name in method.parameters]
    zeros = {f"{what}.{name}": torch.zeros(2) for what in ("h", "theta") for name in names}
    held = {f"h.{BIAS}": torch.tensor([1.0, -2.0]), f"theta.{BIAS}": torch.tensor([1.0, 1.0])}
    context = {**zeros, **held}
    parameters = {"extractor": {}, "classifier": {}}
    for part, name in method.parameters:
        parameters[part][name] = torch.zeros(2)
    parameters["classifier"]["bias"] = torch.tensor([3.0, 4.0])
    # −⟨(1, −2), (3, 4)⟩ + .25 · ‖(2, 3)‖² = 5 + 3.25
    assert method.penalty(parameters, context).item() == 8.25


def test_eqs_3_and_4_by_hand_where_two_of_three_silos_give(method):
    state = dict(method.begin())
    state |= {f"h.{BIAS}": torch.tensor([0.0, 3.0, 0.0]), f"theta.{BIAS}": torch.ones(3)}
    folded = {spec.name: state[f"theta.{spec.name}"] for spec in method.model.tensors}
    folded |= {BIAS: torch.tensor([1.0, 4.0, -2.0]), WEIGHT: torch.tensor(2.0)}
    combined = method.combine(state, 1, ("a", "c"), {"model": folded})
    # h − .5 · (2/3) · (mean − θ) = (0, 3, 0) − (1/3) · (0, 3, −3); θ = mean − 2 h
    assert combined.state[f"h.{BIAS}"].tolist() == pytest.approx([0.0, 2.0, 1.0])
    assert combined.published["corrected"][BIAS].tolist() == pytest.approx([1.0, 0.0, -4.0])
    assert (
        combined.state[f"theta.{BIAS}"].tolist() == combined.published["corrected"][BIAS].tolist()
    )
    assert combined.published.keys() == {"corrected"}
    untouched = "extractor.conv1.bias"
    assert torch.equal(combined.published["corrected"][untouched], state[f"theta.{untouched}"])


def test_one_step_of_a_silo_by_hand(make_job, make_data):
    """One batch of three: w ← θ − η (∇L(θ) − h), for α/2 ‖w − θ‖² is flat at θ.

    Momentum and decay are none.
    """
    job, points = make_job("feddyn", {"alpha": 0.5}, training={"lr": 0.1}), make_data(3)
    method = job.method()
    start = initial_state(method, "a")
    h = {name: value + 0.25 for name, value in start.extra.items() if name.startswith("h.")}
    outcome = local_round(
        method, job, SiloState(start.parts, {**start.extra, **h}), 1, {}, points, points, "a"
    )
    model = build(job.model, job.seed)
    torch.nn.functional.cross_entropy(
        model["classifier"](model["extractor"](points.x)), points.y
    ).backward()
    for part, module in model.items():
        for name, parameter in module.named_parameters():
            by_hand = parameter.detach() - 0.1 * (parameter.grad - 0.25)
            assert torch.allclose(outcome.state.parts[part][name], by_hand, atol=1e-6), name


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_h_is_the_mean_of_all_silos_h_whoever_took_part(make_job, make_shards, buffers):
    model = {"norm": "batch", "buffers": buffers}
    job = make_job(
        "feddyn", {"alpha": 0.5}, model, silos=list("abcde"), participation=0.4, rounds=5
    )
    simulation, method = trained(job, make_shards(job)), job.method()
    assert len({job.cohort(round_) for round_ in range(5)}) > 1
    settled = [method.deliver(state, {}, FACTS).extra for state in simulation.states.values()]
    for name, h in simulation.coordinator.items():
        if name.startswith("h."):
            of_all = torch.stack([extra[name] for extra in settled]).mean(0)
            assert torch.allclose(h, of_all, atol=1e-6), name
            assert "running" not in name
    assert simulation.coordinator[f"h.{BIAS}"].abs().max() > 1e-3


def test_after_one_round_of_all_the_mean_is_passed_by_as_far_as_it_went(make_job, make_shards):
    """h = −α (mean − θ), so θ becomes mean − h/α = 2 mean − θ.

    With hardly any α the silos train as those of FedAvg.
    """
    job = make_job("feddyn", {"alpha": 1e-7}, rounds=1)
    other = make_job("fedavg", {"weights": "equal"}, rounds=1)
    start, shards = initial_state(job.method(), "a"), make_shards(job)
    ours, average = (simulate(each, shards).states["b"].parts for each in (job, other))
    for part, name in job.method().parameters:
        by_hand = 2 * average[part][name] - start.parts[part][name]
        assert torch.allclose(ours[part][name], by_hand, atol=1e-5), name


def test_what_crosses_is_the_model_each_silo_counting_once(make_job):
    job = make_job("feddyn", model={"norm": "batch", "buffers": "global"})
    (part,), (down,) = job.method().up(3), job.method().down(3)
    assert part.exchange == Sum("mean", 1.0)
    average = make_job("fedavg", model=job.model.model_dump()).method().model
    assert part.tensors == down.tensors == average.tensors
    statistics = job.method().flat(initial_state(job.method(), "a"), "extractor")
    assert statistics["extractor.norm1.running_var"].shape == (16,)


def test_declared_counts_cannot_stand_for_equal_weights(make_job):
    counts = dict.fromkeys("abcd", 9)
    security = {"secure_aggregation": "required", "weights": "public", "counts": counts}
    with refused(r'counts each silo once, .*; write security.weights = "private"'):
        make_job("feddyn", silos=list("abcd"), min_cohort=3, security=security).document()
    with refused("alpha = 0: give a value above 0"):
        make_job("feddyn", {"alpha": 0})
