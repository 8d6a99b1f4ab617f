"""Rounds of one step under noise that the silos share, against the step of a trusted curator."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import make_data, make_job, run_private
from support.refusals import refused
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.course import ContributionsAndState, Effort
from staddle.algorithms.engines import engine
from staddle.algorithms.exchange.parts import Contribution, Sum
from staddle.algorithms.job.job import Job
from staddle.algorithms.job.privacy import SHARED, TRAINING, Spend, job_spends, round_spends
from staddle.algorithms.job.privacy_table import (
    LEAST_SHARE,
    MOST_DRAWN,
    PrivacyTable,
    share_variance,
)
from staddle.algorithms.job.shared_steps import RECORDS, STEPS, VALUES, SharedSteps
from staddle.algorithms.leaks.taint import PUBLIC, paid, worst
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.algorithms.training import private_round
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.algorithms.training.silo_round import local_round

SILOS = ["a", "b", "c", "d"]
PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 1.0, "sigma": "2.0", "noise": "shared"}
# A deviation of this noise of counts is rounded to nothing.
PRIVACY |= {"histogram_sigma": 0.4, "clip": 0.25}
ABLE = {"fedavg", "fedavg-ft", "fedavgm", "fedadam", "fedyogi", "fedper", "fedrep", "fedbabu"}
ABLE |= {"fedbn", "fedrod", "lg-fedavg", "pfedsim"}
LR = 0.1
BLIND = {"secure_aggregation": "required"}


class Told:
    """All records are drawn; noise is what it is told, in standard deviations."""

    def __init__(self, local=0.0, share=0.0):
        self.local, self.share, self.variances = local, share, []

    def normal(self, count):
        return np.full(count, self.local)

    def discrete_gaussian(self, count, variance):
        self.variances.append(variance)
        return np.full(count, round(self.share * float(variance) ** 0.5), np.int64)

    def drawn(self, records, q):
        return np.arange(records)


def shared_job(method="fedavg", options=None, privacy=None, **fields):
    model = {"norm": "group"} if method == "fedbn" else {}
    return make_job(
        method,
        options,
        model,
        min_cohort=3,
        privacy={**PRIVACY, **(privacy or {})},
        **{"silos": SILOS, "rounds": 2, "security": {"secure_aggregation": "required"}, **fields},
    )


def shards(job):
    return {
        silo: (make_data(20 + 5 * i, i), make_data(12, 100 + i)) for i, silo in enumerate(job.silos)
    }


def run(job, random=None, data=None):
    return run_private(job, data or shards(job), random or Told())


def clipped_gradients(module, data, clip):
    """Each record's gradient cut to the clip over all parameters, and added up in float64."""
    values = {name: p.detach() for name, p in module.named_parameters()}

    def loss(of, x, y):
        return torch.nn.functional.cross_entropy(functional_call(module, of, x[None]), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(values, data.x, data.y)
    rows = torch.cat([each.flatten(1).double() for each in found.values()], 1)
    factor = (clip / rows.norm(dim=1)).clamp(max=1)
    return {
        name: (each.double() * factor.reshape(-1, *(1,) * (each.ndim - 1))).sum(0)
        for name, each in found.items()
    }


def whole(parts):
    return torch.nn.Sequential(parts["extractor"], parts["classifier"])


def named(values):
    """Of a ``Sequential`` of extractor and classifier, by the names of the parts."""
    return {
        name.replace("0.", "extractor.", 1) if name[0] == "0" else f"classifier.{name[2:]}": value
        for name, value in values.items()
    }


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_round_without_noise_is_the_step_of_a_curator_who_has_all_records(decay):
    job = shared_job(rounds=1, training={"weight_decay": decay})
    module = whole(job.setting().build())
    data = shards(job)
    sums = [named(clipped_gradients(module, train, 0.25)) for train, _ in data.values()]
    records = sum(len(train) for train, _ in data.values())
    final = run(job, data=data).states["b"].parts
    for name, before in named(dict(module.named_parameters())).items():
        mean = sum(each[name] for each in sums) / records
        part, _, leaf = name.partition(".")
        moved = before.double() - LR * (mean + decay * before.double())
        assert (moved - before.double()).abs().max() > 1e-5
        assert_close(final[part][leaf].double(), moved, atol=3e-8, rtol=0)


def test_the_shares_of_all_but_the_dishonest_are_the_noise_of_one_step():
    """Each share is one deviation of its own: n of them together, of which h are all noise."""
    job, clear, noisy = shared_job(rounds=1, privacy={"dishonest": 2}), Told(), Told(share=1.0)
    data = shards(job)
    without, having = run(job, clear, data), run(job, noisy, data)
    variance = Fraction(2.0) ** 2 * 4**24 / 2
    assert set(noisy.variances) == {variance}
    records = sum(len(train) for train, _ in data.values())
    moved = LR * 4 * float(variance) ** 0.5 * 0.25 / 2**24 / records
    for part, tensors in without.states["a"].parts.items():
        for name, value in tensors.items():
            there = having.states["a"].parts[part][name].double()
            assert_close(value.double() - there, torch.full_like(there, moved), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_what_stays_moves_at_its_silo_by_its_own_gradient_under_all_of_the_noise(rate):
    job, random = shared_job("fedper", rounds=1, privacy={"local_rate": rate}), Told(local=1.0)
    module = whole(job.setting().build())
    data = shards(job)
    run_of = run(job, random, data)
    for silo, (train, _) in data.items():
        sums = named(clipped_gradients(module, train, 0.25))
        for name, before in job.setting().build()["classifier"].named_parameters():
            noise = 2.0 * 0.25
            step = (sums[f"classifier.{name}"] + noise) / len(train)
            found = run_of.states[silo].parts["classifier"][name].double()
            assert_close(found, before.double() - LR * rate * step, atol=3e-8, rtol=0)


def test_a_silo_keeps_what_is_summed_as_it_came_down_and_says_who_paid(monkeypatch):
    seen = []
    contribute = private_round.PrivateRound.contribute

    def watched(self, state):
        made = contribute(self, state)
        seen.append((self, state, made))
        return made

    monkeypatch.setattr(private_round.PrivateRound, "contribute", watched)
    job = shared_job("fedper", rounds=2)
    run(job)
    first, later = seen[0], seen[-1]
    build = job.setting().build()["extractor"].state_dict()
    for name, value in first[1].parts["extractor"].items():
        assert torch.equal(value, build[name])
        assert first[1].taints[f"part/extractor/{name}"] == PUBLIC
    side, state, (contributions, taints, kept) = later
    assert kept is state
    assert set(contributions) == {STEPS}
    # the counts' reservation, that of the round before, by the classifier, and that of this round
    assert taints[STEPS].pop(RECORDS) == paid(0)
    assert set(taints[STEPS].values()) == {worst((paid(0), paid(1), paid(2)))}
    assert all(value.dtype == torch.int64 for value in contributions[STEPS].tensors.values())
    assert int(contributions[STEPS].tensors[RECORDS]) == side.facts.samples


@pytest.mark.parametrize("name", sorted(ABLE))
def test_nothing_that_a_silo_keeps_depends_on_its_share_of_the_noise(name, monkeypatch):
    """Nor on a gradient under a share alone, so neither does anything of a later round."""
    job, rounds = shared_job(name), []
    method = job.method()

    def watched(*arguments, **named):
        rounds.append(arguments)
        return local_round(*arguments, **named)

    monkeypatch.setattr(engine, "local_round", watched)
    run(job, Told(local=0.1, share=0.1))
    own = [arguments[:8] for arguments in rounds if arguments[7] == "b"]
    assert [arguments[3] for arguments in own] == list(range(job.length))
    for arguments in own:
        few, many = (again(job, arguments, Told(local=0.1, share=share)) for share in (0.0, 9.0))
        assert_equal(few.state.flat, many.state.flat)
        for part, contribution in few.contributions.items():
            if part != STEPS:
                assert_equal(contribution.tensors, many.contributions[part].tensors)
        means = method.up(arguments[3])[:1]
        assert (STEPS in few.contributions) == (bool(means) and means[0].name == STEPS)


def again(job, arguments, random):
    return local_round(*arguments, private=PrivateSilo(MemoryAccount(job), lambda: random))


def assert_equal(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in some.items())


@pytest.mark.parametrize("unit", ["record", "silo"])
def test_a_method_gets_no_share_that_it_could_write_to_or_keep(monkeypatch, unit):
    """One that kept it could give it away in a later round, where nobody else's noise is."""
    given, seen = FedAvg.contribute, []

    def looking(self, state, facts):
        seen.append(dict(facts.summed))
        return given(self, state, facts)

    monkeypatch.setattr(FedAvg, "contribute", looking)
    run(shared_job(privacy={"unit": unit, "sample_rate": 1.0}))
    assert seen
    assert not any(seen)


def test_what_is_made_of_a_share_stays_at_the_silo(monkeypatch):
    given = SharedSteps.contribute

    def changed(self, state, facts):
        tensors = {
            name: value + 0 for name, value in given(self, state, facts)[STEPS].tensors.items()
        }
        extra = {"own": next(iter(facts.summed.values())) + 1}
        made = {STEPS: Contribution(tensors)}
        return ContributionsAndState(made, replace(state, extra=extra))

    monkeypatch.setattr(SharedSteps, "contribute", changed)
    job = shared_job()
    train, test = shards(job)["a"]
    private = PrivateSilo(MemoryAccount(job), Told)
    began = initial_state(job.method(), "a")
    outcome = local_round(job.method(), job, began, 0, {}, train, test, "a", private=private)
    taints = outcome.taints[STEPS]
    assert {taint.exact for name, taint in taints.items() if name != RECORDS} == {True}
    assert outcome.state.taints["extra/own"].exact


def test_a_round_costs_one_step():
    job = shared_job(rounds=40, privacy={"sample_rate": 0.25})
    assert job.method().effort(0) == Effort(shared=1)
    assert round_spends(job, 0, "2.0") == (Spend(SHARED, "2.0", "0.25", 1),)
    # two rounds more, which crashes may cost
    assert {spend.purpose: spend.steps for spend in job_spends(job, "2.0")} == {
        "histogram": 1,
        SHARED: 42,
    }
    assert Spend(SHARED, "2.0", "0.25", 1).shared
    assert not Spend(TRAINING, "2.0", "0.25", 1).shared


def test_rounds_in_which_no_mean_crosses_have_local_noise():
    job = shared_job("pfedsim", {"rho": 0.5}, rounds=4, privacy={"sample_rate": 0.25})
    parts = [[part.name for part in job.up(round_)] for round_ in range(4)]
    assert parts == [[STEPS, "metrics"]] * 2 + [["extractor", "rows", "metrics"]] * 2
    assert [spend.purpose for spend in round_spends(job, 1, "2.0")] == [SHARED]
    assert round_spends(job, 2, "2.0") == (Spend(TRAINING, "2.0", "0.25", 4),)
    assert [part.name for part in job.down(2)] == ["model"]
    scores = run(job).scores("trained")
    assert set(scores) == set(SILOS)


@pytest.mark.parametrize("name", sorted(ABLE))
def test_methods_whose_means_are_of_steps_from_one_model_share_their_noise(name):
    job = shared_job(name)
    (steps,) = (part for part in job.up(0) if part.name == STEPS)
    assert steps.exchange == Sum("total")
    assert {spec.dtype for spec in steps.tensors} == {"int64"}
    result = run(job, Told(local=0.1, share=0.1))
    assert set(result.scores(job.method().product)) == set(SILOS)
    # The coordinator takes its next step from what the silos have.
    if job.method().product == "delivered":
        for key, value in result.coordinator.items():
            if key.startswith(VALUES):
                part, _, leaf = key.removeprefix(VALUES).partition(".")
                assert torch.equal(result.states["c"].parts[part][leaf], value)


def test_all_others_are_refused():
    others = {name for name in METHODS if not METHODS[name].sums_steps}
    assert others == set(METHODS) - ABLE
    for name in ("fedssa", "ppfl", "fedprox", "local", "fednova"):
        with refused("no round of it is a mean, by records, of steps"):
            shared_job(name).method()


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("fedavg", {"weights": "equal"}, "no round of it is a mean, by records"),
        ("pfedsim", {"rho": 0.0}, "no round of it is a mean, by records"),
        ("fedrep", {"extractor_epochs": 2}, "by more than one epoch"),
    ],
)
def test_options_by_which_a_round_is_no_single_step_are_refused(method, options, said):
    with refused(said):
        shared_job(method, options).method()


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"epochs": 2}, "epochs = 1, and more rounds"),
        ({"momentum": 0.9}, "momentum does nothing"),
        ({"optimiser": "adam"}, 'optimiser = "sgd"'),
        ({"clip": 1.0}, r"leave training\.clip out"),
    ],
)
def test_training_that_is_no_plain_step_is_refused(training, said):
    with refused(said):
        shared_job(training=training).method()
    # its second phase has local noise, and whole epochs of its own
    if "momentum" in training:
        shared_job("pfedsim", training=training).method()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"security": {}}, 'secure_aggregation = "required"'),
        ({"security": {"secure_aggregation": "required", "colluders": 2}}, "raise dishonest"),
        ({"privacy": {"dishonest": 3}}, "nobody is left to share noise with"),
        ({"privacy": {"noise": "local", "dishonest": 2}}, "does nothing with local noise"),
        ({"privacy": {"noise": "local", "local_rate": 0.5}}, "where all noise is local"),
        ({"participation": 0.5}, "a share of the noise from every silo"),
        ({"privacy": {"metrics_sigma": 1001.0}}, "silos share is at most 1,000; lower it"),
        (
            {"security": {**BLIND, "weights": "public", "counts": dict.fromkeys(SILOS, 9)}},
            "steps are weighed by noisy counts",
        ),
    ],
)
def test_jobs_in_which_shares_would_be_missing_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        shared_job(**fields)


def test_a_document_has_shared_noise_and_says_nothing_of_local_noise():
    document = json.loads(json.dumps(shared_job().document()))
    assert (document["privacy"]["noise"], document["privacy"]["dishonest"]) == ("shared", 1)
    assert Job.from_document(document, "job", ()) == shared_job()
    local = shared_job(privacy={"noise": "local"}).document()
    assert not {"noise", "dishonest", "local_rate", "unit"} & set(local["privacy"])
    with refused("no step of it has local noise; take it out"):
        shared_job(privacy={"local_rate": 0.5}).method()


def test_more_noise_than_whole_numbers_hold_is_refused():
    job = shared_job(privacy={"sigma": None})
    with refused("noise that silos share is at most 1,000 clips"):
        job_spends(job, "1000.001")


@pytest.mark.parametrize("method", ["fedavg", "pfedsim"])
def test_many_silos_are_one_batch_without_any_of_which_nothing_opens(method):
    silos = [f"s{number}" for number in range(16)]
    local = shared_job(method, silos=silos, privacy={"noise": "local"})
    shared = shared_job(method, silos=silos)
    assert shared.batches == (tuple(silos),)
    assert method == "pfedsim" or len(local.batches) > 1


def test_a_silo_of_too_many_records_sits_the_job_out(monkeypatch):
    # 20 to 35 records, and up to 4.8 more in each of three classes
    monkeypatch.setattr(private_round, "MOST_DRAWN", 36)
    with refused("a step draws up to 39 of this silo's records on average"):
        run(shared_job())
    assert 2 * MOST_DRAWN * 2**24 <= 2**39


def test_records_that_noise_hides_count_as_if_they_were_there(monkeypatch):
    """Else a job could have it hide nearly all of them, and a sum leave the numbers that it has."""

    class Hiding(Told):
        def normal(self, count):
            hides = np.full(count, -1.0)
            hides[0] = 2.0
            return hides

    # each silo has about ten records of a class, of which less than 12 count as none
    job = shared_job(privacy={"histogram_sigma": 4.0})
    silo, (data, test) = next(iter(shards(job).items()))
    monkeypatch.setattr(private_round, "MOST_DRAWN", len(data) - 1)
    private = PrivateSilo(MemoryAccount(job), Hiding)
    with refused("a step draws up to"):
        local_round(
            job.method(),
            job,
            initial_state(job.method(), silo),
            0,
            {},
            data,
            test,
            silo,
            private=private,
        )
    assert private.account.counts().counts.sum() < len(data) - 1


def test_a_sum_that_cannot_be_of_all_silos_is_refused():
    method = shared_job().method()
    steps = {
        spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in method.up(0)[0].tensors
    }
    results = {STEPS: steps | {RECORDS: torch.tensor(3)}}
    with refused("4 silos say that they have 3 records together"):
        method.combine(method.begin(), 0, tuple(SILOS), results)


def test_the_next_step_is_from_what_the_method_published():
    """A method with an optimiser at the coordinator publishes another value than the mean."""
    method = shared_job("fedavgm", {"server_lr": 0.5}).method()
    begun = method.begin()
    assert begun.keys() >= {VALUES + spec.name for spec in method.down(1)[0].tensors}
    steps = {
        spec.name: torch.full(spec.shape, 2**20, dtype=torch.int64)
        for spec in method.up(0)[0].tensors
    }
    results = {STEPS: steps | {RECORDS: torch.tensor(100)}}
    combined = method.combine(begun, 0, tuple(SILOS), results)
    (published,) = combined.published.values()
    for name, value in published.items():
        # a mean gradient of 2^20 units, of which the coordinator's optimiser takes half
        step = LR * 0.25 / 2**24 * 2**20 / 100
        before = begun[VALUES + name].double()
        assert_close(value.double(), before - 0.5 * step, atol=3e-8, rtol=0)
        assert torch.equal(combined.state[VALUES + name], value)


@given(
    sigma=st.decimals("0.001", "100000", places=3),
    units=st.integers(1, 1 << 45),
    honest=st.integers(1, 10_000),
)
def test_honest_shares_are_the_least_that_have_the_noise_together(sigma, units, honest):
    found = share_variance(str(sigma), units, honest)
    thousandths = int(sigma * 1000) * units
    needed = thousandths**2
    assert found * honest * 10**6 >= needed
    assert found == LEAST_SHARE or (found - 1) * honest * 10**6 < needed
    assert found >= LEAST_SHARE


def test_no_float_comes_between():
    assert share_variance("1.1", 1 << 38, 3) == -(-121 * (1 << 76) // 300)
    assert share_variance("1e-3", 10**6, 1) == 10**6
    assert share_variance("0.001", 1, 5) == LEAST_SHARE
    # 1.2 and 1.001 are floats below the decimals
    assert share_variance(1.2, 1 << 38, 1) == share_variance("1.2", 1 << 38, 1)
    assert share_variance(1.001, 10**12, 1, 3) == 3 * 1001**2 * 10**18


def test_whose_shares_count():
    table = PrivacyTable(epsilon=1.0, delta=1e-5, sample_rate=0.5)
    assert table.honest(10) == 1
    assert replace_(table, noise="shared").honest(10) == 9
    assert replace_(table, noise="shared", dishonest=3).honest(10) == 7


def replace_(table, **changes):
    return table.model_copy(update=changes)


def test_counts_of_test_records_have_shares_of_their_noise_and_may_fall_below_zero():
    job = shared_job(rounds=1, privacy={"metrics_sigma": 6.0, "dishonest": 2})
    random = Told(share=-1.0)
    (noised,) = run(job, random).metrics
    (exact,) = run(shared_job(rounds=1, privacy={"metrics_sigma": 6.0}), Told()).metrics
    # three counts, of which a record changes each by one; two silos are honest
    variance = 6 * 6 * 3 / 2
    assert random.variances.count(variance) == 3 * len(SILOS)
    off = {name: noised[name] - count for name, count in exact.items()}
    assert set(map(int, off.values())) == {-4 * round(variance**0.5)}
    assert {spec.least for part in job.counted_parts for spec in part.tensors} == {-(2.0**40)}
    assert [spend.purpose for spend in round_spends(job, 0, "2.0")] == [SHARED, "metrics-shared"]
