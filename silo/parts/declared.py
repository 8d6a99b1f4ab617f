"""What a job lets this silo give, as plain values read once from the document that its operator
signed.

The gate asks this and not the job's code: what code of a method says or does after the job was
admitted changes nothing of what may leave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Self

from ...algorithms.exchange.parts import (
    WEIGHT,
    Exchange,
    Gram,
    Item,
    Kind,
    Mix,
    Part,
    Sum,
    TensorSpec,
    contribution_items,
)
from ...algorithms.job.security import for_silos
from ...errors import LocalError
from ...files.documents import canonical_json
from ...security.arithmetic.fixedpoint import Group
from ...security.blind.mix_context import mix_group
from ...security.blind.plan import shared, sum_groups, uploaded
from ...security.blind.sum import Bounds
from ...security.secagg.shared_gram import Compared, compared_of


@dataclass(frozen=True)
class RecordCount:
    """How many records this silo has for a job in which this may show."""

    train: int
    test: int


@dataclass(frozen=True)
class Declared:
    """One admitted job."""

    job: str
    digest: str  # SHA-256 of the canonical document, hex
    method: str
    # (first round, what each of its rounds gives), the end among them
    phases: tuple[tuple[int, tuple[Item, ...]], ...]
    # None of a private job: nothing that is done in it depends on how many there are
    records: RecordCount | None
    # of the values of a blind job; None: what leaves, leaves in the clear
    bounds: Bounds | None = None
    # the same phases, as the parts of a blind job
    parts: tuple[tuple[int, tuple[Part, ...]], ...] = ()
    silos: tuple[str, ...] = ()  # of a blind job

    @classmethod
    def of(cls, document: Mapping[str, Any], records: RecordCount) -> Self:
        """Read a document that has been verified and is as our own code writes it."""
        own = None if document["privacy"] else records
        starts, given = zip(
            *((phase["from_round"], phase["up"]) for phase in document["schema"]), strict=True
        )
        name, method, said = document["name"], document["method"]["name"], document["security"]
        digest = sha256(canonical_json(document)).hexdigest()
        if said["secure_aggregation"] == "off":
            return cls(
                name, digest, method, tuple(zip(starts, map(_sent, given), strict=True)), own
            )
        parts = [tuple(map(_blind, up)) for up in given]
        phases = tuple(zip(starts, map(contribution_items, parts), strict=True))
        hidden = for_silos(said["audience"], document["schema"])
        limits = Bounds(
            said["clip_exponent"],
            said["weights"],
            said["weight_least"],
            said["weight_most"],
            hidden,
        )
        return cls(
            name,
            digest,
            method,
            phases,
            own,
            limits,
            tuple(zip(starts, parts, strict=True)),
            tuple(document["silos"]),
        )

    @property
    def private(self) -> bool:
        """Whether the signed document has a [privacy] table."""
        return self.records is None

    def items(self, round_: int) -> tuple[Item, ...]:
        """All that this round gives to the gate, in wire order.

        LocalError for a round that the job does not have.

        Of a blind job, vectors that leave as sketches are whole.
        """
        if not 0 <= round_ <= (last := self.phases[-1][0]):
            raise LocalError(f"job {self.job!r} has no round {round_}, its last is {last}")
        return next(items for start, items in reversed(self.phases) if start <= round_)

    def groups(
        self, round_: int, readers: Sequence[str] = ()
    ) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
        """The groups of a round's secure sum, without scale, and their parts.

        LocalError where it has none.

        ``readers`` are the silos that get rows of it.
        """
        if strange := [silo for silo in readers if silo not in self.silos]:
            raise LocalError(
                f"rows for {', '.join(strange)}, no silo of job {self.job!r}; nothing leaves"
            )
        parts, bounds = self._blind_parts(round_)
        return sum_groups(parts, bounds, readers)

    def compared(self, round_: int) -> tuple[tuple[Part, ...], Compared | None]:
        """The part that a round compares by shares, none or one.

        LocalError where it has no blind round.
        """
        parts, bounds = self._blind_parts(round_)
        found = shared(parts)
        return found, next((compared_of(part, bounds.clip_exponent) for part in found), None)

    def hidden(self, round_: int) -> tuple[Part, ...]:
        """The parts of a round that leave one by one, padded or rotated.

        LocalError where it has no blind round.
        """
        return uploaded(self._blind_parts(round_)[0])

    def padded_group(self, part: Part) -> Group:
        """That of a part that leaves padded; LocalError where the job is not blind."""
        if self.bounds is None:
            raise LocalError(f"job {self.job!r} has no secure aggregation")
        return mix_group(
            part.name, sum(spec.elements for spec in part.tensors), self.bounds.clip_exponent
        )

    def _blind_parts(self, round_: int) -> tuple[tuple[Part, ...], Bounds]:
        if self.bounds is None:
            raise LocalError(f"job {self.job!r} has no secure aggregation")
        self.items(round_)  # there is such a round
        return next(parts for start, parts in reversed(self.parts) if start <= round_), self.bounds


EXCHANGES: Mapping[str, Exchange] = {
    "sum.mean": Sum("mean"),
    "sum.ratio": Sum("ratio"),
    "sum.total": Sum("total"),
    "mix": Mix(),
    "mix.directed": Mix(directed=True),
    "gram": Gram(),
    "gram.shared": Gram(shared=True),
}


def _blind(part: Mapping[str, Any]) -> Part:
    """A part of a blind job, as its own wire would be written."""
    specs = tuple(map(_spec, part["tensors"]))
    most = next((spec.most for spec in specs if spec.name == WEIGHT), None)
    given = tuple(spec for spec in specs if spec.name != WEIGHT)
    exchange = EXCHANGES.get(part["exchange"])
    if exchange is None:
        raise LocalError(
            f"part {part['name']!r} crosses by {part['exchange']!r}, which has no blind form"
        )
    if isinstance(exchange, Sum) and most is not None:
        exchange = replace(exchange, most=most)
    if whole := part.get("sketch_of"):
        (sent,), given = specs, tuple(map(_spec, whole))
        exchange = Gram(sketch=sent.shape[-1])
    return Part(part["name"], Kind[part["kind"]], exchange, given)


def _sent(parts: Sequence[Mapping[str, Any]]) -> tuple[Item, ...]:
    """What leaves in the clear of these parts."""
    return tuple(
        Item(part["name"], Kind[part["kind"]], _spec(each))
        for part in parts
        for each in part["tensors"]
    )


def _spec(tensor: Mapping[str, Any]) -> TensorSpec:
    least, most = (
        None if bound is None else float(bound) for bound in map(tensor.get, ("least", "most"))
    )
    return TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), least, most)
