"""What the coordinator delivers at the start of a round: checked against the job, and recorded as ingress.

Rows of a Mix come behind the plain tensors and are opened as they come (rows.py).

Nothing leaves from here: the gate hands in the frames of the call that it made.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..algorithms.job import Job
from ..errors import RefusedError
from ..proto import tensor_pb2 as tensor
from ..proto.channel import FETCH
from ..proto.frames import Frame
from ..proto.stream import Digests, Inbound
from ..proto.wire import Item, delivered_items
from ..security.ledger import Ledger
from ..security.records import Payload, Peer
from .payload import Buffer, announced, unpack
from .rows import Rows, expected_rows, largest_rows


@dataclass(frozen=True)
class Delivered:
    """What came down: tensors by part and name; of the plain ones what they were declared as, and the SHA-256 of each.

    Both in wire order.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    items: Sequence[Item]
    digests: Sequence[bytes]


def largest(job: Job, round_: int) -> int:
    """Bytes of the largest delivery that a round can have."""
    in_rows = expected_rows(job, round_)
    plain = [part for part in job.down(round_) if part.name not in in_rows]
    return sum(item.spec.nbytes for item in delivered_items(plain)) + largest_rows(job, round_)


async def take(
    ledger: Ledger, sender: Peer, job: Job, round_: int, frames: AsyncIterator[Frame], rows: Rows | None = None
) -> Delivered:
    """Take a delivery in; RefusedError for anything that the job's schema does not have in this round.

    ``rows`` opens those of a Mix as their words come, off the loop; without it there may be none.
    """
    taking = _Taking(sender.id, job, round_, rows)
    inbound = Inbound(sender.id, taking.check, taking.write)
    async for frame in frames:
        if rows is None:
            inbound.feed(frame)
        else:
            await asyncio.to_thread(inbound.feed, frame)
    _, digests = inbound.finish()
    delivered = taking.delivered()
    if delivered:
        await asyncio.to_thread(_record, ledger, sender, job, round_, taking.size, digests)
    return Delivered(delivered, taking.items, digests.tensors[: len(taking.items)])


class _Taking:
    """What comes: the plain tensors first, then the words of the rows."""

    def __init__(self, sender: str, job: Job, round_: int, rows: Rows | None) -> None:
        self.items: Sequence[Item] = ()
        self.size = 0
        self._sender, self._job, self._round, self._rows = sender, job, round_, rows
        self._buffer = Buffer()
        self._left = 0  # bytes of plain tensors

    def check(self, manifest: tensor.Manifest) -> Sequence[int]:
        """The sizes of what is hashed. Nothing is allocated before all of the manifest is what it may be."""
        words: list[int] = []
        if self._rows is not None:
            words = self._rows.announced(self._sender, manifest.rows)
        elif manifest.rows:
            raise RefusedError(self._sender, "MANIFEST", f"delivers {len(manifest.rows)} rows where there are none")
        self.items = announced(self._sender, self._job, self._round, manifest, words)
        if self._rows is not None:
            self._rows.admit()
        self.size, self._left = manifest.size, manifest.size - sum(words)
        self._buffer.reserve(self._left)
        return [*(item.spec.nbytes for item in self.items), *words]

    def write(self, chunk: memoryview) -> None:
        """Bytes of either."""
        plain, behind = chunk[: self._left], chunk[self._left :]
        self._left -= len(plain)
        self._buffer.write(plain)
        if self._rows is not None and behind:
            self._rows.write(behind)

    def delivered(self) -> dict[str, dict[str, Tensor]]:
        """Once all is there."""
        plain = unpack(self._sender, self.items, self._buffer.bytes)
        return plain if self._rows is None else {**plain, **self._rows.delivered()}


def _record(ledger: Ledger, sender: Peer, job: Job, round_: int, size: int, digests: Digests) -> None:
    ledger.ingress(
        job=job.name,
        round_number=round_,
        purpose="delivery",
        rpc=FETCH,
        sender=sender,
        message=Payload(bytes=size, sha256=digests.total.hex()),
    )
