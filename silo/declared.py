"""What a job lets this silo give, as plain values read once from the document that its operator signed.

The gate asks this and not the job's code: what code of a method says or does after the job was admitted changes nothing
of what may leave.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from ..algorithms.exchange import Kind, TensorSpec
from ..errors import LocalError
from ..files import canonical_json
from ..proto.wire import Item


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

    @classmethod
    def of(cls, document: Mapping[str, Any], records: Records) -> Self:
        """Read a document that has been verified and is as our own code writes it."""
        phases = tuple((phase["from_round"], tuple(_items(phase["up"]))) for phase in document["schema"])
        digest = sha256(canonical_json(document)).hexdigest()
        return cls(document["name"], digest, document["method"]["name"], phases, records)

    def items(self, round_: int) -> tuple[Item, ...]:
        """All that this round gives, in wire order; LocalError for a round that the job does not have."""
        if not 0 <= round_ <= (last := self.phases[-1][0]):
            raise LocalError(f"job {self.job!r} has no round {round_}, its last is {last}")
        return next(items for start, items in reversed(self.phases) if start <= round_)


def _items(parts: Sequence[Mapping[str, Any]]) -> Iterator[Item]:
    for part in parts:
        for tensor in part["tensors"]:
            least, most = (None if bound is None else float(bound) for bound in map(tensor.get, ("least", "most")))
            spec = TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), least, most)
            yield Item(part["name"], Kind[part["kind"]], spec)
