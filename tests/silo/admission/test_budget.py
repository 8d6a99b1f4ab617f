"""The agent's budget beside the ledger that keeps its head: refused where they disagree."""

import shutil
import threading
from decimal import Decimal
from itertools import count

import pytest
from support.jobs import make_job
from support.private_jobs import folder_of, opened, policy_for, private_job, steps_of
from support.recording_gate import World, records

from staddle.algorithms.job.privacy import Spend, job_spends
from staddle.errors import ExhaustedError, LocalError
from staddle.security.dp.budget import Ceiling
from staddle.security.ledger import audit
from staddle.security.log.segments import Reading

SPEND = (Spend("training", "2", "0.25", 4),)
CEILING = Ceiling("100", "0.00001")


@pytest.fixture
def job(made):
    return private_job(made)


@pytest.fixture
def world(made, job, tmp_path):
    return World(made, tmp_path, policy_for(made, job))


def heads(world):
    return [record for record in records(world.path) if record["type"] == "privacy.head"]


def test_each_reservation_has_its_head_in_the_ledger_with_what_is_spent(world, job):
    with opened(world) as budget:
        assert heads(world) == []
        steppers = budget.reserve(job, 0, SPEND, CEILING)
        one = steppers.reservation
        steppers.take(0)
        budget.reserve(job, 1, SPEND, CEILING)
        assert [budget.paid(seq, job.digest) for seq in (one.seq, one.seq + 1, one.seq + 2)] == [
            True,
            False,
            True,
        ]
        assert not budget.paid(one.seq, "ab" * 32)
    first, second = heads(world)
    assert (first["dataset"], first["delta"], first["limit"]) == ("data", "0.00001", "8.0")
    assert first["size"] == one.seq + 1 < second["size"]
    assert Decimal(0) < Decimal(first["epsilon"]) < Decimal(second["epsilon"]) < 8
    world.ledger.close()
    assert audit.verify(world.path).ok


def test_a_reservation_says_what_shared_noise_protects_and_who_may_be_dishonest(world, job):
    private = {"epsilon": 8.0, "delta": 0.01, "sample_rate": 1.0, "sigma": "2.5"}
    private |= {"unit": "silo", "noise": "shared", "dishonest": 2}
    security = {"secure_aggregation": "required"}
    fields = {"model": {"norm": "group"}, "silos": ["a", "b", "c", "d"], "min_cohort": 3}
    whole = make_job("fedavg", privacy=private, security=security, **fields)
    with opened(world) as budget:
        budget.reserve(job, 0, SPEND, CEILING)
        budget.reserve(whole, 0, SPEND, CEILING)
    lines = Reading(folder_of(world))
    reserved = [line.record for line in lines if line.record["type"] == "budget.reserve"]
    assert "sharing" not in reserved[0]
    assert reserved[1]["sharing"] == {"unit": "silo", "dishonest": 2}


def test_a_restart_resets_nothing_and_a_crash_is_no_rollback(world, job):
    with opened(world) as budget:
        taken = budget.reserve(job, 0, SPEND, CEILING)
        for _ in range(3):
            taken.take(0)
        budget.commit(job, taken.reservation.seq)
        # died before the head was kept
        budget._budget.reserve(job.name, job.digest, 2, "x", taken.reservation.events)
    world.restart()
    with opened(world) as budget:
        assert steps_of(budget, job) == {("2", "0.25"): 7}


def test_training_that_was_stopped_has_spent_the_steps_that_it_took(world, job):
    with opened(world) as budget:
        first = budget.reserve(job, 0, SPEND, CEILING)
        first.take(0)
        second = budget.reserve(job, 0, SPEND, CEILING)
        assert steps_of(budget, job) == {("2", "0.25"): 5}
        with pytest.raises(ExhaustedError, match="which is committed"):
            first.take(0)  # nothing of it goes on
        with pytest.raises(LocalError, match="is not open"):
            budget.commit(job, first.reservation.seq)
        second.take(0)
        second.take(0)
    with opened(world) as budget:  # it was closed in good order
        assert steps_of(budget, job) == {("2", "0.25"): 3}


def test_a_changed_policy_sets_another_limit_from_the_start_on(world, made, job):
    planned = job_spends(job, "2")
    with opened(world) as budget:
        budget.check_room(job, planned)
        budget.reserve(job, 0, SPEND, CEILING)
    strict = policy_for(made, job, epsilon=1.7)
    with opened(world, strict) as budget:
        why = r"all of job 'private' would bring .* over the policy's limit of 1\.7"
        with pytest.raises(ExhaustedError, match=why):
            budget.check_room(job, planned)
        budget.reserve(job, 1, [Spend("training", "90", "0.25", 4)], CEILING)
    assert [head["limit"] for head in heads(world)] == ["8.0", "1.7"]


def test_two_jobs_at_once_cannot_overdraw_and_their_heads_come_in_order(world, made, job):
    jobs = (job, private_job(made, "other"))
    with opened(world) as budget:
        rounds = []

        def spend(job):
            for round_ in count():
                # Each goes on until nothing is left, however much the other has taken by then.
                try:
                    steppers = budget.reserve(job, round_, SPEND, CEILING)
                except ExhaustedError:
                    return
                rounds.append(job.name)
                for _ in range(4):
                    steppers.take(0)
                budget.commit(job, steppers.reservation.seq)

        threads = [threading.Thread(target=spend, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 7 < budget._budget.epsilon() <= 8
        assert sum(steps_of(budget, each)["2", "0.25"] for each in jobs) == 4 * len(rounds)
    sizes = [head["size"] for head in heads(world)]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == len(rounds)


def remove(folder, _):
    shutil.rmtree(folder)


def empty(folder, _):
    shutil.rmtree(folder)
    folder.mkdir()


def put_back(folder, copy):
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [(remove, "gone, and with it"), (empty, "gone, and with it"), (put_back, "was rolled back")],
)
def test_a_budget_that_was_lost_or_rolled_back_is_refused(world, job, tmp_path, change, why):
    with opened(world) as budget:
        budget.reserve(job, 0, SPEND, CEILING)
    shutil.copytree(folder_of(world), tmp_path / "copy")
    with opened(world) as budget:
        budget.reserve(job, 1, SPEND, CEILING)
    change(folder_of(world), tmp_path / "copy")
    with pytest.raises(LocalError, match=rf"{why}.*; .*restore"), opened(world):
        pass


def test_a_budget_whose_head_was_never_kept_may_be_new(world):
    for _ in range(2):
        with opened(world):
            pass
        shutil.rmtree(folder_of(world))
