"""What a job spends: durable before it is spent, within its own target, kept in any crash."""

import pytest
import torch
from faults.disk import Calls, killed
from support.private_jobs import opened, policy_for, private_job, steps_of
from support.recording_gate import World, records
from support.refusals import refused

from staddle.algorithms.job.privacy import Spend, histogram_spend, round_spends
from staddle.algorithms.training.accountant import Counts
from staddle.errors import ExhaustedError, LocalError
from staddle.silo.admission.accountant import COUNTS, JobAccount
from staddle.silo.job_folder import JobFolder

STEPS = ("2", "0.25")


@pytest.fixture
def job(made):
    return private_job(made)


@pytest.fixture
def world(made, job, tmp_path):
    return World(made, tmp_path, policy_for(made, job))


def account_of(world, budget, job):
    folder = JobFolder(world.path.parent / "jobs" / job.name)
    folder.accept(b"{}", "data")
    return JobAccount(budget, job, folder)


def test_a_round_takes_the_steps_that_it_reserved_and_gives_back_the_rest(world, job):
    with opened(world) as budget:
        account = account_of(world, budget, job)
        spending = account.reserve(0, round_spends(job, 0, "2"))
        assert steps_of(budget, job) == {STEPS: 4}
        assert budget.paid(spending.id, job.digest)
        for _ in range(3):
            spending.take("training")
        account.commit(spending)
        assert steps_of(budget, job) == {STEPS: 3}


def test_no_step_is_taken_beyond_or_beside_a_reservation(world, job):
    with opened(world) as budget:
        account = account_of(world, budget, job)
        spending = account.reserve(
            0, [Spend("training", "2", "0.25", 1), Spend("metrics", "20", "1", 1)]
        )
        spending.take("training")
        with pytest.raises(ExhaustedError, match="had 1 of these, which are taken"):
            spending.take("training")
        with pytest.raises(LocalError, match="has no step for 'statistics'"):
            spending.take("statistics")
        account.commit(spending)
        with pytest.raises(ExhaustedError, match="which is committed"):
            spending.take("metrics")
        with pytest.raises(LocalError, match="is not open"):
            account.commit(spending)
        assert steps_of(budget, job) == {STEPS: 1, ("20", "1"): 0}


def test_the_job_is_kept_to_its_own_target_at_its_own_delta(world, made, job):
    strict = private_job(made, "strict", privacy={"epsilon": 5.0, "delta": 1e-9})
    with opened(world) as budget:
        account_of(world, budget, job).reserve(0, round_spends(job, 0, "2"))
        account = account_of(world, budget, strict)
        many = [Spend("training", "2", "0.25", 14)]
        spending = account.reserve(0, many)  # 4.3 at 1e-9, and under the 6 of the other job at 1e-5
        for _ in range(14):
            spending.take("training")
        why = r"at delta = 0\.000000001, over the job's own target of 5\.0"
        with pytest.raises(ExhaustedError, match=why):
            account.reserve(1, many)
        assert steps_of(budget, strict) == {STEPS: 14}


def test_counts_are_drawn_once_whatever_restarts(world, made, job):
    with opened(world) as budget:
        account = account_of(world, budget, job)
        assert account.counts() is None
        spending = account.reserve(0, [histogram_spend(job.private)])
        account.keep_counts(Counts(torch.tensor([12, 0, 31]), spending.id))
        account.commit(spending)
    with opened(world) as budget:
        account = account_of(world, budget, job)
        kept = account.counts()
        assert kept.counts.tolist() == [12, 0, 31]
        assert (kept.counts.dtype, kept.id) == (torch.int64, spending.id)
        other = private_job(made, "other")
        folder = JobFolder(world.path.parent / "jobs" / "other")
        folder.accept(b"{}", "data")
        path = world.path.parent / "jobs" / job.name / COUNTS
        (folder.path / COUNTS).write_bytes(path.read_bytes())
        with refused(r"counts\.json: not the counts that this job released here"):
            JobAccount(budget, other, folder).counts()
        path.write_text("{}")
        with pytest.raises(LocalError, match="counts"):
            account.counts()


# Killed at any call that shows afterwards: what was promised is spent, and the folders agree.
def scenario(job, world_of, begun=lambda: None):
    def run(place, promise):
        world = world_of(place)
        with opened(world) as budget:
            begun()
            account = account_of(world, budget, job)
            drawn = account.reserve(0, [histogram_spend(job.private)])
            drawn.take("histogram")
            account.keep_counts(Counts(torch.tensor([5, 0, 7]), drawn.id))
            promise(1)
            account.commit(drawn)
            spending = account.reserve(0, round_spends(job, 0, "2"))
            promise(2)
            for _ in range(3):
                spending.take("training")
            account.commit(spending)

    return run


def check(job, world, promised):
    with opened(world) as budget:  # a crash is never taken for a rollback
        steps = steps_of(budget, job)
        counts = account_of(world, budget, job).counts()
    assert 3 * (promised == 2) <= steps.get(STEPS, 0) <= 4
    assert steps.get(("10.0", "1"), 0) >= (promised >= 1)
    assert counts is not None or not promised
    if counts is not None:
        assert counts.counts.tolist() == [5, 0, 7]
    assert (
        len([record for record in records(world.path) if record["type"] == "privacy.head"])
        >= promised
    )


@pytest.mark.parametrize("how", ["before", "torn"])
def test_killed_at_any_call_nothing_is_forgotten(world, made, job, tmp_path, monkeypatch, how):
    def world_of(place):
        return World(made, place, world.policy)

    with monkeypatch.context() as patch:
        calls, begun = Calls(patch), []
        scenario(job, world_of, lambda: begun.append(len(calls.made)))(
            tmp_path / "whole", lambda _: None
        )
    deadly = ("write",) if how == "torn" else ("write", "replace")
    places = [nth for nth, name in enumerate(calls.made, 1) if nth > begun[0] and name in deadly]
    assert len(places) > 5
    for nth in places:
        place = tmp_path / f"{nth}"
        promised = killed(place, nth, how, scenario(job, world_of))
        assert promised is not None
        check(job, world_of(place), promised)
