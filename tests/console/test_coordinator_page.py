"""What a coordinator's page shows of a database and a ledger that a test made."""

from contextlib import closing
from dataclasses import replace

import pytest
from support.signed_federation import job_document

from staddle.commands.federation import local_federation
from staddle.console import coordinator_facts, coordinator_page
from staddle.console.coordinator_facts import CoordinatorFacts, RoundTraffic, gathered, seconds_left
from staddle.coordinator import config as configs
from staddle.coordinator import status
from staddle.coordinator.live_status import LiveStatus, SiloSeen
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.ledger.records import DeliveredRecord, MessageDigest, Received, Serving

SILOS = ("a", "b", "c")
HASH = "ab" * 32
GIVEN = {"given": {"a": HASH}, "failed": {"c": "lost"}}
IN_ROUND = {"cohort": SILOS, "stage": "round", "round": 2, **GIVEN}
OPEN = JobState("open", SILOS, 5, 2, 1.0, answers=dict.fromkeys(SILOS, "accepted"), **IN_ROUND)
QUEUED = JobState("<b>next", SILOS, 7, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    federation = local_federation.make(tmp_path_factory.mktemp("made") / "f", SILOS)
    local_federation.sign_job(federation, job_document(SILOS, name="open", rounds=5))
    signed = (federation.folder / "jobs" / "open.json").read_bytes()
    local_federation.write_coordinator(federation, [], {})
    config = configs.load(federation.coordinator_config)
    config.directory.mkdir()
    path = config.directory / "coordinator.sqlite"
    with closing(Database(path)) as database, database.transaction():
        database.add_job(signed, OPEN, {})
        database.add_job(canonical_json({"document": {}}), QUEUED, {})
        for round_, right in enumerate((20, 40)):
            sums = {"correct.delivered": right, "correct.trained": right + 5, "tested": 50}
            database.close_round("open", round_, ["a", "b"], sums, {}, {})
    return config


@pytest.fixture(scope="module")
def found(made):
    return status.read(made)


def at(seconds):
    return f"2026-11-20T21:30:{seconds:02}.000000Z"


class Line:
    """The one thing that is read of a line of the ledger."""

    def __init__(self, seconds):
        self.record = {"time": at(seconds)}


def received(silo, round_, size):
    message = MessageDigest(bytes=size, sha256=HASH)
    fields = {"job_digest": HASH, "ledger_seq": 1, "ledger_leaf": HASH, "checkpoint": "x"}
    common = {"silo": silo, "job": "open", "round": round_, "message": message}
    return Received(**common, **fields, receipt="cd" * 64)


def delivered(silo, round_, size):
    message = MessageDigest(bytes=size, sha256=HASH)
    return DeliveredRecord(silo=silo, job="open", job_digest=HASH, round=round_, message=message)


RECORDS = [
    (Line(0), Serving(coordinator="c", software="staddle 9", roster=HASH)),
    (Line(1), delivered("a", 0, 10)),
    (Line(2), delivered("b", 0, 10)),
    (Line(5), received("a", 0, 100)),
    (Line(6), received("b", 0, 100)),
    (Line(8), delivered("a", 1, 10)),
    (Line(16), received("a", 1, 100)),
]


@pytest.fixture(scope="module")
def facts():
    return gathered(CoordinatorFacts("now", 0.0), RECORDS)


def test_the_ledger_says_when_who_was_heard_and_what_rounds_took(facts):
    assert facts.software == "staddle 9"
    assert facts.heard == {"a": at(16), "b": at(6)}
    assert dict(facts.sent) == {"a": 200, "b": 100}
    assert facts.rounds["open"] == {
        0: RoundTraffic(at(1), at(6), 200, 20),
        1: RoundTraffic(at(8), at(16), 100, 10),
    }
    assert [own.seconds for own in facts.rounds["open"].values()] == [5.0, 8.0]


def test_the_time_that_is_left_follows_from_the_last_closed_rounds():
    rounds = {number: RoundTraffic(at(0), at(10 * number)) for number in range(5)}
    rounds[4].last = at(59)  # of the open round nothing is known
    assert seconds_left(rounds, 4, 10) == 60.0
    assert seconds_left(rounds, 1, 10) is None
    assert seconds_left({}, 0, 10) is None


def test_each_silo_of_the_roster_stands_with_what_it_owes(made, found, facts):
    roster = rosters.load(made.roster)
    a, b, c = coordinator_page.silo_lines(found, roster, facts)
    assert (a.name, a.organisation, a.waits) == ("a", "organisation of a", ())
    assert (a.state, a.is_away, a.heard, a.bytes) == ("", False, at(16), 200)
    assert b.waits == ("its upload to open, round 2",)
    assert (c.is_away, c.heard, c.bytes) == (True, "", 0)
    assert c.state.startswith("lost")
    near = {silo: SiloSeen(connected=silo != "b", software="staddle 9") for silo in "abc"}
    running = replace(found, running=True, live=LiveStatus(at(0), near))
    lines = coordinator_page.silo_lines(running, roster, None)
    assert [line.state for line in lines] == ["connected", "not connected", "connected"]
    assert [line.is_away for line in lines] == [False, True, False]
    assert [line.live.software for line in lines] == ["staddle 9"] * 3


def test_a_job_says_who_is_missing_and_why(found):
    job, queued = found.jobs
    assert coordinator_page.missing(job) == [
        "b: owes its upload to open, round 2",
        f"c: {coordinator_page.in_words('lost')}",
    ]
    assert coordinator_page.missing(queued) == []
    assert coordinator_page.queue(found.jobs) == "1 round, 1 queued"
    assert coordinator_page.queue(()) == "none"


def test_a_jobs_page_has_its_curves_its_rounds_and_what_could_be_read(made, found, facts):
    job = next(each for each in found.jobs if each.job == "open")
    shown = coordinator_page.job_details(made, job, facts)
    (accuracy,) = shown.curves
    assert accuracy.said == (
        "accuracy, rounds 0 to 1: as delivered 40.0% to 80.0%, as trained 50.0% to 90.0%"
    )
    assert [(one.round, one.seconds, one.received) for one in shown.rounds] == [
        (1, 8.0, 100),
        (0, 5.0, 200),
    ]
    assert shown.seconds_left == 30.0
    assert shown.dropped["c"].startswith("lost")
    assert shown.awaited == "its upload to open, round 2"
    assert shown.readable[0].startswith("in the clear: the coordinator sees")
    assert shown.readable[-1].startswith("no [privacy]")


def test_a_job_that_cannot_be_read_hides_no_other(made, found):
    job = next(each for each in found.jobs if each.job != "open")
    shown = coordinator_page.job_details(made, job, None)
    assert shown.readable[0].startswith("This release cannot read the job")
    assert (shown.curves, shown.rounds, shown.seconds_left) == ((), (), None)
    assert shown.untold == "no round has closed yet"


def test_the_summary_says_what_runs(found):
    assert coordinator_page.summary(found) == (
        "Coordinator does not run; open: round, 2 of 5 rounds closed"
    )


def test_a_ledger_that_is_gone_does_not_hold(made):
    assert not coordinator_facts.read(made).verified.ok
