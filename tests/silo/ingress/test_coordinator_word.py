"""The coordinator's word on a silo's jobs: bounded, kept, and never more than text."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.signed_federation import job_document

from staddle.algorithms.data.dataset import Dataset
from staddle.commands.federation import local_federation
from staddle.errors import UnreachableError, UnwritableError
from staddle.files import checked_file
from staddle.proto import federation_pb2 as pb
from staddle.silo import agent as agents
from staddle.silo import config as configs
from staddle.silo import status
from staddle.silo.agent import Agent, Lane
from staddle.silo.egress.session import TurnedAwayError
from staddle.silo.ingress.coordinator_word import FILE, MOST_LOST, CoordinatorWord, KeptWord, read
from staddle.silo.job_folder import MOST_REASON, JobFolder
from staddle.silo.session import (
    Barred,
    Connect,
    Connected,
    ConnectionLost,
    Poll,
    RoundOpened,
    TaskReceived,
)

NAMES = ("first", "second")


@pytest.fixture
def silo(tmp_path):
    """A silo that accepted two jobs: their digests, and where they stand by ``status``."""
    made = local_federation.make(tmp_path / "f", ("a", "b"))
    documents = [job_document(("a", "b"), name=name, rounds=4) for name in NAMES]
    jobs = [local_federation.sign_job(made, document) for document in documents]
    data = Dataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    local_federation.write_silo(made, "a", "127.0.0.1:1", data, jobs)
    config = configs.load(made.silo_config("a"))
    for job in jobs:
        folder = JobFolder(config.directory / "jobs" / job.name)
        folder.accept((made.folder / "jobs" / f"{job.name}.json").read_bytes(), "data")
    return SimpleNamespace(
        directory=config.directory,
        digests=tuple(job.digest for job in jobs),
        stages=lambda: {job.job: (job.stage, job.why) for job in status.jobs(config)},
    )


def test_a_stop_is_told_once_and_kept_until_the_coordinator_says_it_no_more(silo):
    first, _ = silo.digests
    word = KeptWord(silo.directory)
    told = {first: "stopped by operator 'olga'", "ab" * 32: "a job that is none of ours"}
    assert word.note_stops(told) == {"first": told[first]}
    assert word.note_stops(dict(told)) == {}
    assert read(silo.directory).stopped == {first: told[first]}
    # Another agent is told the same.
    assert KeptWord(silo.directory).note_stops(told) == {}
    said = ("stopped", f"the coordinator says: {told[first]}")
    assert silo.stages() == {"first": said, "second": ("runs", "")}
    assert word.note_stops({}) == {}
    assert silo.stages()["first"] == ("runs", "")


def test_a_coordinator_without_a_session_comes_first_and_what_has_ended_stays_so(silo):
    first, second = silo.digests
    word = KeptWord(silo.directory)
    word.note_stops({first: "x" * 5000, second: "stopped"})
    assert len(read(silo.directory).stopped[first]) == MOST_REASON
    word.note_lost("y" * 5000)
    JobFolder(silo.directory / "jobs" / "second").fail("too few silos")
    assert silo.stages() == {
        "first": ("no session", "y" * MOST_LOST),
        "second": ("failed", "the coordinator says: too few silos"),
    }
    word.note_lost("")
    assert silo.stages()["first"] == ("stopped", f"the coordinator says: {'x' * MOST_REASON}")


def test_a_damaged_file_counts_as_none(silo):
    (silo.directory / FILE).write_bytes(b"\x00")
    assert read(silo.directory) == CoordinatorWord()
    KeptWord(silo.directory).note_lost("away")
    assert read(silo.directory).lost == "away"


def test_a_job_on_whose_round_a_lane_works_is_not_called_stopped(silo):
    """Whatever a coordinator says: people must not read that nothing happens."""
    agent, (first, second) = Agent.__new__(Agent), silo.digests
    agent._word = KeptWord(silo.directory)
    at_work = RoundOpened("first", first, 0, 0, ())
    agent._stops_told = Counter()
    agent._lanes = (Lane(0, task=at_work), Lane(1))
    stops = [pb.StoppedJob(job_digest=bytes.fromhex(each), reason="so") for each in silo.digests]
    told = pb.Task(stopped=pb.StoppedJobs(jobs=stops))
    agent._note_stops(told)
    assert read(silo.directory).stopped == {second: "so"}
    agent._note_stops(pb.Task())  # of an older coordinator
    assert read(silo.directory).stopped == {second: "so"}
    agent._lanes = (Lane(0), Lane(1))
    agent._note_stops(told)
    assert read(silo.directory).stopped == {first: "so", second: "so"}


def test_stops_that_come_and_go_are_logged_ever_more_rarely(silo, monkeypatch):
    first, _ = silo.digests
    agent, lines = Agent.__new__(Agent), []
    agent._word, agent._stops_told, agent._lanes = KeptWord(silo.directory), Counter(), (Lane(0),)
    monkeypatch.setattr(agents.log, "event", lambda _, times, **__: lines.append(times))
    stop = pb.StoppedJob(job_digest=bytes.fromhex(first), reason="so")
    for _ in range(20):
        agent._note_stops(pb.Task(stopped=pb.StoppedJobs(jobs=[stop])))
        agent._note_stops(pb.Task(stopped=pb.StoppedJobs()))
    assert lines == [1, 2, 4, 8, 16]


def test_a_stop_without_a_reason_is_a_stop(silo):
    first, _ = silo.digests
    KeptWord(silo.directory).note_stops({first: ""})
    assert silo.stages()["first"][0] == "stopped"


def test_a_full_disk_loses_the_word_and_nothing_else(silo, monkeypatch):
    def full(*_):
        raise UnwritableError("coordinator.json: no space left")

    first, _ = silo.digests
    word = KeptWord(silo.directory)
    with monkeypatch.context() as patch:
        patch.setattr(checked_file, "write_json", full)
        assert word.note_stops({first: "so"}) == {"first": "so"}
        word.note_lost("away")
    assert read(silo.directory) == CoordinatorWord()
    word.note_lost("")
    assert read(silo.directory) == CoordinatorWord(stopped={first: "so"})


async def test_a_loss_is_logged_ever_more_rarely_and_kept_until_a_session_opens(silo, monkeypatch):
    """A silo that was removed tries again for years; another text is logged at once."""
    agent, lines, unwritten = Agent.__new__(Agent), [], []
    agent._word, agent._losses = KeptWord(silo.directory), Counter()
    refused, away = "coordinator: its roster no longer has this silo", "coordinator: away"
    found = [*[refused] * 9, away, refused, None, refused]

    async def run_effect(lane, effect):
        if isinstance(effect, Poll):
            return TaskReceived(None)
        if (why := found.pop(0)) is not None:
            raise UnreachableError(*why.split(": "))
        return Connected()

    monkeypatch.setattr(agent, "_run_effect", run_effect, raising=False)
    monkeypatch.setattr(agents.log, "problem", lambda _, why, times: lines.append((why, times)))
    monkeypatch.setattr(agents.log, "unwritten", lambda _, **said: unwritten.append(said["times"]))
    for _ in range(11):
        why = found[0]
        assert await agent._perform(Lane(0), Connect(1)) == ConnectionLost(why)
        assert silo.stages()["first"] == ("no session", why)
    assert lines == [*[(refused, times) for times in (1, 2, 4, 8)], (away, 1)]
    assert unwritten == [3, 5, 6, 7, 9, 10]
    assert await agent._perform(Lane(0), Connect(1)) == Connected()
    assert silo.stages()["first"] == ("runs", "")
    # A session that tells of a task or of none begins the count anew.
    await agent._perform(Lane(0), Poll())
    await agent._perform(Lane(0), Connect(1))
    assert lines[-1] == (refused, 1)


async def test_whom_the_coordinator_bars_has_no_session_either(silo, monkeypatch):
    agent = Agent.__new__(Agent)
    agent._word, agent._losses = KeptWord(silo.directory), Counter()

    async def run_effect(lane, effect):
        raise TurnedAwayError("coordinator", "IDENTITY", "no such member")

    monkeypatch.setattr(agent, "_run_effect", run_effect, raising=False)
    barred = await agent._perform(Lane(0), Poll())
    assert barred == Barred("coordinator: no such member")
    assert silo.stages()["first"] == ("no session", barred.why)


def test_texts_that_differ_without_end_take_no_memory():
    agent = Agent.__new__(Agent)
    agent._losses = Counter()
    for number in range(1000):
        agent._tell_lost(f"refused for the {number}. time")
    assert len(agent._losses) <= agents.MOST_LOSSES + 1
