import math
from dataclasses import replace

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_states

from staddle.algorithms import catalog
from staddle.algorithms.course import Facts, SiloState, Survey
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.delivery import Row
from staddle.algorithms.exchange.parts import WEIGHT
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.local import Local

POOLED = {"variances": "pooled"}


@pytest.fixture
def make(make_job):
    return lambda options=None, **fields: make_job("fedpac", options, **fields).method()


def wide(rows):
    """Rows as those of 64 features."""
    return torch.cat([torch.tensor(rows), torch.zeros(len(rows), 62)], dim=1)


def surveyed(method, counts=(2, 0, 1), x=((1.0, 2.0), (3.0, 0.0), (0.0, 4.0)), y=(0, 0, 2)):
    """Facts of a silo whose features are its records, and twice its records after training."""
    x, y = wide(x), torch.tensor(y)
    sums = {
        **method.measure({"extractor": lambda x: x}, x, y),
        **method.survey({"extractor": lambda x: 2 * x}, x, y),
    }
    return Facts("a", 1, len(y), torch.tensor(counts), sums)


def test_eqs_1_and_4_by_hand(make):
    """Class 0: features (1, 2) and (3, 0), class 2: (0, 4).

    The global prototypes are (3, 0), nothing, (0, 1.5).
    """
    method = make()
    state = initial_state(method, "a")
    state = replace(state, extra={"prototypes": wide([[3.0, 0.0], [0.0, 0.0], [0.0, 1.5]])})
    contributions = method.contribute(state, surveyed(method))
    # h_0 = 2/3 · (2, 1), h_2 = 1/3 · (0, 4); a third of the prototypes is (1, 0) and (0, 0.5)
    h = contributions["vectors"].tensors["h"].reshape(3, 64)[:, :2]
    assert torch.allclose(h, torch.tensor([[4 / 3 - 1, 2 / 3], [0.0, 0.0], [0.0, 4 / 3 - 0.5]]))
    # squares: 5 + 9 + 16 = 30; ‖h‖² = 16/9 + 4/9 + 16/9 = 4; V = (30/3 - 4) / 3
    assert contributions["variance"].tensors["v"].item() == pytest.approx(2.0)
    assert torch.equal(
        contributions["prototypes"].tensors["mean"], wide([[4.0, 2.0], [0.0, 0.0], [0.0, 8.0]])
    )
    assert contributions["prototypes"].weight.tolist() == [2, 0, 1]
    assert contributions["extractor"].weight == 3
    pooled = make(POOLED).contribute(state, surveyed(method))["variance"]
    assert (pooled.tensors["v"].item(), pooled.weight) == (pytest.approx(6 / 64), 3)


def test_eq_3_by_hand(make):
    """Logits are 0, so the cross-entropy is log 3.

    Class 0 is 4 off in one of 64 features, class 1 has no prototype.
    """
    method = make({"lam": 8.0})
    parts = {"extractor": lambda x: x, "classifier": lambda z: 0 * z[:, :3]}
    prototypes = wide([[5.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    x = wide([[1.0, 0.0], [7.0, 7.0], [0.0, 1.0]])
    loss = method.aligned(parts, x, torch.tensor([0, 1, 2]), {"prototypes": prototypes})
    assert loss.tolist() == pytest.approx([math.log(3) + 8 * 16 / 64, math.log(3), math.log(3)])


def test_pooled_variances_by_hand(make, make_job):
    """The pooled n V / d is 0.25, so n V is 16.

    40 records in all of two silos, or the counts that the job declares.
    """
    found = {"v": torch.tensor(0.25), WEIGHT: torch.tensor(40.0)}
    assert make(POOLED).variances(("a", "b"), found).tolist() == [0.8, 0.8]
    method = make(POOLED)
    method.setting = replace(method.setting, counts={"a": 8, "b": 32})
    assert method.variances(("a", "b"), found).tolist() == [2.0, 0.5]


def test_beside_a_model_the_papers_numbers_cross(make):
    """C·d numbers of prototypes, and C·d + 1 for Eq. 6."""
    method = make(rounds=3)
    parts = (method.prototypes, method.vectors, method.variance)
    assert [sum(s.elements for s in part.tensors) for part in parts] == [3 * 64, 3 * 64, 1]


def test_a_round_by_hand_and_a_row_over_what_was_given(make):
    """Two silos far apart in Eq. 6 keep their own classifier.

    Two alike mix theirs, and a third that is away waits.
    """
    method = make(silos=list("abcd"), rounds=3)
    ones = {f"extractor.{s.name}": torch.ones(s.shape) for s in method.template["extractor"]}
    gram = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1e6]]]).double()
    results = {"extractor": ones, "classifier": {}, "vectors": {"gram": gram}}
    results["prototypes"] = {"mean": torch.zeros(3, 64)}
    results["variance"] = {"v": torch.tensor([1.0, 3.0, 1.0]).double()}
    before = method.begin()
    # all were mixed with c alone, which stays c's own row
    before["alpha"][:] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    combined = method.combine(before, 1, ("a", "b", "d"), results)
    assert combined.published.keys() == {"extractor", "prototypes"}
    # alike: a = V_0 / (V_0 + V_1) = 1/4 of the other
    rows = [[3 / 4, 1 / 4, 0, 0], [3 / 4, 1 / 4, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert combined.state["alpha"].tolist() == [pytest.approx(row) for row in rows]
    rows = {silo: method.deliveries(combined.state, 2, silo)[2:] for silo in "abcd"}
    assert isinstance(rows["a"][0], Row)
    assert rows["a"][0].weights == pytest.approx({"a": 3 / 4, "b": 1 / 4})
    assert rows["c"] == rows["d"] == ()


def test_classifier_then_extractor_then_a_look(make):
    method = make(
        {"classifier_epochs": 3, "classifier_lr": 0.2}, training={"epochs": 5, "momentum": 0.5}
    )
    facts = Facts("a", 1, 3, torch.tensor([1, 1, 1]))
    classifier, extractor, survey = method.stages(initial_state(method, "a"), facts)
    assert classifier.trains == ("classifier",)
    assert classifier.epochs == 3
    assert classifier.optimiser.lr == 0.2
    assert (extractor.trains, extractor.epochs, extractor.optimiser.lr) == (("extractor",), 2, 0.1)
    assert classifier.optimiser.momentum == extractor.optimiser.momentum == 0.5
    assert isinstance(survey, Survey)


@pytest.mark.parametrize(("given", "epochs"), [(None, 1), (4, 4)])
def test_both_stages_take_the_jobs_epochs_unless_options_say_otherwise(make, given, epochs):
    method = make({"classifier_epochs": 2, "extractor_epochs": given}, training={"epochs": 3})
    facts = Facts("a", 1, 3, torch.tensor([1, 1, 1]))
    classifier, extractor, _ = method.stages(initial_state(method, "a"), facts)
    assert (classifier.epochs, extractor.epochs) == (2, epochs)


def test_before_the_first_delivery_it_trains_alone_in_the_same_two_stages(
    make_job, make_shards, monkeypatch
):
    class TwoStages(Local):
        def stages(self, state, facts):
            classifier = self.stage("classifier")
            optimiser = replace(classifier.optimiser, lr=0.05)
            return replace(classifier, optimiser=optimiser), self.stage("extractor")

    monkeypatch.setitem(catalog.METHODS, "local", TwoStages)
    job, alone = make_job("fedpac", {"classifier_lr": 0.05}, rounds=1), make_job("local", rounds=1)
    found, expected = (simulate(each, make_shards(each)).states for each in (job, alone))
    check_states(found, expected)


def test_it_mixes(make_job, make_shards):
    job = make_job("fedpac", rounds=4, training={"epochs": 3})
    result = simulate(job, make_shards(job))
    alpha = result.coordinator["alpha"]
    assert alpha.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert bool((alpha > 0).all())  # like data: everyone's classifier is of use
    assert bool((result.states["a"].extra["prototypes"] != 0).any(1).all())


def test_a_round_of_one_silo_is_refused(make_job):
    with refused(r"draws 1 of 3 silos, so no two are ever compared .* raise participation"):
        make_job("fedpac", participation=0.1, min_cohort=1).document()


def test_a_delivery_goes_where_it_belongs(make):
    method = make()
    state = initial_state(method, "a")
    assert not state.extra["prototypes"].any()
    head = {f"classifier.{name}": value + 1 for name, value in state.parts["classifier"].items()}
    facts = Facts("a", 1, 3, torch.tensor([1, 1, 1]))
    taken = method.deliver(
        state, {"classifier": head, "prototypes": {"mean": torch.ones(3, 64)}}, facts
    )
    assert isinstance(taken, SiloState)
    assert torch.equal(taken.parts["classifier"]["bias"], state.parts["classifier"]["bias"] + 1)
    assert torch.equal(taken.parts["extractor"]["fc1.bias"], state.parts["extractor"]["fc1.bias"])
    assert torch.equal(taken.extra["prototypes"], torch.ones(3, 64))
    assert torch.equal(method.deliver(taken, {}, facts).extra["prototypes"], torch.ones(3, 64))
