"""The Federation service: protobuf in, checked values to the daemon, protobuf out."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor

from ... import log
from ...algorithms.exchange.parts import Item, delivered_items
from ...errors import LocalError, RefusedError, reason
from ...files.file_bounds import open_regular
from ...proto import federation_pb2 as pb
from ...proto import secure_pb2 as secure
from ...proto import tensor_pb2 as tensor
from ...proto.channel import (
    CHUNK_BYTES,
    MOST_LANES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    transfer_seconds,
)
from ...proto.convert.group_key import poll_from_wire as key_poll_from_wire
from ...proto.convert.group_key import secagg_delivery_to_wire as key_reply_to_wire
from ...proto.convert.secagg_received import secagg_delivery_to_wire
from ...proto.convert.secagg_sent import poll_from_wire
from ...proto.frames import ChunkFrame, Frame
from ...proto.stream import TOGETHER, Digester, chunks, recut
from ...proto.wire import tensor_bytes, to_wire
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ...security.log.attestation import CHALLENGE_BYTES
from ..blind.hidden_uploads import dumped, received
from ..daemon import Daemon
from ..jobs.collector import Attachments
from ..jobs.job_run import JobRun, SiloDelivery
from ..live_status import Greeting
from ..rounds.events import Answered, Done, SiloFailed
from ..rounds.tasks import FinishTask, OfferTask, RoundTask, SiloTask, task_for
from ..storage.key_contributions import relayed
from ..storage.silo_heads import MAX_HEAD_BYTES
from .guard import Context, caller
from .uploads import Uploads

SIGNATURE_BYTES = 64
# witness tasks in a row while another one waits: who greets in a loop holds nobody up
WITNESSED_BEFORE_A_TASK = 4
LONGEST_REASON = 500  # characters of why a job ended


class Service:
    """The calls of silos; identity and limits were checked by the guard.

    Each call first checks who calls, and whether the session is current. The guard turns
    RefusedError into a status.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._uploads = Uploads(daemon, self._admit)
        self._witnessed: Counter[str] = Counter()  # silo → witness tasks since its last other one

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:  # noqa: N802 gRPC's name
        """Agree on a version; open a session.

        RefusedError says which step failed. The reply has the last head that is held of the silo's
        ledger: the silo detects an old copy with it.
        """
        silo = caller(context, self._daemon.roster).id
        # (1) The name that is claimed is the certificate's.
        if request.silo != silo:
            raise RefusedError(
                silo,
                "IDENTITY",
                f"says it is {request.silo[:64]!r}, its certificate is that of {silo!r}",
            )
        # (2) One version that both speak.
        if not request.protocol_min <= PROTOCOL_MAX or not request.protocol_max >= PROTOCOL_MIN:
            why = (
                f"speaks protocol {request.protocol_min} to {request.protocol_max}, this"
                f" coordinator {PROTOCOL_MIN} to {PROTOCOL_MAX}; install the same release of"
                " Staddle on both sides"
            )
            raise RefusedError(silo, "PROTOCOL_VERSION", why)
        # (3) One roster. The silo takes over this one if it is newer and its founders signed it.
        if request.roster_digest != bytes.fromhex(self._daemon.receiving.roster_digest):
            log.event("roster.differs", silo=silo, version=self._daemon.roster.version)
            return pb.HelloReply(roster=rosters.encoded(self._daemon.roster))
        # (4) A challenge that others sign: their word on its ledger is then of this session.
        if len(request.challenge) != CHALLENGE_BYTES:
            raise RefusedError(
                silo,
                "MANIFEST",
                f"its challenge has {len(request.challenge)} bytes, not {CHALLENGE_BYTES}",
            )

        # A new session ends the one before: two processes of one silo would answer for each other.
        token = secrets.token_bytes(16)
        timing = self._daemon.config.timing
        self._daemon.sessions[silo] = token
        self._daemon.attesting.ask(silo, request.challenge)
        self._daemon.saw(silo)
        now = utc_now().timestamp()
        told = Greeting.of(request.software, request.clock, now, request.jobs)
        self._daemon.greeted(silo, told)
        self._daemon.tell()
        return pb.HelloReply(
            protocol=min(request.protocol_max, PROTOCOL_MAX),
            session=token,
            beat_seconds=timing.beat_seconds,
            hold_seconds=timing.hold_seconds,
            held=self._daemon.receiving.heads.note(silo),
            generation=self._daemon.generation,
            jobs=told.jobs,
        )

    async def Poll(self, request: pb.PollRequest, context: Context) -> pb.Task:  # noqa: N802
        """Wait for a task that the silo does not have in hand.

        After ``hold_seconds`` the task is ``nothing``. Other silos' questions come before tasks,
        but only so many in a row.
        """
        silo = self._silo(request.session, context)
        in_hand = {(own.job, own.kind, own.round) for own in request.in_hand[:MOST_LANES]}
        at_work = {job for job, *_ in in_hand}
        until = self._daemon.hold()
        while True:
            changed = self._daemon.changed_for(silo)
            # A new session may have begun: what waits is for that one.
            self._check_session(silo, request.session)
            # A job's next task comes last while its silo is behind: it takes one task of a job at a
            # time, and would never hear of other jobs.
            tasks = sorted(self._daemon.tasks_for(silo), key=lambda own: own[0].job.name in at_work)
            found = next((own for own in tasks if _named(*own) not in in_hand), None)
            in_turn = found is None or self._witnessed[silo] < WITNESSED_BEFORE_A_TASK
            if in_turn and (witness := self._daemon.attesting.waiting(silo)) is not None:
                self._witnessed[silo] += 1
                return pb.Task(witness=witness)
            if found is not None:
                self._witnessed[silo] = 0
                return self._task(silo, *found)
            if not await self._daemon.woken(silo, changed, until):
                return pb.Task(nothing=pb.Nothing(), **self._lists(silo))

    async def Attest(self, request: pb.Attestation, context: Context) -> pb.AttestReply:  # noqa: N802
        """Pass on what a silo says that it holds of another one's ledger, if that one asked.

        Its signature is for the silo that asked; the coordinator only matches it with the question.
        RefusedError MANIFEST for a malformed one.
        """
        silo = self._silo(request.session, context)
        if len(request.held) > MAX_HEAD_BYTES or len(request.signature) != SIGNATURE_BYTES:
            raise RefusedError(
                silo, "MANIFEST", "its attestation has no signature, or its head is too long"
            )
        if self._daemon.attesting.answered(silo, request):
            # Where this one holds nothing, others are asked in its place.
            more = self._daemon.attesting.wants(request.silo)
            self._daemon.tell(None if more else [request.silo])
        return pb.AttestReply()

    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatReply:  # noqa: N802
        """Note that a silo is alive; say whether its work is wanted, and what others ask it.

        A silo stops training once its work is not wanted. Questions go with the reply, since a silo
        at work does not poll.
        """
        silo = self._silo(request.session, context)
        tasks = self._daemon.tasks_for(silo)
        wanted = (request.job, request.round) in ((run.job.name, _round(own)) for run, own in tasks)
        return pb.BeatReply(wanted=wanted, asked=self._daemon.attesting.questions(silo))

    async def Answer(self, request: pb.AnswerRequest, context: Context) -> pb.AnswerReply:  # noqa: N802
        """Take an answer into the job's state; a late one changes nothing.

        It is durable when the call returns. RefusedError SECURE if a silo accepts a keyed job but
        has not contributed to its key.
        """
        silo = self._silo(request.session, context)
        run = self._run(silo, request.job, request.job_digest)
        code = _code(request.code)
        match request.kind:
            case pb.ANSWER_KIND_ACCEPT:
                # Its part of the key comes first: with the last acceptance the job begins.
                if run.job.keyed:
                    self._daemon.contributions.check_silo(run.job, silo)
                self._daemon.apply(run, Answered(silo, None))
            case pb.ANSWER_KIND_DECLINE:
                self._daemon.apply(run, Answered(silo, code))
            case pb.ANSWER_KIND_FAILED:
                self._daemon.apply(run, SiloFailed(silo, request.round, code))
            case pb.ANSWER_KIND_DONE:
                self._daemon.apply(run, Done(silo))
            case _:
                raise RefusedError(silo, "MANIFEST", f"answer of unknown kind {request.kind}")
        return pb.AnswerReply()

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:  # noqa: N802
        """Stream what is delivered to this silo at the start of its round.

        RefusedError ROUND_CLOSED if the silo has no such task, LIMIT if it fetches too often or too
        slowly. The delivery is in the ledger before its last frame.
        """
        silo = self._silo(request.session, context)
        run = self._run(silo, request.job, request.job_digest)
        task = task_for(run.state, silo)
        if task is None or _round(task) != request.round:
            raise RefusedError(
                silo,
                "ROUND_CLOSED",
                f"job {run.job.name!r}: round {request.round} is not open to it",
            )

        # Each delivery is a record of our ledger, so a silo may not fetch without end.
        self._daemon.receiving.check_delivery(run.job, silo, request.round)

        # What a recipient's rows were made of is on disk before a word of them leaves.
        attachments = await run.collector.attachments(request.round, silo)
        with self._daemon.reading(run, silo):
            delivery = await run.delivery(request.round, silo)
        # In schema order, on which silo and coordinator agree.
        down = [part for part in run.job.down(request.round) if part.name in delivery.tensors]
        items = delivered_items(down)
        sizes = [
            *(item.spec.nbytes for item in items),
            *(each.nbytes for each in attachments.words),
        ]
        size = sum(sizes)
        manifest = tensor.Manifest(
            job=run.job.name,
            job_digest=bytes.fromhex(run.job.digest),
            round=request.round,
            size=size,
            tensors=to_wire(items),
            rows=attachments.rows,
            prekeys=attachments.prekeys,
            sums=attachments.sums,
            proofs=attachments.proofs,
        )

        # Hashed while it is sent, so nothing is read twice.
        digester = Digester(sizes, _known(items, delivery, attachments))
        tensors = [delivery.tensors[item.part][item.spec.name] for item in items]
        words = [each.pieces for each in attachments.words]

        # A silo that reads ever more slowly must not keep the tensors in memory.
        try:
            async with asyncio.timeout(transfer_seconds(size)):
                await context.write(tensor.Frame(manifest=manifest))
                async for chunk in _chunks(tensors, words):
                    digester.update(chunk.content)
                    self._daemon.saw(silo)
                    await context.write(chunk)  # waits while the silo is busy: back-pressure
                digests = digester.digests()
                # Before the end frame: whatever a silo has whole stands in our ledger.
                if sizes:
                    self._daemon.delivered(run, silo, request.round, size, digests)
                end = tensor.End(sha256=digests.total, tensor_sha256=digests.tensors)
                await context.write(tensor.Frame(end=end))
        except TimeoutError:
            raise RefusedError(
                silo, "LIMIT", "the delivery was read slower than its size allows"
            ) from None
        counts = {"sums": len(attachments.sums), "rows": len(attachments.rows)}
        some = {name: count for name, count in counts.items() if count}
        log.event("delivered", job=run.job.name, round=request.round, silo=silo, bytes=size, **some)

    async def Weights(self, request: pb.WeightsRequest, context: Context) -> None:  # noqa: N802
        """Stream the file of weights that a job names to one of its silos, from a byte on.

        RefusedError MANIFEST for a job without, LIMIT if the silo reads too slowly.
        """
        silo = self._silo(request.session, context)
        job = self._run(silo, request.job, request.job_digest).job
        weights, path = job.model.weights, job.weights_file
        if weights is None or path is None:
            raise RefusedError(silo, "MANIFEST", f"job {job.name!r} names no file of weights")
        if request.offset > weights.expected[1]:
            raise RefusedError(silo, "MANIFEST", f"the file ends before byte {request.offset}")
        # Not a code on which silos greet again: it does not help before an operator acts.
        if not path.exists():
            why = "its file of weights is gone; its operator has to submit it again"
            raise RefusedError(silo, "UNKNOWN_JOB", f"job {job.name!r}: {why}")
        try:
            with open_regular(path) as file:
                file.seek(request.offset)
                async with asyncio.timeout(transfer_seconds(weights.expected[1])):
                    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        self._daemon.saw(silo)
                        await context.write(pb.WeightsPiece(data=data))
        except TimeoutError:
            raise RefusedError(
                silo, "LIMIT", "the file was read slower than its size allows"
            ) from None
        except OSError as error:
            raise LocalError(f"{path}: cannot read it: {reason(error)}") from error

    async def Upload(self, frames: AsyncIterator[Frame], context: Context) -> pb.Receipt:  # noqa: N802
        """Take what a silo uploads.

        One stream, from manifest to end frame. The receipt is signed and durable when it leaves.
        """
        return await self._uploads.receive(caller(context, self._daemon.roster).id, frames)

    async def Standing(self, request: pb.StandingRequest, context: Context) -> pb.StandingReply:  # noqa: N802
        """Say what has come of an upload whose connection the silo lost.

        The reply has the receipt if it was accepted, else the number of bytes that are here. An
        upload that still seems to run is cut off first.
        """
        silo = self._silo(request.session, context)
        run = self._run(silo, request.job, request.job_digest)
        return await self._uploads.standing(silo, run, request.round, request.part)

    async def Padded(  # noqa: N802
        self, request: secure.PaddedWordUpload, context: Context
    ) -> secure.SecureTaken:
        """Take a silo's word on its upload of a Mix.

        It is durable when the call returns. No other word on this upload is accepted later.
        """
        silo = self._silo(request.session, context)
        word = received(silo, request)
        run = self._run(silo, word.job, word.job_digest)
        run.collector.padded(silo, word, dumped(request))
        return secure.SecureTaken()

    async def Secure(self, request: secure.SecureUpload, context: Context) -> secure.SecureTaken:  # noqa: N802
        """Take a message into a round's secure sum.

        It is durable before it takes effect. A repetition is accepted, a different message refused.
        """
        silo = self._silo(request.session, context)
        run = self._run(silo, request.attempt.job, request.attempt.job_digest)
        run.collector.sum_of(silo, request.attempt.round).accept(silo, request)
        return secure.SecureTaken()

    async def SecureNext(  # noqa: N802
        self, request: secure.SecurePoll, context: Context
    ) -> secure.SecureDelivery:
        """Wait for the next message of a round's secure sum.

        After ``hold_seconds`` the reply is empty. The request says how many messages the silo has
        had, so a lost reply is sent again.
        """
        silo = self._silo(request.session, context)
        asked = poll_from_wire(silo, request)
        run = self._run(silo, asked.job, asked.job_digest)
        until = self._daemon.hold()
        while True:
            changed = self._daemon.changed_for(silo)
            self._check_session(silo, asked.session)
            if (message := run.collector.message(silo, asked.round, asked.had)) is not None:
                return secagg_delivery_to_wire(message)
            if not await self._daemon.woken(silo, changed, until):
                return secagg_delivery_to_wire(None)

    async def Contribute(self, request: secure.Contributed, context: Context) -> secure.SecureTaken:  # noqa: N802
        """Take a silo's contribution to the key of a job.

        It is durable when the call returns. A second contribution that differs is refused.
        """
        silo = self._silo(request.session, context)
        self._daemon.contribute(self._run(silo, request.job, request.job_digest), silo, request)
        return secure.SecureTaken()

    async def GroupKey(self, request: secure.KeyPoll, context: Context) -> secure.KeyReply:  # noqa: N802
        """Pass on the other silos' contributions to the key of a job, once all are there.

        Each comes with the letter that only this silo can open.
        """
        silo = self._silo(request.session, context)
        asked = key_poll_from_wire(silo, request)
        bodies = self._daemon.contributions.bodies(self._run(silo, asked.job, asked.job_digest).job)
        return key_reply_to_wire(await asyncio.to_thread(relayed, bodies, silo))

    def _admit(self, silo: str, manifest: tensor.Manifest) -> JobRun:
        self._check_session(silo, manifest.session)
        # Only the manifest carries the session; the stream may outlast it.
        return self._run(silo, manifest.job, manifest.job_digest)

    def _silo(self, session: bytes, context: Context) -> str:
        silo = caller(context, self._daemon.roster).id
        self._check_session(silo, session)
        # Any call in a session is a sign of life.
        self._daemon.saw(silo)
        return silo

    def _check_session(self, silo: str, session: bytes) -> None:
        self._check_stopping(silo)
        # Who has not said hello has no session, not an empty one.
        own = self._daemon.sessions.get(silo, secrets.token_bytes())
        # In constant time: a token cannot be guessed byte by byte.
        if not secrets.compare_digest(own, session):
            raise RefusedError(silo, "SESSION", "unknown or ended session; say hello again")

    def _check_stopping(self, silo: str) -> None:
        if self._daemon.stopping:
            raise RefusedError(silo, "STOPPING", "this coordinator is stopping; try again later")

    def _run(self, silo: str, job: str, digest: bytes) -> JobRun:
        # A job of other silos sounds like one that is not there: members hear of their own alone.
        run = self._daemon.run_of(job)
        if run is None or silo not in run.job.silos:
            raise RefusedError(silo, "UNKNOWN_JOB", f"no job {job[:64]!r} for this silo")
        # The silo may know a different job under this name.
        if digest != bytes.fromhex(run.job.digest):
            raise RefusedError(
                silo,
                "UNKNOWN_JOB",
                f"job {job!r} has digest {run.job.digest}, not {digest[:32].hex()}",
            )
        return run

    def _lists(self, silo: str) -> dict[str, Any]:
        """What goes with each task, for the silo's people: what is offered, and what is stopped."""
        stopped = [
            pb.StoppedJob(job_digest=bytes.fromhex(digest), reason=self._reason(why))
            for digest, why in self._daemon.stopped_jobs(silo).items()
        ]
        return {
            "open_offers": pb.OpenOffers(signed_sha256=self._daemon.open_offers(silo)),
            "stopped": pb.StoppedJobs(jobs=stopped),
        }

    def _reason(self, why: str) -> str:
        # Not with paths of this machine.
        return why.replace(str(self._daemon.config.directory), "…")[:LONGEST_REASON]

    def _task(self, silo: str, run: JobRun, task: SiloTask) -> pb.Task:
        lists = self._lists(silo)
        job: dict[str, Any] = {"job": run.job.name, "job_digest": bytes.fromhex(run.job.digest)}
        match task:
            case OfferTask():
                return pb.Task(offer=pb.Offer(**job, signed_job=run.signed), **lists)
            case RoundTask(round_, cohort, counted):
                # Signed heads of the others: who holds one witnesses a rollback (security rule 30).
                heads = self._daemon.receiving.heads.others(silo, run.job.silos)
                opened = pb.Round(**job, round=round_, cohort=cohort, counted=counted, heads=heads)
                return pb.Task(round=opened, **lists)
            case FinishTask(round_, completed, counted, reason):
                over = pb.Finish(**job, round=round_, completed=completed, counted=counted)
                over.reason = self._reason(reason)
                return pb.Task(finish=over, **lists)


def _known(
    items: Sequence[Item], delivery: SiloDelivery, attachments: Attachments
) -> dict[int, bytes]:
    """Digests that are known already, by place: published tensors and words hash but once."""
    digests = [
        *(delivery.digests.get((item.part, item.spec.name)) for item in items),
        *(each.sha256 for each in attachments.words),
    ]
    return {place: sha256 for place, sha256 in enumerate(digests) if sha256 is not None}


async def _chunks(
    tensors: list[Tensor], words: list[Iterator[memoryview]]
) -> AsyncIterator[ChunkFrame]:
    """The bytes of tensors, then words.

    These are read, or a row is added up, in a thread, while they are sent.
    """
    # Tensors are in memory already: no thread needed.
    if not words:
        for chunk in chunks(tensors):
            yield chunk
        return
    made = recut(chain(map(tensor_bytes, tensors), *words))
    while some := await asyncio.to_thread(lambda: list(islice(made, TOGETHER))):
        for each in some:
            yield each


def _code(value: Any) -> str:
    if value not in pb.ErrorCode.values():
        return "UNSPECIFIED"
    return pb.ErrorCode.Name(value).removeprefix("ERROR_CODE_")


KINDS: Mapping[type[SiloTask], int] = {
    OfferTask: pb.TASK_KIND_OFFER,
    RoundTask: pb.TASK_KIND_ROUND,
    FinishTask: pb.TASK_KIND_FINISH,
}


def _named(run: JobRun, task: SiloTask) -> tuple[str, int, int]:
    """A task as ``InHand`` names it."""
    return run.job.name, KINDS[type(task)], _round(task)


def _round(task: SiloTask) -> int:
    return 0 if isinstance(task, OfferTask) else task.round
