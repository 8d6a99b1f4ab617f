from dataclasses import replace

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_tensors
from torch.testing import assert_close

from staddle.algorithms.baselines import pfedfda
from staddle.algorithms.course import Change, Facts, Stage, Survey
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.common.gaussian_classifier import estimates, linear, priors_of
from staddle.algorithms.training.silo_round import local_round, to_modules
from staddle.errors import PeerError
from staddle.security.blind.plan import simulated


@pytest.fixture
def make(make_job):
    return lambda options=None, **fields: make_job("pfedfda", options, **fields).method()


def test_eq_6_by_hand(make):
    """Class 1 changed by 4 at the silos that hold it, 6 of 8 records: by 3 in all.

    Class 2 nobody holds.
    """
    method = make()
    state = method.begin()
    change = torch.tensor([1.0, 4.0, 0.0])[:, None].expand(3, 64)
    sums = {
        "extractor": {spec.name: torch.ones(spec.shape) for spec in method.extractor.tensors},
        "covariance": {"covariance": torch.ones(64, 64)},
        "records": {"records": torch.tensor(8)},
        "changes": {"change": change, WEIGHT: torch.tensor([8.0, 6.0, 0.0])},
    }
    combined = method.combine(state, 0, ("a", "b"), sums)
    expected = state["means"] + torch.tensor([1.0, 3.0, 0.0])[:, None]
    assert torch.allclose(combined.state["means"], expected)
    assert torch.equal(combined.published["means"]["mean"], combined.state["means"])
    assert combined.published.keys() == {"extractor", "covariance", "means"}
    silos_alone = {**sums, "extractor": {}, "covariance": {}}
    assert method.combine(state, 0, ("a", "b"), silos_alone).published.keys() == {"means"}


def test_all_begin_with_the_same_statistics(make):
    method = make()
    one, other = (method.initial_extra(silo) for silo in "ab")
    assert torch.equal(one["means"], method.begin()["means"])
    assert torch.equal(one["means"], other["means"])
    assert 0 <= one["means"].min() < one["means"].max() < 1
    assert torch.equal(one["covariance"], torch.eye(64))


def facts_of(method, data):
    return Facts("a", 0, len(data), torch.bincount(data.y, minlength=method.setting.outputs))


def features_of(method, state, data):
    with torch.no_grad():
        return to_modules(method, "a", state)["extractor"].eval()(data.x).double()


def test_a_round_of_one_silo_follows_the_equations(make_job, make_data, monkeypatch):
    asked = []

    def beta(*given):
        asked.append(given)
        return torch.tensor([0.25, 0.5]).double()

    monkeypatch.setattr(pfedfda, "best_beta", beta)
    job, data = make_job("pfedfda", training={"lr": 1e-4}), make_data(20)
    data = replace(data, y=data.y.clamp(max=1))  # of three classes it holds two
    method, start = job.method(), initial_state(job.method(), "a")
    outcome = local_round(method, job, start, 0, {}, data, make_data(6, 1), "a")
    parts, extra = outcome.state.parts, outcome.state.extra
    assert not torch.equal(parts["extractor"]["fc1.weight"], start.parts["extractor"]["fc1.weight"])
    means, covariance = (start.extra[name].double() for name in ("means", "covariance"))
    z = features_of(method, outcome.state, data)  # of the trained extractor
    own, priors = estimates(z, data.y, means, 1.0), priors_of(torch.bincount(data.y, minlength=3))
    ((*tensors, ridge, one),) = asked
    assert_close(tensors[:1], [z])
    assert_close(tensors[1:], [data.y, (means, covariance), priors], atol=0, rtol=0)
    assert (ridge, one) == (1.0, False)
    assert extra["beta"].tolist() == [0.25, 0.5]
    change, adapted = 0.25 * (own[0] - means), 0.5 * own[1] + 0.5 * covariance  # (4)
    weight, bias = linear(means + change, adapted, priors)
    for found, expected, within in (
        (extra["change"], change, 1e-5),
        (extra["adapted"], adapted, 1e-5),
        (parts["classifier"]["weight"], weight, 1e-3),
        (parts["classifier"]["bias"], bias, 1e-3),
        (extra["means"], means, 0),  # the global ones
    ):
        assert_close(found.double(), expected, atol=within, rtol=1e-5 if within else 0)
    contributions = outcome.contributions
    assert not contributions["changes"].tensors["change"][2].any()
    assert contributions["changes"].weight.tolist() == [20, 20, 0]
    assert contributions["records"].tensors["records"] == 20
    assert torch.equal(contributions["covariance"].tensors["covariance"], extra["adapted"])


def test_features_that_are_not_finite_are_told_of(make, make_data):
    method, data = make(), make_data(4)
    z = torch.full((4, 64), torch.inf).double()
    facts = replace(facts_of(method, data), measured={"features": z, "labels": data.y.double()})
    with refused(r"features of the trained extractor are not finite; .* lower training\.lr"):
        method.adapt(initial_state(method, "a"), facts)


def test_the_extractor_is_trained_below_the_global_classifier(make):
    """The classifier of Eq. 2 has the silo's priors, and no stage trains it."""
    method, facts = make(), Facts("a", 0, 4, torch.tensor([3, 1, 0]))
    state = initial_state(method, "a")
    begin, stage, survey, change = method.stages(state, facts)
    assert (type(begin), type(stage), type(survey), type(change)) == (Change, Stage, Survey, Change)
    assert stage.trains == ("extractor",)
    assert survey.rows
    begun = begin.change(state, facts)
    means, covariance = (begun.extra[name].double() for name in ("means", "covariance"))
    weight, bias = linear(means, covariance, priors_of(facts.class_counts))
    assert torch.allclose(begun.parts["classifier"]["weight"].double(), weight, atol=1e-5)
    assert torch.allclose(begun.parts["classifier"]["bias"].double(), bias, atol=1e-5)


def test_a_delivery_makes_the_classifier(make):
    method, facts = make(), Facts("a", 1, 4, torch.tensor([3, 1, 0]))
    state = initial_state(method, "a")
    state = replace(
        state, extra={**state.extra, "priors": torch.tensor([0.5, 0.25, 0.25]).double()}
    )
    down = {"means": {"mean": torch.eye(3, 64)}, "covariance": {"covariance": 2 * torch.eye(64)}}
    taken = method.deliver(state, down, facts)
    # w = μ / 2, b = log π - ½ · 1 · ½
    assert torch.allclose(taken.parts["classifier"]["weight"], torch.eye(3, 64) / 2)
    assert taken.parts["classifier"]["bias"].tolist() == pytest.approx(
        [-0.9431, -1.6363, -1.6363], abs=1e-4
    )
    assert torch.equal(taken.extra["means"], torch.eye(3, 64))
    assert torch.equal(method.deliver(taken, {}, facts).extra["covariance"], 2 * torch.eye(64))


def test_beside_the_extractor_the_papers_numbers_cross(make):
    """The d² + C·d numbers of its means and covariance, and a count."""
    method = make(rounds=3)
    sizes = {
        part.name: sum(spec.elements for spec in part.tensors)
        for part in (*method.up(0), *method.down(0))
    }
    assert not any(s.name.startswith("classifier") for p in method.up(0) for s in p.tensors)
    del sizes["extractor"]
    assert sizes == {"covariance": 64**2, "changes": 3 * 64, "means": 3 * 64, "records": 1}


@pytest.mark.parametrize("interpolation", ["two", "one"])
def test_it_learns_and_adapts_in_the_end(make_job, make_shards, interpolation):
    job = make_job(
        "pfedfda", {"interpolation": interpolation}, rounds=3, training={"lr": 0.02, "epochs": 3}
    )
    result = simulate(job, make_shards(job))
    assert job.length == 4
    assert min(result.scores("trained").values()) > 0.7  # of three classes
    one, *others = result.states.values()
    for other in others:  # one extractor, below classifiers of their own
        assert torch.equal(
            one.parts["extractor"]["fc1.weight"], other.parts["extractor"]["fc1.weight"]
        )
        assert not torch.equal(one.parts["classifier"]["bias"], other.parts["classifier"]["bias"])
        assert torch.equal(one.extra["means"], other.extra["means"])
    betas = torch.stack([state.extra["beta"] for state in result.states.values()])
    assert bool((betas[:, 0] == betas[:, 1]).all()) == (interpolation == "one")


SECURITY = {"secure_aggregation": "required", "clip_exponent": 6}
BLIND = {"silos": list("abcd"), "min_cohort": 3, "security": SECURITY}


def test_blind_a_class_of_few_silos_is_not_summed(make_job, make_shards):
    job = make_job("pfedfda", rounds=2, **BLIND)
    assert job.counted
    shards = make_shards(job)
    for silo in "bcd":  # class 2 is of one silo
        train, test = shards[silo]
        shards[silo] = (replace(train, y=train.y.clamp(max=1)), test)
    blind, clear = simulate(job, shards, exchanges=simulated(job)), simulate(job, shards)
    for result in (blind, clear):
        changed = (result.coordinator["means"] != job.method().begin()["means"]).any(1)
        assert changed.tolist() == [True, True, False]
    for silo in job.silos:
        check_tensors(blind.states[silo].flat, clear.states[silo].flat, 2e-2)


def test_the_ridge_is_an_option(make, make_data):
    data = make_data(9)
    for ridge in (0.5, 1.0):
        method = make({"ridge": ridge})
        state = initial_state(method, "a")
        z = features_of(method, state, data)
        facts = replace(facts_of(method, data), measured={"features": z, "labels": data.y.double()})
        adapted = method.adapt(state, facts).extra
        own = estimates(z, data.y, state.extra["means"].double(), ridge)[1]
        second = adapted["beta"][1]
        assert torch.allclose(
            adapted["adapted"].double(), second * own + (1 - second) * torch.eye(64), atol=1e-6
        )


def test_a_delivered_covariance_that_has_no_inverse_is_the_coordinators_fault(make):
    method = make()
    state, facts = initial_state(method, "a"), Facts("a", 1, 6, torch.tensor([3, 3, 0]))
    came = {"covariance": {"covariance": torch.zeros(64, 64)}}
    said = "the delivered covariance cannot be used: pfedfda: a covariance of feat"
    with pytest.raises(PeerError, match=said):
        method.deliver(state, came, facts)
