"""A long vector in k rotated numbers that keep inner products: ``Gram`` over backbones.

The map of a count-sketch (algorithms/exchange/count_sketch.py) comes from the key that the
coordinator lacks, and a secret rotation comes after it: a sketch alone shows the magnitudes of a
vector's coordinates (security rule 14)::

    S(x)_b = Σ_{i: h(i) = b} s(i) x_i      h(i), s(i) from the stream (masks.py) of the sketch's key
    sent     Q S(x), Q [k, k]              rotation.py

Over the keys, with ⟨,⟩ exact for Q but for rounding (Weinberger et al., "Feature hashing for large
scale multitask learning", 2009)::

    E ⟨S x, S y⟩ = ⟨x, y⟩,    Var ⟨S x, S y⟩ ≤ (‖x‖² ‖y‖² + ⟨x, y⟩²) / k

so a cosine c is off by about √((1 + c²) / k): 0.044 at most for k = 1024. A use of the key is for
one round, so what is off in one round says nothing of the next.

Why the map is secret: Q keeps ‖S x‖², which for a unit vector x differs from 1 by about √(2/k), in
a way that depends on all of x and on the map. Who knows the map confirms a guess of x by it;
without the map it tells next to nothing.
"""

from collections.abc import Sequence

import numpy as np

from ...errors import LocalError
from ..arithmetic.fixedpoint import Floats, Reals
from ..arithmetic.masks import PIECE, Keystream
from ..identity.domains import GRAM_SKETCH, framed
from ..identity.pairwise_keys import derive
from .rotation import rotate, rotate_each

STEP = PIECE // 8  # coordinates that are worked on at a time
LARGEST = 1 << 16  # numbers of a sketch: buckets are then uniform to 2^-47, and Q takes seconds


def hidden(vectors: Reals, size: int, key: bytes) -> Reals:
    """The form in which ``vectors`` [n, d] leave: Q v [n, d], or sketched, Q S(v) [n, size].

    Size 0 means no sketch. The same vector and key give the same bits, whatever n is.
    """
    return sketched(vectors, size, key) if size else rotate(vectors, key)


def hidden_each(vectors: Reals, size: int, keys: Sequence[bytes]) -> Reals:
    """Like ``hidden``, each vector under a key of its own.

    One key per vector, in order. The bits are those of ``hidden``, called for one vector at a time.
    """
    if size:
        pairs = zip(vectors, keys, strict=True)
        vectors = np.concatenate([_sketch(vector[None], size, key) for vector, key in pairs])
    return rotate_each(vectors, keys)


def sketched(vectors: Floats, size: int, key: bytes) -> Reals:
    """Q S(v) [n, size] float64 of ``vectors`` [n, d], piece by piece.

    ``key`` as ``rotation.Use`` gives it.
    """
    return rotate(_sketch(vectors, size, key), key)


def _sketch(vectors: Floats, size: int, key: bytes) -> Reals:
    """S(v) [n, size] float64."""
    if not 1 <= size <= LARGEST:
        raise LocalError(f"a sketch of {size} numbers; take 1 to {LARGEST}")
    if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float64):
        raise LocalError(
            f"vectors are {vectors.dtype} {list(vectors.shape)}; give float32 or float64 [n, d]"
        )

    # A key of its own: bucket and sign must say nothing of the rotation that follows.
    source = Keystream(derive(key, b"", framed(GRAM_SKETCH)), 0)
    total, words = np.zeros((len(vectors), size)), np.empty(STEP, "<u8")
    for at in range(0, vectors.shape[1], STEP):
        here = vectors[:, at : at + STEP]
        made = words[: here.shape[1]]
        source.fill(made.data.cast("B"))
        # The lowest bit of a word is the sign, and the other 63 choose the bucket.
        bucket = ((made >> np.uint64(1)) % np.uint64(size)).astype(np.int64)
        sign = 1.0 - 2.0 * (made & np.uint64(1)).astype(np.float64)
        for i, vector in enumerate(here):
            # in the order of coordinates
            total[i] += np.bincount(bucket, weights=vector * sign, minlength=size)
    return total
