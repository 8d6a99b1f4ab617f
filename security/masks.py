"""Masks: streams of uniform words that are added to what a silo sends, and that cancel in the sum.

The stream of a key is AES-256 in counter mode (NIST SP 800-38A section 6.5), one per group of tensors; its counter
block is the group's number and the block's, 8 bytes each, big-endian. So no two groups share a block, and any piece can
be made alone. A key serves one attempt (its context is in the key), so the counter may start at 0 each time.

The mask of silo u, whose ids are ordered as text::

    PRG(self_u) + Σ_{v > u} PRG(pair_uv) - Σ_{v < u} PRG(pair_uv)   mod 2^b

In the sum over all who dealt, each pair cancels; the coordinator removes the self masks of the survivors, and the
survivors' half of each pair whose other silo is lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from ..errors import LocalError
from .fixedpoint import WORD, Words

AES_256_CTR = 1  # field ``prg`` of a specification
KEY_BYTES = 32
AES_BLOCK = 16
PIECE = 1 << 18  # bytes of a stream that are made and added at a time: they stay in a core's cache
_ZEROS = bytes(PIECE)


@dataclass(frozen=True, slots=True)
class Term:
    """A key whose stream is added, or subtracted; printing it shows no secret."""

    key: bytes = field(repr=False)
    negative: bool = False

    def __neg__(self) -> "Term":
        return Term(self.key, not self.negative)


def pair_term(silo: str, other: str, key: bytes) -> Term:
    """The term of ``silo`` for the mask that it shares with ``other``."""
    if silo == other:
        raise LocalError(f"{silo!r} shares no mask with itself")
    return Term(key, negative=other < silo)


class Keystream:
    """AES-256-CTR bytes of one key and group, from a byte offset on."""

    def __init__(self, key: bytes, group: int, offset: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise LocalError(f"a key of {len(key)} bytes; a mask's has {KEY_BYTES}")
        block, rest = divmod(offset, AES_BLOCK)
        self._encryptor = Cipher(AES(key), CTR(group.to_bytes(8) + block.to_bytes(8))).encryptor()
        self._encryptor.update(bytes(rest))

    def fill(self, into: memoryview) -> None:
        """Overwrite at most PIECE bytes with the next ones of the stream."""
        self._encryptor.update_into(_ZEROS[: len(into)] if len(into) < PIECE else _ZEROS, into)


class Mask:
    """The sum of terms over one group, from a word on; holds one piece of one stream, whatever the group's size."""

    def __init__(self, terms: Iterable[Term], group: int, ring: int, first: int = 0) -> None:
        self._dtype = np.dtype(WORD[ring])
        offset = first * self._dtype.itemsize
        self._streams = [(Keystream(term.key, group, offset), term.negative) for term in terms]

    def add_to(self, words: Words) -> None:
        """Add the mask's next words to ``words`` in place, mod 2^b."""
        if words.dtype != self._dtype:
            raise LocalError(f"words are {words.dtype}, the mask is {self._dtype}; this is a bug in Staddle")
        size = PIECE // self._dtype.itemsize
        scratch = np.empty(min(size, words.size), self._dtype)
        for at in range(0, words.size, size):
            piece = words[at : at + size]
            made = scratch[: piece.size]
            view = made.data.cast("B")
            for stream, negative in self._streams:
                stream.fill(view)
                if negative:
                    np.subtract(piece, made, out=piece)
                else:
                    np.add(piece, made, out=piece)


def negated(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms that remove what these add."""
    return tuple(-term for term in terms)
