"""What is declared of the exchanges, and the checks of what is given."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.exchange.parts import (
    DTYPES,
    MIX_BITS,
    WEIGHT,
    Contribution,
    Kind,
    Mix,
    Part,
    Sum,
    TensorSpec,
    integer_weights,
    kept_share,
    laid_out,
    own_weight,
)

TWO = (TensorSpec("w", "float32", (2, 3)), TensorSpec("b", "float32", (2,)))

proportions = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40).filter(
    lambda w: sum(w) > 0
)


@given(proportions)
def test_integer_weights_add_up_to_two_to_the_32_and_are_off_by_less_than_one(weights):
    integers = integer_weights(weights)
    assert sum(integers) == 2**MIX_BITS
    whole = Fraction(sum(weights))  # the sum that the code takes, rounded once
    for weight, integer in zip(weights, integers, strict=True):
        assert integer >= 0
        assert abs(integer - Fraction(weight) / whole * 2**MIX_BITS) < 1 + Fraction(1, 1000)


@given(proportions, st.integers(0, 30))
def test_integer_weights_do_not_depend_on_scale_by_powers_of_two(weights, power):
    assert integer_weights(weights) == integer_weights([w * 2**power for w in weights])


def test_integer_weights_give_the_remainder_to_the_earlier_silo():
    third = 2**MIX_BITS // 3  # 3 · third = 2^32 - 1
    assert integer_weights([1, 1, 1]) == (third + 1, third, third)
    assert integer_weights([0, 5]) == (0, 2**MIX_BITS)


def test_integer_weights_give_the_rest_to_the_largest_remainders():
    """2^32/7 = 613,566,756.57 and five of it 3,067,833,782.86: the rest of 2 goes to .86 and to the
    earlier .57.
    """
    assert integer_weights([1, 5, 1]) == (613_566_757, 3_067_833_783, 613_566_756)
    assert integer_weights([1, 1, 5]) == (613_566_757, 613_566_756, 3_067_833_783)


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -0.1], [float("nan")], [float("inf"), 1.0]]
)
def test_integer_weights_refuse(weights):
    with refused("positive sum"):
        integer_weights(weights)


GOOD = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
MEAN = Part("m", Kind.WHOLE_MODEL, Sum("mean"), TWO)


@pytest.mark.parametrize(
    ("contribution", "complaint"),
    [
        (Contribution({"w": torch.zeros(2, 3)}, 1.0), "its schema has"),
        (Contribution({**GOOD, "x": torch.zeros(1)}, 1.0), "its schema has"),
        (
            Contribution({**GOOD, "b": torch.zeros(3)}, 1.0),
            r"is float32 \[3\], its schema says float32 \[2\]",
        ),
        (Contribution({**GOOD, "b": torch.zeros(2).double()}, 1.0), "is float64"),
        (Contribution({**GOOD, "b": torch.zeros(2).half()}, 1.0), "is torch.float16"),
        (Contribution({**GOOD, "b": torch.tensor([0.0, float("nan")])}, 1.0), "NaN or infinity"),
        (Contribution({**GOOD, "b": torch.tensor([0.0, float("inf")])}, 1.0), "NaN or infinity"),
        (Contribution(GOOD), "needs a weight"),
        (Contribution(GOOD, -1.0), "its weight holds a value below 0"),
        (Contribution(GOOD, 2.0**53 + 2), "its weight holds a value above 9.0072e"),
        (Contribution(GOOD, float("nan")), "its weight holds NaN or infinity"),
        (Contribution(GOOD, float("inf")), "its weight holds NaN or infinity"),
        (Contribution(GOOD, torch.ones(2, dtype=torch.float64)), "@weight"),
    ],
)
def test_give_refuses(contribution, complaint):
    with refused(complaint):
        laid_out(MEAN, contribution)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [("float32", (0.0, None)), ("float64", (None, 1.0)), ("int64", (-1.0, 1.0))],
)
def test_give_refuses_values_beyond_the_bounds_of_their_spec(dtype, bounds):
    spec = TensorSpec("x", dtype, (3,), *bounds)
    part = Part("p", Kind.COUNTS, Sum("total"), (spec,))
    inside = torch.tensor(
        [-1 if bounds[0] is None else bounds[0], 0, 1 if bounds[1] is None else bounds[1]]
    )
    expected = inside.tolist()
    assert laid_out(part, Contribution({"x": inside.to(DTYPES[dtype])}))["x"].tolist() == expected
    for bound, said, step in zip(bounds, ("below", "above"), (-1, 1), strict=True):
        if bound is not None:
            for where in range(3):
                beyond = torch.zeros(3, dtype=DTYPES[dtype])
                beyond[where] = bound + step
                with refused(rf"tensor 'x' holds a value {said} {bound:g};"):
                    laid_out(part, Contribution({"x": beyond}))
    assert laid_out(
        Part("p", Kind.COUNTS, Sum("total"), (replace(spec, shape=(0,)),)),
        Contribution({"x": beyond[:0]}),
    )


@pytest.mark.parametrize("form", ["mean", "ratio"])
def test_a_sum_may_say_the_largest_weight(form):
    part = Part("p", Kind.HEADER_ROWS, Sum(form, most=1.0), (TensorSpec("x", "float32", (2, 1)),))
    shape = part.wire[-1].shape
    assert (part.wire[-1].least, part.wire[-1].most) == (0.0, 1.0)
    rows = {"x": torch.ones(2, 1)}
    for weight in (0.0, 0.5, 1.0):
        laid_out(part, Contribution(rows, torch.full(shape, weight, dtype=torch.float64)))
    for weight, said in (
        (2.0, "above 1"),
        (1 + 2**-52, "above 1"),
        (2.0**53, "above 1"),
        (-(2.0**-60), "below 0"),
    ):
        with refused(f"its weight holds a value {said}"):
            laid_out(part, Contribution(rows, torch.full(shape, weight, dtype=torch.float64)))


def test_give_refuses_a_weight_where_none_crosses():
    with refused("takes no weight"):
        laid_out(Part("m", Kind.BACKBONE, Mix(), TWO), Contribution(GOOD, 1.0))


def test_give_lays_out_in_wire_order_and_detaches():
    leaf = torch.zeros(2, requires_grad=True)
    given_ = laid_out(MEAN, Contribution({"b": leaf, "w": GOOD["w"]}, 2))
    assert list(given_) == ["w", "b", WEIGHT]
    assert not given_["b"].requires_grad
    assert given_[WEIGHT].dtype == torch.float64


@given(
    st.floats(0, 1e6), st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(any), st.randoms()
)
def test_what_a_reader_keeps_is_its_part_of_all_weights_in_any_order(own, others, random):
    found, whole = own_weight(own, others), Fraction(own) + sum(map(Fraction, others))
    assert abs(Fraction(found, 2**32) - Fraction(own) / whole) <= Fraction(1, 2**33)
    random.shuffle(others)
    assert own_weight(own, others) == found


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**32))
def test_of_fewer_others_it_keeps_more(own, mixed):
    exact = Fraction(own * 2**32, own * 2**32 + (2**32 - own) * mixed)
    assert kept_share(own, mixed) == float(exact)
    assert kept_share(own, 2**32) == own / 2**32 <= kept_share(own, mixed)
