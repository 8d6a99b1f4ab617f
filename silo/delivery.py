"""What the coordinator delivers at the start of a round: checked against the job, and recorded as ingress.

Nothing leaves from here: the gate hands in the frames of the call that it made.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..algorithms.job import Job
from ..proto import tensor_pb2 as tensor
from ..proto.channel import FETCH
from ..proto.frames import Frame
from ..proto.stream import Digests, Inbound
from ..proto.wire import Item, delivered_items
from ..security.ledger import Ledger
from ..security.records import Payload, Peer
from .payload import Buffer, announced, unpack


@dataclass(frozen=True)
class Delivered:
    """What came down: tensors by part and name; what they were declared as, and the SHA-256 of each, in wire order."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    items: Sequence[Item]
    digests: Sequence[bytes]


def largest(job: Job, round_: int) -> int:
    """Bytes of the largest delivery that a round can have."""
    return sum(item.spec.nbytes for item in delivered_items(job.down(round_)))


async def take(ledger: Ledger, sender: Peer, job: Job, round_: int, frames: AsyncIterator[Frame]) -> Delivered:
    """Take a delivery in; RefusedError for anything that the job's schema does not have in this round."""
    buffer = Buffer()

    items: Sequence[Item] = ()

    def check(manifest: tensor.Manifest) -> Sequence[int]:
        nonlocal items
        items = announced(sender.id, job, round_, manifest)
        buffer.reserve(manifest.size)
        return [item.spec.nbytes for item in items]

    inbound = Inbound(sender.id, check, buffer.write)
    async for frame in frames:
        inbound.feed(frame)
    _, digests = inbound.finish()
    delivered = unpack(sender.id, items, buffer.bytes)
    if delivered:
        await asyncio.to_thread(_record, ledger, sender, job, round_, len(buffer.bytes), digests)
    return Delivered(delivered, items, digests.tensors)


def _record(ledger: Ledger, sender: Peer, job: Job, round_: int, size: int, digests: Digests) -> None:
    ledger.ingress(
        job=job.name,
        round_number=round_,
        purpose="delivery",
        rpc=FETCH,
        sender=sender,
        message=Payload(bytes=size, sha256=digests.total.hex()),
    )
