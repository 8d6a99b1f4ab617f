"""Decisions of a silo's people: what they are for, and what no decision is."""

import os
import pwd
from hashlib import sha256
from types import SimpleNamespace

import pytest
from support.refusals import refused

from staddle.errors import LocalError, RefusedError
from staddle.security.log.lock import claimed
from staddle.silo.admission import approvals

POLICY, OTHER = sha256(b"policy").hexdigest(), sha256(b"other").hexdigest()


@pytest.fixture
def config(tmp_path):
    return SimpleNamespace(directory=tmp_path, admission=SimpleNamespace(approve="ask"))


def asked(config, signed=b"one", policy=POLICY, job="lung"):
    """The code with which the agent answers; empty where it accepts."""
    try:
        found = approvals.asked(config, job, signed, policy, "coordinator")
    except RefusedError as error:
        return error.code
    return found.answer if found else ""


def shown(signed=b"one", job="lung"):
    return approvals.ShownJob(job, signed, POLICY)


def test_a_silo_that_asks_nobody_keeps_nothing(config, tmp_path):
    config.admission.approve = "policy"
    assert asked(config) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_approval_is_for_one_file_under_one_policy(config):
    assert asked(config) == "WAITING"
    assert approvals.offered(config, "lung") == b"one"
    approvals.approve(config, shown())
    assert asked(config) == "approved"
    assert asked(config, policy=OTHER) == "WAITING"
    assert asked(config, signed=b"two") == "WAITING"
    assert asked(config, job="heart") == "WAITING"
    assert asked(config) == "approved"


def test_a_decision_says_who_made_it_and_the_ledger_does_not_say_why(config, monkeypatch):
    assert asked(config) == "WAITING"
    monkeypatch.setenv("LOGNAME", "somebody else")
    found = approvals.decline(config, shown(), "not our patients")
    assert found.by == pwd.getpwuid(os.getuid()).pw_name
    found = approvals.decline(config, shown(), "not our patients", "the officer")
    recorded = found.recorded()
    assert (recorded.by, recorded.time) == ("the officer", found.time)
    assert recorded.signed == sha256(b"one").hexdigest()
    assert "patients" not in recorded.model_dump_json()
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert approvals.approve(config, shown()).by == "user 2147483641"


def test_a_refusal_holds_under_any_policy_and_for_one_file(config):
    assert asked(config) == "WAITING"
    approvals.decline(config, shown(), "not our patients")
    assert asked(config) == asked(config, policy=OTHER) == "declined"
    assert asked(config, signed=b"two") == "WAITING"


def test_what_was_not_shown_is_not_decided(config):
    """A coordinator offers another job of the name while a person reads the first."""
    assert asked(config, signed=b"one") == "WAITING"
    assert asked(config, signed=b"two") == "WAITING"
    with refused("another job named 'lung' is offered by now; look at it first"):
        approvals.approve(config, shown())
    with refused("no job 'heart' waits for a person here; those that do: lung"):
        approvals.approve(config, shown(job="heart"))
    with refused("'../lung' is no name of a job"):
        approvals.offered(config, "../lung")
    with refused(r"the decision about job 'lung': reason.*500"):
        approvals.decline(config, shown(b"two"), "x" * 501)
    for name in ("x" * 101, "two\nlines", "\x1b[2J", "turned \u202earound"):
        with refused(r"the decision about job 'lung': by"):
            approvals.approve(config, shown(b"two"), name)
    assert asked(config, signed=b"two") == "WAITING"


def test_of_two_people_at_once_the_second_waits_and_no_file_of_a_lock_is_left(config, tmp_path):
    asked(config)
    with claimed(tmp_path / "approvals"), pytest.raises(LocalError, match="another command is at"):
        approvals.approve(config, shown())
    approvals.approve(config, shown())
    assert not (tmp_path / "approvals" / "LOCK").exists()


def test_damaged_decisions_approve_nothing(config, tmp_path):
    assert asked(config) == "WAITING"
    approvals.approve(config, shown())
    path = tmp_path / "approvals" / "decisions.json"
    path.write_bytes(path.read_bytes().replace(POLICY.encode(), OTHER.encode()))
    assert asked(config) == asked(config, policy=OTHER) == "WAITING"


def test_only_so_many_offers_are_kept(config, monkeypatch):
    monkeypatch.setattr(approvals, "MOST_OFFERS", 3)
    for number in range(5):
        assert asked(config, job=f"job-{number}") == "WAITING"
    kept = {path.stem for path in approvals._offers(config.directory)}
    assert kept == {"job-2", "job-3", "job-4"}
    approvals.forget_offer(config.directory, "job-3")
    assert len(approvals._offers(config.directory)) == 2


def digests(*signed):
    return {sha256(each).digest() for each in signed}


def test_an_offer_that_the_coordinator_no_longer_makes_is_gone_and_may_come_again(config):
    directory, heart = config.directory, b"heart's"
    assert asked(config) == asked(config, heart, job="heart") == "WAITING"
    (before,) = (path.stat().st_mtime for path in approvals._offers(directory)[:1])
    moved = approvals.sort_offers(directory, digests(heart, b"another"))
    assert moved == {"lung": approvals.GONE}
    assert approvals.gone(directory) == {"lung": pytest.approx(before)}
    assert approvals.offered(config, "heart") == heart
    with refused("job 'lung' is no longer offered; should it be again, it waits again"):
        approvals.approve(config, shown())
    # Named again, or offered again, it waits since the same time.
    moved = approvals.sort_offers(directory, digests(b"one"))
    assert moved == {"heart": approvals.GONE, "lung": approvals.OFFERS}
    assert approvals.gone(directory).keys() == {"heart"}
    assert asked(config, heart, job="heart") == "WAITING"
    found = {path.stem: path.stat().st_mtime for path in approvals._offers(directory)}
    assert (found["lung"], approvals.gone(directory)) == (before, {})
    # Another file of the name takes its place, wherever that lies.
    approvals.sort_offers(directory, ())
    assert asked(config, b"two") == "WAITING"
    approvals.sort_offers(directory, digests(b"one", b"two"))
    assert approvals.offered(config, "lung") == b"two"
    approvals.forget_offer(directory, "heart")
    assert approvals.gone(directory) == {}


def test_what_is_gone_is_kept_to_a_number(config, monkeypatch):
    monkeypatch.setattr(approvals, "MOST_OFFERS", 3)
    for number in range(5):
        assert asked(config, job=f"job-{number}") == "WAITING"
        approvals.sort_offers(config.directory, ())
    assert approvals.gone(config.directory).keys() == {"job-2", "job-3", "job-4"}


def test_only_the_very_bytes_that_wait_are_dropped_by_their_refusal(config):
    """A coordinator may call anything else by the name of a job that waits."""
    assert asked(config) == "WAITING"
    approvals.drop_offer(config.directory, "lung", b"of somebody")
    assert approvals.offered(config, "lung") == b"one"
    approvals.drop_offer(config.directory, "lung", b"one")
    with refused("no job 'lung' waits for a person here; those that do: none"):
        approvals.offered(config, "lung")
    approvals.drop_offer(config.directory, "lung", b"one")


def test_a_job_that_goes_while_it_is_read_is_left_out(config, monkeypatch):
    assert asked(config) == asked(config, b"two", job="heart") == "WAITING"
    policy = SimpleNamespace(digest=POLICY)
    monkeypatch.setattr(approvals.policies, "load", lambda *_: policy)
    config.policy = config.names = None
    content = approvals._content

    def accepted_meanwhile(path):
        if path.stem == "lung":
            approvals.forget_offer(config.directory, "lung")
        return content(path)

    monkeypatch.setattr(approvals, "_content", accepted_meanwhile)
    assert [each.job for each in approvals.waiting(config)] == ["heart"]
    with refused("no job 'lung' waits for a person here; those that do: heart"):
        approvals.offered(config, "lung")


def test_a_job_may_have_any_name(config):
    """An operator's job once took the place of all decisions."""
    assert asked(config) == "WAITING"
    approvals.decline(config, shown())
    assert asked(config, job="decisions") == "WAITING"
    assert asked(config) == "declined"
    approvals.forget_offer(config.directory, "decisions")
    assert asked(config) == "declined"
    assert approvals.parse(approvals.begin(config.directory)).jobs.keys() == {"lung"}


def test_what_the_policy_declined_is_kept_apart_until_it_is_accepted(tmp_path):
    """Only the newest stay: an operator could have any number signed."""
    for number in range(approvals.MOST_OFFERS + 1):
        approvals.keep_declined(tmp_path, f"lung-{number}", b"{}")
    kept = list(approvals.declined(tmp_path))
    assert len(kept) == approvals.MOST_OFFERS
    assert approvals.declined_offer(tmp_path, kept[0]) == b"{}"
    approvals.forget_offer(tmp_path, kept[0])
    with pytest.raises(LocalError, match="allows already runs without a question"):
        approvals.declined_offer(tmp_path, kept[0])
    approvals.keep_declined(tmp_path, "heart", b"heart's")
    approvals.sort_offers(tmp_path, {sha256(b"heart's").digest()})
    assert list(approvals.declined(tmp_path)) == ["heart"]
    with pytest.raises(LocalError, match="no name of a job"):
        approvals.keep_declined(tmp_path, "../lung", b"{}")
