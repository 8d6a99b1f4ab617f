"""Randomness: every draw of a job comes from a stream named by seed, client, round and purpose.

A stream is Philox keyed by SHA-256 of those four, so that any engine, at any silo, in any order
makes the same draws. The seed is a number in a simulation, and follows from the whole job in a
federation (``Job.root``). What must agree between machines (initial models, cohorts, batches) is
computed from the raw 64-bit words, which the generator's definition fixes; NumPy keeps the right to
change its derived distributions between releases (NEP 19).
"""

import hashlib
import secrets
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...files.documents import canonical_json

DOMAIN = "staddle/stream/1"
Seed = int | str


def stream(seed: Seed, client: str, round_: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose.

    The same four arguments give the same numbers on every machine. Whoever knows the seed can
    compute them, so nothing secret may come from here.
    """
    # Canonical JSON of a list is injective, so no two purposes share a stream. Philox takes a key
    # of 128 bits.
    digest = hashlib.sha256(canonical_json([DOMAIN, seed, client, round_, purpose])).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def secret_stream() -> np.random.Generator:
    """A generator that nobody else can have."""
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))


def raw(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """The next ``count`` 64-bit words of a stream.

    They follow from the definition of Philox, so no release of NumPy changes them.
    """
    return np.asarray(rng.bit_generator.random_raw(count), dtype=np.uint64)


def uniform(
    rng: np.random.Generator, shape: Sequence[int], low: float, high: float
) -> NDArray[np.float64]:
    """Uniform values in [low, high): the upper 53 bits of a word each."""
    # float64 has 53 bits of precision, so every multiple of 2^-53 is exact.
    unit = (raw(rng, prod(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (low + (high - low) * unit).reshape(tuple(shape))


def permutation(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    """A permutation [n] of 0..n-1, int64: the order of n random words."""
    # Stable: equal words, about once in 2^64/n^2 draws, keep their order on every machine.
    return np.argsort(raw(rng, n), kind="stable").astype(np.int64)
