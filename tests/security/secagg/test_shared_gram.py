"""Inner products by shares: what opens, its error, and what c silos with the coordinator see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Drawn

from staddle.errors import LocalError
from staddle.security.arithmetic import field
from staddle.security.arithmetic.field import PRIME
from staddle.security.arithmetic.masks import Keystream
from staddle.security.secagg import shared_gram as g


def compared(groups=2, width=12, clip=3):
    return g.Compared(name="rows", groups=groups, width=width, clip_exponent=clip)


def vectors(own, silos, seed=0, length=None):
    """[silos, groups, width] float64, as long as the bound unless ``length`` differs."""
    drawn = np.random.default_rng(seed).standard_normal((silos, own.groups, own.width))
    length = length or 2.0**own.clip_exponent * (1 - 2**-50)
    return drawn / np.linalg.norm(drawn, axis=2, keepdims=True) * length


def dealt(own, values, colluders, seed=0):
    """What each silo dealt: shares by holder, 1 and up."""
    n = len(values)
    made = {}
    for number, each in enumerate(values, start=1):
        source = Keystream(Drawn(f"{seed}/{number}")(32), 0)
        shares = g.deal(own, g.quantise(own, each), n, colluders, source)
        made[number] = dict(enumerate(shares, start=1))
    return made


def revealed(shares, dealers=None):
    """What each holder reveals of the inner products of these dealers."""
    among = dealers or list(shares)
    return {
        holder: g.multiply({dealer: shares[dealer][holder] for dealer in among})
        for holder in shares
    }


def exactly(own, values):
    """⟨q_i, q_j⟩ [pairs, groups], in Python's integers."""
    q = [g.quantise(own, each).tolist() for each in values]
    pairs = [(i, j) for i in range(len(q)) for j in range(i, len(q))]
    return [
        [sum(a * b for a, b in zip(q[i][k], q[j][k], strict=True)) for k in range(own.groups)]
        for i, j in pairs
    ]


@settings(max_examples=25)
@given(
    st.integers(0, 2), st.integers(0, 4), st.integers(1, 3), st.integers(1, 30),
    st.integers(0, 2**31),
)  # fmt: skip
def test_what_is_opened_are_the_inner_products_of_the_quantised_vectors(
    colluders, more, groups, width, seed
):
    own, n = compared(groups, width), max(3 * colluders + 1, 3) + more
    values = vectors(own, n, seed)
    shares = revealed(dealt(own, values, colluders, seed))
    first = {holder: shares[holder] for holder in list(shares)[-g.needed(colluders) :]}
    assert g.opened(first, colluders).products.tolist() == exactly(own, values)
    found = g.opened(shares, colluders)
    assert (found.products.tolist(), found.wrong) == (exactly(own, values), ())


def test_who_is_lost_is_in_no_product():
    own, n = compared(), 5
    values = vectors(own, n)
    shares = revealed(dealt(own, values, 1), dealers=[1, 3, 4])
    assert g.opened(shares, 1).products.tolist() == exactly(own, values[[0, 2, 3]])


@settings(max_examples=30)
@given(
    st.sampled_from([-3, 0, 3, 20]),
    st.sampled_from([1, 7, 640]),
    st.floats(1e-3, 1),
    st.integers(0, 2**31),
)
def test_the_error_is_within_its_bound(clip, width, part, seed):
    own = compared(1, width, clip)
    values = vectors(own, 4, seed, length=part * 2.0**clip * (1 - 2**-50))
    found = g.gram(own, values)[0]
    exact = values[:, 0] @ values[:, 0].T
    bound = g.deviation(own, part * 2.0**clip, part * 2.0**clip)
    assert np.abs(found - exact).max() <= bound + 1e-15 * 4.0**clip  # and float64 of the exact one


def test_the_bound_of_unit_vectors_as_pfedsim_has_them():
    own = compared(1, 640)
    unit = vectors(own, 10, length=1.0)
    off = np.abs(g.gram(own, unit)[0] - unit[:, 0] @ unit[:, 0].T).max()
    assert 1e-10 < off < 2e-8
    assert g.deviation(own, 1.0, 1.0) < 4e-7


@pytest.mark.parametrize("width", [1, 1 << 16])
def test_the_longest_vectors_do_not_wrap(width):
    own = compared(1, width, clip=0)
    even = np.full((1, width), width**-0.5 * (1 - 2**-40))
    found = g.gram(own, [even, -even])[0]
    assert np.allclose(found, [[1, -1], [-1, 1]], rtol=0, atol=g.deviation(own, 1, 1) + 1e-9)


def test_a_vector_beyond_the_bound_is_refused():
    own = compared(clip=0)
    values = vectors(own, 1)[0]
    values[1] *= 1.01
    why = r"part 'rows': a vector has length 1.01, above the bound 2\^0 of the job"
    with pytest.raises(LocalError, match=why):
        g.quantise(own, values)
    values[1, 0] = np.nan
    with pytest.raises(LocalError, match="has length nan"):
        g.quantise(own, values)


def test_a_holder_reveals_its_product_under_the_zeros_of_both_dealers():
    own = compared()
    shares = dealt(own, vectors(own, 4), 1)
    found = revealed(shares, dealers=[1, 2, 4])[3]
    pairs = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4)]
    for at, (i, j) in enumerate(pairs):
        mine, other = shares[i][3], shares[j][3]
        for group in range(own.groups):
            total = sum(
                int(a) * int(b)
                for a, b in zip(mine.vectors[group], other.vectors[group], strict=True)
            )
            total += int(mine.zeros[j - 1, group]) + (
                int(other.zeros[i - 1, group]) if i != j else 0
            )
            assert int(found[at, group]) == total % PRIME


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_degrees_of_the_hiding_polynomials(colluders):
    own, n, d = compared(), 8, g.degree(colluders)
    shares = dealt(own, vectors(own, n), colluders)[1]
    f = np.stack([shares[k].vectors.reshape(-1) for k in range(1, n + 1)])
    z = np.stack([shares[k].zeros.reshape(-1) for k in range(1, n + 1)])

    def foretold(values, known):
        """Numbers of the last holder that follow from the first so many, and their value at 0."""
        found = field.product(field.interpolation(range(1, known + 1), [0, n]), values[:known])
        return found[1] == values[n - 1], found[0]

    assert foretold(f, d + 1)[0].all()
    assert not foretold(f, d)[0].any()
    same, nothing = foretold(z, 2 * d + 1)
    assert same.all()
    assert not nothing.any()
    assert not foretold(z, 2 * d)[0].any()


# Wrong shares.


def test_of_four_shares_too_many_two_wrong_ones_are_found_and_left_out():
    own, n = compared(), 7
    values = vectors(own, n)
    shares = revealed(dealt(own, values, 1))
    for liar in (2, 6):
        shares[liar] = field.add(shares[liar], np.full_like(shares[liar], liar))
    found = g.opened(shares, 1)
    assert found.wrong == (2, 6)
    assert found.products.tolist() == exactly(own, values)


def test_a_wrong_share_is_noticed_where_it_cannot_be_named():
    own = compared()
    shares = revealed(dealt(own, vectors(own, 4), 1))
    shares[3] = field.add(shares[3], np.ones_like(shares[3]))
    assert g.opened(shares, 1) is None


def test_too_few_shares_open_nothing():
    own = compared()
    shares = revealed(dealt(own, vectors(own, 4), 1))
    with pytest.raises(LocalError, match="shares of 2 silos open no inner product; it takes 3"):
        g.opened({1: shares[1], 4: shares[4]}, 1)


# What is seen.


def other_vectors(values):
    """The same inner products: coordinates in another order, with other signs."""
    return -values[:, :, ::-1]


@pytest.mark.parametrize(("n", "colluders"), [(4, 1), (7, 2)])
def test_the_view_of_colluders_is_ambiguous(n, colluders):
    """What colluders and coordinator see fits any vectors with the same inner products.

    The argument of the module, number by number.

    From the draws behind one view of the last c silos and the coordinator, draws are made that give
    the very same view for other vectors of the honest silos. They are as likely, since all draws
    are uniform.
    """
    d, own = g.degree(colluders), compared(1, 6)
    honest, bad = range(1, n - colluders + 1), range(n - colluders + 1, n + 1)
    values = vectors(own, n)
    values[n - colluders :] = 0  # so that they, too, have the same products with both
    shares, others = dealt(own, values, colluders), other_vectors(values)
    view = revealed(shares)
    twin = {dealer: dict(shares[dealer]) for dealer in shares}
    # f' has the other vector at 0, and what the colluders hold of f at theirs.
    for dealer in honest:
        secret = field.from_signed(g.quantise(own, others[dealer - 1]))
        known = np.stack([secret[0], *(shares[dealer][k].vectors[0] for k in bad)])
        points = field.product(field.interpolation([0, *bad], range(1, n + 1)), known)
        for k in range(1, n + 1):
            twin[dealer][k] = g.GramShare(points[k - 1][None], shares[dealer][k].zeros.copy())
    # z' makes up for the difference.
    for dealer in honest:
        for other in range(1, n + 1):
            if other in honest and other < dealer:
                continue
            for k in range(1, n + 1):
                was = field.product(shares[dealer][k].vectors, shares[other][k].vectors.T)[0, 0]
                now = field.product(twin[dealer][k].vectors, twin[other][k].vectors.T)[0, 0]
                twin[dealer][k].zeros[other - 1, 0] = (
                    int(twin[dealer][k].zeros[other - 1, 0]) + int(was) - int(now)
                ) % PRIME
    # It is a polynomial that z may be: of degree 2d, and nothing at 0.
    for dealer in honest:
        for other in range(1, n + 1):
            values_of = np.array(
                [[twin[dealer][k].zeros[other - 1, 0]] for k in range(1, n + 1)], "<u8"
            )
            at, rest = list(range(1, 2 * d + 2)), list(range(2 * d + 2, n + 1))
            found = field.product(field.interpolation(at, [0, *rest]), values_of[: 2 * d + 1])
            assert found.reshape(-1).tolist() == [0, *values_of[2 * d + 1 :].reshape(-1).tolist()]
    # The view is the same: all that is revealed, and all that the colluders hold.
    assert all(np.array_equal(view[k], revealed(twin)[k]) for k in view)
    for dealer in honest:
        assert not np.array_equal(twin[dealer][1].vectors, shares[dealer][1].vectors)
        for k in bad:
            assert np.array_equal(twin[dealer][k].vectors, shares[dealer][k].vectors)
            assert np.array_equal(twin[dealer][k].zeros, shares[dealer][k].zeros)


def test_shares_and_what_is_revealed_look_uniform():
    own = compared(2000, 1)
    shares = dealt(own, np.zeros((4, 2000, 1)), 1)
    held = shares[1][4].vectors[:, 0]
    told = g.multiply({dealer: shares[dealer][2] for dealer in shares})[1]  # of silos 1 and 2
    for drawn in (held.astype(float) / PRIME, told.astype(float) / PRIME):
        assert abs(drawn.mean() - 0.5) < 0.02  # of fixed seeds
        assert abs(drawn.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(held, told)[0, 1]) < 0.06


def test_with_no_colluders_a_silo_alone_reads_nothing():
    own = compared()
    shares = dealt(own, vectors(own, 3), 0)
    q = field.from_signed(g.quantise(own, vectors(own, 3)[0]))
    assert g.degree(0) == 1
    assert not np.array_equal(shares[1][2].vectors, q)


# Bytes.


def test_a_share_is_read_as_it_was_written_and_anything_else_is_none():
    own = compared()
    share = dealt(own, vectors(own, 4), 1)[1][2]
    data = g.dumped(share)
    assert len(data) == 8 * own.numbers(4)
    found = g.loaded(own, 4, data)
    assert np.array_equal(found.vectors, share.vectors)
    assert np.array_equal(found.zeros, share.zeros)
    for silos, wrong in ((4, data[:-1]), (4, data + b"\0"), (5, data)):
        assert g.loaded(own, silos, wrong) is None
    assert g.loaded(own, 4, PRIME.to_bytes(8, "little") + data[8:]) is None
    assert "vectors [2, 12]" in repr(share)


def test_revealed_products_are_read_as_they_were_written_and_anything_else_is_none():
    own = compared()
    products = revealed(dealt(own, vectors(own, 4), 1))[3]
    data = g.products_dumped(products)
    assert len(data) == 8 * own.products(4) == 8 * 2 * 10
    assert np.array_equal(g.products_loaded(own, 4, data), products)
    assert g.products_loaded(own, 3, data) is g.products_loaded(own, 4, data[8:]) is None
    assert g.products_loaded(own, 4, data[:-8] + b"\xff" * 8) is None


def test_products_become_symmetric_matrices():
    own = compared(2, 3)
    values = vectors(own, 3)
    products = g.dequantise(own, g.opened(revealed(dealt(own, values, 0)), 0).products)
    assert np.array_equal(g.squares(own, products, 3), g.gram(own, list(values)))
