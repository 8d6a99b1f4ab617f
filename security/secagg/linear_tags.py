"""Linear tags: silos see that the coordinator delivers the sum of what they sent, unaltered.

There is one tag per group of tensors, over the field of p = 2^64 - 59. Its coefficients come from
the key that all silos share and the coordinator lacks (security rule 8). Number k stands in row
r = ⌊k / 512⌋ and column c = k mod 512 of a table::

    H(q)                 Σ_r β_r Σ_c α_c q_rc         mod p       linear in q
    silo j sends         T_j = H(q_j) + pad_j         mod p       with its upload
    coordinator          T   = Σ_j T_j                mod p       over the survivors
    silos compare        T - Σ_j pad_j = H(Q)         mod p       with the integers Q that came down

A row of a Mix is Σ_j a_j q_j with public integers a_j: then T = Σ_j a_j T_j, and silos take off Σ_j
a_j pad_j. Its vectors may be of several rounds, so α and β have the context that they share, and
each pad has the context of its own upload.

A sum that was shifted in any word, or that wrapped around 2^b, passes with probability 2 / p, about
2^-63, whatever is added to T: the shift has a row that is not 0, whose sum under α is 0 with 1 / p;
if it is not, one β_r in p fits. So the bounds of two families of hash functions add up where they
are composed (Stinson, "Universal hashing and authentication codes", Designs, Codes and
Cryptography, 1994). With a coefficient of its own for each number it would be 1 / p, and their
stream twice as long as words of 32 bits. No shift is a multiple of p: an honest |Q| is below 2^63 -
59, so it differs from every signed word by less than p (with ring 64 and a smaller p, such as 2^61
- 1, words shifted by p would pass).

The pads hide from the coordinator what T would tell of α. It can take them off together with one
silo, and can forge tags then. So the tags of a secure sum are under its masks as well, modulo p:
streams of the very keys that mask the words, which come off the sum over all survivors and off
nothing less. Without them T_j would tell the two what q_j is where there are few numbers to choose
from: the test counts of silo j, or whether it holds a class. The tag of an upload that is mixed has
pads alone: whoever takes them off can take off those of the words, too.

A silo that sends a false tag spoils the sum for all, and what they see is the same as if the
coordinator had altered a word: nobody can tell which.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ...errors import LocalError, RefusedError
from ..arithmetic.fixedpoint import SIGNED, Reals, Words
from ..arithmetic.masks import Keystream, Term, negated
from ..faults import COORDINATOR, COORDINATOR_OR_SILO, Code, check
from ..identity.domains import SECAGG_PAD, SECAGG_TAG, framed
from ..identity.pairwise_keys import derive

PRIME = 2**64 - 59  # the largest below 2^64
TAG_BYTES = 8
SIDE = 512  # columns of the table, and rows that are added up at a time: a page
_AT_ONCE = 64  # rows whose numbers are floats at a time: 256 KiB, inside a core's cache
_DIGIT = 13  # bits of a coefficient's digits
_DIGITS = 5  # of a coefficient, which is below 2^64
_HALF = 32  # bits of the halves of larger numbers
_MASKS = 2**32 - 1  # the stream of a mask that tags take; no sum has a group of this number


class Tagger:
    """Takes in a vector group by group, in order, and gives H(q) of each group.

    A group may come in any number of pieces. Memory holds one page of a table, whatever the size of
    the group.
    """

    def __init__(self, group_key: bytes, ctx: bytes, groups: int) -> None:
        self._key = derive(group_key, ctx, framed(SECAGG_TAG))
        self._done = [0] * groups
        # -1 before the first words; a group without words has the sum 0.
        self._group, self._table = -1, _Table(Keystream(self._key, 0))
        self._scratch = np.empty((_AT_ONCE, SIDE))

    @property
    def sums(self) -> list[int]:
        """H of what each group has so far."""
        sums = list(self._done)
        if self._group >= 0:
            sums[self._group] = self._table.value()
        return sums

    def add(self, group: int, words: Words) -> None:
        """The next words of a group, mod 2^32 or 2^64, taken as signed integers.

        LocalError for a group before it.
        """
        if group < self._group:
            raise LocalError(
                f"tags group {group} after group {self._group}; this is a bug in Staddle"
            )
        if group > self._group:
            self._done = self.sums
            self._group, self._table = group, _Table(Keystream(self._key, group))
        # Tags are over signed integers, whose sums do not wrap; words are added mod 2^b.
        self._table.add(words.view(SIGNED[8 * words.itemsize]), self._scratch)

    def padded(
        self,
        group_key: bytes,
        ctx: bytes,
        silo: str,
        own: Mapping[int, bytes] | None = None,
        terms: Sequence[Term] = (),
    ) -> bytes:
        """The tags that a silo sends: its sums under its pads and, in a secure sum, its masks.

        8 bytes per group. ``terms`` are the masks. ``own``, by group, are pad keys that only one
        other silo has; they replace the key that all silos have.
        """
        # A row's tag must not show its numbers to other silos, which have the key that all share.
        pads = self._pads(group_key, ctx, silo)
        for index, key in (own or {}).items():
            pads[index] = self._pads(key, ctx, silo)[index]
        return _masked([value + pad for value, pad in zip(self.sums, pads, strict=True)], terms)

    def check(
        self, combined: bytes, group_key: bytes, ctx: bytes, survivors: Sequence[str]
    ) -> None:
        """RefusedError unless this vector is the sum of what the survivors tagged.

        The code is SUM. A malformed tag is the coordinator's fault. For one that does not fit it
        blames the coordinator or a silo of the cohort, since nobody can tell who altered what.
        """
        self.check_weighted(combined, group_key, [TagPads(silo, ctx) for silo in survivors])

    def check_weighted(
        self, combined: bytes, group_key: bytes, summed: Sequence["TagPads"]
    ) -> None:
        """RefusedError unless this vector is the weighted sum of these tagged ones.

        ``summed`` has the silo, the context and the integer weight of each vector in the sum. Code
        and blame are those of ``check``.
        """
        tags = decoded(combined, len(self._done))
        if tags is None:
            why = f"brings tags of {len(combined)} bytes that are none"
            raise RefusedError(COORDINATOR, Code.SUM, why)
        pads = [(self._pads(group_key, each.ctx, each.silo), each.weight) for each in summed]
        for index, tag in enumerate(tags):
            self._compare(index, tag, [(pad[index], weight) for pad, weight in pads])

    def check_group(
        self,
        group: int,
        tag: bytes,
        keys: Mapping[str, bytes],
        ctx: bytes,
        survivors: Sequence[str],
    ) -> None:
        """RefusedError unless a group, taken in alone, is the sum of what the survivors tagged.

        ``keys``, by survivor, are those of their pads.
        """
        tags = decoded(tag, 1)
        if tags is None:
            why = f"brings a tag of {len(tag)} bytes that is none"
            raise RefusedError(COORDINATOR, Code.SUM, why)
        pads = [(self._pads(keys[silo], ctx, silo)[group], 1) for silo in survivors]
        self._compare(group, tags[0], pads)

    def _compare(self, group: int, tag: int, pads: Sequence[tuple[int, int]]) -> None:
        found = (tag - sum(pad * weight for pad, weight in pads)) % PRIME
        why = (
            f"brings a sum of group {group} that was altered, or of which a silo falsified its tag"
        )
        check(found == self.sums[group], COORDINATOR_OR_SILO, Code.SUM, why)

    def _pads(self, group_key: bytes, ctx: bytes, silo: str) -> list[int]:
        """One per group, uniform mod p but for 2^-64."""
        return _uniform(
            derive(group_key, ctx, framed(SECAGG_PAD, silo.encode())), 0, len(self._done)
        )


@dataclass(frozen=True, slots=True)
class TagPads:
    """A silo's pads on a combined tag: their context, and the integer weight of its vector."""

    silo: str
    ctx: bytes
    weight: int = 1


def combine(
    tags: Mapping[str, bytes],
    groups: int,
    weights: Mapping[str, int] | None = None,
    terms: Sequence[Term] = (),
) -> bytes:
    """At the coordinator: the sum of the survivors' tags; RefusedError names a silo that sent none.

    ``weights`` are the integers that it multiplies the vectors by, per silo; each is 1 without
    them. ``terms`` are the masks that are still on a secure sum.
    """
    # Linear, so the coordinator can add tags that it cannot make.
    totals = [0] * groups
    for silo, sent in tags.items():
        weight = 1 if weights is None else weights[silo]
        values = decoded(sent, groups)
        if values is None:
            raise RefusedError(
                silo,
                Code.UPLOAD,
                f"its tags, {len(sent)} bytes, are not {groups} numbers of the field",
            )
        pairs = zip(totals, values, strict=True)
        totals = [(total + weight * value) % PRIME for total, value in pairs]
    return _masked(totals, negated(terms))


def decoded(data: bytes, groups: int) -> list[int] | None:
    """The tags in one spelling each; None for anything else.

    ``data`` is a peer's. A tag has TAG_BYTES, big-endian, and is below p.
    """
    if len(data) != TAG_BYTES * groups:
        return None
    values = [int.from_bytes(data[at : at + TAG_BYTES]) for at in range(0, len(data), TAG_BYTES)]
    # A number of p or more would be a second spelling of the same tag.
    return values if max(values, default=0) < PRIME else None


def _masked(values: Sequence[int], terms: Iterable[Term]) -> bytes:
    """The values with a number of each term's stream on them, uniform mod p but for 2^-64."""
    sums = list(values)
    for term in terms:
        times = -term.times if term.negative else term.times
        pairs = zip(sums, _uniform(term.key, _MASKS, len(sums)), strict=True)
        sums = [value + times * mask for value, mask in pairs]
    return _encoded(value % PRIME for value in sums)


def _uniform(key: bytes, stream: int, count: int) -> list[int]:
    # From 128 bits per number, so that the numbers mod p are uniform but for 2^-64.
    made = memoryview(bytearray(16 * count))
    Keystream(key, stream).fill(made)
    return [int.from_bytes(made[at : at + 16]) % PRIME for at in range(0, len(made), 16)]


def _encoded(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(TAG_BYTES) for value in values)


class _Table:
    """H of one group, whose numbers come in order, cut anywhere.

    All is exact. A product of matrices adds up ``SIDE`` = 2^9 products of an integer of at most
    2^31 in magnitude and a digit below 2^13, so every partial sum is an integer below 2^53,
    whatever the order: float64 has it as it is. Larger integers are taken in halves, low + 2^32
    high.
    """

    def __init__(self, stream: Keystream) -> None:
        # The stream begins with α, which serves all pages; β follows page by page.
        self._columns, self._stream = _digits(_field(stream, SIDE)), stream
        self._total, self._at = 0, 0  # H of whole pages; numbers in the open page
        self._begin()

    def _begin(self) -> None:
        self._rows = _digits(_field(self._stream, SIDE))
        # Σ_c α_c q_rc of its rows, by the half of q and the digit of α
        self._page = np.zeros((2, SIDE, _DIGITS))

    def add(self, numbers: Words, scratch: Reals) -> None:
        """The next signed integers; ``scratch`` is [rows, SIDE] float64."""
        left = numbers
        while left.size:
            row, column = divmod(self._at, SIDE)
            rows = min(len(scratch), SIDE - row)
            block, left = left[: rows * SIDE - column], left[rows * SIDE - column :]
            end = column + block.size
            # ``_halves`` yields no high halves for a block whose integers all fit into 32 bits.
            for page, half in zip(self._page, _halves(block), strict=False):
                used = scratch[: -(-end // SIDE)]
                flat = used.reshape(-1)
                # The scratch holds numbers of the previous block before and after this one.
                flat[:column], flat[end:] = 0, 0
                flat[column:end] = half
                # Exact in whatever order BLAS adds the 512 products (class docstring).
                page[row : row + len(used)] += used @ self._columns
            self._at += block.size
            # A full page becomes one number, so memory does not grow with the group.
            if self._at == SIDE * SIDE:
                self._total, self._at = self.value(), 0
                self._begin()

    def value(self) -> int:
        """H of the numbers so far."""
        total = self._total
        for shift, sums in zip((0, _HALF), self._page, strict=True):
            # With words of 32 bits, the page of high halves is all zeros.
            if not sums.any():
                continue
            high = np.rint(sums * 2.0**-_HALF)  # below 2^21, and what is left at most 2^31
            for half, part in ((0, sums - high * 2.0**_HALF), (_HALF, high)):
                # Python integers from here on, since the shifts exceed 64 bits.
                products = (part.T @ self._rows).tolist()
                for i, j in product(range(_DIGITS), repeat=2):
                    total += int(products[i][j]) << (shift + half + _DIGIT * (i + j))
        return total % PRIME


def _halves(numbers: Words) -> Iterator[Words]:
    """Low halves from -2^31 to 2^31 - 1 and, where there are any, high ones up to 2^31."""
    if numbers.itemsize == _HALF // 8:
        yield numbers
        return
    low = numbers.astype(np.int32)  # mod 2^32
    yield low
    # A low half that reads as negative is 2^32 too low, so the high half takes one more.
    high = (numbers >> _HALF) + (low < 0)
    if high.any():
        yield high


def _field(stream: Keystream, count: int) -> Words:
    """The next numbers below 2^64, uniform mod p but for 2^-32 of each probability.

    Each is made of 96 bits: h 2^64 + l ≡ 59 h + l.
    """
    low, high = np.empty(count, "<u8"), np.empty(count, "<u4")
    for made in (low, high):
        stream.fill(made.data.cast("B"))
    rest = np.uint64(2**64 - PRIME)
    found = low + rest * high
    found[found < low] += rest  # it wrapped around 2^64, by less than 2^38
    return found


def _digits(numbers: Words) -> Reals:
    """The digits of numbers [n] below 2^64 as floats [n, _DIGITS], the lowest first."""
    shifts = np.arange(_DIGITS, dtype=np.uint64) * np.uint64(_DIGIT)
    digits: Reals = ((numbers[:, None] >> shifts) & np.uint64(2**_DIGIT - 1)).astype(np.float64)
    return digits
