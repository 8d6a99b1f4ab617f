"""A data set's budget never forgets and never exceeds its limit, in crashes, restarts and races."""

import math
import os
import shutil
import threading
import uuid
from decimal import Decimal

import pytest
from faults.disk import Calls, failing, killed, short
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ledgers import KEY, OTHER_KEY

from staddle.errors import ExhaustedError, LocalError, UnwritableError
from staddle.security.dp.budget import Budget, Ceiling, Steppers
from staddle.security.dp.budget_records import MechanismSteps
from staddle.security.dp.rdp import Event, epsilon, spent
from staddle.security.log.head import HeldHead
from staddle.security.log.segments import segments

JOB, OTHER = "ab" * 32, "cd" * 32
POLICY = "e3" * 32
STEPS = MechanismSteps(sigma="1.1", q="0.02", steps=100)


def opened(folder, dataset="cxr", key=KEY, known=False, limit="8"):
    budget = Budget.open(folder, dataset, "lung", "a", key, known=known)
    if limit:
        budget.set_limit(limit, "0.00001", POLICY)
    return budget


def reserve(budget, round_=0, steps=STEPS, job=JOB, **more):
    return budget.reserve("lung-3", job, round_, "training", [steps], **more)


def cost(*events):
    return epsilon(spent(events), 1e-5)


def test_what_is_reserved_counts_as_spent_and_what_was_not_taken_comes_back(tmp_path):
    with opened(tmp_path) as budget:
        one = reserve(budget)
        assert budget.epsilon() == cost(Event("1.1", "0.02", 100))
        budget.commit(one, [40])
        assert budget.epsilon() == cost(Event("1.1", "0.02", 40))
        reserve(budget, 1, MechanismSteps(sigma="20", q="1", steps=1))
        expected = cost(Event("1.1", "0.02", 40), Event("20", "1", 1))
        assert budget.epsilon() == expected
        assert budget.epsilon([Event("5", "1", 2)]) > expected
    with opened(tmp_path, known=True) as again:
        assert again.epsilon() == expected
        (job,) = again.jobs()
        assert (job.job, job.job_digest, job.reserved) == ("lung-3", JOB, 1)
        assert Decimal(job.epsilon) >= Decimal(expected) > Decimal(job.epsilon) - Decimal("0.0001")


def test_more_than_the_limit_is_refused_and_nothing_is_written(tmp_path):
    with opened(tmp_path, limit="2") as budget:
        reserve(budget)
        size = budget.head().size
        why = r"training of round 1 of job 'lung-3' .* limit of 2; raise epsilon in its \["
        with pytest.raises(ExhaustedError, match=why + r"dataset\.cxr\]"):
            reserve(budget, 1, MechanismSteps(sigma="1.1", q="0.02", steps=5000))
        with pytest.raises(ExhaustedError, match="to inf"):
            reserve(budget, 1, MechanismSteps(sigma="0", q="0.02", steps=1))
        assert budget.head().size == size
        reserve(budget, 1, MechanismSteps(sigma="30", q="0.02", steps=1))


def test_a_new_job_a_restart_and_a_new_limit_reset_nothing(tmp_path):
    with opened(tmp_path, limit="3") as budget:
        budget.commit(reserve(budget, steps=MechanismSteps(sigma="1", q="0.02", steps=300)), [300])
        before = budget.epsilon()
    with opened(tmp_path, limit="3", known=True) as budget:
        assert budget.epsilon() == before
        with pytest.raises(ExhaustedError):
            reserve(budget, job=OTHER, steps=MechanismSteps(sigma="1", q="0.02", steps=1000))
        budget.set_limit("0.5", "0.00001", POLICY)
        with pytest.raises(ExhaustedError, match=r"over the policy's limit of 0\.5"):
            reserve(budget, job=OTHER, steps=MechanismSteps(sigma="1000", q="0.02", steps=1))
        budget.set_limit("6", "0.00001", POLICY)
        reserve(budget, job=OTHER, steps=MechanismSteps(sigma="1", q="0.02", steps=300))
        assert [job.job_digest for job in budget.jobs()] == [JOB, OTHER]


def test_a_job_has_a_target_of_its_own_at_its_own_delta(tmp_path):
    with opened(tmp_path) as budget:
        reserve(budget, job=OTHER)
        reserve(budget, ceiling=Ceiling("1.8", "0.00001"))
        over = MechanismSteps(sigma="1.1", q="0.02", steps=100)
        why = r"job 'lung-3' .* at delta = 0\.0000000001, over the job's own target of 1\.8"
        with pytest.raises(ExhaustedError, match=why):
            reserve(budget, 1, over, ceiling=Ceiling("1.8", "0.0000000001"))
        reserve(budget, 1, over, ceiling=Ceiling("1.8", "0.00001"))


def test_all_that_a_job_is_to_spend_must_fit_beside_what_others_have(tmp_path):
    planned = [Event("1.1", "0.02", 400)]
    with opened(tmp_path, limit="3") as budget:
        budget.check_room("lung-3", JOB, planned)
        reserve(budget, steps=MechanismSteps(sigma="1.1", q="0.02", steps=300))
        budget.check_room("lung-3", JOB, planned)  # of which it has spent some itself
        size = budget.head().size
        why = r"all of job 'mri' would bring .* over the policy's limit of 3"
        with pytest.raises(ExhaustedError, match=why):
            budget.check_room("mri", OTHER, [*planned, *planned, *planned])
        # All of a job that runs beside it counts as spent, and what it has reserved counts once.
        few = [Event("1.1", "0.02", 250)]
        budget.check_room("mri", OTHER, few)
        budget.check_room("mri", OTHER, few, {JOB: planned})
        with pytest.raises(ExhaustedError, match=why):
            budget.check_room("mri", OTHER, few, {JOB: planned * 2})
        assert budget.head().size == size


def test_a_reservation_is_known_as_that_of_its_job_for_ever(tmp_path):
    with opened(tmp_path) as budget:
        one, other = reserve(budget), reserve(budget, job=OTHER)
        budget.commit(one, [0])
        commit = budget.head().size - 1
    with opened(tmp_path, known=True) as budget:
        known = [
            (seq, job)
            for seq in range(-1, commit + 3)
            for job in (JOB, OTHER)
            if budget.paid(seq, job)
        ]
    assert known == [(one.seq, JOB), (other.seq, OTHER)]


def test_steps_are_taken_one_by_one_and_none_beyond(tmp_path):
    with opened(tmp_path) as budget:
        events = [
            MechanismSteps(sigma="2", q="0.5", steps=2),
            MechanismSteps(sigma="3", q="1", steps=1),
        ]
        reservation = budget.reserve("lung-3", JOB, 0, "training", events)
        steps = Steppers(reservation)
        steps.take(0)
        steps.take(0)
        with pytest.raises(ExhaustedError, match="had 2 of these, which are taken"):
            steps.take(0)
        budget.commit(reservation, steps.end())
        with pytest.raises(ExhaustedError, match="which is committed"):
            steps.take(1)
        assert budget.epsilon() == cost(Event("2", "0.5", 2))


@pytest.mark.parametrize("taken", [[101], [100, 0]])
def test_a_commit_of_what_was_not_reserved_is_refused(tmp_path, taken):
    with opened(tmp_path) as budget:
        one = reserve(budget)
        with pytest.raises(LocalError, match=r"reserved were \[100\]"):
            budget.commit(one, taken)
        budget.commit(one, [100])
        with pytest.raises(LocalError, match="not an open reservation"):
            budget.commit(one, [0])


def test_without_a_limit_nothing_is_spent(tmp_path):
    with (
        opened(tmp_path, limit="") as budget,
        pytest.raises(LocalError, match=r"has no budget; set one in the policy, \[dataset.cxr\]"),
    ):
        reserve(budget)


def test_two_jobs_at_once_cannot_overdraw(tmp_path):
    with opened(tmp_path, limit="2") as budget:
        refused = []

        def spend(job):
            for round_ in range(40):
                try:
                    reserve(budget, round_, MechanismSteps(sigma="1", q="0.02", steps=30), job=job)
                except ExhaustedError:
                    refused.append(job)

        threads = [threading.Thread(target=spend, args=(job,)) for job in (JOB, OTHER)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused
        assert 1.9 < budget.epsilon() <= 2


def test_two_processes_cannot_share_it(tmp_path):
    with opened(tmp_path), pytest.raises(LocalError, match="writ"):
        opened(tmp_path)


def test_a_budget_that_is_gone_is_never_a_new_one(tmp_path):
    opened(tmp_path / "a").close()
    shutil.rmtree(tmp_path / "a")
    for make in (lambda: None, (tmp_path / "a").mkdir):
        make()
        why = "gone, and with it what was spent on data set 'cxr'; restore"
        with pytest.raises(LocalError, match=why):
            opened(tmp_path / "a", known=True)


def test_another_data_set_or_another_key_is_refused(tmp_path):
    opened(tmp_path).close()
    for options in ({"dataset": "mri"}, {"key": OTHER_KEY}):
        with pytest.raises(LocalError, match=r"signed|another|key"):
            opened(tmp_path, **options)


def test_an_older_copy_is_known_by_the_head_that_others_keep(tmp_path):
    with opened(tmp_path / "a") as budget:
        reserve(budget)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    with opened(tmp_path / "a") as budget:
        reserve(budget, 1)
        head = budget.head()
        budget.check_held(HeldHead("the silo's ledger", head))
    with opened(tmp_path / "old") as budget:
        with pytest.raises(LocalError, match="was rolled back or altered"):
            budget.check_held(HeldHead("the silo's ledger", head))
        reserve(budget, 1, job=OTHER)  # as long again, and another log
        with pytest.raises(LocalError, match="was rolled back or altered"):
            budget.check_held(HeldHead("the silo's ledger", head))


def test_an_altered_record_is_refused(tmp_path):
    with opened(tmp_path) as budget:
        reserve(budget)
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"steps":100', b'"steps":101'))
    with pytest.raises(LocalError):
        opened(tmp_path)


# Crashes. What was promised is a reservation that came back.

ROUNDS = 2


def scenario(folder, promise):
    """Rounds of reserve and commit; ``promise`` is told how many reservations came back."""
    with opened(folder) as budget:
        for round_ in range(ROUNDS):
            one = reserve(budget, round_)
            promise(round_ + 1)
            budget.commit(one, [90])


def least(promised, found):
    """Each is spent: the 90 steps that were taken, or all 100 where it was not committed."""
    assert 90 * promised <= found <= 100 * ROUNDS


def spent_steps(folder):
    with opened(folder, known=True) as budget:
        (job,) = budget._jobs.values()
        return job.steps["1.1", "0.02", False]


def calls_of(folder, monkeypatch):
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        scenario(folder, lambda _: None)
    return calls.made


@pytest.mark.parametrize("how", ["before", "after", "torn"])
def test_killed_at_any_call_nothing_spent_is_forgotten(tmp_path, monkeypatch, how):
    for nth, name in enumerate(calls_of(tmp_path / "whole", monkeypatch), 1):
        if how == "torn" and name != "write":
            continue  # it dies before the call, as above
        place = tmp_path / f"{nth}"
        promised = killed(place, nth, how, scenario)
        assert promised is not None
        if promised:
            least(promised, spent_steps(place))


@pytest.mark.parametrize("fault", [failing(28), short], ids=["ENOSPC", "short"])
def test_a_full_disk_ends_spending(tmp_path, monkeypatch, fault):
    for nth in range(1, len(calls_of(tmp_path / "whole", monkeypatch)) + 1):
        place, promised = tmp_path / f"{nth}", [0]
        with monkeypatch.context() as patch:
            Calls(patch, nth, fault)
            with pytest.raises(LocalError):
                scenario(place, promised.append)
        if promised[-1]:
            least(promised[-1], spent_steps(place))


def test_after_a_fault_nothing_is_reserved(tmp_path, monkeypatch):
    budget = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: failing(28)("write", None, (), {}))
        with pytest.raises(UnwritableError):
            reserve(budget)
    with pytest.raises(UnwritableError):
        reserve(budget)
    budget.close()
    with opened(tmp_path) as again:
        assert again.epsilon() == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_reserving_committing_and_crashing_keeps_what_was_spent(tmp_path, data):
    """Against a list of what was taken: never below it, over the limit, or falling uncommitted."""
    place = tmp_path / uuid.uuid4().hex
    budget, waiting, used, total = opened(place, limit="1.5"), [], 0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["reserve", "commit", "crash"])):
            case "reserve":
                steps = data.draw(st.integers(1, 400))
                try:
                    asked = MechanismSteps(sigma="1.1", q="0.02", steps=steps)
                    waiting.append((reserve(budget, 0, asked), steps))
                    total += steps
                except ExhaustedError:
                    assert cost(Event("1.1", "0.02", total + steps)) > 1.5
            case "commit" if waiting:
                one, steps = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                taken = data.draw(st.integers(0, steps))
                budget.commit(one, [taken])
                used, total = used + taken, total - steps + taken
            case "crash":
                budget.close()
                budget, waiting = opened(place, limit="1.5", known=True), []
        assert budget.epsilon() == cost(Event("1.1", "0.02", total))
        assert cost(Event("1.1", "0.02", used)) <= budget.epsilon() <= 1.5
        assert not math.isinf(budget.epsilon())
    budget.close()
