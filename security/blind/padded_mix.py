"""``Mix`` by one upload: a silo sends its vector once, hidden, and recipients open rows alone.

In Z_2^64, with integer weights a_rj that add up to 2^32 for each recipient r (security rules 10
and 19)::

    silo j sends        y_j = q(x_j) + PRG(seed_j)           q(x) = rint(clip(x) 2^e), e = 62 - 32 -
                                                             log2 clip
    to each other silo  seed_j, sealed to its prekey         32 fresh bytes an upload: sealing.py,
                                                             prekeys.py
    coordinator         Y_r = Σ_{j ≠ r} a_rj y_j             over stored uploads, whenever r asks
    recipient r         Q_r = Y_r - Σ_j a_rj PRG(seed_j)     its tag must fit:
                                                             security/secagg/linear_tags.py
                        row = (Q_r + a_rr q(x_r)) 2^-(32+e)  its own part never leaves it

No row wraps: |q| ≤ 2^30, so |Σ a q| ≤ 2^62. It is off by at most 2^-(e+1), and by n · clip · 2^-32
in all where exact weights are meant. The stream is that of security/arithmetic/masks.py under
HKDF(seed_j, salt = ctx_j, info = framed(MIX_STREAM, prg, j)), where ctx_j names line, silo, round,
attempt and version: even a seed that is used again gives another stream.

All silos have all seeds: this holds while the coordinator and no silo collude. Weights and versions
are the recipient's to check (mix_row.py), since the coordinator could add y_j in any proportion.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...algorithms.exchange.parts import MIX_BITS
from ...errors import LocalError
from ..arithmetic.fixedpoint import Flat, Floats, Words, cut, dequantise, quantise
from ..arithmetic.masks import PIECE, Mask, Term, negated
from ..faults import COORDINATOR, Code, check, passed_on
from ..identity.domains import MIX_SEAL, MIX_STREAM, MIX_UPLOAD, framed
from ..identity.pairwise_keys import derive
from ..identity.selection import all_but
from ..identity.signers import Sign, Signers
from ..secagg.linear_tags import TAG_BYTES, Tagger, TagPads
from .mix_context import WORD_BYTES, MixContext, Version
from .prekeys import check_own
from .sealing import (
    FIRST,
    Letter,
    SealedSecret,
    Sealing,
    check_letter,
    check_sealed,
    open_letter,
    seal_to_all,
)

STEP = PIECE // WORD_BYTES  # words that are worked on at a time
LENT = 4 * STEP  # words that are given at a time: as many as cross in a chunk

# (silo, first byte, bytes) -> a piece of its stored upload
Read = Callable[[str, int, int], "bytes | memoryview"]


@dataclass(frozen=True, slots=True)
class PaddedUpload:
    """A silo's signed word on one upload: SHA-256 of the hidden bytes, padded tag, sealed seed."""

    version: Version
    sha256: bytes
    tag: bytes
    sealing: Sealing
    signature: bytes = b""

    def signed_bytes(self, line: MixContext) -> bytes:
        """The bytes that the silo signs, behind UPLOAD."""
        return framed(self.version.context(line), self.sha256, self.tag, self.sealing.encoded())

    def check(self, line: MixContext, signers: Signers) -> None:
        """RefusedError, for the silo, unless it signed this for this line.

        Code UPLOAD or SHARES. ``check_upload`` compares the digest with the stored bytes.
        """
        silo = self.version.silo
        signed = signers.by_silo(silo, MIX_UPLOAD, self.signed_bytes(line), self.signature)
        check(signed, silo, Code.UPLOAD, "its signature does not fit the upload to be mixed")
        check(
            self.sealing.sender == silo,
            silo,
            Code.UPLOAD,
            f"signed a seed of {self.sealing.sender!r} as its own",
        )
        self.sealing.check()
        sized = len(self.tag) == TAG_BYTES and len(self.sha256) == hashlib.sha256().digest_size
        check(sized, silo, Code.UPLOAD, "the digest or the tag of its upload has the wrong size")


def hidden_pieces(
    line: MixContext, version: Version, seed: bytes, values: Flat, tagger: Tagger
) -> Iterator[Words]:
    """y_j as the silo sends it, piece by piece, each valid until the next is asked for.

    ``tagger`` takes in q(x_j).

    ``values`` [elements] have passed ``check_values``. ``seed`` is fresh, and remembered before the
    first byte leaves.
    """
    # The tag is of the numbers before they are hidden: those are what a row's opener has.
    # Ring 64, since words are weighted by up to 2^32 (mix_context.py).
    hidden, elements = Mask([_term(line, version, seed)], 0, 64), line.group.elements
    buffer = np.empty(min(LENT, elements), "<u8")
    for start in range(0, elements, LENT):
        lent = buffer[: min(LENT, elements - start)]
        for at in range(0, lent.size, STEP):
            words = lent[at : at + STEP]
            quantise(line.group, cut(values, start + at, start + at + words.size), 1.0, words)
            tagger.add(0, words)
            hidden.add_to(words)
        yield lent


def tagger_of(line: MixContext, group_key: bytes) -> Tagger:
    """A tagger of one vector of the line, whose uploads and rows have the same coefficients.

    Bound to the line and not to a version, since a row adds up uploads of several rounds.
    """
    return Tagger(group_key, line.context(), 1)


def make_upload(
    line: MixContext,
    version: Version,
    sha256: bytes,
    padded: bytes,
    seed: bytes,
    ephemeral: bytes,
    others: Mapping[str, bytes],
    sign: Sign,
    generations: Mapping[str, int] = FIRST,
) -> tuple[PaddedUpload, tuple[SealedSecret, ...]]:
    """The signed word on what was sent, and the seed sealed to the prekeys of ``others``, by id.

    ``generations`` are of those prekeys that are not the first of their silo. ``padded`` is
    ``tagger.padded(group_key, version.context(line), silo)``; ``ephemeral`` is a fresh seed of its
    own.
    """
    ctx, silo = version.context(line), version.silo
    sealing, pieces = seal_to_all(ctx, MIX_SEAL, silo, seed, ephemeral, others, generations)
    unsigned = PaddedUpload(version, sha256, padded, sealing)
    return (
        PaddedUpload(
            version, sha256, padded, sealing, sign(MIX_UPLOAD, unsigned.signed_bytes(line))
        ),
        pieces,
    )


def check_upload(
    line: MixContext,
    upload: PaddedUpload,
    pieces: Sequence[SealedSecret],
    sha256: bytes,
    signers: Signers,
) -> None:
    """At the coordinator, of what it stored and digested: RefusedError names the uploading silo."""
    upload.check(line, signers)
    silo = upload.version.silo
    check(upload.sha256 == sha256, silo, Code.UPLOAD, "its upload is not the one that it signed")
    # The seed is sealed to every other silo: any of them may get a row with this upload.
    check_sealed(upload.sealing, pieces, all_but(signers.silos, silo))


def mixed_pieces(line: MixContext, weights: Mapping[str, int], read: Read) -> Iterator[Words]:
    """At the coordinator: Y = Σ a_j y_j of the silos in ``weights``, piece by piece.

    A piece is valid until the next one.

    What is read need stay valid only until the next. Holds a chunk and two pieces, whatever the
    length and the number of silos. LocalError if a stored upload is too short.
    """
    elements = line.group.elements
    total, scratch = np.empty(min(LENT, elements), "<u8"), np.empty(min(STEP, elements), "<u8")
    for start in range(0, elements, LENT):
        lent = total[: min(LENT, elements - start)]
        for at in range(0, lent.size, STEP):
            words = lent[at : at + STEP]
            begin, size = (start + at) * WORD_BYTES, words.nbytes
            for place, (silo, weight) in enumerate(weights.items()):
                stored = read(silo, begin, size)
                if len(stored) != size:
                    raise LocalError(
                        f"the stored upload of {silo!r} has {len(stored)} bytes at {begin}, not"
                        f" {size}"
                    )
                # the first takes the place of those before
                made = scratch[: words.size] if place else words
                np.multiply(np.frombuffer(stored, "<u8"), np.uint64(weight), out=made)
                if place:
                    words += made
        yield lent


@dataclass(frozen=True, slots=True)
class Summand:
    """One other silo's part of a row: its upload, its integer weight and its seed.

    ``weight`` is in steps of 2^-32. Printing it shows no seed.
    """

    upload: PaddedUpload
    weight: int
    seed: bytes = field(repr=False)


def check_sent(
    line: MixContext, upload: PaddedUpload, letter: Letter, silo: str, signers: Signers
) -> None:
    """At ``silo``: RefusedError, for the coordinator, unless another silo signed both, for us.

    It opens nothing, so the generation that the sender signed is known before any seed is opened.
    """
    # (1) The other silo signed this upload to this line; the coordinator could see that itself.
    with passed_on():
        upload.check(line, signers)

    # (2) It signed this letter too, and for us: another letter would not open, and the other silo
    # would be blamed for it.
    sender = upload.version.silo
    check_letter(upload.sealing.root, letter, sender, silo, all_but(signers.silos, sender))


def open_seed(
    line: MixContext,
    upload: PaddedUpload,
    letter: Letter,
    silo: str,
    own: Mapping[int, bytes],
    signers: Signers,
) -> bytes:
    """At ``silo``: the seed of another one's upload.

    ``own`` are the private halves of its prekeys, by generation.

    The steps run in order; RefusedError says whose fault it is.
    """
    # (1) The other silo signed the upload, and the letter.
    check_sent(line, upload, letter, silo, signers)

    # (2) It is sealed to a prekey that we have.
    sender = upload.version.silo
    prekey = check_own(own, sender, letter.sealed.generation)

    # (3) It opens, and holds the seed that all have.
    recipients = all_but(signers.silos, sender)
    return open_letter(
        upload.version.context(line), MIX_SEAL, upload.sealing, letter, recipients, prekey
    )


class Opening:
    """A recipient's row as it is delivered, 8 bytes per element; nothing opens before its tag fits.

    The numbers are made of the words as these come, so that the row alone is in memory, and a piece
    of its words.
    """

    def __init__(
        self,
        line: MixContext,
        group_key: bytes,
        summands: Sequence[Summand],
        own_weight: int,
        own: Flat,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        """``own`` are our values, unless ``own_weight`` is 0; ``dtype`` is that of the row."""
        self._line, self._key, self._summands = line, group_key, summands
        self._tagger = tagger_of(line, group_key)
        # Y holds each upload's pad as many times as the upload weighs; this mask removes them all.
        self._mask = Mask(
            negated([_term(line, s.upload.version, s.seed, s.weight) for s in summands]), 0, 64
        )
        self._own_weight, self._own = np.uint64(own_weight), own
        self._row, self._filled = np.empty(line.group.elements, dtype), 0
        self._words, self._part = np.empty((2, min(STEP, self._row.size)), "<u8")

    def add(self, piece: bytes | memoryview) -> None:
        """The next words of Y; RefusedError for half a word, or a row longer than its group.

        Pieces may be cut anywhere between words. The row must not be used before ``finish``.
        """
        check(
            len(piece) % WORD_BYTES == 0,
            COORDINATOR,
            Code.SUM,
            f"brings {len(piece)} bytes, no whole words",
        )
        came = np.frombuffer(piece, "<u8")
        fits = self._filled + came.size <= self._row.size
        check(fits, COORDINATOR, Code.SUM, f"brings a row of more than {self._row.size} numbers")
        for at in range(0, came.size, STEP):
            words = self._words[: min(STEP, came.size - at)]
            # Copied, since the received bytes are read-only.
            words[:] = came[at : at + STEP]
            self._mask.add_to(words)
            self._tagger.add(0, words)
            self._mix(words)

    def _mix(self, words: Words) -> None:
        """Add our own part to the next integers, in place, and make numbers of them."""
        group, here = self._line.group, slice(self._filled, self._filled + words.size)
        if self._own_weight:
            part = self._part[: words.size]
            quantise(group, cut(self._own, here.start, here.stop), 1.0, part)
            part *= self._own_weight
            words += part
        exponent, numbers = MIX_BITS + group.scale_exponent, self._part[: words.size].view("<f8")
        # The tag is not checked yet: only ``finish`` hands the row out.
        self._row[here] = dequantise(words, group.ring, exponent, numbers)
        self._filled = here.stop

    def finish(self, combined: bytes) -> Floats:
        """The row, [elements], with our own part of it.

        RefusedError if it is not what the others sent.

        ``combined`` is Σ a_j T_j as the coordinator gives it.
        """
        whole = self._filled == self._row.size
        check(
            whole,
            COORDINATOR,
            Code.SUM,
            f"brings a row of {self._filled} numbers, not {self._row.size}",
        )

        # Σ a_j T_j less Σ a_j pad_j: with any other weights, or a word that was changed, no tag
        # fits (security rule 8).
        padded = [
            TagPads(s.upload.version.silo, s.upload.version.context(self._line), s.weight)
            for s in self._summands
        ]
        self._tagger.check_weighted(combined, self._key, padded)
        return self._row


def _term(line: MixContext, version: Version, seed: bytes, times: int = 1) -> Term:
    key = derive(
        seed, version.context(line), framed(MIX_STREAM, line.prg.to_bytes(1), version.silo.encode())
    )
    return Term(key, times=times)
