"""Decisions of a silo's people: what they are for, and what no decision is."""

from hashlib import sha256
from types import SimpleNamespace

import pytest
from support.refusals import refused

from staddle.errors import RefusedError
from staddle.silo.admission import approvals

POLICY, OTHER = sha256(b"policy").hexdigest(), sha256(b"other").hexdigest()


@pytest.fixture
def config(tmp_path):
    return SimpleNamespace(directory=tmp_path, admission=SimpleNamespace(approve="ask"))


def asked(config, signed=b"one", policy=POLICY, job="lung"):
    """The code with which the agent answers; empty where it accepts."""
    try:
        approvals.check_approved(config, job, signed, policy, "coordinator")
    except RefusedError as error:
        return error.code
    return ""


def test_a_silo_that_asks_nobody_keeps_nothing(config, tmp_path):
    config.admission.approve = "policy"
    assert asked(config) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_approval_is_for_one_file_under_one_policy(config):
    assert asked(config) == "WAITING"
    assert approvals.offered(config, "lung") == b"one"
    approvals.approve(config, "lung", b"one", POLICY)
    assert asked(config) == ""
    assert asked(config, policy=OTHER) == "WAITING"
    assert asked(config, signed=b"two") == "WAITING"
    assert asked(config, job="heart") == "WAITING"
    assert asked(config) == ""


def test_a_refusal_holds_under_any_policy_and_for_one_file(config):
    assert asked(config) == "WAITING"
    approvals.decline(config, "lung", b"one", POLICY, "not our patients")
    assert asked(config) == asked(config, policy=OTHER) == "NOT_APPROVED"
    assert asked(config, signed=b"two") == "WAITING"


def test_what_was_not_shown_is_not_decided(config):
    """A coordinator offers another job of the name while a person reads the first."""
    assert asked(config, signed=b"one") == "WAITING"
    assert asked(config, signed=b"two") == "WAITING"
    with refused("another job named 'lung' is offered by now; look at it first"):
        approvals.approve(config, "lung", b"one", POLICY)
    with refused("no job 'heart' waits for a person here; those that do: lung"):
        approvals.approve(config, "heart", b"one", POLICY)
    with refused("'../lung' is no name of a job"):
        approvals.offered(config, "../lung")
    with refused("a reason of 501 characters; at most 500"):
        approvals.decline(config, "lung", b"two", POLICY, "x" * 501)
    assert asked(config, signed=b"two") == "WAITING"


def test_damaged_decisions_approve_nothing(config, tmp_path):
    assert asked(config) == "WAITING"
    approvals.approve(config, "lung", b"one", POLICY)
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
