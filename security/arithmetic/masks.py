"""Masks: streams of uniform words that are added to what a silo sends, and that cancel in the sum.

The stream of a key is AES-256 in the counter mode of GCM (NIST SP 800-38D section 6.5); GCM's tag
is never computed. Plain CTR gives the same bytes. One of the two is twice as fast in OpenSSL, which
one depends on the processor, so a process tries both once (``_faster``). The stream comes in
segments of 1 MiB, each under a nonce of its own, so any of them can be made alone. Block i of
segment s of group g is ::

    AES-256(key, counter block)  counter block = g (4 bytes) ‖ s (8 bytes) ‖ i + 2 (4 bytes),
                                 big-endian

GCM begins with 2: block 1 belongs to its tag, and the all-zero block to its hash key. A segment has
2^16 blocks of the 2^32 - 2 that a nonce may have, so the counter does not overflow, and no two
(group, segment) share a block. A key serves one attempt (its context is in the key), so segments
may be numbered from 0 each time.

The mask of silo u, whose ids are ordered as text::

    PRG(self_u) + Σ_{v > u} PRG(pair_uv) - Σ_{v < u} PRG(pair_uv)   mod 2^b

In the sum over all who dealt, each pair cancels; the coordinator removes the self masks of the
survivors, and the survivors' half of each pair whose other silo is lost.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM

from ...errors import LocalError, check_local
from .fixedpoint import WORD, Words

AES_256_GCM: Literal[2] = 2  # field ``prg`` of a specification; 1 was AES-256-CTR
KEY_BYTES = 32
SEGMENT = 1 << 20  # bytes of a stream under one nonce
PIECE = 1 << 18  # bytes of a stream that are made and added at a time: they stay in a core's cache
THREADS = 4  # of one mask over a whole group
FIRST_BLOCK = (2).to_bytes(4)  # of a segment
_ZEROS = memoryview(bytes(PIECE))


@dataclass(frozen=True, slots=True)
class Term:
    """A key whose stream is added ``times`` times, or subtracted; printing it shows no secret.

    ``key`` has 32 bytes. ``times`` is above 1 only where an upload is weighted by an integer.
    """

    key: bytes = field(repr=False)
    negative: bool = False
    times: int = 1

    def __neg__(self) -> "Term":
        return Term(self.key, not self.negative, self.times)


def pair_term(silo: str, other: str, key: bytes) -> Term:
    """The term of ``silo`` for the mask that it shares with ``other``.

    LocalError if both are the same silo.
    """
    check_local(silo != other, f"{silo!r} shares no mask with itself")
    # Opposite signs on the two sides, by the order of ids, so that the pair cancels in the sum.
    return Term(key, negative=other < silo)


def _ctr(nonce: bytes) -> CTR:
    return CTR(nonce + FIRST_BLOCK)


# Cipher modes that give the same bytes from a nonce of 12.
MODES: tuple[Callable[[bytes], GCM | CTR], ...] = (GCM, _ctr)


@cache
def _faster() -> Callable[[bytes], GCM | CTR]:
    """The mode that is faster on this processor, by the best of five pieces each."""
    # The best of five, since other processes make a piece take longer and never shorter.
    into = memoryview(bytearray(PIECE))
    took = dict.fromkeys(MODES, float("inf"))
    for mode in MODES * 5:
        encryptor = Cipher(AES(bytes(KEY_BYTES)), mode(bytes(12))).encryptor()
        began = time.perf_counter()
        encryptor.update_into(_ZEROS, into)
        took[mode] = min(took[mode], time.perf_counter() - began)
    return min(MODES, key=took.__getitem__)


class Keystream:
    """The stream of one key and group, from a byte offset on.

    Not thread-safe: each ``fill`` advances it. LocalError for a key of other than 32 bytes.
    """

    def __init__(self, key: bytes, group: int, offset: int = 0) -> None:
        size = len(key)
        check_local(size == KEY_BYTES, f"a key of {size} bytes; a mask's has {KEY_BYTES}")
        self._cipher = AES(key)
        self._group = group.to_bytes(4)
        self._segment, skipped = divmod(offset, SEGMENT)
        self._begin()
        # The cipher cannot start inside of a segment, so the bytes before the offset, less than
        # 1 MiB, are made and thrown away.
        self.fill(memoryview(bytearray(skipped)))

    def fill(self, into: memoryview) -> None:
        """Overwrite bytes with the next ones of the stream.

        The next call continues where this one ended, in pieces of any length.
        """
        while into:
            if not self._left:
                self._segment += 1
                self._begin()
            # A step stays within its segment, since the next has another nonce, and within the
            # buffer of zeros.
            step = min(len(into), self._left, PIECE)
            self._encryptor.update_into(_ZEROS[:step], into[:step])
            self._left -= step
            into = into[step:]

    def _begin(self) -> None:
        # Group and segment fill the 12 bytes, so no two of them share a nonce under one key.
        nonce = self._group + self._segment.to_bytes(8)
        self._encryptor = Cipher(self._cipher, _faster()(nonce)).encryptor()
        self._left = SEGMENT


class Mask:
    """The sum of terms over one group, from a word on.

    Holds one piece of one stream in memory, whatever the group's size.
    """

    def __init__(self, terms: Iterable[Term], group: int, ring: int, first: int = 0) -> None:
        self._dtype = np.dtype(WORD[ring])
        # In bytes. It is above 0 where several threads share a group.
        offset = first * self._dtype.itemsize
        self._streams = [
            (Keystream(term.key, group, offset), term.negative, term.times) for term in terms
        ]
        # Kept between calls: new memory costs as much time as a stream.
        self._scratch: Words = np.empty(0, self._dtype)

    def add_to(self, words: Words) -> None:
        """Add the mask's next words to ``words`` in place, mod 2^b."""
        if words.dtype != self._dtype:
            raise LocalError(
                f"words are {words.dtype}, the mask is {self._dtype}; this is a bug in Staddle"
            )

        # Piece by piece through all streams, so that words and keystream stay in a core's cache.
        size = PIECE // self._dtype.itemsize
        if self._scratch.size < min(size, words.size):
            self._scratch = np.empty(min(size, words.size), self._dtype)
        for at in range(0, words.size, size):
            piece = words[at : at + size]
            made = self._scratch[: piece.size]
            view = made.data.cast("B")
            for stream, negative, times in self._streams:
                stream.fill(view)
                if times != 1:
                    np.multiply(made, self._dtype.type(times), out=made)
                if negative:
                    np.subtract(piece, made, out=piece)
                else:
                    np.add(piece, made, out=piece)


def add_whole(terms: Sequence[Term], group: int, words: Words) -> None:
    """Add the mask of a whole group to its words in place, in several threads.

    Each thread makes some of the segments.
    """
    # Whole segments: a share that began inside of one would make the first part of it in vain.
    share = -(-words.nbytes // (SEGMENT * THREADS)) * SEGMENT // words.itemsize
    starts = range(0, words.size, max(share, 1))
    if len(starts) <= 1:
        Mask(terms, group, 8 * words.itemsize).add_to(words)
        return
    with ThreadPoolExecutor(len(starts)) as pool:
        for done in [pool.submit(_add_share, terms, group, words, at, at + share) for at in starts]:
            done.result()


def _add_share(terms: Sequence[Term], group: int, words: Words, start: int, stop: int) -> None:
    Mask(terms, group, 8 * words.itemsize, start).add_to(words[start:stop])


def negated(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms that remove what these add."""
    return tuple(-term for term in terms)
