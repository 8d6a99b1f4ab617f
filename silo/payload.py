"""What a round gives, and what comes down, as declared tensors: pure functions that the gate calls."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from ..algorithms.exchange import all_finite
from ..algorithms.job import Job
from ..errors import LocalError, RefusedError
from ..proto.stream import Inbound
from ..proto.tensor_pb2 import Manifest
from ..proto.wire import Item, check_manifest, delivered_items, tensor_from
from ..security.release import Release
from ..security.roster import Roster


class Buffer:
    """The bytes of a delivery, in memory that is taken once."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._filled = 0

    def reserve(self, size: int) -> None:
        """Make room for exactly this many bytes."""
        self.bytes = bytearray(size)

    def write(self, chunk: memoryview) -> None:
        """Append bytes, of which no more come than there is room for."""
        end = self._filled + len(chunk)
        memoryview(self.bytes)[self._filled : end] = chunk
        self._filled = end


def release_of(item: Item) -> Release:
    """What policy and ledger read about one tensor."""
    spec = item.spec
    return Release(item.part, item.kind.name.lower(), spec.name, spec.dtype, spec.shape)


def bytes_by_kind(items: tuple[Item, ...], offset: int = 0) -> dict[str, int]:
    """Payload bytes of a bundle behind an offset, by kind of part."""
    sizes: Counter[str] = Counter()
    for item in items:
        skipped = min(offset, item.spec.nbytes)
        sizes[item.kind.name.lower()] += item.spec.nbytes - skipped
        offset -= skipped
    return dict(sizes)


def readers_of(roster: Roster) -> tuple[str, ...]:
    """Who can open what a silo gives in the clear: the coordinator. The other silos see only folded results."""
    return (roster.coordinator.id,)


def exactly(items: tuple[Item, ...], payload: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
    """The values in wire order; LocalError for anything missing, unknown or of another form."""
    given = {(part, name): value for part, values in payload.items() for name, value in values.items()}
    declared = {(item.part, item.spec.name) for item in items}
    for part, name in sorted(given.keys() - declared):
        raise LocalError(f"tensor {part}/{name} is not in the job's schema; the whole message is refused")
    values = []
    for item in items:
        value = given.get((item.part, item.spec.name))
        dtype = str(value.dtype).removeprefix("torch.") if value is not None else "missing"
        if value is None or tuple(value.shape) != item.spec.shape or dtype != item.spec.dtype:
            found = "missing" if value is None else f"{dtype} {list(value.shape)}"
            raise LocalError(
                f"tensor {item.part}/{item.spec.name} is {found}, the job's schema says {item.spec.dtype} "
                f"{list(item.spec.shape)}; the whole message is refused"
            )
        values.append(value.detach().cpu())
    return values


def announced(peer: str, job: Job, round_: int, manifest: Manifest) -> tuple[Item, ...]:
    """What a delivery's manifest declares; RefusedError unless it is all of some parts that this round may bring."""
    if manifest.job != job.name or manifest.job_digest.hex() != job.digest or manifest.round != round_:
        raise RefusedError(peer, "MANIFEST", f"delivery is of {manifest.job[:64]!r} round {manifest.round}")
    if manifest.offset:
        raise RefusedError(peer, "MANIFEST", f"delivery begins at byte {manifest.offset}; send all of it")
    parts = {part.name: part for part in job.down(round_)}
    named = list(dict.fromkeys(header.part for header in manifest.tensors))
    unknown = [name for name in named if name not in parts]
    if unknown:
        raise RefusedError(peer, "MANIFEST", f"delivers part {unknown[0][:64]!r}, which is not in the schema")
    items = delivered_items([parts[name] for name in named])
    check_manifest(peer, manifest, items)
    return items


def unpack(peer: str, inbound: Inbound, buffer: bytearray) -> dict[str, dict[str, Tensor]]:
    """Tensors of a finished delivery by part; RefusedError for NaN or infinity. They share the buffer's memory."""
    delivered: dict[str, dict[str, Tensor]] = {}
    offset = 0
    for item in inbound.items:
        value = tensor_from(buffer, item.spec, offset)
        if not all_finite(value):
            raise RefusedError(peer, "NOT_FINITE", f"delivered {item.part}/{item.spec.name} holds NaN or infinity")
        delivered.setdefault(item.part, {})[item.spec.name] = value
        offset += item.spec.nbytes
    return delivered
