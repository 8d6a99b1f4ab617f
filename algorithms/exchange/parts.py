"""The four exchanges: what crosses, and how.

Everything that a method sends upward is a part, and each part crosses by one of four exchanges
(DESIGN.md section 1):

========  ============================  ===================================================
exchange  silo i uploads                the coordinator needs only
========  ============================  ===================================================
``Sum``   tensors x_i and a weight w_i  sum_i w_i x_i and sum_i w_i, over all or row by row
``Mix``   tensors x_i                   for each recipient r: sum_j A_rj x_j
``Gram``  vectors v_i, one per group    the inner products <v_i, v_j>, or those of sketches
``Each``  tensors x_i                   x_i itself
========  ============================  ===================================================

``plain.py`` runs them in the clear, ``security/blind/sum.py`` and
``security/blind/mix_and_gram.py`` blind.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from itertools import chain
from math import fsum, inf, prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...errors import LocalError
from ..numerics.streams import Seed

Tensors = Mapping[str, Tensor]
Read = Callable[[str, str], Tensor]  # (silo, tensor name) -> what that silo uploaded

# the name under which a Sum's weight crosses; "@" cannot start a tensor's own name
WEIGHT = "@weight"
# Elements of a float64 accumulator: 4 MiB, whatever the size of a tensor.
REGION = 1 << 19
LARGEST_WEIGHT = 2.0**53  # counts of records are exact up to here
MOST_TENSORS = 16_384  # in one transfer: a manifest has a header for each
UNBOUNDED = (-inf, inf)
MIX_BITS = 32  # security rule 19: the integer weights of a Mix row add up to 2^32 exactly

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Methods compute in the dtypes above; in the others only what a codec makes crosses.
WIRE_DTYPES = {**DTYPES, "bfloat16": torch.bfloat16, "int8": torch.int8, "int32": torch.int32}


class Kind(IntEnum):
    """The kind of a part, in the field's words; numbers as ``PartKind`` in proto/tensor.proto."""

    WHOLE_MODEL = 1
    BACKBONE = 2
    INTER_LEARNING_MODEL = 3
    HEADER_ROWS = 4
    PROTOTYPES = 5
    CANONICAL_MODELS = 6
    CLASSIFIER_ROWS = 7
    MEMBERSHIP = 8
    COUNTS = 9
    METRIC = 10
    SKETCH = 11
    KEY = 12
    SHARE = 13
    STATISTICS = 14


# Non-negative by nature: their inner products disclose the values up to the order of classes
# (security rule 2).
DISCLOSED = (Kind.COUNTS, Kind.MEMBERSHIP, Kind.METRIC, Kind.STATISTICS)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (a key of WIRE_DTYPES), shape and any bounds of one tensor that crosses.

    An empty shape is a scalar's. Bounds are inclusive; both ends reject values beyond them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | None = None
    most: float | None = None

    @property
    def elements(self) -> int:
        """Number of elements; Python integers, so no shape overflows it."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire.

        These are the values alone, without headers and names.
        """
        return self.elements * WIRE_DTYPES[self.dtype].itemsize

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest value; infinite where there is no bound."""
        least = -inf if self.least is None else self.least
        most = inf if self.most is None else self.most
        return least, most


def specs_of(tensors: Tensors) -> tuple[TensorSpec, ...]:
    """Specs of the given tensors, in their order.

    They have no bounds. KeyError for a dtype in which no tensor may cross.
    """
    return tuple(
        TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()
    )


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum over silos.

    ``mean``: sum_i w_i x_i / sum_i w_i with one weight a silo. ``ratio``: the same row by row, w_i
    of shape [rows], rows without weight come back as zeros. ``total``: sum_i x_i, no weight, in
    float64 (int64 stays int64). ``most`` is the largest weight that a silo may have: 1 where it
    says whether a silo has a row.
    """

    form: Literal["mean", "ratio", "total"] = "mean"
    most: float = LARGEST_WEIGHT

    @property
    def schema_name(self) -> str:
        """The exchange in a schema's words.

        The signed job document contains it.
        """
        return f"sum.{self.form}"


@dataclass(frozen=True, slots=True)
class Mix:
    """A weighted sum per recipient, over the last version that each silo uploaded.

    ``directed``: over the uploads of one round alone, by weights that are known before it: for the
    silos that were away then, or for the round's own members (``Method.directed_for``).
    """

    directed: bool = False

    @property
    def schema_name(self) -> str:
        """The exchange in a schema's words."""
        return "mix.directed" if self.directed else "mix"


@dataclass(frozen=True, slots=True)
class Gram:
    """Inner products of one tensor [groups, d] per silo, group by group.

    Never for counts or proportions.

    ``sketch`` = k > 0: of sketches [groups, k] of the vectors, which alone cross, as float32
    (count_sketch.py). In the clear all know their map, that of ``seed``; blind it follows from the
    key that the job's silos share. ``shared``: by secret sharing, without that key.
    """

    sketch: int = 0
    seed: Seed = 0
    shared: bool = False

    @property
    def schema_name(self) -> str:
        """The exchange in a schema's words."""
        return "gram.shared" if self.shared else "gram"


@dataclass(frozen=True, slots=True)
class Each:
    """The value of each silo, visible to the coordinator."""

    @property
    def schema_name(self) -> str:
        """The exchange in a schema's words."""
        return "each"


Exchange = Sum | Mix | Gram | Each


class Codec(Protocol):
    """A form of a part's tensors that takes fewer bytes (codec.py)."""

    @property
    def feeds_back(self) -> bool:
        """True if a silo adds what one round left out to what the next one codes."""
        ...

    @property
    def compares(self) -> bool:
        """True if it codes how far a tensor is from what came down of it in the same round."""
        ...

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """What crosses in place of a tensor: itself, where the codec leaves it as it is."""
        ...

    def encode(self, spec: TensorSpec, value: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors of ``specs``, by name, and the value that they stand for."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that cross together: a name, a kind, an exchange and specs in wire order.

    Names are unique among the parts that go up in a round, and among those that come down. A
    ``codec`` says in which form an upload crosses; the job sets it, never the method.
    """

    name: str
    kind: Kind
    exchange: Exchange
    tensors: tuple[TensorSpec, ...]
    codec: Codec | None = None

    @property
    def given(self) -> tuple[TensorSpec, ...]:
        """Specs of all tensors that a method makes for this part, a Sum's weight included."""
        shape: tuple[int, ...]
        match self.exchange:
            # A mean has one weight per silo, a ratio one per row.
            case Sum("mean", most):
                shape = ()
            case Sum("ratio", most):
                shape = self.tensors[0].shape[:1]
            case _:
                return self.tensors
        # A negative weight would subtract a silo's tensors, and so single out another's.
        return (*self.tensors, TensorSpec(WEIGHT, "float64", shape, 0.0, most))

    @property
    def wire(self) -> tuple[TensorSpec, ...]:
        """Specs of all tensors that a silo uploads: ``given``, coded, or sketches of it."""
        if self.codec is not None:
            return tuple(chain.from_iterable(map(self.codec.specs, self.given)))
        if not self.sketch:
            return self.given
        (spec,) = self.tensors
        return (TensorSpec(spec.name, "float32", (*spec.shape[:-1], self.sketch)),)

    @property
    def sketch(self) -> int:
        """Length of the sketches in which the vectors of a Gram cross; 0: whole vectors."""
        return self.exchange.sketch if isinstance(self.exchange, Gram) else 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """A silo's upload for one part: tensors, and the weight of a Sum of form mean or ratio.

    The weight is at least 0: a number or [] for a mean, [rows] for a ratio. It is None for all
    other exchanges.
    """

    tensors: Tensors
    weight: float | Tensor | None = None


class Exchanges(Protocol):
    """One way to run the exchanges, chosen once at job admission: in the clear, or blind.

    Parts are those of ``Job.up``, with the exchanges that the job chose.
    """

    def contribute(self, part: Part, contribution: Contribution) -> dict[str, Tensor]:
        """At the silo: what ``collect`` reads, exactly ``part.given``, or a sketch of it.

        What a codec makes of it is up to the caller (codec.py).
        """
        ...

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """At the coordinator: the result over ``members``, in that order; empty for a Mix."""
        ...

    def mix(
        self, part: Part, recipient: str, weights: Mapping[str, float], read: Read
    ) -> dict[str, Tensor] | None:
        """One recipient's row over the last version of each silo in ``weights``.

        ``weights`` may name the recipient too. None where it gets no row: a blind one that would
        show it too much (security rules 4 to 6).
        """
        ...

    def mix_rows(
        self, part: Part, rows: Mapping[str, Mapping[str, float]], read: Read
    ) -> Mapping[str, Tensors | None]:
        """``mix`` for each recipient of ``rows``, with its weights."""
        ...


def laid_out(part: Part, contribution: Contribution) -> dict[str, Tensor]:
    """The tensors of a contribution, exactly ``part.given`` in its order; else LocalError.

    A Sum's weight is among them as ``@weight``, in float64. Tensors are detached, contiguous and
    finite.
    """
    tensors = {**contribution.tensors, **_checked_weight(part, contribution.weight)}
    names = [spec.name for spec in part.given]
    # Nothing may be missing, and nothing may leave that the signed schema lacks.
    if tensors.keys() != set(names):
        raise LocalError(f"part {part.name!r}: gave {sorted(tensors)}, its schema has {names}")
    return {spec.name: checked(part, spec, tensors[spec.name]) for spec in part.given}


def _checked_weight(part: Part, weight: float | Tensor | None) -> dict[str, Tensor]:
    """The weight under its name on the wire; nothing for a part without one."""
    # ``given`` adds a weight, and nothing else.
    needed = part.given != part.tensors
    if weight is None:
        if needed:
            raise LocalError(f"part {part.name!r}: a Sum of form {part.exchange!r} needs a weight")
        return {}
    if not needed:
        raise LocalError(f"part {part.name!r}: {part.exchange!r} takes no weight")
    # Counts of records are exact in float64 up to 2^53.
    tensor = torch.as_tensor(weight, dtype=torch.float64)
    fault = value_fault(part.given[-1], tensor)
    if fault:
        raise LocalError(f"part {part.name!r}: its weight {fault}")
    return {WEIGHT: tensor}


def checked(part: Part, spec: TensorSpec, tensor: Tensor) -> Tensor:
    """The tensor, if it has its spec's dtype, shape and bounds and is finite; else LocalError."""
    if not fits(spec, tensor):
        raise LocalError(
            f"part {part.name!r}: tensor {spec.name!r} is"
            f" {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}, its schema says"
            f" {spec.dtype} {list(spec.shape)}"
        )
    if fault := value_fault(spec, tensor):
        raise LocalError(
            f"part {part.name!r}: tensor {spec.name!r} {fault}; training has diverged, lower the lr"
        )
    return tensor.detach().contiguous()


def picked(specs: Iterable[TensorSpec], tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of these specs, by name and in their order.

    KeyError if one is missing.
    """
    return {spec.name: tensors[spec.name] for spec in specs}


def elements_of(specs: Iterable[TensorSpec]) -> int:
    """Numbers in all tensors of these specs together."""
    return sum(spec.elements for spec in specs)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all these tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def fits(spec: TensorSpec, tensor: Tensor) -> bool:
    """True if a tensor has its spec's dtype and shape.

    ``value_fault`` checks bounds.
    """
    return tensor.dtype == DTYPES[spec.dtype] and tuple(tensor.shape) == spec.shape


def value_fault(spec: TensorSpec, tensor: Tensor) -> str:
    """The fault in a tensor's values; empty if there is none.

    The text reveals no value: it says "NaN", or which bound is broken.
    """
    if not all_finite(tensor):
        return "holds NaN or infinity"
    return bounds_fault(spec, tensor)


def bounds_fault(spec: TensorSpec, tensor: Tensor) -> str:
    """How finite values break the bounds of their spec; empty if they keep them.

    NaN would pass, so check that values are finite first.
    """
    least, most = spec.bounds
    # ``aminmax`` takes no empty tensor.
    if tensor.numel() == 0 or spec.bounds == UNBOUNDED:
        return ""
    low, high = torch.aminmax(tensor)
    if low.item() < least:
        return f"holds a value below {least:g}"
    if high.item() > most:
        return f"holds a value above {most:g}"
    return ""


def all_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite."""
    # Least and greatest tell it without a temporary of the tensor's size.
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    extremes = torch.stack(torch.aminmax(tensor))  # NaN comes through
    return bool(torch.isfinite(extremes).all())


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Non-negative integers in the proportion of ``weights`` that add up to 2^32 exactly.

    By largest remainder; ties go to the earlier silo. Raises LocalError for weights that are
    negative, not finite or all zero.
    """
    finite = all(0 <= weight < inf for weight in weights)
    if not finite or sum(weights) <= 0:
        raise LocalError(
            f"mixing weights {list(weights)} are not non-negative finite numbers with a"
            " positive sum"
        )
    # fsum rounds once, so the order of the weights does not matter.
    whole = fsum(weights)
    exact = [weight / whole * 2**MIX_BITS for weight in weights]
    floors = list(map(int, exact))

    # Silos check that the integers add up exactly (security rule 19), so rounding alone does
    # not do.
    missing = 2**MIX_BITS - sum(floors)
    # The largest remainders get one more each; indices break ties, the same on every machine.
    by_remainder = sorted(range(len(weights)), key=lambda i: (floors[i] - exact[i], i))
    for i in by_remainder[:missing]:
        floors[i] += 1
    return tuple(floors)


def own_weight(own: float, others: Iterable[float]) -> int:
    """The share of a recipient's own values next to those of others, in steps of 2^-32: 0 to 2^32.

    ``own`` and ``others`` are non-negative weights, with a positive one in ``others``; their order
    does not matter.
    """
    # Fractions are exact; a sum of floats would depend on their order.
    mine, rest = Fraction(own), sum(map(Fraction, others), Fraction(0))
    return round(mine / (mine + rest) * (1 << MIX_BITS))


def kept_share(own: int, mixed: int) -> float:
    """The share, 0 to 1, that a recipient keeps of its own values.

    ``own`` comes from ``own_weight``; the silos that are left of the row weigh ``mixed`` of its
    2^32. Where all are left, the share is own / 2^32. It is computed from integers, so it is the
    same on every machine.
    """
    whole = 1 << MIX_BITS
    return own * whole / (own * whole + (whole - own) * mixed)


def walk_tensors(parts: Sequence[Part]) -> Iterator[tuple[Part, TensorSpec]]:
    """All tensors that cross, in wire order."""
    for part in parts:
        for spec in part.wire:
            yield part, spec


@dataclass(frozen=True, slots=True)
class Item:
    """One declared tensor of a transfer."""

    part: str
    kind: Kind
    spec: TensorSpec


def upload_items(parts: Sequence[Part]) -> tuple[Item, ...]:
    """All tensors that a silo uploads for these parts, in wire order, weights included."""
    return _items(parts, lambda part: part.wire)


def contribution_items(parts: Sequence[Part]) -> tuple[Item, ...]:
    """All tensors that a method makes for these parts, in wire order; vectors are whole.

    In a blind job the silo's gate takes these, and makes from them what crosses.
    """
    return _items(parts, lambda part: part.given)


def delivered_items(parts: Sequence[Part]) -> tuple[Item, ...]:
    """All tensors that are delivered for these parts, in wire order.

    Weights never come down.
    """
    return _items(parts, lambda part: part.tensors)


def _items(
    parts: Sequence[Part], specs: Callable[[Part], tuple[TensorSpec, ...]]
) -> tuple[Item, ...]:
    return tuple(Item(part.name, part.kind, spec) for part in parts for spec in specs(part))
