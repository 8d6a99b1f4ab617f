"""Silos with the right keys and bad intentions in a blind round, against the coordinator as it
ships.

Three of four silos are honest; the fourth takes part until it does its harm, and goes on where it
still can.
"""

import asyncio
import contextlib
import os
from dataclasses import replace
from hashlib import sha256
from unittest.mock import patch

import grpc
import numpy as np
import pytest
from support.raw_silo import SECONDS, Caller, code_of, maybe_late
from support.signed_federation import job_document, signed_federation

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import server
from staddle.coordinator.rpc.limits import AT_ONCE
from staddle.coordinator.storage.database import Database
from staddle.proto import secure_pb2 as secure
from staddle.proto.channel import SECURE
from staddle.proto.convert.secagg_received import SignedSpec, secagg_delivery_from_wire
from staddle.proto.convert.secagg_sent import Attempt, Over, SecaggUpload, secagg_upload_to_wire
from staddle.security.arithmetic.shamir import split
from staddle.security.blind.plan import JobPlan
from staddle.security.faults import Code
from staddle.security.identity import roster as rosters
from staddle.security.identity.signers import Signers
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import deal, make_bundle
from staddle.security.secagg.masked_sum import GroupValues as Values
from staddle.security.secagg.masked_sum import masked_chunks
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.messages import make_header
from staddle.security.secagg.receiving_keys import receiving_keys
from staddle.security.secagg.spec import Terms

pytestmark = pytest.mark.actor("silo")

SILOS = ("north", "east", "south", "west")  # the first is the bad one
# enough of these end a stage: the honest wait until the harm is done
ENOUGH = (s.SendSurvival, s.SendReveal)
# seconds for a step: where it is over because the bad one is silent, and where it is not
HURRIED, PATIENT = 2, 60


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """With declared counts, so that a sum over three of the four is opened."""
    security = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    security |= {"counts": dict.fromkeys(SILOS, 60), "tags": False}
    documents = []
    for seconds in (HURRIED, PATIENT):
        fields = {"name": f"job-{seconds}", "round_timeout": seconds, "min_cohort": 3}
        documents.append(job_document(SILOS, **fields, security=security))
    world = signed_federation(tmp_path_factory.mktemp("attacked"), SILOS, *documents)
    world.configs = {}
    for seconds in (HURRIED, PATIENT):
        timing = {"admission_seconds": 20, "beat_seconds": 20, "hold_seconds": 1}
        timing["secure_seconds"] = seconds
        local_federation.write_coordinator(world.federation, [f"job-{seconds}"], timing)
        world.configs[seconds] = configs.load(world.federation.coordinator_config)
    return world


class BlindCaller(Caller):
    """A silo made of raw calls and the pure machine; ``run`` takes part in round 0."""

    def __init__(self, address, keys, roster, job):
        super().__init__(address, keys, roster, job)
        self.raw = self.channel.unary_unary(SECURE, request_serializer=bytes)
        terms = replace(Terms(), batches=job.batches)
        signers = Signers.of(roster)
        self.party = machine.Participant(self.silo, signers, terms, keys.sign, os.urandom)
        model = JobPlan(job).round(0).model_digest((), ())
        members = rosters.members_digest(roster, job.silos)
        self.frame = JobPlan(job).round(0).frame(roster.federation, members, model)
        self.had, self.state, self.survivors = 0, None, None

    @property
    def attempt(self):
        return Attempt(self.job.name, self.digest, 0, self.state.spec.attempt, self.state.ctx)

    def message(self, body, **changes):
        attempt = replace(self.attempt, **changes)
        return secagg_upload_to_wire(SecaggUpload(self.session, attempt, body))

    def secure(self, message):
        return self.stub.Secure(message, timeout=SECONDS)

    def asked(self, **changes):
        fields = self.of_round(0, had=self.had)
        return self.stub.SecureNext(secure.SecurePoll(**{**fields, **changes}), timeout=SECONDS)

    async def run(self, harm=None, at=None):
        """Until the sum is open; ``await harm(self, effect)`` before each effect of the type
        ``at``.

        It says whether the effect is still done; where not, this silo is silent from then on.
        """
        while self.survivors is None:
            told = secagg_delivery_from_wire(await self.asked())
            if told is None:
                continue
            self.had += 1
            if isinstance(told.body, SignedSpec):
                signed = told.body.document, told.body.signature
                self.state, effects = machine.begin(self.party, self.frame, *signed, Memory())
            else:
                if isinstance(told.body, s.KeysReceived):
                    self.keys = told.body.keys
                self.state, effects = machine.advance(self.state, told.body)
            for effect in effects:
                if isinstance(effect, at or ()) and not await harm(self, effect):
                    return
                await self.do(effect)

    async def do(self, effect):
        match effect:
            case s.UploadWords():
                await self.upload(self.frames(effect))
                self.state, (header,) = machine.advance(self.state, self.streamed(effect))
                await self.secure(self.message(header))
            case s.Finish(survivors=survivors):
                self.survivors = survivors
            case s.Remember():
                pass
            case s.LeaveAttempt():
                raise AssertionError(effect)
            case s.SendSurvival() | s.SendReveal():
                await maybe_late(self.secure(self.message(effect)))
            case _:
                await self.secure(self.message(effect))

    def words(self, effect):
        made = [Values(np.full(group.elements, 0.01)) for group in self.state.spec.groups]
        chunks = masked_chunks(self.state.spec, self.silo, made, effect.terms)
        return b"".join(words.tobytes() for words in chunks)

    def streamed(self, effect):
        payload = self.words(effect)
        return s.Streamed(len(payload), sha256(payload).digest())

    def frames(self, effect, payload=None, **changes):
        payload = self.words(effect) if payload is None else payload
        fields = {"size": len(payload), "context": self.state.ctx, **changes}
        return self.frames_of_bytes(payload, self.of_round(0) | fields)


@pytest.fixture
def serving(world, tmp_path):
    """A coordinator with four silos in round 0.

    ``serving.rows()`` is what it keeps of the bad one's sum.

    It gives them ``seconds`` for each step.
    """
    complaints = []

    @contextlib.asynccontextmanager
    async def begin(seconds):
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        job = world.jobs[f"job-{seconds}"]
        config = world.configs[seconds].model_copy(update={"directory": tmp_path / "state"})
        async with server.running(config) as address:
            callers = [BlindCaller(address, world.keys[silo], world.roster, job) for silo in SILOS]
            for caller in callers:
                await caller.accept()
            for caller in callers:
                await caller.told("round")
            yield callers
            for caller in callers:
                await caller.channel.close()
        assert complaints == []

    def rows():
        database = Database(tmp_path / "state" / "coordinator.sqlite", read_only=True)
        return [row for row in database.secure_rows(f"job-{PATIENT}", 0) if row.silo == SILOS[0]]

    begin.rows = rows
    begin.spools = lambda: list((tmp_path / "state" / "spool").iterdir())
    return begin


def play(serving, harm, at, seconds=PATIENT, stays=True):
    """A round with this harm; who survived.

    The bad silo is asked into the next one, if it ``stays``.
    """

    async def scenario():
        harmed = asyncio.Event()

        async def first(bad, effect):
            goes_on = await harm(bad, effect)
            harmed.set()
            return goes_on

        async def after_it(*_):
            return await harmed.wait()

        async with serving(seconds) as (bad, *good):
            async with asyncio.timeout(SECONDS):
                others = (silo.run(after_it, at if at in ENOUGH else None) for silo in good)
                await asyncio.gather(bad.run(first, at), *others)
            assert {silo.survivors for silo in good} == {good[0].survivors}
            await bad.hello()  # the coordinator lives, and takes the bad one again, too
            for silo in (bad, *good) if stays else good:
                assert (await silo.told("round")).round == 1
            return good[0].survivors

    return asyncio.run(scenario())


EVERYBODY, OTHERS = tuple(sorted(SILOS)), tuple(sorted(SILOS[1:]))


# Who stops in a stage, by saying so or by saying nothing.

STAGES = {
    "keys": (s.SendKeys, OTHERS),
    "shares": (s.SendShares, OTHERS),
    "masked words": (s.UploadWords, OTHERS),
    "survivors": (s.SendSurvival, EVERYBODY),  # its words are in the sum
    "reveal": (s.SendReveal, EVERYBODY),
}


@pytest.mark.parametrize("says", [False, True], ids=["silent", "says so"])
@pytest.mark.parametrize(("at", "survivors"), STAGES.values(), ids=STAGES)
def test_who_stops_in_a_stage_holds_nobody_up_for_long(serving, at, survivors, says):
    async def harm(bad, _):
        if says:
            await bad.secure(bad.message(Over(Code.STOPPED)))
        return False

    assert play(serving, harm, at, PATIENT if says else HURRIED) == survivors


# Lies: (before which of its messages, what it says, code, words of the refusal, who survives).


async def differing_keys(bad, effect):
    """The same message is taken again, another one in its place is not."""
    state = bad.state
    keys = receiving_keys(state.seeds.receiving, state.ctx, bad.silo, state.spec.cohort)
    await bad.secure(bad.message(s.SendKeys(state.bundle, keys)))
    root = state.bundle.receiving
    drawn = os.urandom(32), os.urandom(32)
    other = make_bundle(state.ctx, bad.silo, *drawn, root, bad.party.sign)
    return bad.message(s.SendKeys(other, keys))


def late(make):
    async def made(bad, effect):
        return make(bad, effect)

    return made


def header_of(bad, effect, **changes):
    """A header of other words than were uploaded, signed."""
    fields = {"length": bad.streamed(effect).length, "sha256": bytes(32), **changes}
    of_attempt = bad.state.ctx, bad.silo, bad.state.h_u2
    return s.SendHeader(make_header(*of_attempt, tags=b"", sign=bad.party.sign, **fields))


async def wrong_header(bad, effect):
    await bad.upload(bad.frames(effect))
    return bad.message(header_of(bad, effect))


def changed(name, **fields):
    def make(bad, effect):
        return bad.message(replace(effect, **{name: replace(getattr(effect, name), **fields)}))

    return late(make)


def other_portions(bad, effect):
    first, *rest = effect.portions
    return bad.message(replace(effect, portions=(replace(first, own=bytes(32)), *rest)))


def other_shares(bad, effect):
    first, *rest = effect.reveal.shares
    shares = (replace(first, held=replace(first.held, salt=bytes(32))), *rest)
    return bad.message(s.SendReveal(replace(effect.reveal, shares=shares)))


def of(**changes):
    """The right message, of another job, round or attempt."""
    return late(lambda bad, effect: bad.message(effect, **changes))


def without_body(session=None):
    async def made(bad, effect):
        attempt = bad.message(effect).attempt
        return secure.SecureUpload(session=session or bad.session, attempt=attempt)

    return made


def early_header(bad, _):
    header = make_header(bad.state.ctx, bad.silo, bytes(32), 9, bytes(32), b"", bad.party.sign)
    return bad.message(s.SendHeader(header))


NONE = bytes(64)
BAD_DEALING = changed("dealing", signature=NONE)
BAD_SURVIVAL = changed("survival", signature=NONE)
NO_WORDS = late(lambda bad, effect: bad.message(header_of(bad, effect)))
LIES = {
    "keys in another's name": (s.SendKeys, changed("bundle", silo="east"), "SECURE", OTHERS),
    "keys with a bad signature": (s.SendKeys, changed("bundle", signature=NONE), "SECURE", OTHERS),
    "another job": (s.SendKeys, of(job="other"), "UNKNOWN_JOB", EVERYBODY),
    "another job's digest": (s.SendKeys, of(job_digest=bytes(32)), "UNKNOWN_JOB", EVERYBODY),
    "another round": (s.SendKeys, of(round=1), "ROUND_CLOSED", EVERYBODY),
    "another attempt": (s.SendKeys, of(attempt=1), "SECURE", EVERYBODY),
    "another context": (s.SendKeys, of(ctx=bytes(32)), "SECURE", EVERYBODY),
    "another session": (s.SendKeys, without_body(b"x" * 16), "SESSION", EVERYBODY),
    "no body": (s.SendKeys, without_body(), "MANIFEST", EVERYBODY),
    "a header before its time": (s.SendShares, late(early_header), "SECURE", EVERYBODY),
    "other keys": (s.SendShares, differing_keys, "SECURE", EVERYBODY),
    "portions that it did not sign": (s.SendShares, late(other_portions), "SECURE", OTHERS),
    "a dealing with a bad signature": (s.SendShares, BAD_DEALING, "SECURE", OTHERS),
    "a header of other words": (s.UploadWords, wrong_header, "SECURE", OTHERS),
    "a header without words": (s.UploadWords, NO_WORDS, "SECURE", OTHERS),
    "a signature that is none": (s.SendSurvival, BAD_SURVIVAL, "SECURE", EVERYBODY),
    "shares that nobody dealt": (s.SendReveal, late(other_shares), "SECURE", EVERYBODY),
}


@pytest.mark.parametrize(("at", "lie", "code", "survivors"), LIES.values(), ids=LIES)
def test_a_lie_is_refused_and_the_others_have_their_sum(serving, at, lie, code, survivors):
    """Who said what it cannot have said drops out.

    Who said it too early, twice or elsewhere may still go on.
    """
    goes_on = survivors == EVERYBODY and at not in ENOUGH

    async def harm(bad, effect):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.secure(await lie(bad, effect))
        assert code_of(caught.value) == code, caught.value.details()
        return goes_on

    assert play(serving, harm, at) == survivors


# Masked words.


async def twice(bad, effect):
    await bad.upload(bad.frames(effect))
    return bad.frames(effect)


def in_frames(change=lambda words: words, **fields):
    """Frames of the masked words, changed."""
    return late(lambda bad, effect: bad.frames(effect, change(bad.words(effect)), **fields))


def cut_short(bad, effect):
    words = bad.words(effect)
    return bad.frames(effect, words[:-8], size=len(words))


EARLY = late(lambda bad, _: bad.frames(None, bytes(40)))
UPLOADS = {  # name: before which of its messages, frames, code, who survives
    "before their stage": (s.SendShares, EARLY, "ROUND_CLOSED", EVERYBODY),
    "of another attempt": (s.UploadWords, in_frames(context=NONE[:32]), "ROUND_CLOSED", EVERYBODY),
    "in the clear": (s.UploadWords, in_frames(context=b""), "MANIFEST", EVERYBODY),
    "too few": (s.UploadWords, in_frames(lambda words: words[:-8]), "MANIFEST", OTHERS),
    "too many": (s.UploadWords, in_frames(lambda words: words + bytes(8)), "MANIFEST", OTHERS),
    "fewer than declared": (s.UploadWords, late(cut_short), "LENGTH", OTHERS),
    "twice": (s.UploadWords, twice, "ROUND_CLOSED", OTHERS),
}


@pytest.mark.parametrize(("at", "frames", "code", "survivors"), UPLOADS.values(), ids=UPLOADS)
def test_masked_words_that_are_not_awaited_are_refused(serving, at, frames, code, survivors):
    async def harm(bad, effect):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.upload(await frames(bad, effect), wary=True)
        assert code_of(caught.value) == code, caught.value.details()
        return survivors == EVERYBODY

    # it owes its header
    assert play(serving, harm, at, HURRIED if frames is twice else PATIENT) == survivors
    assert serving.spools() == []


@pytest.mark.parametrize("victim", OTHERS)
def test_one_share_that_does_not_join_ends_no_sum(serving, victim):
    """It fits its commitment, so its holder cannot see it.

    Before: the round's sum was never opened, the job failed.
    """

    def wrong(secret, threshold, holders, draw):
        shares = split(secret, threshold, holders, draw)
        number = sorted(SILOS).index(victim) + 1
        return {**shares, number: bytes(33)}

    async def harm(bad, effect):
        state, sign = bad.state, bad.party.sign
        holders = {member: state.spec.holder(member) for member in state.spec.cohort}
        with patch("staddle.security.secagg.dealing.split", wrong):
            own = state.ctx, state.h_u1, bad.keys, bad.silo, state.seeds
            dealing, portions, kept = deal(*own, state.spec.threshold, holders, sign)
        bad.state = replace(state, dealing=dealing, held={bad.silo: kept})
        object.__setattr__(effect, "dealing", dealing)  # it is sent in the place of the honest one
        object.__setattr__(effect, "portions", portions)
        return True

    # it goes, if the wrong share was looked at
    assert play(serving, harm, s.SendShares, stays=False) == EVERYBODY


# Many calls, and large numbers.


def test_who_says_that_it_had_more_than_it_was_told_is_refused(serving):
    async def harm(bad, _):
        for had in (bad.had + 1, 10**6, 2**32 - 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bad.asked(had=had)
            assert code_of(caught.value) == "SECURE"
        return True

    assert play(serving, harm, s.SendShares) == EVERYBODY


def test_bytes_that_are_no_message_are_refused(serving):
    async def harm(bad, _):
        for data in (b"\xff\xff\xff", os.urandom(1000), bytes(5_000_000)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bad.raw(data, timeout=SECONDS)
            assert caught.value.code() is not grpc.StatusCode.UNKNOWN, caught.value.details()
        empty = secure.Dealt(portions=[secure.Portion()] * 100)
        with pytest.raises(grpc.aio.AioRpcError, match="fields in field 4") as caught:
            await bad.secure(secure.SecureUpload(session=bad.session, shares=empty))
        assert code_of(caught.value) == "MANIFEST"
        return True

    assert play(serving, harm, s.SendShares) == EVERYBODY


def test_many_questions_at_once_hold_nobody_up(serving):
    async def harm(bad, _):
        asked = await asyncio.gather(*(bad.asked() for _ in range(100)), return_exceptions=True)
        refused = {answer.code() for answer in asked if isinstance(answer, grpc.aio.AioRpcError)}
        # LIMIT; others are above what one connection may have
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in refused
        assert refused <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        answered = sum(isinstance(answer, secure.SecureDelivery) for answer in asked)
        assert answered <= AT_ONCE["SecureNext"]
        return True

    assert play(serving, harm, s.SendShares) == EVERYBODY


def test_what_is_refused_or_said_again_is_not_kept(serving):
    async def harm(bad, effect):
        await bad.secure(bad.message(effect))
        before = serving.rows()
        for _ in range(50):
            await bad.secure(bad.message(effect))  # taken already
            for message in (bad.message(effect, ctx=bytes(32)), bad.message(effect, round=1)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await bad.secure(message)
                assert code_of(caught.value) in ("SECURE", "ROUND_CLOSED")
        assert len(before) == 1
        assert before == serving.rows()
        return True

    assert play(serving, harm, s.SendKeys) == EVERYBODY
