"""The numbers of a secure sum: chunks at a silo, one accumulator at the coordinator.

A group's words are its elements, row by row, then its private weights. They cross in chunks of
``chunk_bytes``, each with canaries at its end: one, and four in the last chunk of a group::

    chunk_bytes = 64, ring 32, 20 elements    15 words, 1 canary | 5 words, 4 canaries

Canaries are the first words of SHA-256(framed(CANARY, ctx, group, chunk)); opened, each must be its
word times the number of survivors. They reveal masks that did not come off by accident; they prove
nothing against a coordinator.

An opened sum is no larger than its survivors' values can make it (``check_bounds``). If it is, a
silo sent words that stand for no value within the clip; within the clip a silo may still contribute
what it likes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import RefusedError, check_local
from ..arithmetic.fixedpoint import (
    BLOCK,
    COORDINATOR_READS,
    SIGNED,
    WORD,
    Flat,
    Floats,
    Group,
    Reals,
    Words,
    check_values,
    check_weights,
    cut,
    dequantise,
    quantise,
    quantise_weights,
    weight_exponent,
)
from ..arithmetic.masks import Mask, Term, add_whole, negated
from ..faults import COORDINATOR, COORDINATOR_OR_SILO, Code, check
from ..identity.domains import SECAGG_CANARY, framed
from .linear_tags import Tagger
from .spec import RoundSpec

LAST_CANARIES = 4


@dataclass(frozen=True, slots=True)
class GroupValues:
    """A silo's values [elements] for one group, and weights [rows] where they are private.

    Values are float32 or float64, in one array or in several of one dtype. Weights are float64,
    within the bounds that the group declares. ``check_group_values`` checks all of it.
    """

    values: Flat
    weights: Reals | None = None


@dataclass(frozen=True, slots=True)
class GroupChunk:
    """A piece of one group: ``body`` of its numbers from ``start`` on, then canaries.

    ``group`` is the group's index in the specification, ``number`` the chunk's index in the group.
    ``start`` counts numbers without canaries, ``first`` counts all words.
    """

    group: int
    number: int
    first: int
    start: int
    body: int
    canaries: int

    @property
    def words(self) -> int:
        """How many words the chunk has."""
        return self.body + self.canaries


@dataclass(frozen=True)
class OpenedGroup:
    """The sum of one group over the survivors, still as words; numbers are made on request.

    ``weight`` is Σ w, [rows] float64. Public weights w are the declared counts, private ones those
    that the silos uploaded, equal ones 1.
    """

    elements: int
    ring: int
    exponent: int
    unit: float  # what a weight of 1 in the ring stands for
    weight: Reals
    pieces: tuple[tuple[int, Words], ...]  # first element, words

    @property
    def total(self) -> Reals:
        """Σ w x, [elements] float64."""
        made = np.empty(self.elements)
        for start, words in self.pieces:
            made[start : start + words.size] = (
                dequantise(words, self.ring, self.exponent) * self.unit
            )
        return made

    def mean(self, dtype: npt.DTypeLike = np.float32, memory: Words | None = None) -> Floats:
        """Σ w x / Σ w, [elements], row by row; rows without weight are zeros.

        It needs no temporary of that size. ``memory``, of the words in one piece, becomes the
        result where its words are as wide as the numbers; the words are lost then.
        """
        made = self._result(np.dtype(dtype), memory)
        factor = np.divide(
            self.unit, self.weight, out=np.zeros_like(self.weight), where=self.weight > 0
        )
        factor *= 2.0**-self.exponent  # exact

        # Block by block, inside a core's cache: the numbers of all elements would be a temporary.
        columns, scratch = self.elements // len(factor), np.empty(min(BLOCK, self.elements))
        for start, block in self.blocks():
            numbers, stop = scratch[: block.size], start + block.size
            numbers[:] = block
            one_row = len(factor) == 1
            numbers *= factor[0] if one_row else factor[np.arange(start, stop) // columns]
            made[start:stop] = numbers
        return made

    def _result(self, dtype: np.dtype[Any], memory: Words | None) -> Floats:
        if memory is None or memory.itemsize != dtype.itemsize:
            return np.empty(self.elements, dtype)
        # In place: ``mean`` copies each block before it writes the result over the same bytes.
        return memory[: self.elements].view(dtype)

    def blocks(self) -> Iterator[tuple[int, Words]]:
        """The signed integers of the sum, each block with its first element."""
        for first, words in self.pieces:
            for at in range(0, words.size, BLOCK):
                yield first + at, words[at : at + BLOCK].view(SIGNED[self.ring])


def chunks(spec: RoundSpec) -> Iterator[GroupChunk]:
    """All chunks of an upload, in order."""
    for index, group in enumerate(spec.groups):
        width = spec.chunk_bytes // (group.ring // 8)
        # A last chunk has room for all four canaries, so none of them is cut off by its end.
        number = first = start = 0
        while True:
            left = group.body - start
            last = left <= width - LAST_CANARIES
            chunk = GroupChunk(
                index, number, first, start, min(left, width - 1), LAST_CANARIES if last else 1
            )
            yield chunk
            if last:
                break
            number, first, start = number + 1, first + chunk.words, start + chunk.body


def upload_bytes(spec: RoundSpec) -> int:
    """Length of the masked words of every upload, canaries included.

    Shares of compared vectors, if any, follow after them (``gram_pieces.message_bytes``).
    """
    return sum(chunk.words * (spec.groups[chunk.group].ring // 8) for chunk in chunks(spec))


def canaries(ctx: bytes, chunk: GroupChunk, ring: int) -> Words:
    """The words at the end of a chunk.

    They depend on context, group and chunk, so silos and coordinator compute the same ones. They
    are not secret.
    """
    fields = (ctx, chunk.group.to_bytes(8), chunk.number.to_bytes(8))
    # 32 bytes are enough in either ring for the four words that the last chunk has.
    digest = hashlib.sha256(framed(SECAGG_CANARY, *fields)).digest()
    return np.frombuffer(digest, WORD[ring])[: chunk.canaries]


def check_group_values(
    spec: RoundSpec, given: Sequence[GroupValues], *, saturate: bool = False
) -> tuple[int, ...]:
    """How many values of each group are cut to its clip.

    LocalError for what cannot be sent, before anything is.
    """
    # All groups are checked before the first chunk: an upload that stops halfway has used its mask.
    check_local(
        len(given) == len(spec.groups),
        f"values for {len(given)} groups, the specification has {len(spec.groups)}",
    )
    pairs = list(zip(spec.groups, given, strict=True))
    for group, each in pairs:
        check_local(
            (group.weights == "private") == (each.weights is not None),
            f"group {group.name!r}: its weights are {group.weights}; give some only if private",
        )
        if each.weights is not None:
            check_weights(group, each.weights)
    return tuple(check_values(group, each.values, saturate=saturate) for group, each in pairs)


def masked_chunks(
    spec: RoundSpec,
    silo: str,
    given: Sequence[GroupValues],
    terms: Sequence[Term],
    tagger: Tagger | None = None,
    pads: Mapping[int, Term] | None = None,
) -> Iterator[Words]:
    """The chunks that a silo sends, each valid until the next is requested.

    ``given`` has passed ``check_group_values``. ``tagger`` takes in the numbers before they are
    masked. ``pads``, by group, hide numbers from the coordinator that it must not read from the
    open sum either; canaries have none. LocalError unless each such group has one. Memory holds one
    chunk and one piece of a stream, whatever the size of the upload.
    """
    ctx = spec.context()
    masks = [Mask(terms, index, group.ring) for index, group in enumerate(spec.groups)]
    padding = _padding(spec, pads or {})
    # One buffer for all chunks, of whole words of either ring.
    buffer = np.empty(min(spec.chunk_bytes, -(-upload_bytes(spec) // 8) * 8), np.uint8)
    for chunk in chunks(spec):
        group = spec.groups[chunk.group]
        words = buffer.view(WORD[group.ring])[: chunk.words]
        body = words[: chunk.body]
        _write_body(spec, silo, group, given[chunk.group], chunk, body)
        words[chunk.body :] = canaries(ctx, chunk, group.ring)

        # In this order: tags are of the numbers, pads hide numbers and no canaries, masks hide all.
        if tagger is not None:
            tagger.add(chunk.group, body)
        if chunk.group in padding:
            padding[chunk.group].add_to(body)
        masks[chunk.group].add_to(words)
        yield words


def _padding(spec: RoundSpec, pads: Mapping[int, Term]) -> dict[int, Mask]:
    wanted = [index for index, group in enumerate(spec.groups) if group.reader != COORDINATOR_READS]
    check_local(
        sorted(pads) == wanted,
        f"pads of groups {sorted(pads)}, and {wanted} are not for the coordinator's eyes",
    )
    return {index: Mask([pads[index]], index, spec.groups[index].ring) for index in wanted}


def unpad(group: int, words: Words, pads: Sequence[Term]) -> None:
    """Take all survivors' pads off a group's opened words in place; there are no canaries."""
    add_whole(negated(pads), group, words)


def _write_body(
    spec: RoundSpec, silo: str, group: Group, given: GroupValues, chunk: GroupChunk, into: Words
) -> None:
    """Quantise a chunk of a group: its elements, then its private weights."""
    # A chunk may hold elements, weights, or the last elements and the first weights.
    split = min(max(group.elements - chunk.start, 0), chunk.body)
    stop = chunk.start + split
    values, elements = cut(given.values, chunk.start, stop), into[:split]
    if given.weights is None:
        public = group.weights == "public"
        quantise(group, values, spec.share_of(silo, group) if public else 1.0, elements)
        return

    # Weights are quantised as parts of the largest one allowed, so they are at most 1.
    parts = given.weights / group.weight_most
    if group.rows == 1:
        quantise(group, values, float(parts[0]), elements)
    else:
        rows = np.arange(chunk.start, stop) // (group.elements // group.rows)
        quantise(group, values, parts[rows], elements)

    # They stand behind the elements, and a chunk may end among them.
    if split < chunk.body:
        first = stop - group.elements
        weights = given.weights[first : first + chunk.body - split]
        quantise_weights(group, weights, len(spec.cohort), into[split:])


class Accumulator:
    """The sum so far, mod 2^b: 4 or 8 bytes per word, whatever the number of silos."""

    def __init__(self, spec: RoundSpec) -> None:
        self.spec = spec
        self._chunks = tuple(chunks(spec))
        # Later chunks of a group overwrite earlier ones in this dictionary, so its last one stays.
        ends = {chunk.group: chunk.first + chunk.words for chunk in self._chunks}
        self._words = [np.zeros(ends[i], WORD[group.ring]) for i, group in enumerate(spec.groups)]

    def add(self, upload: Iterable[bytes | memoryview]) -> None:
        """Add one silo's whole upload, chunk by chunk; the caller checked it against its header.

        LocalError for chunks of other sizes or of another number than the specification has. The
        sum holds a part of the upload then, and must be discarded.
        """
        # Chunk by chunk: memory does not grow with the number of silos.
        pieces = iter(upload)
        for chunk in self._chunks:
            total = self._words[chunk.group][chunk.first : chunk.first + chunk.words]
            piece = np.frombuffer(next(pieces, b""), total.dtype)
            check_local(
                piece.size == total.size,
                f"chunk {chunk.number} of group {chunk.group} has {piece.size} words, not"
                f" {total.size}",
            )
            # Unsigned words wrap around: this adds mod 2^b.
            total += piece
        check_local(
            next(pieces, None) is None,
            "an upload has more chunks than its specification; check it before it is added",
        )

    def open(self, terms: Sequence[Term], survivors: Sequence[str]) -> tuple[OpenedGroup, ...]:
        """Take off the masks that did not cancel, once; each group's sum over the survivors.

        ``terms`` are those that are still on. Pads stay, so the sum of a padded group means
        nothing. RefusedError (SUM) if canaries do not come out: then there is no sum.
        """
        # In place, since the words are as large as an upload. So ``open`` works only once: a second
        # call would subtract the masks again.
        for index in range(len(self.spec.groups)):
            add_whole(negated(terms), index, self._words[index])

        # Numbers under a mask that is still on look like any others; canaries do not.
        ctx = self.spec.context()
        for chunk in self._chunks:
            group = self.spec.groups[chunk.group]
            found = self._words[chunk.group][chunk.first + chunk.body : chunk.first + chunk.words]
            wanted = canaries(ctx, chunk, group.ring) * found.dtype.type(len(survivors))
            if (found != wanted).any():
                why = (
                    f"canaries of chunk {chunk.number} of group {group.name!r} do not come out; the"
                    " sum is discarded"
                )
                raise RefusedError(COORDINATOR, Code.SUM, why)

        opened = tuple(
            opened_group(self.spec, index, survivors, self._bodies(index))
            for index in range(len(self.spec.groups))
        )
        for group, each in zip(self.spec.groups, opened, strict=True):
            if group.reader == COORDINATOR_READS:  # the words of other groups are noise
                check_bounds(group, len(self.spec.cohort), len(survivors), each)
        return opened

    def numbers(self) -> Iterator[tuple[int, Words]]:
        """The integers of the open sum by group, piece by piece, for silos to check tags.

        Call it after ``open``. The pieces are views of the accumulator, without canaries.
        """
        for chunk in self._chunks:
            yield chunk.group, self._words[chunk.group][chunk.first : chunk.first + chunk.body]

    def _bodies(self, index: int) -> Iterator[tuple[int, Words]]:
        """The integers of a group, piece by piece, each with the index of its first one."""
        for chunk in self._chunks:
            if chunk.group == index:
                yield chunk.start, self._words[index][chunk.first : chunk.first + chunk.body]


def check_bounds(group: Group, silos: int, survivors: int, opened: OpenedGroup) -> None:
    """RefusedError (SUM) where no values and weights within their bounds add up to these numbers.

    |Σ q| ≤ 2^e C Σ w + m/2 over m survivors of a cohort of ``silos``
    (security/arithmetic/fixedpoint.py). A private Σ w is known to m/2 of its own steps, and lies
    between m times the bounds of one weight; a row may be missing at a silo.
    """
    slack, weight = 0.0, opened.weight
    if group.weights == "private":
        slack = survivors * group.weight_most * 2.0 ** -weight_exponent(group.ring, silos)
        # With several rows, a silo without records of a class has weight 0 (``check_weights``).
        least = survivors * group.weight_least if group.rows == 1 else 0
        most = survivors * group.weight_most
        sound = (weight >= least - slack) & (weight <= most + slack)
        found = f"weights from {weight.min():g} to {weight.max():g}"
        _bounded(bool(sound.all()), group, survivors, found)

    # One limit per row. The factor and the addend are room for rounding.
    exact = np.ldexp(group.clip * (weight + slack) / opened.unit, group.scale_exponent)
    limits = exact * (1 + 2.0**-40) + survivors
    columns = opened.elements // len(limits)
    for start, block in opened.blocks():
        if len(limits) == 1:  # no temporary of the block's size
            low, high = block.min(), block.max()
            fits = bool(-limits[0] <= low and high <= limits[0])
        else:
            limit = limits[np.arange(start, start + block.size) // columns]
            fits = bool(((-limit <= block) & (block <= limit)).all())
        _bounded(fits, group, survivors, "numbers")


def _bounded(fits: bool, group: Group, survivors: int, what: str) -> None:
    why = (
        f"group {group.name!r} has {what} that {survivors} silos within its clip cannot give; one"
        " of them gave others"
    )
    check(fits, COORDINATOR_OR_SILO, Code.SUM, why)


def opened_group(
    spec: RoundSpec, index: int, survivors: Sequence[str], bodies: Iterable[tuple[int, Words]]
) -> OpenedGroup:
    """The sum of a group over the survivors.

    ``bodies`` are its integers in order: pieces, each with the index of its first one.
    """
    group = spec.groups[index]

    # A piece may hold the last elements and the first weights, which have a scale of their own.
    pieces, weights = [], np.empty(group.body - group.elements)
    for start, body in bodies:
        split = min(max(group.elements - start, 0), body.size)
        pieces.append((start, body[:split]))
        if split < body.size:
            at = start + split - group.elements
            exponent = weight_exponent(group.ring, len(spec.cohort))
            weights[at : at + body.size - split] = dequantise(body[split:], group.ring, exponent)

    # Public weights are shares of the whole cohort, so after a dropout they sum to less than 1: the
    # mean divides by the counts of those who are left.
    unit, weight = 1.0, np.array([len(survivors)], np.float64)
    if group.weights == "private":
        unit, weight = float(group.weight_most), weights * group.weight_most
    elif group.weights == "public":
        counts = spec.counts_of(group)
        counted = sum(counts[spec.cohort.index(silo)] for silo in survivors)
        unit, weight = float(sum(counts)), np.array([counted], np.float64)
    return OpenedGroup(
        group.elements, group.ring, group.scale_exponent, unit, weight, tuple(pieces)
    )
