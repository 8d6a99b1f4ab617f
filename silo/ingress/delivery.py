"""The delivery at the start of a round: checked against the job, and recorded as ingress.

Open sums come behind the plain tensors and are checked (open_sums.py); rows of a Mix come last and
are opened as they come (mix_rows.py).

Nothing leaves from here: the gate hands in the frames of the call that it made.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...algorithms.exchange.parts import Item, delivered_items
from ...errors import RefusedError
from ...proto import tensor_pb2 as tensor
from ...proto.channel import FETCH
from ...proto.convert.secagg_messages import MOST_PROOF_BYTES, proofs_from_wire, proofs_to_wire
from ...proto.frames import ChunkFrame, Frame
from ...proto.stream import TOGETHER, Digests, Inbound
from ...security.blind.plan import RoundPlan
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import Ingress, MessageDigest, Peer
from ..parts.tensors import Buffer, announced, unpack
from .directed_rows import AnyRows, DirectedRows
from .mix_rows import expected_rows, largest_rows
from .open_sums import IncomingSums, largest_sums


@dataclass(frozen=True)
class ReceivedDelivery:
    """The tensors of a delivery, by part and name; all fields are in wire order.

    ``items`` are the declared plain tensors, ``digests`` the SHA-256 of each. ``sums`` are the
    parts that came as words of open sums, with the SHA-256 of their words.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    items: Sequence[Item]
    digests: Sequence[bytes]
    sums: Sequence[tuple[str, bytes]] = ()


def largest(plan: RoundPlan) -> int:
    """Bytes of the largest delivery that a round can have.

    It bounds the time of the download.
    """
    # Each part comes in one form: as tensors, in the words of its sum, or in rows.
    otherwise = {*expected_rows(plan), *plan.in_words}
    plain = [part for part in plan.down if part.name not in otherwise]
    return (
        sum(item.spec.nbytes for item in delivered_items(plain))
        + largest_sums(plan)
        + largest_rows(plan)
    )


async def take(
    ledger: Ledger,
    sender: Peer,
    plan: RoundPlan,
    frames: AsyncIterator[Frame],
    rows: AnyRows | None = None,
    sums: IncomingSums | None = None,
) -> ReceivedDelivery:
    """Check and record a delivery.

    RefusedError for anything that the job's schema does not have in this round. ``rows`` opens
    those of a Mix as their words come, and ``sums`` checks open sums, off the loop; without the one
    or the other there may be none.
    """
    # Opening rows and checking sums takes long: off the loop, so that heartbeats continue.
    taking = _Taking(sender.id, plan, rows, sums)
    inbound = Inbound(sender.id, taking.check, taking.write)
    waiting: list[Frame] = []
    async for frame in frames:
        if rows is None and sums is None:
            inbound.feed(frame)
            continue
        waiting.append(frame)
        # Chunks go to the thread in groups; a manifest goes at once, before any data.
        if len(waiting) == TOGETHER or not isinstance(frame, ChunkFrame):
            await asyncio.to_thread(_feed, inbound, waiting)
            waiting = []
    if waiting:  # of a stream that stopped before its end
        await asyncio.to_thread(_feed, inbound, waiting)

    # Durable before the delivery is handed on, so that no model is used that the ledger lacks.
    _, digests = inbound.finish()
    delivered = taking.delivered()
    # Nothing to record for a delivery without tensors.
    if delivered:
        await asyncio.to_thread(_record, ledger, sender, plan, taking.size, digests)
    # Digests are in the order of the bytes: plain tensors first.
    plain, behind = digests.tensors[: len(taking.items)], digests.tensors[len(taking.items) :]
    if sums is None:
        return ReceivedDelivery(delivered, taking.items, plain)

    # Digests of sums come first among those behind; rows are in no model digest.
    named = tuple(zip(sums.parts, behind, strict=False))
    return ReceivedDelivery(delivered, taking.items, plain, named)


def _feed(inbound: Inbound, frames: Sequence[Frame]) -> None:
    for frame in frames:
        inbound.feed(frame)


class _Taking:
    """Takes the plain tensors first, then the words of open sums, then those of the rows."""

    def __init__(
        self, sender: str, plan: RoundPlan, rows: AnyRows | None, sums: IncomingSums | None
    ) -> None:
        self.items: Sequence[Item] = ()
        self.size = 0
        self._sender, self._plan, self._rows, self._sums = sender, plan, rows, sums
        self._buffer = Buffer()
        self._left = 0  # bytes of plain tensors
        self._summed = 0  # bytes of the words of sums

    def check(self, manifest: tensor.Manifest) -> Sequence[int]:
        """Check a manifest; returns the sizes of the pieces that are hashed.

        Nothing is allocated before all of the manifest is what it may be.
        """
        # A sum or a row without a checker would come in unchecked.
        self._check_words({header.part for header in manifest.tensors})
        words: list[int] = []
        summed: list[int] = []
        if self._sums is not None:
            summed = self._sums.announced(self._sender, manifest.sums)
        elif manifest.sums:
            raise RefusedError(
                self._sender, "MANIFEST", f"delivers {len(manifest.sums)} sums where there are none"
            )
        if self._rows is not None:
            words = self._rows.announced(self._sender, manifest.rows, manifest.prekeys)
        elif brought := len(manifest.rows) + len(manifest.prekeys):
            raise RefusedError(
                self._sender, "MANIFEST", f"delivers {brought} rows or prekeys where there are none"
            )
        self.items = announced(
            self._sender, self._plan.job, self._plan.round, manifest, [*summed, *words]
        )

        # Evidence first: it says which silos a sum may lack.
        self._show(manifest)
        if self._sums is not None:
            self._sums.admit()
        if self._rows is not None:
            self._rows.admit()

        self.size, self._summed = manifest.size, sum(summed)
        self._left = manifest.size - self._summed - sum(words)
        self._buffer.reserve(self._left)
        return [*(item.spec.nbytes for item in self.items), *summed, *words]

    def _show(self, manifest: tensor.Manifest) -> None:
        """Evidence against dealers goes to whatever checks who is in a sum.

        RefusedError where nothing does.
        """
        checks = [
            each
            for each in (self._sums, self._rows)
            if isinstance(each, IncomingSums | DirectedRows)
        ]

        # Evidence that nothing reads would be bytes of the coordinator's choice.
        proofs = proofs_from_wire(self._sender, manifest.proofs)
        if proofs and not checks:
            raise RefusedError(
                self._sender, "MANIFEST", f"delivers {len(proofs)} proofs without a sum"
            )
        # Bytes that parsing drops would go unchecked.
        if proofs_to_wire(proofs) != list(manifest.proofs):
            why = (
                f"delivers proofs of more than {MOST_PROOF_BYTES} bytes, or of another protocol"
                " version"
            )
            raise RefusedError(self._sender, "MANIFEST", why)
        for each in checks:
            each.proofs = proofs

    def _check_words(self, parts: set[str]) -> None:
        """RefusedError for a part that comes as tensors, where nothing would show that they are its
        sum.
        """
        for name in self._plan.in_words:
            if name in parts:
                why = (
                    f"delivers part {name!r} as tensors; it has to come in the words of its sum,"
                    " which are checked"
                )
                if self._sums is not None:
                    # Recorded in the ledger as a refused sum, with the culprit.
                    self._sums.refuse_tensors(self._sender, name, why)
                raise RefusedError(self._sender, "MANIFEST", why)

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes; a chunk may hold plain tensors, sums and rows, in this order."""
        plain, behind = chunk[: self._left], chunk[self._left :]
        self._left -= len(plain)
        self._buffer.write(plain)
        summed, behind = behind[: self._summed], behind[self._summed :]
        self._summed -= len(summed)
        if self._sums is not None and summed:
            self._sums.write(summed)
        if self._rows is not None and behind:
            self._rows.write(behind)

    def delivered(self) -> dict[str, dict[str, Tensor]]:
        """The tensors by part, once all bytes are here.

        RefusedError for NaN or infinity in a plain tensor.
        """
        plain = unpack(self._sender, self.items, self._buffer.bytes)
        found = [each.delivered() for each in (self._sums, self._rows) if each is not None]
        return {
            name: tensors for delivered in (plain, *found) for name, tensors in delivered.items()
        }


def _record(ledger: Ledger, sender: Peer, plan: RoundPlan, size: int, digests: Digests) -> None:
    record = Ingress(
        job=plan.job.name,
        round=plan.round,
        purpose="delivery",
        rpc=FETCH,
        sender=sender,
        message=MessageDigest(bytes=size, sha256=digests.total.hex()),
    )
    ledger.append(record)
