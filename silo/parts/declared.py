"""What a job lets this silo upload, as plain values read once from its signed document.

The gate asks this and not the job's code: whatever code of a method says or does after the job was
admitted changes nothing of what may leave.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import filterfalse
from operator import itemgetter
from typing import Any, Self, TypeVar

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
    elements_of,
)
from ...algorithms.job.evaluated import evaluated, evaluation_of
from ...algorithms.job.security import for_silos
from ...algorithms.tasks.counting import Counting
from ...errors import LocalError
from ...files.documents import canonical_json
from ...files.packages import Package
from ...security.arithmetic.fixedpoint import Group
from ...security.blind.mix_context import mix_group
from ...security.blind.plan import shared, sum_groups, uploaded
from ...security.blind.sum import Bounds
from ...security.ledger.records import Noise
from ...security.secagg.shared_gram import Compared, compared_of

T = TypeVar("T")


@dataclass(frozen=True)
class RecordCount:
    """The number of this silo's records, for a job in which it may show.

    ``test`` counts those held out.
    """

    train: int
    test: int


@dataclass(frozen=True)
class Declared:
    """The declarations of one admitted job.

    Plain values, read once, so that no method's code can change them later.
    """

    job: str
    digest: str  # SHA-256 of the canonical document, hex
    method: str
    # (first round, what a silo makes in each of its rounds), the end among them
    phases: tuple[tuple[int, tuple[Item, ...]], ...]
    # None of a private job: nothing that is done in it depends on how many there are
    records: RecordCount | None
    # of the values of a blind job; None: what leaves, leaves in the clear
    bounds: Bounds | None = None
    # the same phases, as the parts of a blind job
    parts: tuple[tuple[int, tuple[Part, ...]], ...] = ()
    silos: tuple[str, ...] = ()  # of a blind job
    packages: tuple[Package, ...] = ()  # whose code the job runs
    dataset: str | None = None  # that the job asks for, if it does
    noise: Noise = "local"  # "shared": the silos of a private job share the noise of its sums
    # what evaluation counts; None for the task of an installed package
    counting: Counting | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any], records: RecordCount) -> Self:
        """Read a document that has been verified and is as our own code writes it."""
        # Plain values alone: code of a method that runs later can change objects of the job, and
        # none of these.
        schema, security = document["schema"], document["security"]
        known = evaluated(evaluation_of(document))
        plain = cls(
            job=document["name"],
            digest=sha256(canonical_json(document)).hexdigest(),
            method=document["method"]["name"],
            phases=tuple((phase["from_round"], _sent(phase["up"])) for phase in schema),
            records=None if document["privacy"] else records,
            packages=tuple(Package(**each) for each in document.get("packages", ())),
            dataset=document.get("dataset"),
            noise=(document["privacy"] or {}).get("noise", "local"),
            counting=None if known is None else known.counting,
        )
        if security["secure_aggregation"] == "off":
            return plain

        # The parts of a blind job come to the gate whole; the gate hides them.
        parts = tuple((phase["from_round"], tuple(map(_blind, phase["up"]))) for phase in schema)
        limits = Bounds(
            security["clip_exponent"],
            security["weights"],
            security["weight_least"],
            security["weight_most"],
            for_silos(security["audience"], schema),
        )
        return replace(
            plain,
            phases=tuple((start, contribution_items(own)) for start, own in parts),
            bounds=limits,
            parts=parts,
            silos=tuple(document["silos"]),
        )

    @property
    def private(self) -> bool:
        """True if the signed document has a [privacy] table; ``records`` is None then."""
        return self.records is None

    def items(self, round_: int) -> tuple[Item, ...]:
        """The items that a silo brings to the gate in this round, in wire order.

        LocalError for a round that the job does not have. In a blind job, vectors that leave as
        sketches are whole.
        """
        # The last phase is the end of the job: a delivery without training.
        last = self.phases[-1][0]
        if not 0 <= round_ <= last:
            raise LocalError(f"job {self.job!r} has no round {round_}, its last is {last}")
        return _at(round_, self.phases)

    def groups(
        self, round_: int, readers: Sequence[str] = ()
    ) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
        """The groups of a round's secure sum, without scale, and their parts.

        ``readers`` are the silos that get rows of it. LocalError for a round without a secure sum.
        """
        # Readers are named in the coordinator's specification, so check them.
        strange = list(filterfalse(self.silos.__contains__, readers))
        if strange:
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
        if not found:
            return found, None
        return found, compared_of(found[0], bounds.clip_exponent)

    def hidden(self, round_: int) -> tuple[Part, ...]:
        """The parts of a round that leave one by one, padded or rotated.

        LocalError where it has no blind round.
        """
        return uploaded(self._blind_parts(round_)[0])

    def hidden_part(self, round_: int, name: str, exchange: type[Mix | Gram]) -> Part:
        """The part of this name that is to leave hidden by such an exchange.

        LocalError unless the signed document has it so in this round.
        """
        for part in self.hidden(round_):
            if part.name == name and isinstance(part.exchange, exchange):
                return part
        raise LocalError(
            f"part {name!r} does not cross by a {exchange.__name__} in round {round_}; nothing"
            " leaves"
        )

    def padded_group(self, part: Part) -> Group:
        """The group of a part that leaves padded; LocalError where the job is not blind."""
        return mix_group(part.name, elements_of(part.tensors), self._blind_bounds().clip_exponent)

    def _blind_parts(self, round_: int) -> tuple[tuple[Part, ...], Bounds]:
        bounds = self._blind_bounds()
        self.items(round_)  # there is such a round
        return _at(round_, self.parts), bounds

    def _blind_bounds(self) -> Bounds:
        if self.bounds is None:
            raise LocalError(f"job {self.job!r} has no secure aggregation")
        return self.bounds


def _at(round_: int, phases: Sequence[tuple[int, T]]) -> T:
    """The value of the phase that a round is in, by the phases' first rounds."""
    # The last phase that begins at or before the round.
    phase = bisect_right(phases, round_, key=itemgetter(0)) - 1
    return phases[phase][1]


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
    exchange = EXCHANGES.get(part["exchange"])
    if exchange is None:
        raise LocalError(
            f"part {part['name']!r} crosses by {part['exchange']!r}, which has no blind form"
        )

    # the weight of a sum crosses last, and is no tensor of the part
    *tensors, last = specs
    if last.name != WEIGHT:
        tensors = [*specs]
    elif isinstance(exchange, Sum) and last.most is not None:
        exchange = replace(exchange, most=last.most)

    # the gate takes whole vectors, and sketches them under the key that the coordinator lacks
    whole = part.get("sketch_of")
    if whole:
        exchange, tensors = Gram(sketch=last.shape[-1]), list(map(_spec, whole))
    return Part(part["name"], Kind[part["kind"]], exchange, tuple(tensors))


def _sent(parts: Sequence[Mapping[str, Any]]) -> tuple[Item, ...]:
    """The tensors of these parts that leave in the clear."""
    return tuple(
        Item(part["name"], Kind[part["kind"]], _spec(each))
        for part in parts
        for each in part["tensors"]
    )


def _spec(tensor: Mapping[str, Any]) -> TensorSpec:
    bounds = {key: float(tensor[key]) for key in ("least", "most") if key in tensor}
    return TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), **bounds)
