"""A silo of raw calls that takes part in secure sums with the pure machine."""

import asyncio
import hashlib
import os
from dataclasses import replace

from support.raw_silo import SECONDS, Caller, maybe_late

from staddle.algorithms.exchange.parts import delivered_items
from staddle.proto.convert.secagg_received import SignedSpec, secagg_delivery_from_wire
from staddle.proto.convert.secagg_sent import (
    Over,
    SecaggPoll,
    SecaggUpload,
    poll_to_wire,
    secagg_upload_to_wire,
)
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import given
from staddle.security.identity import roster as rosters
from staddle.security.identity.signers import Signers
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.evidence import proven
from staddle.security.secagg.masked_sum import masked_chunks
from staddle.security.secagg.memory import NO_STATE, Memory
from staddle.security.secagg.spec import Terms


class BlindSilo(Caller):
    """``contributions(round)``: its tensors by part.

    ``hear(effect)`` may change an effect, or be None for silence.
    """

    def __init__(self, address, keys, roster, job, contributions):
        super().__init__(address, keys, roster, job)
        terms = replace(Terms(colluders=job.security.colluders), batches=job.batches)
        signers = Signers.of(roster)
        self.participant = machine.Participant(self.silo, signers, terms, keys.sign, os.urandom)
        self.whole_roster, self.contributions, self.memory = roster, contributions, Memory()
        self.hear = lambda effect: effect
        self.state, self.had, self.finished = None, 0, None

    async def frame(self, round_):
        """What it knows of the round's sum, from what it receives."""
        frames = [frame async for frame in self.fetch(round_)]
        self.received = b"".join(frame.chunk for frame in frames)
        down = {header.part for header in frames[0].manifest.tensors}
        items = delivered_items([part for part in self.job.down(round_) if part.name in down])
        plan = JobPlan(self.job).round(round_)
        model = plan.model_digest(items, frames[-1].end.tensor_sha256[: len(items)])
        members = rosters.members_digest(self.whole_roster, self.job.silos)
        return plan.frame(self.whole_roster.federation, members, model)

    async def next(self, round_):
        """What it is told next; None if nothing is for the hold time."""
        asked = SecaggPoll(self.session, self.job.name, self.digest, round_, self.had)
        reply = await self.stub.SecureNext(poll_to_wire(asked), timeout=SECONDS)
        told = secagg_delivery_from_wire(reply)
        self.had += told is not None
        return told

    async def take_part(self, round_):
        """The round, until its sum is open; what it was told in the end."""
        own = await self.frame(round_)
        stateless = JobPlan(self.job).round(round_).sums_metrics_alone
        self.memory = self.memory.starting(NO_STATE if stateless else round_)
        self.had, self.finished = 0, None
        async with asyncio.timeout(SECONDS):
            while self.finished is None:
                if (told := await self.next(round_)) is not None:
                    await self.heard(own, told)

    async def heard(self, own, told):
        self.attempt = told.attempt
        match told.body:
            case SignedSpec(document, signature, notes, proofs):
                excused = proven(proofs, own.federation, own.job_digest, self.participant.signers)
                participant = replace(
                    self.participant, terms=replace(self.participant.terms, excused=excused)
                )
                fitting = [each for each in proofs if each.is_of(self.memory.signed_ctx)]
                evidence, signed = (fitting or [None])[0], (document, signature)
                self.state, effects = machine.begin(
                    participant, own, *signed, self.memory, notes, evidence
                )
            case Over(code):
                self.state, effects = machine.advance(self.state, s.AttemptStopped(code))
                effects = [effect for effect in effects if not isinstance(effect, s.LeaveAttempt)]
            case body:
                self.state, effects = machine.advance(self.state, body)
        await self.do(effects)

    async def do(self, effects):
        for effect in effects:
            if (effect := self.hear(effect)) is None:
                return
            match effect:
                case s.Remember(memory):
                    self.memory = memory
                case s.UploadWords(terms):
                    self.words = self.masked(terms)
                    await self.upload(self.masked_frames())
                    sha256 = hashlib.sha256(self.words).digest()
                    streamed = s.Streamed(len(self.words), sha256, self.tags, self.kept)
                    self.state, more = machine.advance(self.state, streamed)
                    await self.do(more)
                case s.Finish(sha256):
                    self.finished = sha256
                case s.LeaveAttempt(code):
                    await self.say(Over(code))
                case s.SendSurvival() | s.SendReveal():
                    await maybe_late(self.say(effect))
                case _:
                    await self.say(effect)

    async def say(self, body):
        message = secagg_upload_to_wire(SecaggUpload(self.session, self.attempt, body))
        await self.stub.Secure(message, timeout=SECONDS)

    tags = b""  # of masked words, padded; where the job's silos share a key
    kept = b""  # its own share of what is compared by shares

    def masked(self, terms):
        spec = self.state.spec
        parts = zip(self.job.up(spec.round), spec.groups, strict=True)
        values = [
            given(part, group, self.contributions(spec.round)[part.name]) for part, group in parts
        ]
        return b"".join(words.tobytes() for words in masked_chunks(spec, self.silo, values, terms))

    def masked_frames(self, **changes):
        """Its upload, right in all that ``changes`` of the manifest leave."""
        fields = {"size": len(self.words), "context": self.state.ctx, **changes}
        manifest = self.of_round(self.state.spec.round) | fields
        return self.frames_of_bytes(self.words, manifest)
