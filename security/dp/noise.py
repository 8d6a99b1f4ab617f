"""Randomness of differentially private training: noise, and which records a step draws.

No seed of a job reaches it.

Whoever can make the noise again can take it off, so each step has a key of its own from the
operating system, used for nothing else and forgotten with the step. Its AES-256 stream
(security/arithmetic/masks.py) gives 53-bit uniforms, and these, by Box and Muller's transform in
float64, normal numbers::

    z, z'    sqrt(-2 ln u) cos 2πv, sqrt(-2 ln u) sin 2πv       u in (0, 1], v in [0, 1)
    noise    σ (z_1 + z_2 + z_3 + z_4) / 2                      one number of four

A single z takes only some of the values that float64 has, and so betrays what it was added to
(Mironov, "On significance of the least significant bits for differential privacy", 2012); a sum of
four of them takes so many more that to search them is out of reach (Holohan, Braghin, "Secure
random sampling in differential privacy", 2021; Opacus's secure mode does the same).

Of a pair, z + z' = sqrt(-4 ln u) cos(2πv - π/4) takes one cosine. It is torch's: the last bit is
numpy's or the next one, at a fifth of the time, and cosines are most of it.

Noise that silos share is in integers, and exact (discrete_gaussian.py).
"""

import os
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from ...errors import LocalError
from ..arithmetic.fixedpoint import Reals, Words
from ..arithmetic.masks import KEY_BYTES, PIECE, Keystream
from .discrete_gaussian import Integers, draw

SUMMED = 4  # normal numbers in one of noise
_UNIT = 2.0**-53
_WORDS = PIECE // 8  # uniforms that are made at a time

Draw = Callable[[int], bytes]  # random bytes; os.urandom but for tests


class Randomness:
    """The random numbers of one step, in order; printing it shows no key.

    Not thread-safe: each call reads the stream where the previous one ended.
    """

    def __init__(self, draw: Draw = os.urandom) -> None:
        # Fresh for each step, whatever seed the job has: the coordinator knows that seed, and could
        # make the noise again and subtract it.
        key = draw(KEY_BYTES)
        self._stream = Keystream(key, 0)
        self._words = np.empty(_WORDS, "<u8")

    def uniform(self, count: int) -> Reals:
        """``count`` numbers in [0, 1), multiples of 2^-53.

        float64 [count], from 8 bytes of the stream each.
        """
        made = np.empty(count)
        for at in range(0, count, _WORDS):
            here = made[at : at + _WORDS]
            words = self._words[: here.size]
            self._stream.fill(words.data.cast("B"))
            # The upper 53 bits: float64 holds every integer of 53 bits exactly.
            np.right_shift(words, np.uint64(11), out=words)
            np.multiply(words, _UNIT, out=here)
        return made

    def normal(self, count: int) -> Reals:
        """``count`` normal numbers of mean 0 and variance 1, each half the sum of four.

        float64 [count]. The caller multiplies by σ times the sensitivity.
        """
        # In pieces of the cache: a model of millions of weights needs as many numbers each step.
        made = np.empty(count)
        step = _WORDS // SUMMED
        for at in range(0, count, step):
            here = made[at : at + step]
            pairs = here.size * SUMMED // 2
            radius, angle = self.uniform(pairs), self.uniform(pairs)

            # The logarithm of 0 is infinite, so [0, 1) becomes (0, 1].
            np.subtract(1.0, radius, out=radius)
            np.log(radius, out=radius)
            # -4, not the -2 of Box and Muller: this is the sum of a pair (module docstring).
            radius *= -4.0
            np.sqrt(radius, out=radius)
            angle *= 2 * np.pi
            angle -= np.pi / 4
            two = torch.from_numpy(angle).cos_().numpy()
            two *= radius  # z + z' of each pair
            np.add(two[: here.size], two[here.size :], out=here)
            # Four numbers of variance 1 have a sum of variance 4.
            here /= np.sqrt(SUMMED)
        return made

    def words(self, count: int) -> Words:
        """``count`` words of 64 bits, the next ones of the stream: uint64 [count]."""
        made = np.empty(count, "<u8")
        self._stream.fill(made.data.cast("B"))
        return made

    def discrete_gaussian(self, count: int, variance: Fraction | int) -> Integers:
        """``count`` integers of the discrete Gaussian, exact (discrete_gaussian.py).

        int64 [count]. LocalError for a variance that is not above 0, or is above 2^90.
        """
        return draw(self.words, count, variance)

    def drawn(self, records: int, q: float) -> npt.NDArray[np.int64]:
        """The records that a step takes, each with probability ``q`` on its own, in order.

        There may be none.
        """
        if not 0 < q <= 1:
            raise LocalError(
                f"a step draws each record with probability {q:g}; give one above 0, at most 1"
            )
        # One draw per record: the accounting assumes Poisson sampling (rdp.py).
        return np.flatnonzero(self.uniform(records) < q)
