"""The egress gate: the one body through which every upload of a round leaves this silo.

``Gate._upload`` makes ten checks and records, in this order. Each can stop the upload (security
rule 27).

(1) The upload is exactly what the signed document declares, in copies that the gate alone holds.
(2) Every value is finite and within its bounds.
(3) Weights and metrics count no more records than there are; in a private job they are noisy, and
    whole numbers. What hides the values is bound to the signed job and to this round.
(4) The policy allows every tensor, its readers, what it was computed from, each part's norm, the
    round's bytes and its attempts.
(5) All that leaves in a private job was paid for out of the data set's budget, by this very job.
(6) INTENT is durable in the ledger.
(7) The bytes leave, hashed as they go.
(8) DIGEST is durable.
(9) END leaves, and makes the message count.
(10) OUTCOME is durable.

An upload takes one of four forms: plain, the masked words of a secure sum, or one part of a Mix or
a Gram on its own, padded or rotated (messages.py). All pass the same body.

Where the connection breaks between (6) and (10), the INTENT stays open until the coordinator has
been asked (outcomes.py). The next attempt is an INTENT of its own, over the bytes that the
coordinator does not have. So every byte on the wire is declared by the intent that it goes under,
twice where it goes twice. The policy limits the sum of a round's bytes. It limits the attempts,
too: otherwise a round could continue for ever in pieces of a few bytes.

No method code runs after check (1), and the digests are of the bytes that left. The gate does not
know what the declared numbers say: a method can write anything into the tensors that it may upload
(docs/wire.md). What else leaves are control messages (session.py) and protocol messages
(protocol.py).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NoReturn

from ... import log
from ...algorithms.exchange.parts import Gram, Mix, value_fault
from ...algorithms.job.job import Job
from ...errors import LocalError
from ...proto import tensor_pb2 as tensor
from ...proto.channel import UPLOAD
from ...proto.frames import Frame
from ...proto.stream import Digester, Digests
from ...security.arithmetic.fixedpoint import unscaled
from ...security.blind.directed_mix import is_row
from ...security.identity import roster as rosters
from ...security.ledger import records
from ...security.ledger.egress_ledger import Ledger
from ...security.policy.policy import SiloPolicy
from ...security.policy.release import MASKED, PaidBy, nothing_paid, own_part, unpaid
from ...security.secagg.silo_events import Streamed
from ...security.secagg.spec import brought_fault
from ..admission.signed_sets import SignedSets
from ..parts.contributions import Contributions, tainted
from ..parts.declared import Declared
from ..parts.releases import bytes_by_kind, readers_of
from ..parts.tensors import exactly, miscounted, norms, of_parts
from .client import Client
from .messages import (
    Masking,
    Outgoing,
    Padding,
    Rotating,
    Sent,
    UploadForm,
    masked,
    padded,
    plain,
    rotated,
    sent,
    streamed,
)
from .outcomes import Denials, Outcomes, SettledUpload, Status, SumRecords
from .protocol import ProtocolMessages
from .session import CoordinatorSession, TurnedAwayError, UnreachableError
from .witness import Witness


@dataclass
class _Sent:
    """How far an upload came."""

    size: int = 0  # message bytes handed to the transport
    # of the whole message, once all of it was made
    digests: Digests = field(default_factory=lambda: Digests(()))


class Gate:
    """The way out: uploads pass here, other messages through ``session`` and ``protocol``."""

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        policy: SiloPolicy,
        roster: rosters.Roster,
        witness: Witness,
        paid: PaidBy = nothing_paid,
    ) -> None:
        """``paid`` knows the reservations of the privacy budgets of this silo's data sets."""
        self._ledger = ledger
        self._policy = policy
        self._roster = roster
        self._paid = paid
        self._denials = Denials(ledger, policy.digest)
        self._outcomes = Outcomes(ledger, roster)
        self.session = CoordinatorSession(client, ledger, roster, witness, policy.file.control)
        self.protocol = ProtocolMessages(self.session, ledger, policy, self._denials)
        self.sum_records = SumRecords(ledger)
        self.signed_sets = SignedSets(ledger, roster, policy)
        # For one upload or greeting: an upload proves growth from the head that came with the last.
        self.door = asyncio.Lock()

    def ledger_head(self) -> str:
        """The signed head of this silo's ledger, of all its records, as text."""
        return bytes(self._ledger.checkpoint()).decode()

    # The four forms of an upload. ``cohort`` are the ids of the round's silos, sorted.

    async def upload_plain(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        cohort: Sequence[str],
    ) -> None:
        """Upload a round's contributions in the clear.

        DeniedError, LocalError or PeerError say what held them back, or went wrong.
        """
        # Whatever mistake led here: values that the signed job hides never leave in the clear.
        if declared.bounds is not None:
            raise LocalError(
                f"job {declared.job!r} wants secure aggregation; nothing of it leaves in the clear"
            )
        readers = readers_of(self._roster)
        form = UploadForm(lambda items, values: plain(items, values, readers))
        await self._upload(declared, round_, contributions, cohort, form)

    async def upload_masked(
        self, declared: Declared, round_: int, contributions: Contributions, masking: Masking
    ) -> Streamed:
        """Upload a round's contributions as the masked words of a secure sum.

        Returns what was streamed, for its header.
        """
        # The coordinator sets the weights of a row: one that leans on this silo would show its
        # reader this silo's values.
        spec = masking.spec
        rows = (group for group in spec.groups if is_row(group) and group.reader in spec.cohort)
        for group in rows:
            if fault := brought_fault(spec, group, spec.min_cohort):
                raise LocalError(f"a row {group.name!r} that {fault}; nothing leaves")

        # The specification is the coordinator's, too: another sum, or another comparison next to
        # it, could show more of the values than the document that the operator signed.
        parts, own = declared.groups(round_, masking.readers)
        compared, as_declared = declared.compared(round_)
        mismatch = ""
        if spec.compared != as_declared:
            mismatch = f"compares {spec.compared}, the signed job declares {as_declared}"
        elif (groups := tuple(map(unscaled, spec.groups))) != own:
            mismatch = f"a secure sum of groups {groups}, the signed job declares {own}"
        form = UploadForm(
            lambda items, values: masked(parts, items, values, masking),
            (*parts, *compared),
            mismatch,
        )
        outgoing, digests = await self._upload(declared, round_, contributions, spec.cohort, form)
        return streamed(outgoing, digests)

    async def upload_padded(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        padding: Padding,
        cohort: Sequence[str],
    ) -> Sent:
        """Upload one part of a round as the padded words of a Mix.

        Returns what left, to be signed.
        """
        line, version = padding.line, padding.version
        part = declared.hidden_part(round_, line.group.name, Mix)

        # Line and version say to all readers of the words whose they are: which job's, part's,
        # silo's and round's.
        bound = (line.job, line.job_digest, line.group, version.silo, version.round)
        group = declared.padded_group(part)
        own = (declared.job, declared.digest, group, self._ledger.silo, round_)
        mismatch = ""
        if bound != own:
            mismatch = f"a padded upload bound to {bound}, the signed job declares {own}"
        form = UploadForm(lambda _, values: padded(part, values, padding), (part,), mismatch)
        outgoing, digests = await self._upload(declared, round_, contributions, cohort, form)
        return sent(outgoing, digests)

    async def upload_rotated(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        rotating: Rotating,
        cohort: Sequence[str],
    ) -> None:
        """Upload one part of a round as the rotated vectors of a Gram."""
        part = declared.hidden_part(round_, rotating.use.group, Gram)

        # A rotation is used once: under one rotation, vectors of two rounds could be compared.
        bound = (rotating.use.job, rotating.use.round)
        own = (declared.digest, round_)
        mismatch = ""
        if bound != own:
            mismatch = f"vectors rotated for {bound}, the signed job declares {own}"
        form = UploadForm(lambda _, values: rotated(part, values, rotating), (part,), mismatch)
        await self._upload(declared, round_, contributions, cohort, form)

    # The one body.

    async def _upload(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        cohort: Sequence[str],
        form: UploadForm,
    ) -> tuple[Outgoing, Digests]:
        """Let an upload out by the ten checks; returns what left, and its digests."""
        # (1) Code of a method may still hold its tensors, and write to them behind a check. So the
        # gate copies exactly what the signed document declares, and reads these copies alone.
        items, tensors = of_parts(declared.items(round_), contributions.tensors, form.parts)
        values = await asyncio.to_thread(exactly, items, tensors)

        # (2) NaN and infinity would spoil the average of all silos, and a value out of its bounds
        # is not what the document declares.
        for item, value in zip(items, values, strict=True):
            if why := value_fault(item.spec, value):
                raise LocalError(f"tensor {item.part}/{item.spec.name} {why}; it does not leave")

        # (3) A weight above the number of records would buy a larger say in the average, and a
        # count of no records could say anything. (3b) Masks, pads and rotations of another job or
        # round would hide the values from others than the document says.
        if why := miscounted(items, values, declared.records, declared.counting):
            raise LocalError(f"{why}; the message does not leave")
        if form.mismatch:
            raise LocalError(f"{form.mismatch}; nothing leaves")
        outgoing = await asyncio.to_thread(form.make, items, values)

        # (4) The job may ask for more than this silo's own policy allows.
        if declared.private:  # whatever leaves in any other job is exact, whatever is said of it
            outgoing = replace(outgoing, releases=tainted(outgoing.releases, contributions))
        offset = self._outcomes.offset(
            declared.digest, round_, outgoing.size, outgoing.context.hex()
        )
        # Norms take a pass over all values, so compute them only for a policy that bounds them.
        lengths = None
        if self._policy.bounds_norms:
            lengths = await asyncio.to_thread(norms, items, values)
        applied = await self._applied(declared, round_, outgoing, offset, lengths)

        # (5) Whatever was not paid for would leave outside the epsilon that the budget counts.
        if declared.private:
            await self._check_paid(declared, round_, outgoing)

        # (6) Durable before the first byte: a process that dies on the way counts it as left.
        async with self.door:
            # The coordinator may hold the head of one whose receipt was lost.
            if self.unsettled:
                raise UnreachableError(self.session.coordinator.id, "has an upload to settle first")
            intent = await asyncio.to_thread(
                self._intend, declared, round_, outgoing, offset, applied, cohort
            )
            named = {"job": declared.job, "round": round_, "intent": intent}
            for kind, left in bytes_by_kind(outgoing.releases, offset).items():
                log.event("leaving", **named, kind=kind, bytes=left)

            # (7) to (10)
            manifest = tensor.Manifest(
                session=self.session.token,
                job=declared.job,
                job_digest=bytes.fromhex(declared.digest),
                round=round_,
                size=outgoing.size,
                tensors=outgoing.headers,
                offset=offset,
                context=outgoing.context,
                part=outgoing.part,
            )
            return outgoing, await self._stream(intent, manifest, outgoing)

    async def _applied(
        self,
        declared: Declared,
        round_: int,
        outgoing: Outgoing,
        offset: int,
        norms: Mapping[str, float] | None,
    ) -> records.Applied:
        """The rule of the policy by which an upload leaves; DeniedError where none lets it."""
        policy = self._policy.on(declared.dataset)
        decision = policy.decide(
            declared.method,
            outgoing.releases,
            self._roster.coordinator.id,
            outgoing.readers,
            # the policy adds the whole message
            sent=self._ledger.sent(declared.digest, round_) - offset,
            attempts=self._ledger.attempts(declared.digest, round_, own_part(outgoing.releases)),
            norms=norms,
        )
        if not decision.allow:
            await self._denials.deny(declared.job, declared.digest, round_, decision.reasons)
        return records.Applied(file=self._policy.digest, rule=decision.rule, decision="allow")

    async def _check_paid(self, declared: Declared, round_: int, outgoing: Outgoing) -> None:
        paid = partial(self._paid, self._policy.on(declared.dataset).dataset)
        reasons = unpaid(outgoing.releases, declared.digest, paid)
        if reasons:
            await self._denials.deny(declared.job, declared.digest, round_, reasons)

    def _intend(
        self,
        declared: Declared,
        round_: int,
        outgoing: Outgoing,
        offset: int,
        applied: records.Applied,
        cohort: Sequence[str],
    ) -> int:
        """Append INTENT; returns its place in the ledger."""
        # All that a reader of the ledger needs to judge the upload stands in this record: who, for
        # which job, by which rule, in which form, for whom, paid by which reservations.
        releases, readers = outgoing.releases, outgoing.readers
        dataset = self._policy.on(declared.dataset).dataset
        # Silos share the noise of sums alone: what leaves in another form has local noise.
        noise = {MASKED: declared.noise}.get(outgoing.form, "local")
        record = records.Intent(
            silo=self._ledger.silo,
            job=declared.job,
            job_digest=declared.digest,
            method=declared.method,
            round=round_,
            attempt=outgoing.attempt,
            purpose="update",
            rpc=UPLOAD,
            recipient=self.session.coordinator,
            readers=tuple(readers),
            form=outgoing.form,
            policy=applied,
            tensors=tuple(records.Tensor.of(release, readers) for release in releases),
            message=records.Size(bytes=outgoing.size - offset),
            offset=offset,
            cohort=tuple(cohort),
            secagg=outgoing.secagg,
            hidden=outgoing.hidden,
            dp=records.Paid.of(dataset, releases, noise),
            dataset=dataset,
            packages=tuple(records.PackageCode(**vars(package)) for package in declared.packages),
        )
        return self._ledger.append(record).seq

    async def _stream(self, intent: int, manifest: tensor.Manifest, outgoing: Outgoing) -> Digests:
        """Steps (7) to (10); returns the digests of all that was streamed."""
        sent = _Sent()
        # After an error of our own it stays unknown, which counts as left.
        status: Status | Literal["open"] = "unknown"
        receipt = b""
        try:
            frames = self._frames(intent, manifest, outgoing, sent)
            reply = await self.session.client.upload(frames, manifest.size - manifest.offset)
            # Only the coordinator's signature over this very place of our ledger says ``sent``.
            place = self._outcomes.check_receipt(intent, reply)
            status, receipt = "sent", reply.signature
            # The receipt signs the root of our ledger at this place, so that head is held.
            self.session.witness.accepted(place)
            await self.session.witness.coordinator_head(reply.head)
        except TurnedAwayError:
            # Refused: the message does not count.
            status = "failed"
            raise
        except (UnreachableError, asyncio.CancelledError):
            status = "open"
            raise
        finally:
            # (10) Whatever was on its way when the connection broke has an outcome once it is
            # settled: the coordinator may have all of it.
            if status == "open":
                self._outcomes.broke(intent, sent.size)
            else:
                await self._outcomes.close(intent, status, sent.size, receipt)
        return sent.digests

    async def _frames(
        self, intent: int, manifest: tensor.Manifest, outgoing: Outgoing, sent: _Sent
    ) -> AsyncIterator[Frame]:
        # (7) Digests are of the very bytes that leave, and of those that are there already.
        yield tensor.Frame(manifest=manifest)
        digester = Digester(outgoing.sizes)
        at = 0
        for chunk in outgoing.chunks():
            digester.update(chunk.content)
            at += len(chunk.content)
            if at <= manifest.offset:  # it is there already
                # Skipping does not await anything, so yield to the loop for heartbeats.
                await asyncio.sleep(0)
                continue
            sent.size += len(chunk.content)
            yield chunk

        # (8) No upload counts before the ledger has its digests, so it cannot deny them later.
        sent.digests = digests = digester.digests()
        record = records.Digest(
            ref=intent,
            tensors=tuple(outgoing.hashes(digests)),
            message=records.MessageDigest(bytes=at, sha256=digests.total.hex()),
        )
        sealed = await asyncio.to_thread(self._ledger.seal, record)

        # (9) END shows the coordinator that our ledger grew from the head that it holds, and has
        # the digests: nobody can rewrite it later unseen.
        head, inclusion = self.session.witness.proof(sealed)
        yield tensor.Frame(
            end=tensor.End(
                sha256=digests.total,
                tensor_sha256=digests.tensors,
                ledger_seq=sealed.place.seq,
                ledger_leaf=bytes.fromhex(sealed.place.leaf),
                head=head,
                inclusion=inclusion,
                holds=self.session.witness.holds,
            )
        )

    async def hold_back(self, job: Job, round_: int, purpose: str, reason: str) -> NoReturn:
        """Record that the policy has something against a round, then raise DeniedError.

        The ledger's record says by ``purpose`` what was held back.
        """
        await self._denials.deny(job.name, job.digest, round_, (reason,), purpose)

    # What became of uploads.

    async def settle(self) -> list[SettledUpload]:
        """Ask what became of uploads whose connection broke, and write their outcomes.

        The oldest comes first. The session is open, and no upload runs: the caller has the door.
        """
        settled = await self._outcomes.settle(self.session.standing)
        for upload in settled:
            if upload.digest is not None:  # accepted after the greeting said which head is held
                self.session.witness.accepted(upload.digest)
        return settled

    @property
    def unsettled(self) -> bool:
        """Whether an upload of this process broke, and nobody has asked since what became of it."""
        return self._outcomes.broken

    def left(self, job: Job, round_: int) -> bool:
        """Whether something of a round left, or may have: also before a restart."""
        return self._ledger.sent(job.digest, round_) > 0

    def part_left(self, declared: Declared, round_: int, part: str) -> bool:
        """Whether an attempt at a padded or rotated part of a round left, or may have."""
        return self._ledger.attempts(declared.digest, round_, part) > 0
