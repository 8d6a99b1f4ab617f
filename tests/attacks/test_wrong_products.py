"""Two silos that reveal wrong inner products, of thirty, in a job that takes two to be in league.

Thirty shares lie on a polynomial of degree 4, so twelve wrong ones could be told from the others.
The measure is who is named. It is the coordinator's function that opens what survivors revealed, as
it ships.
"""

import numpy as np
import pytest

from staddle.security.arithmetic.field import PRIME, powers, product, to_signed
from staddle.security.secagg.shared_gram import degree, opened

pytestmark = pytest.mark.actor("silo")

SILOS, COLLUDERS = 30, 2
LIARS = (29, 30)


def revealed():
    """Honest shares of one inner product for each pair of silos, but that those of two are shifted,
    by holder.
    """
    pairs, rng = SILOS * (SILOS + 1) // 2, np.random.default_rng(0)
    made = rng.integers(0, PRIME, (2 * degree(COLLUDERS) + 1, pairs), np.int64).astype("<u8")
    made[0] = np.arange(pairs)
    values = product(powers(range(1, SILOS + 1), 0, 2 * degree(COLLUDERS)), made)
    for liar in LIARS:
        values[liar - 1] = (values[liar - 1] + np.uint64(liar)) % np.uint64(PRIME)
    return {
        holder: values[holder - 1].reshape(pairs, 1) for holder in range(1, SILOS + 1)
    }, to_signed(made[0])


def test_no_honest_silo_is_named_beside_them():
    """Before: 300 choices of each size were tried, and silos 1 to 5 were named, too."""
    shares, exact = revealed()
    found = opened(shares, COLLUDERS)
    assert np.array_equal(found.products[:, 0], exact)
    assert found.wrong == LIARS, f"named: {found.wrong}"
