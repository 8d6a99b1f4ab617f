"""A coordinator of blind rounds with bad intentions: the other silos are honest, and played by the
pure machine.

What the one real silo is told, each attack changes. ``world`` is that of hostile.py, with the keys
of the ``others``.
"""

import asyncio
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import grpc
import numpy as np
from support.hostile_coordinator import SILO, Hostile, delivery
from support.hostile_coordinator import make_world as make_files
from support.signed_federation import job_document

from staddle.algorithms.exchange.parts import delivered_items
from staddle.files.documents import canonical_json
from staddle.proto import secure_pb2 as secure
from staddle.proto.channel import ERROR_METADATA
from staddle.proto.convert.secagg_received import (
    SecaggDelivery,
    SignedSpec,
    secagg_delivery_to_wire,
)
from staddle.proto.convert.secagg_sent import Attempt, Over, secagg_upload_from_wire
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.signers import Signers
from staddle.security.secagg import coordinator
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.masked_sum import Accumulator, GroupValues, chunks, masked_chunks
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import Terms, specify

OTHERS = ("east", "south", "west")
SILOS = (SILO, *OTHERS)


def make_world(folder, security, outsiders=(), silos=None, **changes):
    """Keys of all, a roster, signed jobs of two rounds by their [security] tables, and what the
    real silo has.

    ``outsiders`` are silos of the roster that no job is for, unless ``silos`` has those of a job by
    its name; ``changes`` are to the jobs' documents.
    """
    documents = []
    for name, table in security.items():
        fields = {"name": name, "rounds": 2, "min_cohort": 3, "security": table, **changes}
        documents.append(job_document((silos or {}).get(name, SILOS), **fields))
    world = make_files(folder, (*SILOS, *outsiders), *documents)
    world.silos = SILOS
    return world


class Attempted:
    """One attempt: an honest coordinator and three honest silos.

    ``told`` is what the real one is to be told.
    """

    parts = b""  # of all that made the key of the job, where it has one
    proofs = ()  # evidence against dealers that the real one is brought with the specification

    def __init__(
        self,
        world,
        job,
        round_=0,
        attempt=0,
        alter=None,
        notes=(),
        cohort=SILOS,
        absent=(),
        empty=False,
        lenient=False,
    ):
        """``absent`` silos are lost before they upload.

        ``empty``: nothing is delivered for the round.

        ``lenient``: the others sign whatever survives.
        """
        self.cohort, self.others = cohort, [silo for silo in cohort if silo != SILO]
        self.absent, self.empty = absent, empty
        # what the others hold of all secrets while the sum goes on
        self.opened, self.held = None, {}
        self.world, self.job, self.alter = world, world.jobs[job], alter or (lambda _, body: [body])
        self.notes = tuple(notes)
        self.signers = Signers.of(world.roster)
        self.terms = Terms() if lenient else replace(Terms(), batches=self.job.batches)
        self.frame = self.framed(round_)
        self.spec = specify(self.frame, cohort, attempt)
        self.attempt = self.named(self.spec)
        self.told, self.states, self.uploads, self.queue, self.later = [], {}, {}, [], []
        known = self.spec, self.signers, self.terms
        self.state, effects = coordinator.begin(*known, world.keys.sign)
        self.do("coordinator", effects)

    def framed(self, round_):
        items = delivered_items(self.job.down(round_)) if round_ and not self.empty else ()
        end = delivery(self.world, self.job.name, round_, seed=round_)[-1].end
        plan = JobPlan(self.job).round(round_)
        model = plan.model_digest(items, list(end.tensor_sha256) if items else ())
        roster = self.world.roster
        members = rosters.members_digest(roster, self.job.silos)
        return plan.frame(roster.federation, members, model, self.parts)

    def named(self, spec):
        job, place = self.world.jobs[spec.job], (spec.round, spec.attempt)
        return Attempt(job.name, bytes.fromhex(job.digest), *place, spec.context())

    def signed(self, **changes):
        """A specification with other fields, as the coordinator signs it."""
        fields = self.spec.model_dump(mode="json", exclude_none=True)
        document = canonical_json({**fields, **changes})
        return SignedSpec(document, self.world.keys.sign(SECAGG_SPEC, document))

    # What happens, in one thread, one thing after another.

    def happen(self, who, event):
        self.queue.append((who, event))
        # the others sign after the real one, so that its signature counts
        if isinstance(event, s.SendSurvival):
            self.queue += self.later
            self.later = []
        while self.queue:
            to, event = self.queue.pop(0)
            if to == "coordinator":
                self.state, effects = coordinator.advance(self.state, event)
            elif isinstance(event, c.Ask):
                keys, signed = self.world.others[to], (event.document, event.signature)
                known = self.signers, self.terms
                participant = machine.Participant(to, *known, keys.sign, np.random.bytes)
                self.states[to], effects = machine.begin(participant, self.frame, *signed, Memory())
            else:
                self.states[to], effects = machine.advance(self.states[to], event)
            self.do(to, effects)

    def do(self, who, effects):
        for effect in effects:
            self.act(who, effect)

    def tell(self, silos, body):
        for silo in silos:
            if silo == SILO:
                self.told += [self.addressed(each) for each in self.alter(self, body)]
            else:
                self.queue.append((silo, body))

    def addressed(self, body):
        """A message of this attempt, unless it is one of another already."""
        if isinstance(body, secure.SecureDelivery | bytes):
            return body
        whole = isinstance(body, SecaggDelivery)
        return secagg_delivery_to_wire(body if whole else SecaggDelivery(self.attempt, body))

    def act(self, who, effect):
        match effect:
            case c.Ask():
                signed = effect.document, effect.signature
                self.tell([SILO], SignedSpec(*signed, self.notes, self.proofs))
                for silo in self.others:
                    self.happen(silo, effect)
            case c.Tell(_, s.SurvivorsReceived() as survivors):
                self.tell([SILO], survivors)
                self.later = [(silo, survivors) for silo in self.others]
            case c.Tell(silos, s.NotesReceived() as notes):
                # it is told them in any case
                self.tell(dict.fromkeys([SILO, *silos]), notes)
            case c.Tell(_, s.AbandonAsked()):
                pass
            case c.Tell(silos, message):
                self.tell(silos, message)
            case c.Open(terms, survivors):
                accumulator = Accumulator(self.spec)
                for silo in survivors:
                    accumulator.add(self.pieces(self.uploads[silo]))
                self.opened = accumulator.open(terms, survivors)
                self.queue.append(("coordinator", c.SumPublished(bytes(32))))
            case s.UploadWords() if who in self.absent:
                self.queue.append(("coordinator", c.SiloDropped(who, "lost")))
            case s.UploadWords(terms):
                self.held[who] = self.states[who].held
                made = [self.contribution(group, who) for group in self.spec.groups]
                words = masked_chunks(self.spec, who, made, terms)
                self.uploads[who] = upload = b"".join(each.tobytes() for each in words)
                self.queue.append((who, s.Streamed(len(upload), digest_of(upload))))
            case s.SendKeys() | s.SendShares() | s.SendHeader() | s.SendSurvival() | s.SendReveal():
                self.queue.append(("coordinator", self.event(who, effect)))

    def contribution(self, group, silo):
        """Other numbers of each silo, the same in all rounds."""
        rng = np.random.default_rng([*group.name.encode(), *silo.encode()])
        weights = np.ones(group.rows) if group.weights == "private" else None
        return GroupValues(0.05 * rng.standard_normal(group.elements), weights)

    def pieces(self, payload):
        at = 0
        for chunk in chunks(self.spec):
            size = chunk.words * self.spec.groups[chunk.group].ring // 8
            yield payload[at : at + size]
            at += size

    def event(self, who, body):
        match body:
            case s.SendHeader(header):
                return c.WordsUploaded(header, len(self.uploads[who]), digest_of(self.uploads[who]))
            case Over(code):
                return c.SiloDropped(who, code)
            case _:
                return body


def digest_of(payload):
    return sha256(payload).digest()


class Blind(Hostile):
    """Tells the rounds' sums beside its tasks.

    Once all is told, and nothing comes of it, a round is over.
    """

    def __init__(self, world, tasks, sums, **options):
        super().__init__(world, tasks, **options)
        self.sums = sums  # round → attempts
        self.calls |= {"secure_next": 0}
        self.given = []  # (round, ctx, kind)
        self.contexts = []  # of whole uploads
        self.first = []  # replies to SecureNext before all others
        # rounds are over before the real silo reveals anything: the others suffice
        self.hasty = False
        self.retried = set()  # contexts of attempts that repeat an attacked one honestly
        self.flood = None  # number → a message, for ever after all others

    async def secure(self, request, context):
        given = secagg_upload_from_wire(SILO, request)
        self.given.append((given.attempt.round, given.attempt.ctx, request.WhichOneof("body")))
        if request.WhichOneof("body") == "reveal" and self.hasty:
            await self.closed(context)
        for attempted in self.sums[given.attempt.round]:
            if attempted.spec.context() == given.attempt.ctx:
                attempted.happen("coordinator", attempted.event(SILO, given.body))
        return secure.SecureTaken()

    async def secure_next(self, request, context):
        self.calls["secure_next"] += 1
        if self.first:
            return self.first.pop(0)
        for _ in range(30):
            attempts = [each for each in self.sums[request.round] if each.job.name == request.job]
            told = [message for attempted in attempts for message in attempted.told]
            if request.had < len(told):
                return told[request.had]
            if self.flood is not None:
                return self.flood(request.had)
            await asyncio.sleep(0.01)
        return await self.closed(context)

    async def closed(self, context):
        code, closed = grpc.StatusCode.FAILED_PRECONDITION, ((ERROR_METADATA, "ROUND_CLOSED"),)
        return await context.abort(code, "over", trailing_metadata=closed)

    async def taken(self, frames):
        manifest, payload, end = await super().taken(frames)
        self.contexts.append(manifest.context)
        for attempted in self.sums[manifest.round]:
            if attempted.spec.context() == manifest.context:
                attempted.uploads[SILO] = payload
        return manifest, payload, end


class Later:
    """An attempt that begins once the first has ended."""

    def __init__(self, first, make):
        self.first, self.make, self.made, self.job = first, make, None, first.job

    @property
    def told(self):
        if self.made is None and self.first.state.stage == "ended":
            self.made = self.make(self.first)
        return self.made.told if self.made else []

    def __getattr__(self, name):
        if self.made is None:
            return SimpleNamespace(context=lambda: b"") if name == "spec" else None
        return getattr(self.made, name)
