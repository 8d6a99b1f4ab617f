"""Numbers as integers mod 2^b, b = 32 or 64, so that masks hide them and sums of them are exact.

A silo sends q = rint(w · clip_C(x) · 2^e) in two's complement: clipped first, then weighted
(security rule 15). C = 2^clip_exponent, and 2^e is the largest power of two with 2^e · B ≤
2^(b-1) - 1 - n, where n silos are in the cohort and B bounds |Σ w x|. Then no sum wraps::

    weights  w of a silo           B    |Σ q| ≤ Σ (w C 2^e + 1/2) ≤ B 2^e + n/2 < 2^(b-1)
    public   n_i / Σ n_j           C    counts stand in the specification; Σ over the cohort is 1
    private  n_i / most, row-wise  n C  each row's w is one more number of the sum, scaled by 2^e of
                                        C = 1
    equal    1                     n C

Rounding to float64 keeps within it: w ≤ (n_i / Σ n_j)(1 + 2^-53), and with C a power of two B 2^e ≤
2^(b-2). The opened sum of m silos differs from Σ w clip_C(x) by at most m (2^-(e+1) + 2^-52 C).
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from ...errors import LocalError, check_local
from ...files.documents import Strict

Words: TypeAlias = npt.NDArray[Any]  # little-endian uint32 or uint64
Floats: TypeAlias = npt.NDArray[Any]  # float32 or float64
# One vector; or its pieces in order, each [k], of one dtype.
Flat: TypeAlias = Floats | tuple[Floats, ...]
Reals: TypeAlias = npt.NDArray[np.float64]
Ring: TypeAlias = Literal[32, 64]

WORD: dict[int, npt.DTypeLike] = {32: "<u4", 64: "<u8"}
SIGNED: dict[int, npt.DTypeLike] = {32: "<i4", 64: "<i8"}
FLOAT_DTYPES = (np.float32, np.float64)
BLOCK = 1 << 15  # elements that are worked on at a time: 256 KiB of float64, inside a core's cache
# Largest ratio of the largest to the least private weight for which 32 bits do: rule 18.
WIDEST_PRIVATE = 16

# Who may read a group once its sum is open; for all others its words are padded.
COORDINATOR_READS = "coordinator"
SILOS_READ = "silos"

Count = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]
Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]


class Group(Strict):
    """Tensors that are clipped, weighted and summed alike: one flat vector of equal rows.

    ``clip_exponent`` and ``scale_exponent`` are exponents of 2. As a job declares it, a group has
    scale 0 and no counts; ``unscaled`` restores that form. A group does not parse if its rows are
    unequal, its private weights have no bounds, or 32 bits cannot hold their range.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,129}$")]  # two ids and a dot
    elements: Positive
    rows: Positive = 1  # private weights: one per row; else 1
    ring: Ring = 32
    clip_exponent: Annotated[int, Field(strict=True, ge=-64, le=62)]
    # follows from the size of the cohort
    scale_exponent: Annotated[int, Field(strict=True, ge=0, le=126)] = 0
    weights: Literal["public", "private", "equal"]
    # private: the largest weight of any silo
    weight_most: Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)] = 0
    # private: the declared minimum
    weight_least: Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)] = 0
    # "coordinator", "silos", or one silo's id
    reader: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = COORDINATOR_READS
    # 1000 is ``MOST_SILOS`` of secagg/spec.py, which imports this module and not the reverse.
    # public: by silo of the cohort, where the group has its own counts
    counts: Annotated[tuple[Count, ...], Field(max_length=1000)] = ()
    # share of its own vector that the reader keeps, in units of 2^-32
    own_weight: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        # A weight of each row is divided out of it, so all rows have as many elements.
        if self.elements % self.rows:
            raise ValueError(
                f"group {self.name!r}: {self.elements} elements are not {self.rows} equal rows"
            )
        if self.weights == "private":
            self._check_private()
        elif (self.rows, self.weight_most, self.weight_least) != (1, 0, 0):
            raise ValueError(
                f"group {self.name!r}: rows, weight_least and weight_most are for private weights"
                " only"
            )

        # The coordinator reads the document, so counts that stand in it are public.
        if self.counts and self.weights != "public":
            raise ValueError(f"group {self.name!r}: counts are for public weights only")
        return self

    def _check_private(self) -> None:
        if not 1 <= self.weight_least <= self.weight_most:
            raise ValueError(
                f"group {self.name!r}: private weights need 1 <= weight_least <= weight_most, "
                f"not {self.weight_least} and {self.weight_most}"
            )

        # The lightest silo's values have so many bits fewer, which 32 cannot spare (rule 18).
        if self.ring == 32 and self.weight_most > WIDEST_PRIVATE * self.weight_least:
            raise ValueError(
                f"group {self.name!r}: weights from {self.weight_least} to {self.weight_most}"
                " need ring 64"
            )

    @property
    def body(self) -> int:
        """Numbers that one silo sends of it, canaries aside."""
        # Private weights are masked and summed like elements, one number per row, so that nobody
        # sees those of one silo.
        return self.elements + (self.rows if self.weights == "private" else 0)

    @property
    def nbytes(self) -> int:
        """Length of these numbers as words, canaries aside.

        In bytes, 4 or 8 per number.
        """
        return self.body * (self.ring // 8)

    @property
    def clip(self) -> float:
        """C, the bound on the magnitude of an element."""
        return 2.0**self.clip_exponent


def unscaled(group: Group) -> Group:
    """The group as it is before its cohort is known."""
    return group.model_copy(update={"scale_exponent": 0, "counts": (), "own_weight": 0})


def scale_exponent(ring: int, silos: int, clip_exponent: int, weights: str) -> int:
    """The e that a cohort of ``silos`` uses.

    LocalError if the ring is too small for so large a clip.
    """
    # 2^(e + clip_exponent) <= bound; public weights sum to 1, all others to the number of silos.
    total_weight = 1 if weights == "public" else silos
    bound = ((1 << ring - 1) - 1 - silos) // total_weight
    exponent = bound.bit_length() - 1 - clip_exponent
    check_local(
        bound >= 1 and exponent >= 0,
        f"ring {ring} cannot hold a sum over {silos} silos of numbers up to 2^{clip_exponent}; "
        "take ring 64, or a smaller clip",
    )
    return exponent


def weight_exponent(ring: int, silos: int) -> int:
    """The e of private weights themselves, which are at most 1."""
    return scale_exponent(ring, silos, 0, "private")


def pieces(values: Flat) -> tuple[Floats, ...]:
    """The arrays of a vector.

    A vector is one array, or a tuple of arrays of one dtype, which saves a copy.
    """
    return values if isinstance(values, tuple) else (values,)


def cut(values: Flat, start: int, stop: int) -> Floats:
    """Elements ``start`` to ``stop``; copied only where they lie in several pieces."""
    found, at = [], 0
    for piece in pieces(values):
        if at < stop and start < at + piece.size:
            found.append(piece[max(start - at, 0) : stop - at])
        at += piece.size
    if len(found) == 1:
        return found[0]
    # A chunk with nothing but private weights has no elements.
    return np.concatenate(found or [np.empty(0)])


def check_values(group: Group, values: Flat, *, saturate: bool = False) -> int:
    """How many elements exceed the clip; they may only if ``saturate`` allows cutting them to it.

    LocalError, before anything leaves, for elements over the clip without ``saturate``, for values
    that are not finite, and for anything but ``group.elements`` floats in one row.
    """
    arrays = pieces(values)
    _check_form(group, arrays)

    held = [piece for piece in arrays if piece.size]
    low = float(np.min([piece.min() for piece in held]))
    high = float(np.max([piece.max() for piece in held]))
    check_local(
        bool(np.isfinite([low, high]).all()),  # a NaN anywhere makes both of them NaN
        f"group {group.name!r} holds NaN or infinity; training has diverged, lower the lr",
    )

    largest = max(-low, high)
    if largest <= group.clip:
        return 0
    check_local(
        saturate,
        f"group {group.name!r}: its largest magnitude is {largest:g}, above its clip"
        f" {group.clip:g}; have the job signed with a larger security.clip_exponent",
    )

    # Block by block: |x| of the whole vector would need as much memory again.
    blocks = (piece[at : at + BLOCK] for piece in held for at in range(0, piece.size, BLOCK))
    return sum(int(np.count_nonzero(np.abs(block) > group.clip)) for block in blocks)


def _check_form(group: Group, arrays: Sequence[Floats]) -> None:
    dtypes, dimensions = {piece.dtype for piece in arrays}, {piece.ndim for piece in arrays}
    form = (dtypes, dimensions, sum(piece.size for piece in arrays))
    if form not in [({np.dtype(dtype)}, {1}, group.elements) for dtype in FLOAT_DTYPES]:
        found = ", ".join(f"{piece.dtype} {list(piece.shape)}" for piece in arrays)
        raise LocalError(
            f"group {group.name!r}: got {found}; give float32 or float64 [{group.elements}]"
        )


def check_weights(group: Group, weights: Reals) -> None:
    """LocalError unless private weights are ``group.rows`` numbers within the declared bounds.

    Weights are float64 [rows], in the unit of ``weight_least`` and ``weight_most``. A group of
    several rows may also have weights of 0.
    """
    if weights.dtype != np.float64 or weights.shape != (group.rows,):
        raise LocalError(
            f"group {group.name!r}: weights are {weights.dtype} {list(weights.shape)}, not"
            f" [{group.rows}]"
        )
    held = (weights >= group.weight_least) & (weights <= group.weight_most)
    if group.rows > 1:  # a silo may have no record of a row's class
        held |= weights == 0
    if not held.all():
        raise LocalError(
            f"group {group.name!r}: weight {float(weights[~held][0]):g} is not between the declared"
            f" {group.weight_least} and {group.weight_most}; declare wider bounds in the job"
        )


def quantise(group: Group, values: Floats, weight: float | Reals, into: Words) -> None:
    """Write rint(weight · clip(value) · 2^e) mod 2^b into ``into``, of the same length.

    The caller has checked the values. ``weight`` is one number, or one per value.
    """
    # Clipped before it is weighted: a product that is clipped overflows the sum while the canaries
    # stay intact (security rule 15).
    clip, scale = group.clip, 2.0**group.scale_exponent
    signed = into.view(SIGNED[group.ring])
    clipped = np.empty(min(BLOCK, values.size), values.dtype)
    scaled = np.empty(clipped.size)
    for at in range(0, values.size, BLOCK):
        span = slice(at, min(at + BLOCK, values.size))
        block = scaled[: span.stop - at]
        block[:] = np.clip(values[span], -clip, clip, out=clipped[: block.size])
        # One rounding: scale is a power of two.
        factor = weight if isinstance(weight, float) else weight[span]
        block *= factor * scale
        np.rint(block, out=block)
        # Into the signed view: in C, casting a negative float to an unsigned word is undefined.
        signed[span] = block


def quantise_weights(group: Group, weights: Reals, silos: int, into: Words) -> None:
    """Write the private weights, as parts of the largest one allowed, into ``into``.

    ``weights``, which the caller has checked, are of some of the group's rows. ``silos`` is the
    size of the cohort: the sum over all of it must not wrap.
    """
    scaled = weights / group.weight_most * 2.0 ** weight_exponent(group.ring, silos)
    into.view(SIGNED[group.ring])[:] = np.rint(scaled)


def dequantise(total: Words, ring: int, exponent: int, into: Reals | None = None) -> Reals:
    """The numbers, in float64, that an opened sum stands for.

    ``into`` may be the memory of the words.
    """
    # Exact, except for words beyond 2^53.
    made: Reals = np.multiply(total.view(SIGNED[ring]), 2.0**-exponent, out=into)
    return made


def error_bound(group: Group, members: int) -> Fraction:
    """Upper bound on how far an opened sum over ``members`` silos is from Σ w clip(x).

    A fraction, since a bound that was itself rounded might be exceeded.
    """
    each = Fraction(1, 2 ** (group.scale_exponent + 1)) + Fraction(2) ** (group.clip_exponent - 52)
    return members * each
