from math import log

import pytest
import torch
from support.banded_records import banded, banded_shards
from support.refusals import refused
from support.whole_jobs import check_states, check_tensors
from torch import nn

from staddle.algorithms.baselines.fedproto import Prototypes
from staddle.algorithms.course import Facts, Stage, Survey
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import LARGEST_WEIGHT, WEIGHT, Kind
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.security import unblind
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round
from staddle.security.blind.plan import simulated

SMALL = {"name": "digits-cnn-c", "input": [1, 8, 8]}
TWO = {"extractors": ["digits-cnn-a", "digits-cnn-c"]}


def facts(counts=(2, 0, 1), sums=None, round_=0):
    measured = {} if sums is None else {"sums": torch.tensor(sums)}
    return Facts("a", round_, sum(counts), torch.tensor(counts), measured)


@pytest.fixture
def method(make_job):
    return make_job("fedproto", {"lam": 3}).method()


def filled(method, values):
    """What comes down with prototype j full of values[j]."""
    (spec,) = method.down(0)[0].tensors
    return {"prototypes": {"mean": torch.tensor(values)[:, None].expand(spec.shape).clone()}}


def held(state):
    return state.parts["prototypes"]["mean"][:, 0].tolist()


def test_eq_4_by_hand():
    """f = (1, 1), C = (1, 0), (0, 2) and none: squared distances 1 and 2, of which ‖f‖² = 2 is
    taken.
    """
    part = Prototypes(3, 2)
    part.mean.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
    expected = [[1, 0, -torch.inf], [-1, 0, -torch.inf]]
    assert part(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == expected


def test_who_decides(make_job):
    near = Prototypes(3, 2)
    parts = {
        "extractor": nn.Identity(),
        "classifier": lambda f: torch.tensor([[0.0, 0, 5]]).expand(len(f), 3),
    }
    x = torch.tensor([[1.0, 1.0]])
    prototypes, classifier = (
        make_job("fedproto", {"predict": who}).method() for who in ("prototypes", "classifier")
    )
    # no class has one yet
    assert prototypes.predict({**parts, "prototypes": near}, x).argmax() == 2
    near.mean[1] = 1.0
    assert prototypes.predict({**parts, "prototypes": near}, x).argmax() == 1
    assert classifier.predict({**parts, "prototypes": near}, x).argmax() == 2


def test_eqs_7_and_8_by_hand(method):
    """ℓ_S = log 3 of equal logits; f - C^0 = (0, 1), so ℓ_R = 1/2, times λ = 3.

    Class 2 has no prototype.
    """
    parts = {"extractor": nn.Identity(), "classifier": lambda f: torch.zeros(len(f), 3)}
    context = {"prototypes": torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 0.0]])}
    loss = method.objective(parts, torch.ones(2, 2), torch.tensor([0, 2]), context)
    assert loss.tolist() == pytest.approx([log(3) + 1.5, log(3)], abs=1e-6)


def test_eq_3_by_hand(method):
    """Two records of class 0 and one of class 2."""
    features = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]])
    sums = method.sums(
        {"extractor": lambda _: features}, torch.zeros(3, 1), torch.tensor([0, 2, 0])
    )
    assert sums["sums"].tolist() == [[4, 6], [0, 0], [5, 6]]
    contribution = method.contribute(initial_state(method, "a"), facts(sums=sums["sums"].tolist()))[
        "prototypes"
    ]
    assert contribution.tensors["mean"].tolist() == [[2, 3], [0, 0], [5, 6]]
    assert contribution.weight.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("weights", "mean", "total", "most"),
    [("samples", 6.0, 6, LARGEST_WEIGHT), ("equal", 5.0, 2, 1.0)],
)
def test_eq_6_by_hand(make_job, weights, mean, total, most):
    """Class 0: C = 2 of two records and C = 8 of four, (2·2 + 4·8) / 6 = 6 or (2 + 8) / 2 = 5.

    Class 2 of one silo.
    """
    method = make_job("fedproto", {"weights": weights}).method()
    (part,) = method.up(0)
    given = {}
    held = (("a", (2, 0, 1), (2.0, 0.0, 7.0)), ("b", (4, 0, 0), (8.0, 0.0, 0.0)))
    for silo, counts, values in held:
        sums = torch.tensor(counts)[:, None] * filled(method, values)["prototypes"]["mean"]
        contribution = method.contribute(initial_state(method, silo), facts(counts, sums.tolist()))[
            "prototypes"
        ]
        given[silo] = PLAIN.contribute(part, contribution)
    result = PLAIN.collect(part, ("a", "b"), lambda silo, name: given[silo][name])
    assert result["mean"][:, 0].tolist() == pytest.approx([mean, 0, 7])
    assert result[WEIGHT].tolist() == [total, 0, 1]
    assert part.given[-1].most == most


def test_prototypes_replace_those_of_before_where_there_are_any(method):
    start = initial_state(method, "a")
    first = method.deliver(start, filled(method, [1.0, 2.0, 0.0]), facts())
    later = method.deliver(first, filled(method, [3.0, 0.0, 4.0]), facts())
    assert [held(state) for state in (start, first, later)] == [[0, 0, 0], [1, 2, 0], [3, 2, 4]]
    assert method.deliver(later, {}, facts()) is later
    assert later.parts["extractor"] is start.parts["extractor"]


def test_what_is_given_are_the_features_of_the_trained_extractor(make_job):
    job = make_job("fedproto", {}, {"norm": "batch"})
    method, data = job.method(), banded([0, 0, 2, 0, 2, 0, 0, 0, 0], 1)
    made = local_round(method, job, initial_state(method, "a"), 0, {}, data, data, "a")
    extractor = method.modules("a")["extractor"].eval()
    extractor.load_state_dict(made.state.parts["extractor"])
    features = extractor(data.x).detach()
    means = [features[data.y == label].mean(0) for label in (0, 2)]
    contribution = made.contributions["prototypes"]
    assert torch.allclose(contribution.tensors["mean"][[0, 2]], torch.stack(means), atol=1e-6)
    assert contribution.weight.tolist() == [7, 0, 2]
    assert not contribution.tensors["mean"][1].any()


def test_stages_train_then_measure(method):
    stage, survey = method.stages(
        method.deliver(initial_state(method, "a"), filled(method, [1.0, 0, 0]), facts()), facts()
    )
    assert isinstance(stage, Stage)
    assert stage.trains == ("extractor", "classifier")
    assert stage.context["prototypes"][:, 0].tolist() == [1, 0, 0]
    assert isinstance(survey, Survey)


@pytest.mark.parametrize("options", [{}, TWO])
def test_prototypes_alone_cross(make_job, options):
    """84 features of 10 classes: 840 numbers and 10 counts, of the 61,000 of LeNet-5."""
    job = make_job("fedproto", options, {**SMALL, "classes": 10})
    for round_ in range(job.length + 1):
        for part in (*job.method().up(round_), *job.method().down(round_)):
            assert part.kind == Kind.PROTOTYPES
            assert [(spec.name, spec.shape) for spec in part.tensors] == [("mean", (10, 64))]
    lenet = make_job("fedproto", {}, {"name": "lenet5", "classes": 10}).method()
    expected = [("mean", 840), (WEIGHT, 10)]
    assert [(spec.name, spec.elements) for spec in lenet.up(0)[0].wire] == expected


def test_without_lambda_it_trains_as_alone(make_job):
    one = make_job("fedproto", {"lam": 0, "predict": "classifier"}, SMALL, rounds=2)
    other = make_job("local", {}, SMALL, rounds=2)
    mine, theirs = (simulate(job, banded_shards(job.silos)) for job in (one, other))
    assert mine.scores("delivered") == theirs.scores("trained")
    check_states(mine.states, theirs.states)


def test_it_learns_with_models_that_differ(make_job):
    job = make_job("fedproto", TWO, SMALL, {"epochs": 2}, rounds=3)
    result = simulate(job, banded_shards(job.silos, mostly=0.6))
    assert min(result.scores("delivered").values()) > 0.8
    first, *others = (state.parts["prototypes"] for state in result.states.values())
    assert first["mean"].any(1).all()
    for other in others:
        check_tensors(other, first)


def test_a_silo_keeps_the_prototypes_of_the_last_round(make_job):
    job = make_job("fedproto", {}, SMALL, rounds=1)
    for state in simulate(job, banded_shards(job.silos)).states.values():
        assert state.parts["prototypes"]["mean"].any(1).all()


def test_lambda_draws_the_features_of_all_silos_together(make_job):
    """Of class 0, the distance between two silos' own prototypes, by that from zero."""
    apart = []
    for lam in (0, 3):
        job = make_job("fedproto", {"lam": lam, **TWO}, SMALL, {"epochs": 2}, rounds=3)
        shards, means = banded_shards(job.silos), {}
        states = simulate(job, shards).states
        for silo in ("a", "b"):
            extractor, data = job.method().modules(silo)["extractor"], shards[silo][0]
            extractor.load_state_dict(states[silo].parts["extractor"])
            means[silo] = extractor(data.x)[data.y == 0].mean(0)
        apart.append((means["a"] - means["b"]).norm().item() / means["a"].norm().item())
    assert apart[1] < 0.8 * apart[0]


# Where it may run.


def test_blind_it_gives_no_row_that_few_hold(make_job):
    fields = {"silos": list("abcd"), "min_cohort": 3, "rounds": 2}
    job = make_job("fedproto", {}, SMALL, security={"secure_aggregation": "required"}, **fields)
    assert not list(unblind(job.document()["schema"]))
    assert job.counted
    shards = banded_shards(job.silos)
    rare = {
        silo: tuple(side.take((side.y < 2).nonzero()[:, 0].numpy()) for side in shards[silo])
        for silo in "bcd"
    }
    alone = simulate(job, {**shards, **rare}, exchanges=simulated(job))
    for silo in job.silos:
        assert alone.states[silo].parts["prototypes"]["mean"].any(1).tolist() == [True, True, False]


def test_records_themselves_are_no_features(make_job):
    glm = {"name": "glm", "input": [1, 8, 8]}
    for options, model in (({}, glm), ({"extractors": ["digits-cnn-c", "glm"]}, SMALL)):
        with refused(
            "an extractor without parameters would make them means of records; choose a model"
        ):
            make_job("fedproto", options, model).document()
