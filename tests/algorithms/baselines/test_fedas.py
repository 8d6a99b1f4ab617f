from dataclasses import replace

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_states
from torch import nn
from torch.nn.functional import cross_entropy

from staddle.algorithms.course import Change, Facts, Stage, Survey
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Sum
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import final_round, local_round, to_modules

THREE = Facts("a", 1, 3, torch.tensor([2, 1, 0]))


@pytest.fixture
def make(make_job):
    return lambda options=None, **fields: make_job("fedas", options, **fields).method()


def test_eq_2_by_hand(make):
    """Class 0 is 2 and 4 off in both of two features, class 1 is 3 off in one: (4 + 16) / 2 + 9 /
    2.
    """
    prototypes = torch.tensor([[1.0, 1.0], [0.0, 5.0]])
    x = torch.tensor([[3.0, 3.0], [5.0, 5.0], [3.0, 5.0]])
    losses = make().apart(
        {"extractor": lambda x: x}, x, torch.tensor([0, 0, 1]), {"prototypes": prototypes}
    )
    assert losses.tolist() == [4 * 3 / 2, 16 * 3 / 2, 4.5 * 3]
    assert losses.mean().item() == 10 + 4.5


def test_eq_4_by_hand(make):
    """Three equal probabilities: the gradient of the logits is (1/3, 1/3, -2/3), of square 2/3.

    Times ‖z‖² + 1.
    """
    classifier = nn.Linear(2, 3)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    parts = {"extractor": nn.Identity(), "classifier": classifier}
    z = torch.tensor([[1.0, 2.0], [2.0, 0.0]])  # ‖z‖² = 5, 4
    with torch.no_grad():
        found = make().survey(parts, z, torch.tensor([2, 0]))
    assert found["trace"].item() == pytest.approx(2 / 3 * 6 + 2 / 3 * 5)
    assert found["sums"].tolist() == [[2, 0], [0, 0], [1, 2]]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_eq_4_is_that_of_a_slow_sum(make, make_data, norm):
    method, data = make(model={"norm": norm}), make_data(5)
    modules = {part: module.eval() for part, module in method.modules("a").items()}
    slow = 0.0
    for n in range(len(data)):
        loss = cross_entropy(method.predict(modules, data.x[n : n + 1]), data.y[n : n + 1])
        every = [parameter for module in modules.values() for parameter in module.parameters()]
        slow += sum(float(gradient.square().sum()) for gradient in torch.autograd.grad(loss, every))
    for method.at_once in (1, 2, 100):  # gradients at once
        assert method.squares(modules, data.x, data.y).sum().item() == pytest.approx(slow, rel=1e-4)


def test_gradients_at_once_are_as_many_as_there_is_room_for(make, monkeypatch):
    numbers = sum(spec.elements for specs in make().template.values() for spec in specs)
    for room, expected in ((10 * numbers, 10), (10 * numbers - 1, 9), (1, 1)):
        monkeypatch.setattr("staddle.algorithms.baselines.fedas.NUMBERS_AT_ONCE", room)
        assert make().at_once == expected


def test_eq_5_by_hand(make):
    """Extractors of 1 and 4 with traces of 1 and 2: (1 + 8) / 3; and a silo gives the products."""
    method = make()
    names = [spec.name for spec in method.extractor.tensors]
    total = {name: torch.tensor([9.0, 3.0]) for name in names} | {
        "trace": torch.tensor(3.0).double()
    }
    published = method.combine({}, 0, ("a", "b"), {"weighted": total}).published
    assert all(value.tolist() == [3, 1] for value in published["extractor"].values())
    assert published["extractor"].keys() == set(names)
    state = initial_state(method, "a")
    for trace, weight in ((2.0, 2.0), (0.0, 1e-12)):
        facts = replace(THREE, measured={"trace": torch.tensor(trace).double()})
        given = method.contribute(state, facts)["weighted"].tensors
        assert given["trace"].item() == weight
        own = state.parts["extractor"]["fc1.weight"]
        assert torch.allclose(given["extractor.fc1.weight"], own * weight, rtol=1e-6, atol=0)


def test_what_crosses(make):
    method = make(rounds=3)
    (up,), (down,) = method.up(2), method.down(3)
    assert (up.name, up.exchange, down.name) == ("weighted", Sum("total"), "extractor")
    # a trace beside the extractor: no more crosses than with FedPer, but for one number
    assert (
        sum(spec.elements for spec in up.tensors) == sum(spec.elements for spec in down.tensors) + 1
    )
    assert not any(spec.name.startswith("classifier") for spec in (*up.tensors, *down.tensors))


def test_prototypes_are_those_of_the_extractor_that_the_round_ended_with(make_job, make_data):
    job, data = make_job("fedas"), make_data(9)
    method = job.method()
    state = local_round(
        method, job, initial_state(method, "a"), 0, {}, data, make_data(4, 1), "a"
    ).state
    features = to_modules(method, "a", state)["extractor"].eval()(data.x)
    for label in range(3):
        mean = features[data.y == label].mean(0)
        assert torch.allclose(state.extra["prototypes"][label], mean, atol=1e-6)


@pytest.mark.parametrize(("given", "first", "later"), [(None, 5, 3), (5, 5, 5)])
def test_alignment_and_training_take_the_jobs_epochs(make, given, first, later):
    """All of them train before there is anything to align to."""
    method = make({"alignment_epochs": 2, "training_epochs": given}, training={"epochs": 5})
    state, facts = initial_state(method, "a"), Facts("a", 0, 3, torch.tensor([1, 1, 1]))
    train, *_ = method.stages(state, facts)
    assert train.epochs == first
    known = {"prototypes": torch.ones_like(state.extra["prototypes"])}
    align, train, *_ = method.stages(replace(state, extra=known), facts)
    assert (align.epochs, train.epochs) == (2, later)


def test_a_silo_that_has_trained_aligns_what_comes_down(make_job, make_data):
    """Training is all but off, so a round moves the delivered extractor towards the silo's
    prototypes.
    """
    data, other = make_data(24), make_data(8, 1)

    def apart(epochs):
        job = make_job(
            "fedas", {"alignment_epochs": epochs, "alignment_lr": 0.05}, training={"lr": 1e-30}
        )
        method = job.method()
        state = local_round(method, job, initial_state(method, "a"), 0, {}, data, other, "a").state
        delivered = {name: 1.3 * value for name, value in method.flat(state, "extractor").items()}
        after = local_round(method, job, state, 1, {"extractor": delivered}, data, other, "a").state
        means = state.extra["prototypes"][data.y]
        with torch.no_grad():
            return float(
                (to_modules(method, "a", after)["extractor"](data.x) - means).square().mean()
            )

    distances = [apart(epochs) for epochs in (0, 1, 4)]
    assert distances[2] < distances[1] < distances[0]
    assert distances[2] < 0.9 * distances[0]


def test_the_course_of_a_round(make):
    method, off = make(), make({"alignment_epochs": 0})
    fresh = initial_state(method, "a")
    trained = replace(fresh, extra={"prototypes": torch.ones(3, 64)})
    kinds = [type(step) for step in method.stages(trained, THREE)]
    assert kinds == [Stage, Stage, Survey, Change]
    align, train = method.stages(trained, THREE)[:2]
    assert (align.trains, align.epochs, align.optimiser.lr, align.coupled) == (
        ("extractor",), 1, 0.01, True,
    )  # fmt: skip
    assert align.optimiser.momentum == 0
    assert train.trains == ("extractor", "classifier")
    for each, state in ((method, fresh), (off, trained)):  # nothing to align to, or not asked to
        assert [type(step) for step in each.stages(state, THREE)] == kinds[1:]


def test_without_alignment_and_with_equal_records_it_is_fedper(make_job, make_data):
    def run(method, options):
        # one batch: its order is no matter
        job = make_job(method, options, rounds=3, training={"batch_size": 64})
        return simulate(job, dict.fromkeys(job.silos, (make_data(20), make_data(6, 1)))).states

    check_states(run("fedas", {"alignment_epochs": 0}), run("fedper", {}), 1e-5)


def test_a_silo_that_never_trained_keeps_what_was_delivered(make_job, make_data):
    job, data = make_job("fedas"), make_data(9)
    method = job.method()
    state = initial_state(method, "a")
    delivered = {name: value + 1 for name, value in method.flat(state, "extractor").items()}
    kept = final_round(
        method, job, state, {"extractor": delivered}, data, data, "a", trained=False
    ).state
    assert torch.equal(
        kept.parts["extractor"]["fc1.bias"], state.parts["extractor"]["fc1.bias"] + 1
    )
    assert not kept.extra["prototypes"].any()


BLIND = {"secure_aggregation": "required", "clip_exponent": 20}


def test_what_cannot_be_is_refused(make_job):
    counts = dict.fromkeys("abcde", 30)
    security = {**BLIND, "weights": "public", "dropouts": "any", "counts": counts}
    with refused(r"part 'weighted' \(sum.total\) may hold .* write participation = 1.0"):
        make_job(
            "fedas", silos=list("abcde"), participation=0.8, security=security, min_cohort=3
        ).document()
