"""The coordinator's word on a silo's jobs: bounded, kept, and never more than text."""

from types import SimpleNamespace

import pytest
import torch
from support.signed_federation import job_document

from staddle.algorithms.data.dataset import Dataset
from staddle.commands.federation import local_federation
from staddle.proto import federation_pb2 as pb
from staddle.silo import config as configs
from staddle.silo import status
from staddle.silo.agent import Agent, Lane
from staddle.silo.ingress.coordinator_word import FILE, MOST_LOST, CoordinatorWord, KeptWord, read
from staddle.silo.job_folder import MOST_REASON, JobFolder
from staddle.silo.session import RoundOpened

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
