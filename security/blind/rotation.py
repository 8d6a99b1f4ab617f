"""Secret rotations: ``Gram`` over vectors that the coordinator sees only up to a rotation Q.

All silos make Q from the key that the coordinator lacks, once for each (epoch, job, round, attempt,
tensor group, class), and send Q v: inner products are those of the v, to about d · 2^-53
(security rules 2 and 14). Q is Haar, so a Gram is all that Q v tells. It is built from the
inside, where u_m is uniform on the sphere of dimension m::

    Q_1 = ±1,  Q_m = s H (1 ⊕ Q_(m-1)) with H = I - 2 w wᵀ / wᵀw, w = g + sign(g_1) ‖g‖ e_1, s =
               -sign(g_1)

s H takes e_1 to u_m = g / ‖g‖, g [m] being Gaussian: the first column is uniform, and what is left
is Haar in the complement. No matrix is formed: a vector takes about 2 d² multiplications, and Q
itself d² / 2 Gaussian numbers.

Two machines must have the same Q bit for bit (two correct QRs of one Gaussian give unrelated
vectors). So float64 is only added, subtracted, multiplied, divided and rooted, element by element,
each of which IEEE 754 rounds in one way; sums are folded in halves, in an order that depends on
their length alone. No BLAS, no reduction of a library, no libm: the logarithm of Marsaglia's polar
method is a polynomial below.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...algorithms.exchange.parts import DISCLOSED, Kind
from ...errors import LocalError, check_local
from ...files.documents import Strict
from ..arithmetic.fixedpoint import Reals, Words
from ..arithmetic.masks import PIECE, Keystream
from ..faults import COORDINATOR, Code, check
from ..identity.domains import GRAM_ROTATION, GRAM_USE, GRAM_VECTORS, framed
from ..identity.pairwise_keys import derive

LN2 = 0.6931471805599453
TERMS = 12  # of atanh: the next would be below 2^-60
AHEAD = 1 << 14  # numbers of a key that are made at once

Ordinal = Annotated[int, Field(strict=True, ge=-1, le=2**53 - 1)]


@dataclass(frozen=True, slots=True)
class Use:
    """The one use of a Q; ``epoch`` is the group key's, ``row`` the compared class.

    The key of a rotation depends on all fields, so no two uses share a rotation. ``job`` is the
    digest of the job's document, in hex.
    """

    epoch: int
    job: str
    round: int
    attempt: int
    group: str
    row: int

    def key(self, group_key: bytes) -> bytes:
        """The key of this Q, 32 bytes.

        Whoever has the group key can derive it; the coordinator lacks that key.
        """
        # No salt is needed: ``info`` has every field of the use.
        return derive(group_key, b"", framed(GRAM_ROTATION, *self._fields))

    def context(self, federation: str, roster: str) -> bytes:
        """Ctx of an upload of vectors rotated for this use, 32 bytes.

        ``roster`` is the digest of the roster, hex.
        """
        under = (federation.encode(), bytes.fromhex(roster))
        return hashlib.sha256(framed(GRAM_USE, *under, *self._fields)).digest()

    @property
    def _fields(self) -> tuple[bytes, ...]:
        numbers = (self.epoch, self.round, self.attempt, self.row)
        return (self.job.encode(), self.group.encode(), *(each.to_bytes(8) for each in numbers))


class RotationMemory(Strict):
    """The newest attempt for which this silo rotated a group's vectors; durable before they leave.

    Canonical JSON: ``{"attempt":0,"round":17,"vectors":"9f86…"}``. Under one Q two vectors of a
    silo could be compared over rounds, so an attempt is for one set of vectors, ``vectors`` being
    its digest: after a restart the very same may be rotated again, which gives the same bytes.
    """

    round: Ordinal = -1
    attempt: Ordinal = -1
    vectors: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    def used(self, round_number: int, attempt: int, vectors: str) -> Self:
        """Memory of rotating for an attempt.

        RefusedError unless it is newer than all before, or the same again.
        """
        asked = (round_number, attempt)
        why = (
            f"asks for rotated vectors of round {round_number}, attempt {attempt}, after round"
            f" {self.round}"
        )
        newer = asked > (self.round, self.attempt)
        check(
            newer or asked == (self.round, self.attempt),
            COORDINATOR,
            Code.ATTEMPT,
            f"{why}, attempt {self.attempt}",
        )
        check_local(
            newer or vectors == self.vectors,
            f"round {round_number}, attempt {attempt}: other vectors were rotated before, and"
            " under one rotation two could be compared; this silo uploads none in this round",
        )
        return type(self)(round=round_number, attempt=attempt, vectors=vectors)


def digest_of(vectors: Reals) -> str:
    """Names vectors [n, d] in the memory of their silo: SHA-256, hex.

    It never leaves: guesses could be tried.
    """
    # The shape is hashed too: the same numbers in another shape are other vectors.
    shape = (size.to_bytes(8) for size in vectors.shape)
    return hashlib.sha256(
        framed(GRAM_VECTORS, *shape, np.ascontiguousarray(vectors, "<f8").tobytes())
    ).hexdigest()


def check_kind(part: str, kind: Kind) -> None:
    """LocalError for a part whose Gram discloses it (rule 2): counts, memberships and metrics.

    Their numbers are never negative, so inner products reveal them up to the order of classes.
    """
    check_local(
        kind not in DISCLOSED,
        f"part {part!r} is of kind {kind.name.lower()}: its inner products disclose it up to"
        " the order of classes; noise it and give it by another exchange",
    )


def check_vectors(part: str, vectors: Reals) -> None:
    """LocalError unless each vector [n, d] is zero, or finite and of both signs (rule 2)."""
    check_local(
        bool(np.isfinite(vectors).all()),
        f"part {part!r} holds NaN or infinity; training has diverged, lower the lr",
    )

    # From the Gram of histograms they came back up to the order of classes, with a median error of
    # 0.0005 at 50 silos (security rule 2).
    one_sided = (vectors >= 0).all(axis=1) ^ (vectors <= 0).all(axis=1)
    if one_sided.any():
        raise LocalError(
            f"part {part!r}: vector {int(np.flatnonzero(one_sided)[0])} has entries of one sign"
            " only; inner products of such vectors disclose them, so they do not cross by Gram"
        )


def rotate(vectors: Reals, key: bytes) -> Reals:
    """Q v for each of ``vectors`` [n, d] float64.

    The same bits for the same v and key, whatever n and the machine.
    """
    return _rotate(vectors, (key,))


def rotate_each(vectors: Reals, keys: Sequence[bytes]) -> Reals:
    """Each vector rotated under a key of its own: the same bits as one by one, in less time.

    LocalError unless there is one key per vector, or the vectors are not float64 [n, d].
    """
    matched = len(keys) == len(vectors)
    check_local(matched, f"{len(keys)} keys for {len(vectors)} vectors; give one for each")
    return _rotate(vectors, keys)


def _rotate(vectors: Reals, keys: Sequence[bytes]) -> Reals:
    if vectors.ndim != 2 or vectors.dtype != np.float64 or not vectors.shape[1]:
        raise LocalError(f"vectors are {vectors.dtype} {list(vectors.shape)}; give float64 [n, d]")

    # [d, n]: each sum below is over the first axis, so n does not matter to its order
    turned = vectors.T.copy()
    d = len(turned)
    for m, g in enumerate(_reflecting(keys, d), start=1):  # [m, 1 or n]
        # The sign of g_1: w_1 is then a sum of two numbers of one sign, which loses no digits.
        sign = np.where(g[0] < 0, -1.0, 1.0)
        here = turned[d - m :]  # [m, n]
        if m > 1:
            w = g.copy()
            w[0] += sign * np.sqrt(folded(g * g))
            along = folded(w * here) * (2.0 / folded(w * w))  # [n]
            here -= w * along
        here *= -sign
    return turned.T.copy()


def _reflecting(keys: Sequence[bytes], d: int) -> Iterator[Reals]:
    """The first m numbers of each key's m-th stream of Gaussians, [m, keys], for m = 1 to d."""
    # Streams of several lengths are made at once, which takes less time and gives the same numbers.
    first = 1
    while first <= d:
        last = first
        while last < d and (last + 1 - first) * (last + 1) <= AHEAD:
            last += 1
        made = [_streams(key, range(first, last + 1)) for key in keys]
        for of_each in zip(*made, strict=True):
            yield np.stack(of_each, axis=1)
        first = last + 1


def _streams(key: bytes, lengths: range) -> list[Reals]:
    """``gaussians(key, m, m)`` for each of these m; all but their words is made at once."""
    pairs = [_pairs(m) for m in lengths]
    words = np.empty((sum(pairs), 2), "<u8")
    ends = np.cumsum(pairs)
    for m, end, count in zip(lengths, ends, pairs, strict=True):
        # A stream per vector: points outside of the circle are skipped, so the number of words
        # that a vector takes varies.
        Keystream(key, m).fill(words[end - count : end].data.cast("B"))
    found, inside = _polar(words)
    upto = 2 * np.cumsum(inside)[ends - 1]
    each = [found[start:stop] for start, stop in zip((0, *upto[:-1]), upto, strict=True)]
    return [
        # If too few points lay inside, the same stream is read again from its start, and further.
        made[:m] if len(made) >= m else gaussians(key, m, m)
        for m, made in zip(lengths, each, strict=True)
    ]


def folded(values: Reals) -> Reals:
    """The sum over the first axis, by halves: an order that depends on the length alone.

    Overwrites ``values``.
    """
    # A library's reduction may add in another order on another processor.
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    total: Reals = values[0]
    return total


def gaussians(key: bytes, stream: int, count: int) -> Reals:
    """Standard Gaussians of a keyed stream, [count] float64, by Marsaglia's polar method.

    "A convenient method for generating normal variables", SIAM Review, 1964. Two words of the
    stream make a point of the square; one outside the unit circle is passed over, one inside gives
    two numbers.
    """
    source, made = Keystream(key, stream), np.empty(count)
    filled = 0
    while filled < count:
        words = np.empty((_pairs(count - filled), 2), "<u8")
        source.fill(words.data.cast("B"))
        # Numbers that are left over are dropped: nothing else reads this stream.
        found = _polar(words)[0][: count - filled]
        made[filled : filled + len(found)] = found
        filled += len(found)
    return made


def _pairs(count: int) -> int:
    """Points that are made at a time for so many numbers: a part more than they take on average."""
    return min(PIECE // 16, count * 2 // 3 + 8)


def _polar(words: Words) -> tuple[Reals, npt.NDArray[np.bool_]]:
    """The numbers of the points [pairs, 2] in these words, in order, and which lie inside."""
    points = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0  # exact, in [-1, 1)
    s = points[:, 0] * points[:, 0] + points[:, 1] * points[:, 1]
    inside = (s < 1.0) & (s > 0.0)
    s = s[inside]
    return (points[inside] * np.sqrt(-2.0 * _logarithm(s) / s)[:, None]).reshape(-1), inside


def _logarithm(values: Reals) -> Reals:
    """Natural logarithm of positive numbers: exponent · ln 2 + 2 atanh((m - 1) / (m + 1)).

    It is exact to some last places.
    """
    mantissa, exponent = np.frexp(values)  # exact, in [1/2, 1)
    low = mantissa < 0.7071067811865476
    # With the mantissa around 1, |z| is at most 0.172, so the series is short.
    mantissa = np.where(low, mantissa * 2.0, mantissa)  # in [√½, √2)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = z * z, np.zeros_like(z)
    for k in range(TERMS, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return (exponent - low).astype(np.float64) * LN2 + 2.0 * z * series
