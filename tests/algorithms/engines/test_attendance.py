"""Rounds that lack silos, next to what a coordinator's state machine makes of the same events."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.refusals import refused
from torch.testing import assert_close

from staddle.algorithms.engines.attendance import EVERYONE, Attendance, check_attendance
from staddle.algorithms.engines.engine import Records, Serial, SiloWork
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.method import initial_state
from staddle.coordinator.rounds.events import Drawn, RoundDeadline, UploadStored
from staddle.coordinator.rounds.machine import JobState, advance
from staddle.security.identity.selection import among

SIX = ("f", "a", "e", "b", "d", "c")  # job order is not the alphabet's
SMALL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
BOTH = Attendance(newcomers=2, join_after=2, absent=0.3)
SLOW = Attendance(newcomers=("b",), join_after=2, absent=0.2, step_seconds=1.0, spread=0.7)


@pytest.fixture
def job(make_job):
    """A job of six silos on a small model."""

    def make(method="fedavg", options=None, **fields):
        return make_job(method, options, SMALL, **{"silos": SIX, "rounds": 6, **fields})

    return make


def rounds_of(attendance, job):
    return [attendance.present(job, round_) for round_ in range(job.length)]


@pytest.mark.parametrize("newcomers", [2, ("c", "d")])
def test_newcomers_are_drawn_once_they_have_joined(job, newcomers):
    who, every = Attendance(newcomers=newcomers, join_after=4), job()
    assert who.joining(SIX) == ("d", "c")
    assert rounds_of(who, every) == [SIX[:4]] * 4 + [SIX] * 2
    some = job(participation=0.5)
    drawn = [some.cohort(round_) for round_ in range(6)]
    assert rounds_of(who, some)[4:] == drawn[4:]
    assert rounds_of(who, some)[:4] == [among(cohort, SIX[:4]) for cohort in drawn[:4]]
    # A census comes before the rounds that train, and newcomers miss it.
    assert rounds_of(who, job("feddbe")) == [SIX[:4]] * 5 + [SIX] * 2
    assert rounds_of(EVERYONE, every) == [SIX] * 6
    assert EVERYONE.joining(SIX) == ()


def test_absences_follow_from_the_seed_and_are_those_of_all_methods(job):
    who, long = Attendance(absent=0.3), {"rounds": 300}
    here = rounds_of(who, job(**long))
    assert here == rounds_of(who, job("pfedsim", **long))
    assert here != rounds_of(who, job(seed=8, **long))
    # A census is a round more, and does not move those that train.
    assert rounds_of(who, job("feddbe", **long))[1:] == here
    share = sum(map(len, here)) / (300 * 6)
    assert 0.66 < share < 0.74
    # Whoever is drawn is absent as if all were.
    some = job(participation=0.5, **long)
    expected = [among(some.cohort(round_), here[round_]) for round_ in range(300)]
    assert rounds_of(who, some) == expected


def federation(job, attendance, round_, times):
    """The state of a coordinator after a round of these uploads, in seconds by silo."""
    admitted = attendance.admitted(job, round_)
    state = JobState(
        "job", job.silos, job.length, job.min_cohort, job.quorum, "drawing", round_,
        dict.fromkeys(admitted, "accepted"), opened=True,
    )  # fmt: skip
    away = tuple(silo for silo in admitted if silo not in times)
    state, _ = advance(state, Drawn(round_, admitted, away))
    for silo in sorted(times, key=times.get):
        if times[silo] <= job.round_timeout:
            state, _ = advance(state, UploadStored(silo, round_, f"digest of {silo}"))
    return advance(state, RoundDeadline("round", round_))[0]


def test_a_round_closes_as_at_a_coordinator(job):
    """Whoever is absent counts in the quorum, and whoever is late does not enter."""
    late, failed = 0, 0
    for seed in range(40):
        one = job(seed=seed, quorum=0.7, round_timeout=8.0, min_cohort=2, rounds=3)
        paces = SLOW.paces(one)
        for round_ in range(3):
            steps = {silo: 3 + SIX.index(silo) for silo in SLOW.present(one, round_)}
            times = {silo: taken * paces[silo] for silo, taken in steps.items()}
            state = federation(one, SLOW, round_, times)
            if state.outcome == "failed":
                failed += 1
                with refused(r"simulated seconds, min_cohort is 2.*a federation's job fails there"):
                    SLOW.closed(one, round_, steps)
                continue
            end = SLOW.closed(one, round_, steps)
            assert state.stage == "folding"
            assert end.members == state.members
            assert end.late == tuple(silo for silo in steps if silo not in state.members)
            late += len(end.late)
    assert late > 20
    assert failed > 0


@pytest.mark.parametrize(
    ("quorum", "timeout", "seconds", "late"),
    [(1.0, 100.0, 6.0, ()), (1.0, 4.5, 4.5, ("d", "c")), (0.5, 100.0, 3.0, ("b", "d", "c"))],
)
def test_a_round_lasts_until_its_last_upload_its_timeout_or_its_quorum(
    job, quorum, timeout, seconds, late
):
    one = job(quorum=quorum, round_timeout=timeout)
    steps = {silo: place + 1 for place, silo in enumerate(SIX)}
    end = Attendance(step_seconds=1.0).closed(one, 0, steps)
    assert (end.seconds, end.late, end.members) == (seconds, late, SIX[: 6 - len(late)])


def test_paces_are_drawn_once_or_named(job):
    one = job()
    drawn = SLOW.paces(one)
    assert drawn == SLOW.paces(job("pfedsim")) != SLOW.paces(job(seed=8))
    assert Attendance(step_seconds=2.0).paces(one) == dict.fromkeys(SIX, 2.0)
    named = {silo: float(place + 1) for place, silo in enumerate(SIX)}
    assert Attendance(step_seconds=named).paces(one) == named
    many = job(silos=tuple(f"s-{n}" for n in range(4000)))
    logs = torch.tensor(list(SLOW.paces(many).values())).log()
    assert abs(logs.mean()) < 0.05
    assert abs(logs.std() - 0.7) < 0.05
    # Without a clock, nobody is late and nothing takes time.
    assert BOTH.closed(one, 0, {"f": 10**9}).seconds is None


def test_absent_and_late_silos_leave_no_trace(job, make_shards):
    """FedAvg's model is the mean of the others' alone; the silo itself is as it was."""
    one = job(round_timeout=4.0, min_cohort=1)
    records = {silo: Records(*sides) for silo, sides in make_shards(one, 8).items()}
    named = dict.fromkeys(SIX, 0.5) | {"e": 100.0}
    who = Attendance(newcomers=1, join_after=6, step_seconds=named)
    simulation, whole = (
        Simulation(one, Serial(one, records), attendance=each) for each in (who, EVERYONE)
    )
    before = dict(simulation.states)
    end, _ = simulation.step(), whole.step()
    assert (end.late, end.absent, end.seconds) == (("e",), (), 4.0)
    assert set(end.reports) == set(SIX) - {"e", "c"}
    for silo in SIX:
        assert (simulation.states[silo] is before[silo]) == (silo in ("e", "c"))
    assert simulation.snapshot().trained == set(SIX) - {"e", "c"}
    # In the first round all begin alike: the others trained as they do with everyone there.
    members = ("f", "a", "b", "d")
    weights = {silo: len(records[silo].train) for silo in members}
    (delivered,) = simulation.work(("c",))[0].delivered.values()
    for name, value in delivered.items():
        part, _, leaf = name.partition(".")
        mean = sum(
            whole.states[silo].parts[part][leaf].double() * weights[silo] for silo in members
        )
        assert_close(value.double(), mean / sum(weights.values()), atol=1e-6, rtol=0)


def test_silos_trained_at_once_are_missing_from_the_same_rounds(job, make_shards):
    one = job("fedper", rounds=4, round_timeout=6.0, min_cohort=1)
    alone = check_engines_agree(one, make_shards(one, 8), SLOW)
    assert not alone.snapshot().trained >= set(SIX)


FEWER = Attendance(step_seconds={silo: 1.0 + SIX.index(silo) for silo in SIX}, fewer_epochs=True)


@pytest.mark.parametrize("method", ["fednova", "scaffold"])
def test_who_would_be_late_trains_the_epochs_that_fit(job, make_shards, method):
    """As a silo of a job with so many epochs does, and what it uploads follows from them."""
    three, one = (
        job(method, training={"epochs": epochs, "batch_size": 8, "lr": 0.1}, round_timeout=20.0)
        for epochs in (3, 1)
    )
    records = {silo: Records(*sides) for silo, sides in make_shards(three, 14).items()}
    batches = {silo: -(-len(own.train) // 8) for silo, own in records.items()}
    assert list(batches.values()) == [2, 3, 3, 4, 5, 5]
    work = [
        SiloWork(silo, initial_state(three.method(), silo), {}, FEWER.most_steps(three)[silo])
        for silo in SIX
    ]
    fewer = Serial(three, records).train(0, work, lambda: None)
    assert [fewer[silo].report.work.steps // batches[silo] for silo in SIX] == [3, 3, 2, 1, 1, 1]
    for other, silos in ((three, "fa"), (one, "bdc")):
        whole = [replace(each, most_steps=None) for each in work]
        outcomes = Serial(other, records).train(0, whole, lambda: None)
        for silo in silos:
            for part, made in fewer[silo].contributions.items():
                assert_close(
                    made.tensors, outcomes[silo].contributions[part].tensors, atol=0, rtol=0
                )
    alone = check_engines_agree(three, make_shards(three, 14), FEWER)
    # One epoch does not fit either.
    assert alone.snapshot().trained == set("fae") | {"b"}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"newcomers": 2}, "newcomers and join_after go together"),
        ({"join_after": 2}, "newcomers and join_after go together"),
        ({"spread": 1.0}, "spread varies one step_seconds of all silos"),
        ({"spread": 1.0, "step_seconds": {"a": 1.0}}, "spread varies one step_seconds"),
        ({"absent": 1.0}, "less than 1"),
        ({"fewer_epochs": True}, "fewer_epochs needs a clock"),
        ({"newcomers": 0, "join_after": 2}, "give a whole number above 0, or names of silos"),
        ({"newcomers": "f", "join_after": 2}, "give a whole number above 0, or names of silos"),
        ({"step_seconds": 0}, "give seconds from 1e-9 on, or a table of them by silo"),
        ({"step_seconds": 1e-300}, "give seconds from 1e-9 on"),
        ({"step_seconds": {"a": "fast"}}, "give seconds from 1e-9 on, or a table of them by silo"),
    ],
)
def test_a_table_that_means_nothing_is_refused(keys, wanted):
    with pytest.raises(ValidationError, match=wanted):
        Attendance(**keys)


@pytest.mark.parametrize(
    ("who", "fields", "wanted"),
    [
        (Attendance(newcomers=("z",), join_after=1), {}, "newcomers names 'z', the silos are f, a"),
        (Attendance(newcomers=6, join_after=1), {}, "newcomers = 6, but there are 6 silos"),
        (Attendance(newcomers=1, join_after=7), {}, "join_after = 7, but there are 6 rounds"),
        (Attendance(step_seconds={"z": 1.0}), {}, "step_seconds names 'z'"),
        (Attendance(step_seconds={"a": 1.0}), {}, "step_seconds lacks 'f'; name all silos"),
        (
            Attendance(newcomers=5, join_after=2),
            {},
            "seed 7: round 1 would have 1 of 6 drawn silos",
        ),
        (Attendance(absent=0.9), {}, "lower attendance.newcomers, absent or min_c"),
        (
            BOTH,
            {"min_cohort": 3, "security": {"secure_aggregation": "required"}},
            "blind job sums whole batches",
        ),
    ],
)
def test_what_a_federation_could_not_run_is_refused(job, who, fields, wanted):
    with refused(wanted):
        check_attendance(who, job(**fields))


def test_methods_that_need_all_silos_in_each_round_say_so(job):
    who = Attendance(newcomers=1, join_after=2)
    with refused(r"where rounds lack silos: ppfl: lam = 0\.5 where 5 of 6 silos are drawn"):
        check_attendance(who, job("ppfl", {"lam": 0.5}))
    check_attendance(who, job("ppfl", {"lam": 0.0}))
    check_attendance(BOTH, job("pfedsim", min_cohort=1))
    check_attendance(EVERYONE, job("ppfl", {"lam": 0.5}))
