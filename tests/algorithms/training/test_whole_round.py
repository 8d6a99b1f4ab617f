"""Rounds that protect whole silos, against plain training and the updates that come of it."""

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.jobs import make_data, make_job, run_private
from support.refusals import refused
from torch.testing import assert_close

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.course import ContributionsAndState, Effort
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Contribution
from staddle.algorithms.job.privacy import SHARED, Spend, job_spends, round_spends
from staddle.algorithms.job.shared_steps import STEPS, SharedUpdates
from staddle.algorithms.leaks.taint import EXACT, PUBLIC, paid
from staddle.algorithms.leaks.traps import Caution, TrapError
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.algorithms.training.record_checks import check_training
from staddle.algorithms.training.silo_round import final_round, local_round
from staddle.security.blind.plan import simulated

SILOS, CLIP, UNITS = ["a", "b", "c", "d"], 0.25, 2**24
PRIVACY = {"unit": "silo", "noise": "shared", "epsilon": 8.0, "delta": 0.01, "sample_rate": 1.0}
PRIVACY |= {"sigma": "2.5", "clip": CLIP}
TRAINING = {"epochs": 2, "lr": 0.1, "momentum": 0.9}
ABLE = {"fedavg", "fedavg-ft", "fedavgm", "fedadam", "fedyogi", "fedper", "fedrep", "fedbabu"}
ABLE |= {"fedbn", "fedrod", "lg-fedavg"}


class Told:
    """Shares of the noise are what it is told, in standard deviations; it has no other noise."""

    def __init__(self, share=0.0):
        self.share, self.variances = share, []

    def discrete_gaussian(self, count, variance):
        self.variances.append(variance)
        return np.full(count, round(self.share * float(variance) ** 0.5), np.int64)


def fields_of(fields):
    return {"silos": SILOS, "rounds": 2, **fields}


def whole_job(method="fedavg", options=None, model=None, privacy=None, **fields):
    training = {**TRAINING, **fields.pop("training", {})}
    return make_job(
        method,
        options,
        {"norm": "group", **(model or {})},
        training,
        min_cohort=3,
        privacy={**PRIVACY, **(privacy or {})},
        **{"security": {"secure_aggregation": "required"}, **fields_of(fields)},
    )


def shards(job):
    return {
        silo: (make_data(20 + 15 * i, i), make_data(12, 100 + i))
        for i, silo in enumerate(job.silos)
    }


def run(job, random=None, data=None):
    return run_private(job, data or shards(job), random or Told())


def plain_round(job, silo, data):
    """What a plain job of the same seed trains in its first round, by part."""
    plain = replace(job, privacy=None)
    state = initial_state(plain.method(), silo)
    outcome = local_round(plain.method(), plain, state, 0, {}, *data, silo)
    return state.parts, outcome.state.parts


def own_round(job, silo="a", random=None, data=None):
    method, private = job.method(), PrivateSilo(MemoryAccount(job), lambda: random or Told())
    train, test = data or shards(job)[silo]
    return local_round(
        method, job, initial_state(method, silo), 0, {}, train, test, silo, private=private
    )


def published(job):
    """A last delivery, of zeros."""
    return {
        part.name: {spec.name: torch.zeros(spec.shape) for spec in part.tensors}
        for part in job.down(job.length)
    }


def length(numbers):
    """Exactly: the squared norm of integers."""
    return sum(int(number) ** 2 for values in numbers for number in values.flatten())


def test_a_method_whose_silos_count_alike_gives_the_same():
    """They count alike in any case."""
    equal, weighed = (run(whole_job(options={"weights": how})) for how in ("equal", "samples"))
    for silo in SILOS:
        assert_close(equal.states[silo].parts, weighed.states[silo].parts, rtol=0, atol=0)


def test_a_round_without_noise_moves_by_the_mean_of_updates_that_are_cut_to_the_clip():
    job = whole_job(rounds=1)
    data = shards(job)
    moves, cut = {}, set()
    for silo, own in data.items():
        before, after = plain_round(job, silo, own)
        move = {
            (part, name): after[part][name].double() - value.double()
            for part in before
            for name, value in before[part].items()
        }
        norm = sum(each.square().sum() for each in move.values()).sqrt()
        cut.add(bool(norm > CLIP))
        for key, each in move.items():
            moves[key] = moves.get(key, 0) + each * min(1.0, CLIP / float(norm)) / len(SILOS)
    assert True in cut
    final = run(job, data=data).states["b"].parts
    for (part, name), move in moves.items():
        moved = before[part][name].double() + move
        assert move.abs().max() > 1e-6
        assert_close(final[part][name].double(), moved, atol=1e-7, rtol=0)


def test_the_noise_of_a_sum_is_that_of_two_updates_as_far_apart_as_can_be():
    job, noisy = whole_job(rounds=1, privacy={"dishonest": 2}), Told(share=1.0)
    data = shards(job)
    without, having = run(job, data=data), run(job, noisy, data)
    variance = Fraction(2 * Fraction("2.5") * UNITS) ** 2 / 2
    assert set(noisy.variances) == {variance}
    moved = 4 * float(variance) ** 0.5 * CLIP / UNITS / 4
    for part, tensors in without.states["a"].parts.items():
        for name, value in tensors.items():
            there = having.states["a"].parts[part][name].double()
            assert_close(there - value.double(), torch.full_like(there, moved), atol=1e-6, rtol=0)


def test_no_records_whatever_move_a_sum_by_more_than_two_clips():
    job = whole_job(training={"lr": 5.0})
    pair = []
    for sign in (1, -1):
        train, test = shards(job)["a"]
        train = replace(train, x=sign * 1000 * train.x)
        given = own_round(job, data=(train, test)).contributions[STEPS].tensors
        # room for rounding is set aside within the clip
        assert length(given.values()) <= UNITS**2
        assert length(given.values()) > 0.99 * UNITS**2
        pair.append(given)
    apart = [pair[0][name] - pair[1][name] for name in pair[0]]
    assert UNITS**2 < length(apart) <= (2 * UNITS) ** 2


def test_an_update_that_is_no_number_counts_as_none():
    job = whole_job(training={"lr": 1e30})
    outcome = own_round(job)
    assert any(not value.isfinite().all() for value in outcome.state.flat.values())
    assert length(outcome.contributions[STEPS].tensors.values()) == 0


def test_what_stays_is_trained_as_in_a_plain_job_and_may_not_leave():
    job = whole_job("fedper")
    data = shards(job)
    _, after = plain_round(job, "c", data["c"])
    outcome = own_round(job, "c", Told(share=3.0), data["c"])
    for part in ("extractor", "classifier"):
        for name, value in outcome.state.parts[part].items():
            assert torch.equal(value, after[part][name])
            assert outcome.state.taints[f"part/{part}/{name}"] == EXACT
    names = outcome.contributions[STEPS].tensors
    assert names
    assert all(name.startswith("extractor.") for name in names)
    assert set(outcome.taints[STEPS].values()) == {paid(0)}
    # Test counts stay here: zeros leave.
    assert set(outcome.taints) == {STEPS, "metrics"}
    assert not any(value.any() for value in outcome.contributions["metrics"].tensors.values())
    assert set(outcome.taints["metrics"].values()) == {PUBLIC}


def test_a_model_that_came_down_is_public_and_one_that_was_trained_is_not():
    job = whole_job()
    data, account = shards(job)["a"], MemoryAccount(job)
    private = PrivateSilo(account, Told)
    trained = own_round(job).state
    kept = final_round(
        job.method(), job, trained, published(job), *data, "a", private=private
    ).state
    assert set(kept.taints.values()) == {PUBLIC}
    assert account.spendings == []


def test_what_the_last_delivery_makes_of_records_is_not_public(monkeypatch):
    taken = FedAvg.deliver

    def counting(self, state, delivered, facts):
        return replace(taken(self, state, delivered, facts), extra={"own": facts.class_counts + 0})

    job = whole_job()
    trained, data = own_round(job).state, shards(job)["a"]
    monkeypatch.setattr(FedAvg, "deliver", counting)
    private = PrivateSilo(MemoryAccount(job), Told)
    kept = final_round(
        job.method(), job, trained, published(job), *data, "a", private=private
    ).state
    assert kept.taints.pop("extra/own") == EXACT
    assert set(kept.taints.values()) == {PUBLIC}


def test_what_a_method_makes_of_its_share_or_gives_beside_it_is_held_back(monkeypatch):
    given = SharedUpdates.contribute

    def changed(self, state, facts):
        tensors = {
            name: value + 0 for name, value in given(self, state, facts)[STEPS].tensors.items()
        }
        made = {STEPS: Contribution(tensors)}
        return ContributionsAndState(made, replace(state, extra={"own": torch.ones(1)}))

    monkeypatch.setattr(SharedUpdates, "contribute", changed)
    outcome = own_round(whole_job())
    assert set(outcome.taints[STEPS].values()) == {EXACT}
    assert outcome.state.taints["extra/own"] == EXACT


def test_a_round_costs_one_release_and_no_counts():
    job = whole_job(rounds=40)
    assert job.method().effort(0) == Effort(shared=1)
    assert round_spends(job, 0, "2.5") == (Spend(SHARED, "2.5", "1.0", 1),)
    assert job_spends(job, "2.5") == (Spend(SHARED, "2.5", "1.0", 42),)
    tuned, accounts = whole_job("fedavg-ft", rounds=1), {}

    def account(silo):
        accounts[silo] = MemoryAccount(tuned)
        return PrivateSilo(accounts[silo], Told)

    simulate(tuned, shards(tuned), private=account, exchanges=simulated(tuned))
    for paid_by in accounts.values():
        assert paid_by.counts() is None
        assert [dict(one.taken) for one in paid_by.spendings] == [{SHARED: 1}]


def test_the_release_is_paid_for_before_a_record_is_read():
    job, order = whole_job(), []

    class Watched(MemoryAccount):
        def reserve(self, round_, spends):
            order.append("reserved")
            return super().reserve(round_, spends)

    class Records(type(make_data(1))):
        @property
        def y(self):
            order.append("read")
            return self.__dict__["labels"]

        @y.setter
        def y(self, value):
            self.__dict__["labels"] = value

    train, test = shards(job)["a"]
    seen = object.__new__(Records)
    seen.__dict__.update({**train.__dict__, "labels": train.y})
    seen.__dict__.pop("y")
    private = PrivateSilo(Watched(job), Told)
    method = job.method()
    local_round(method, job, initial_state(method, "a"), 0, {}, seen, test, "a", private=private)
    assert order.index("reserved") < order.index("read")


@pytest.mark.parametrize("name", sorted(ABLE))
def test_methods_whose_silos_give_what_they_trained_from_one_model(name):
    job = whole_job(name)
    (steps,) = job.up(0)[:1]
    assert {spec.dtype for spec in steps.tensors} == {"int64"}
    assert "records" not in {spec.name for spec in steps.tensors}
    assert set(run(job).scores(job.method().product)) == set(SILOS)


def test_all_others_are_refused():
    assert {name for name in METHODS if METHODS[name].sums_steps} == {*ABLE, "pfedsim"}
    for name in ("pfedsim", "fedssa", "fedprox", "local"):
        with refused("silos upload something else than what each trained from one model"):
            whole_job(name).method()


@pytest.mark.parametrize("records", [1, 2])
def test_a_silo_takes_part_whether_it_has_one_record_or_two(records):
    job = whole_job(model={"norm": "batch"})
    train = make_data(records, 5)
    check_training(job, train, "a", "here")
    outcome = own_round(job, data=(train, make_data(4)))
    assert length(outcome.contributions[STEPS].tensors.values()) > 0


def test_layers_that_couple_records_are_free_to_but_sums_have_no_running_statistics():
    job = whole_job(model={"norm": "batch"})
    assert set(run(job).scores("delivered")) == set(SILOS)
    with refused('sums \'extractor.* which no step of it trains.* model.buffers = "local"'):
        whole_job(model={"norm": "batch", "buffers": "global"}).method()


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({"noise": "local"}, 'write noise = "shared"'),
        ({"sample_rate": 0.5}, "write sample_rate = 1"),
        ({"local_rate": 0.5}, "leave local_rate out"),
        ({"metrics_sigma": 20.0}, "leave metrics_sigma out"),
    ],
)
def test_what_has_no_meaning_for_a_whole_silo_is_refused(privacy, said):
    with pytest.raises(ValueError, match=said):
        whole_job(privacy=privacy)


def test_noise_beyond_what_whole_numbers_hold_is_refused():
    with refused("at most 1,000 clips"):
        job_spends(whole_job(), "500.001")
    assert job_spends(whole_job(), "500")


@pytest.mark.parametrize("unit", ["record", "silo"])
def test_a_method_of_another_package_sums_nothing_that_it_does_not_train(monkeypatch, unit):
    def heads(self, _state, _facts):
        return (self.stage("classifier"),)

    monkeypatch.setattr(FedAvg, "stages", heads)
    with refused("sums 'extractor.* which no step of it trains"):
        whole_job(privacy={"unit": unit}, training={"epochs": 1, "momentum": 0.0}).method()


def after_a_round(job, train):
    """The state of silo a after the first round on these records, with how far it stepped."""
    method, private = job.method(), PrivateSilo(MemoryAccount(job), Told)
    data, began = (train, make_data(5)), initial_state(method, "a")
    return local_round(
        method, job, began, 0, {}, *data, "a", private=private, caution=Caution()
    ).state


def takes(job, state, delivered, caution):
    """Whether a silo trains on a delivery of the second round."""
    method, private = job.method(), PrivateSilo(MemoryAccount(job), Told)
    with suppress(TrapError):
        local_round(
            method, job, state, 1, delivered, *shards(job)["a"], "a", private=private,
            caution=caution,
        )  # fmt: skip
        return True
    return False


def moved_down(job, by=0.0):
    """A delivery of the initial model with this added to each number."""
    began = initial_state(job.method(), "a").parts
    return {
        part.name: {
            spec.name: began[spec.name.partition(".")[0]][spec.name.partition(".")[2]] + by
            for spec in part.tensors
        }
        for part in job.down(1)
    }


def test_no_refusal_of_a_delivery_tells_how_far_a_silo_steps():
    job, caution = whole_job(), Caution(max_step=3.0)
    states = [after_a_round(job, make_data(n, 1)) for n in (5, 80)]
    few, many = (state.steps.longest["extractor"] for state in states)
    assert 0 < few < many / 2
    for by in (1e-3, 0.03, 1.0, 100.0):
        assert [takes(job, state, moved_down(job, by), caution) for state in states] == [True] * 2


@pytest.mark.parametrize("method", ["fedavg", "lg-fedavg"])
def test_no_refusal_of_a_delivery_tells_of_rows_that_a_silo_trained(method):
    job, caution = whole_job(method), Caution(max_parallel=2)
    state = after_a_round(job, shards(job)["a"][0])
    alike = {
        part: {name: _rows_alike(value) for name, value in tensors.items()}
        for part, tensors in state.parts.items()
    }
    same = {part: dict(tensors) for part, tensors in moved_down(job).items()}
    trap = {
        part: {name: _rows_alike(value) for name, value in tensors.items()}
        for part, tensors in same.items()
    }
    for parts in (state.parts, alike):
        own = replace(state, parts=parts)
        assert takes(job, own, same, caution)
        assert not takes(job, own, trap, caution)


def _rows_alike(value):
    return value[:1].expand_as(value).clone() if value.ndim > 1 else value
