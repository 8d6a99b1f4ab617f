"""Count-sketch: a long vector in a few numbers that keep inner products.

Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002; for inner products
Weinberger et al., "Feature hashing for large scale multitask learning", 2009. Each coordinate i has
a bucket h(i) and a sign s(i):

    S(x)_b = Σ_{i: h(i) = b} s(i) x_i,  E S(x)·S(y) = x·y,  Var S(x)·S(y) ≤ (‖x‖² ‖y‖² + (x·y)²) /
                                                            size

It saves bytes and is no protection: everybody knows the map. The cosine c of two unit vectors is
estimated without bias, with a standard deviation of at most √((1 + c²) / size). Blind, the map is
secret (security/blind/rotated_sketch.py).
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..numerics.streams import Seed, raw, stream


def count_sketch(vector: Tensor, size: int, seed: Seed) -> Tensor:
    """S(vector) [size] in float64; vectors are comparable where size and seed are the same.

    ``vector`` is [d]. The shorter the sketch, the larger its error (see the top of this file).
    """
    bucket, sign = _projection(len(vector), size, seed)
    return torch.zeros(size, dtype=torch.float64).index_add_(0, bucket, vector.double() * sign)


@lru_cache(maxsize=1)  # a job has one; 5 bytes a coordinate
def _projection(length: int, size: int, seed: Seed) -> tuple[Tensor, Tensor]:
    """Buckets and signs [length] from the words of a public stream.

    The lowest bit is the sign, the rest the bucket.
    """
    words = raw(stream(seed, "", 0, "sketch"), length)
    # Bucket and sign must be independent, so they come from different bits.
    bucket = ((words >> np.uint64(1)) % np.uint64(size)).astype(np.int32)
    sign = 1 - 2 * (words & np.uint64(1)).astype(np.int8)
    return torch.from_numpy(bucket), torch.from_numpy(sign)
