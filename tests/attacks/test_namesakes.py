"""A coordinator with two signed jobs of one name: no silo takes part in both."""

import asyncio
import itertools
import threading

import grpc
import pytest
from support.hostile_coordinator import (
    SILO,
    Hostile,
    delivery,
    make_world,
    offer,
    play,
    policy_for,
    records,
    round_of,
)
from support.signed_federation import job_document

from staddle.commands.federation import local_federation
from staddle.errors import CancelledError
from staddle.proto.channel import ERROR_METADATA
from staddle.silo.training.round import JobTraining

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

SILOS = (SILO, "east", "south")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The job "first", and a job "other" that was signed under the same name."""
    document = job_document(SILOS, name="first", rounds=2)
    world = make_world(tmp_path_factory.mktemp("attacked"), SILOS, document)
    world.jobs["other"] = local_federation.sign_job(world.federation, {**document, "seed": 99})
    world.signed["other"] = (world.federation.folder / "jobs" / "first.json").read_bytes()
    return world


class Both(Hostile):
    """Delivers for the job whose digest is asked for."""

    async def fetch(self, request, context):
        digests = {job.digest: name for name, job in self.world.jobs.items()}
        which = digests[request.job_digest.hex()]
        for frame in delivery(self.world, which, request.round):
            yield frame


def of(world, which, task, *arguments):
    """A task of one of the two, each under its own digest."""
    digest = bytes.fromhex(world.jobs[which].digest)
    if task is offer:
        return offer(world, job_digest=digest, signed_job=world.signed[which])
    return round_of(world, *arguments, job_digest=digest)


def test_of_two_jobs_of_one_name_the_one_that_began_here_stays(world, tmp_path):
    """In any order of offers, once something of one has left the other gets nothing."""
    script = [of(world, "first", offer), of(world, "other", offer), of(world, "first", round_of, 0)]
    script += [of(world, "other", round_of, 0), of(world, "first", offer)]
    script += [of(world, "first", round_of, 0), of(world, "other", round_of, 1)]
    hostile = play(Both(world, script), tmp_path)
    assert hostile.answers == [
        ("ACCEPT", 0, "UNSPECIFIED"),
        ("ACCEPT", 0, "UNSPECIFIED"),
        ("FAILED", 0, "DELIVERY"),  # its place was taken before it began
        ("DECLINE", 0, "JOB_INVALID"),
        ("FAILED", 0, "DELIVERY"),
    ]
    assert [upload[1] for upload in hostile.uploads] == [0, 1]
    assert {r["job_digest"] for r in records(tmp_path, "egress.intent")} == {
        world.jobs["other"].digest
    }


@pytest.mark.parametrize("order", list(itertools.permutations(["offer", "round", "again"])))
def test_whatever_the_order_a_silo_uploads_for_one_of_two_namesakes(world, tmp_path, order):
    kinds = {
        "offer": [of(world, "other", offer), of(world, "other", round_of, 0)],
        "round": [of(world, "first", round_of, 0)],
        "again": [of(world, "first", offer), of(world, "other", round_of, 1)],
    }
    script = [of(world, "first", offer), *itertools.chain(*map(kinds.get, order))]
    hostile = play(Both(world, script), tmp_path)
    left = {record["job_digest"] for record in records(tmp_path, "egress.intent")}
    assert len(left) == 1
    assert len(hostile.uploads) == len({upload[1] for upload in hostile.uploads})


def test_a_job_that_is_offered_again_and_again_is_judged_once(world, tmp_path):
    """The ledger does not grow with offers of a job that was declined."""
    unknown = {"job_digest": bytes(32), "signed_job": b"{}"}
    hostile = play(Hostile(world, [offer(world, **unknown)] * 4), tmp_path)
    assert hostile.answers == [("DECLINE", 0, "JOB_SIGNATURE")] * 4
    assert len(records(tmp_path, "job.decline")) == 1


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """The job "first", which sums in secret, and "other" of the same name, which does not."""
    table = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
    fields = {"name": "first", "rounds": 2, "min_cohort": 3}
    silos = (*SILOS, "west")
    documents = [job_document(silos, **fields, security=table), job_document(silos, **fields)]
    world = make_world(tmp_path_factory.mktemp("hidden"), silos, documents[0])
    world.jobs["other"] = local_federation.sign_job(world.federation, documents[1])
    world.signed["other"] = (world.federation.folder / "jobs" / "first.json").read_bytes()
    world.policy = policy_for([*world.jobs.values()])
    return world


class Swapping(Both):
    """Ends the session once the silo trains in secret, and offers the other job meanwhile."""

    def __init__(self, *given):
        super().__init__(*given)
        self.accepted, self.trained = threading.Event(), threading.Event()

    async def secure(self, request, context):
        raise AssertionError("nothing was asked for")

    async def secure_next(self, request, context):
        metadata = ((ERROR_METADATA, "SESSION"),)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "begin again", metadata)

    async def answer(self, request, context):
        reply = await super().answer(request, context)
        if len(self.answers) > 1:
            self.accepted.set()
        return reply

    async def poll(self, request, context):
        if len(self.tasks) == 1:
            await asyncio.to_thread(self.trained.wait, 60)
        return await super().poll(request, context)


def test_what_was_trained_to_be_summed_in_secret_leaves_in_no_namesake(
    hidden, tmp_path, monkeypatch
):
    """Its round stays in memory while the session is lost, and its folder is empty until then."""
    script = [of(hidden, "first", offer), of(hidden, "first", round_of, 0)]
    script += [of(hidden, "other", offer), of(hidden, "other", round_of, 0)]
    hostile, train, trained = Swapping(hidden, script), JobTraining.train, []

    def held(self, *given):
        try:
            while not hostile.accepted.wait(0.01):
                if self.cancelled():
                    raise CancelledError("as asked")
            trained.append(self.admitted.job.digest)
            return train(self, *given)
        finally:
            hostile.trained.set()

    monkeypatch.setattr(JobTraining, "train", held)
    play(hostile, tmp_path)
    assert hostile.answers[0][0] == "ACCEPT"
    assert ("DECLINE", 0, "JOB_INVALID") in hostile.answers
    assert records(tmp_path, "egress.intent") == []
    assert list(trained) == [hidden.jobs["first"].digest]


def test_a_job_that_is_offered_under_another_name_is_declined(world, tmp_path):
    """Else two lanes could work on one job: each takes what has another name."""
    task = of(world, "first", offer)
    task.offer.job = "another"
    assert play(Hostile(world, [task]), tmp_path).answers == [("DECLINE", 0, "JOB_INVALID")]
    assert records(tmp_path, "job.accept") == []
