"""Linear tags: silos see that the coordinator hands down the sum of what they sent, and nothing added to it.

Over the field of p = 2^64 - 59, for each group of tensors, with coefficients α_k from the key that all silos share and
the coordinator lacks (SECURITY.md rule 8)::

    silo j sends         T_j = Σ_k α_k q_jk + pad_j   mod p       with its upload
    coordinator          T   = Σ_j T_j                mod p       over the survivors
    silos compare        T - Σ_j pad_j = Σ_k α_k Q_k  mod p       with the integers Q that came down

A row of a Mix is Σ_j a_j q_j with public integers a_j: then T = Σ_j a_j T_j, and silos take off Σ_j a_j pad_j. Its
vectors may be of several rounds, so α has the context that they share, and each pad that of its own upload.

A sum that was shifted in any word, or that wrapped around 2^b, passes with probability 2^-63. No shift is a multiple of
p: an honest |Q| is below 2^63 - 59, so it differs from every signed word by less than p (with ring 64 and a smaller p,
such as 2^61 - 1, words shifted by p would pass).

The pads hide from the coordinator what T would tell of α. It can take them off together with one silo, and can forge
tags then. So the tags of a secure sum are under its masks as well, modulo p: streams of the very keys that mask the
words, which come off the sum over all survivors and off nothing less. Without them T_j would tell the two what q_j is
where there are few numbers to choose from: the test counts of silo j, or whether it holds a class. The tag of an upload
that is mixed has pads alone: whoever takes them off can take off those of the words, too.

A silo that sends a false tag spoils the sum for all, and what they see is the same as if the coordinator had altered a
word: nobody can tell which.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RefusedError
from .fixedpoint import SIGNED, Floats, Words
from .labels import SECAGG_PAD, SECAGG_TAG, framed
from .masks import PIECE, Keystream, Term, negated
from .pairwise import derive
from .secagg_fault import COORDINATOR, COORDINATOR_OR_SILO, Code, check

PRIME = 2**64 - 59  # the largest below 2^64
TAG_BYTES = 8
_ROW = 512  # products that are added up at a time: as floats they are off by less than 2^62 (``_added``)
_DROPPED = 11  # bits of a coefficient that no float64 has
_STEP = PIECE // 8  # coefficients that are made at a time
_NARROW = np.iinfo(np.int32)
_MASKS = 2**32 - 1  # the stream of a mask that tags take; no sum has a group of this number


class Tagger:
    """Takes in a vector group by group, in order, and gives Σ_k α_k q_k mod p of each group."""

    def __init__(self, group_key: bytes, ctx: bytes, groups: int) -> None:
        key = derive(group_key, ctx, framed(SECAGG_TAG))
        self._streams = [Keystream(key, index) for index in range(groups)]
        self._alpha, self._scratch = np.empty(_STEP, np.uint64), np.empty((3, _STEP), np.uint64)
        self.sums = [0] * groups

    def add(self, group: int, words: Words) -> None:
        """The next words of a group, mod 2^32 or 2^64, taken as signed integers."""
        ring = 8 * words.itemsize
        signed = words.view(SIGNED[ring])
        for at in range(0, words.size, _STEP):
            piece = signed[at : at + _STEP]
            alpha = self._alpha[: piece.size]
            self._streams[group].fill(alpha.data.cast("B"))
            self.sums[group] = (self.sums[group] + _product(alpha, piece, self._scratch[:, : piece.size])) % PRIME

    def padded(
        self,
        group_key: bytes,
        ctx: bytes,
        silo: str,
        own: Mapping[int, bytes] | None = None,
        terms: Sequence[Term] = (),
    ) -> bytes:
        """What a silo sends: its sums under its pads and, in a secure sum, the masks of ``terms``; 8 bytes a group.

        ``own``, by group, are keys of pads that one other silo has, in place of the one that all have.
        """
        pads = self._pads(group_key, ctx, silo)
        for index, key in (own or {}).items():
            pads[index] = self._pads(key, ctx, silo)[index]
        return _masked([value + pad for value, pad in zip(self.sums, pads, strict=True)], terms)

    def check(self, combined: bytes, group_key: bytes, ctx: bytes, survivors: Sequence[str]) -> None:
        """RefusedError unless this vector is the sum of what the survivors tagged."""
        self.check_weighted(combined, group_key, [Padded(silo, ctx) for silo in survivors])

    def check_weighted(self, combined: bytes, group_key: bytes, summed: Sequence["Padded"]) -> None:
        """RefusedError unless this vector is the weighted sum of these tagged ones."""
        tags = decoded(combined, len(self.sums))
        check(tags is not None, COORDINATOR, Code.SUM, f"brings tags of {len(combined)} bytes that are none")
        pads = [(self._pads(group_key, each.ctx, each.silo), each.weight) for each in summed]
        for index, tag in enumerate(tags or ()):
            self._compare(index, tag, [(pad[index], weight) for pad, weight in pads])

    def check_group(
        self, group: int, tag: bytes, keys: Mapping[str, bytes], ctx: bytes, survivors: Sequence[str]
    ) -> None:
        """RefusedError unless one group, which alone was taken in, is the sum of what the survivors tagged.

        ``keys``, by survivor, are those of their pads.
        """
        tags = decoded(tag, 1)
        check(tags is not None, COORDINATOR, Code.SUM, f"brings a tag of {len(tag)} bytes that is none")
        self._compare(group, (tags or [0])[0], [(self._pads(keys[silo], ctx, silo)[group], 1) for silo in survivors])

    def _compare(self, group: int, tag: int, pads: Sequence[tuple[int, int]]) -> None:
        found = (tag - sum(pad * weight for pad, weight in pads)) % PRIME
        why = f"brings a sum of group {group} that was altered, or of which a silo falsified its tag"
        check(found == self.sums[group], COORDINATOR_OR_SILO, Code.SUM, why)

    def _pads(self, group_key: bytes, ctx: bytes, silo: str) -> list[int]:
        """Uniform mod p but for 2^-64, one a group."""
        return _uniform(derive(group_key, ctx, framed(SECAGG_PAD, silo.encode())), 0, len(self.sums))


@dataclass(frozen=True, slots=True)
class Padded:
    """Whose pads are on a combined tag, made for which context, and how often: the integer weight of its vector."""

    silo: str
    ctx: bytes
    weight: int = 1


def combine(
    tags: Mapping[str, bytes], groups: int, weights: Mapping[str, int] | None = None, terms: Sequence[Term] = ()
) -> bytes:
    """At the coordinator: the sum of the survivors' tags; RefusedError names a silo that sent none.

    ``weights`` are the integers that it adds the vectors with, by silo; each 1 if there are none. ``terms`` are the
    masks that are still on a secure sum.
    """
    totals = [0] * groups
    for silo, sent in tags.items():
        weight = 1 if weights is None else weights[silo]
        values = decoded(sent, groups)
        if values is None:
            raise RefusedError(silo, Code.UPLOAD, f"its tags, {len(sent)} bytes, are not {groups} numbers of the field")
        totals = [(total + weight * value) % PRIME for total, value in zip(totals, values, strict=True)]
    return _masked(totals, negated(terms))


def decoded(data: bytes, groups: int) -> list[int] | None:
    """The tags in one spelling each; None for anything else."""
    if len(data) != TAG_BYTES * groups:
        return None
    values = [int.from_bytes(data[at : at + TAG_BYTES]) for at in range(0, len(data), TAG_BYTES)]
    return values if all(value < PRIME for value in values) else None


def _masked(values: Sequence[int], terms: Iterable[Term]) -> bytes:
    """With a number of each term's stream on every value, uniform mod p but for 2^-64."""
    sums = list(values)
    for term in terms:
        times = -term.times if term.negative else term.times
        sums = [value + times * mask for value, mask in zip(sums, _uniform(term.key, _MASKS, len(sums)), strict=True)]
    return _encoded(value % PRIME for value in sums)


def _uniform(key: bytes, stream: int, count: int) -> list[int]:
    made = memoryview(bytearray(16 * count))
    Keystream(key, stream).fill(made)
    return [int.from_bytes(made[at : at + 16]) % PRIME for at in range(0, len(made), 16)]


def _encoded(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(TAG_BYTES) for value in values)


def _product(alpha: Words, numbers: Words, scratch: Words) -> int:
    """Σ α q, exact; ``scratch`` is [3, n] uint64.

    Numbers that fit 32 bits, as all that one silo mixes, are taken whole, others as low + 2^32 high.
    """
    near, real, part = scratch[0].view(np.float64), scratch[1].view(np.float64), scratch[2]
    signed = part.view(np.int64)
    np.right_shift(alpha, np.uint64(_DROPPED), out=part)
    near[:] = signed  # exact
    if numbers.dtype == np.int32:
        signed[:] = real[:] = numbers
        return _added(alpha, near, part, real)
    if _NARROW.min <= numbers.min() and numbers.max() <= _NARROW.max:
        real[:] = numbers
        return _added(alpha, near, numbers.view(np.uint64), real)
    np.bitwise_and(numbers, np.int64(0xFFFFFFFF), out=signed)
    real[:] = signed
    low = _added(alpha, near, part, real)
    np.right_shift(numbers, np.int64(32), out=signed)
    real[:] = signed
    return low + (_added(alpha, near, part, real) << 32)


def _added(alpha: Words, near: Floats, numbers: Words, real: Floats) -> int:
    """Σ α q, exact, of numbers below 2^32 in magnitude; ``near`` and ``real`` are ⌊α / 2^11⌋ and q as floats.

    A row's sum S is known mod 2^64 from integers that wrap, as r in [0, 2^64), and nearly from floats: what α lost,
    each product's rounding and, in whatever order they are added (Higham, "Accuracy and Stability of Numerical
    Algorithms", section 3.1), 511 roundings of the sum come to less than 2^9 (2^43 + 2^43 + 2^52) < 2^62. So
    S = r + 2^64 k, and the float that says k is off by less than 1/2.
    """
    whole = alpha.size // _ROW * _ROW
    total = _rows(*(each[:whole].reshape(-1, _ROW) for each in (alpha, near, numbers, real)))
    if whole < alpha.size:
        total += _rows(*(each[None, whole:] for each in (alpha, near, numbers, real)))
    return total


def _rows(alpha: Words, near: Floats, numbers: Words, real: Floats) -> int:
    wrapped = np.einsum("ij,ij->i", alpha, numbers)
    times = np.rint(np.vecdot(near, real) * 2.0 ** (_DROPPED - 64) - wrapped * 2.0**-64)
    total: int = sum(wrapped.tolist()) + (int(times.sum()) << 64)
    return total
