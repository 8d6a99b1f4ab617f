"""What a job lets this silo give, as plain values read once from the document that its operator signed.

The gate asks this and not the job's code: what code of a method says or does after the job was admitted changes nothing
of what may leave.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Self

from ..algorithms.exchange import WEIGHT, Kind, Part, Sum, TensorSpec
from ..errors import LocalError
from ..files import canonical_json
from ..proto.wire import Item
from ..security.blind_sum import Bounds, group
from ..security.fixedpoint import Group


@dataclass(frozen=True)
class Records:
    """How many records this silo has for a job."""

    train: int
    test: int


@dataclass(frozen=True)
class Declared:
    """One admitted job."""

    job: str
    digest: str  # SHA-256 of the canonical document, hex
    method: str
    phases: tuple[tuple[int, tuple[Item, ...]], ...]  # (first round, what each of its rounds gives), the end among them
    records: Records
    bounds: Bounds | None = None  # of the values of secure sums; None: what leaves, leaves in the clear
    parts: tuple[tuple[int, tuple[Part, ...]], ...] = ()  # the same phases, as the parts of secure sums

    @classmethod
    def of(cls, document: Mapping[str, Any], records: Records) -> Self:
        """Read a document that has been verified and is as our own code writes it."""
        phases = tuple((phase["from_round"], tuple(_items(phase["up"]))) for phase in document["schema"])
        digest = sha256(canonical_json(document)).hexdigest()
        declared = cls(document["name"], digest, document["method"]["name"], phases, records)
        said = document["security"]
        if said["secure_aggregation"] == "off":
            return declared
        limits = Bounds(said["clip_exponent"], said["weights"], said["weight_least"], said["weight_most"])
        sums = tuple((phase["from_round"], tuple(map(_sum, phase["up"]))) for phase in document["schema"])
        return replace(declared, bounds=limits, parts=sums)

    def items(self, round_: int) -> tuple[Item, ...]:
        """All that this round gives, in wire order; LocalError for a round that the job does not have."""
        if not 0 <= round_ <= (last := self.phases[-1][0]):
            raise LocalError(f"job {self.job!r} has no round {round_}, its last is {last}")
        return next(items for start, items in reversed(self.phases) if start <= round_)

    def groups(self, round_: int) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
        """The parts of a round's secure sum and their groups, without scale; LocalError where it has none."""
        if self.bounds is None:
            raise LocalError(f"job {self.job!r} has no secure aggregation")
        bounds = self.bounds
        self.items(round_)  # there is such a round
        parts = next(parts for start, parts in reversed(self.parts) if start <= round_)
        return parts, tuple(group(part, bounds) for part in parts)


def _sum(part: Mapping[str, Any]) -> Part:
    """A part that crosses by a Sum, as its own wire would be written."""
    items = tuple(_items([part]))
    specs = tuple(item.spec for item in items if item.spec.name != WEIGHT)
    most = next((item.spec.most for item in items if item.spec.name == WEIGHT), None)
    exchange = {"sum.mean": Sum("mean"), "sum.ratio": Sum("ratio"), "sum.total": Sum("total")}.get(part["exchange"])
    if exchange is None:
        raise LocalError(f"part {part['name']!r} crosses by {part['exchange']!r}, which is no secure sum")
    return Part(part["name"], Kind[part["kind"]], exchange if most is None else replace(exchange, most=most), specs)


def _items(parts: Sequence[Mapping[str, Any]]) -> Iterator[Item]:
    for part in parts:
        for tensor in part["tensors"]:
            least, most = (None if bound is None else float(bound) for bound in map(tensor.get, ("least", "most")))
            spec = TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), least, most)
            yield Item(part["name"], Kind[part["kind"]], spec)
