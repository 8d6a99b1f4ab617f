"""Costs against hand-worked numbers, an integral and another library; errors on the safe side."""

import math
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from staddle.errors import LocalError
from staddle.security.dp import rdp as a
from staddle.security.dp.rdp import Event

DELTA = 1e-5


def cost(*events, delta=DELTA):
    return a.epsilon(a.spent(events), delta)


def oracle(accountant, sigma, q, steps):
    event = PoissonSampledDpEvent(q, GaussianDpEvent(sigma))
    return accountant.compose(SelfComposedDpEvent(event, steps)).get_epsilon(DELTA)


def whole(rho):
    """Only whole orders: at others dp-accounting stops its series early."""
    return np.where([float(order).is_integer() for order in a.ORDERS], rho, np.inf)


def test_the_gaussian_mechanism_costs_alpha_by_two_sigma_squared():
    rho = a.spent([Event("2", "1", 3)])
    assert np.allclose(rho, [3 * order / 8 for order in a.ORDERS], rtol=1e-8)


def test_a_sampled_step_is_the_integral_of_its_definition():
    """(1 / (α - 1)) log E_{z ~ N(0, σ²)} ((1 - q) + q exp((2z - 1) / 2σ²))^α."""
    sigma, q = 1.3, 0.2
    rho = dict(zip(a.ORDERS, a.spent([Event("1.3", "0.2", 1)]), strict=True))
    for order in (1.1, 1.5, 2.7, 8, 10.9):

        def density(z, order=order):
            ratio = math.log1p(q * math.expm1((2 * z - 1) / (2 * sigma**2)))
            return math.exp(order * ratio - z**2 / (2 * sigma**2)) / (
                sigma * math.sqrt(2 * math.pi)
            )

        moment = quad(density, -60, 80, points=[0, order], limit=800, epsabs=0, epsrel=1e-12)[0]
        expected = math.log(moment) / (order - 1)
        assert expected <= rho[order] <= expected * (1 + 1e-8)


@pytest.mark.parametrize("sigma", ["0.7", "1", "4"])
@pytest.mark.parametrize("q", ["0.005", "0.1", "1"])
@pytest.mark.parametrize("steps", [1, 40, 3000])
def test_two_libraries_agree_and_tighter_ones_are_below(sigma, q, steps):
    rho = a.spent([Event(sigma, q, steps)])
    of = (float(sigma), float(q), steps)
    theirs = oracle(RdpAccountant([o for o in a.ORDERS if float(o).is_integer()]), *of)
    assert a.epsilon(whole(rho), DELTA) == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    ours = a.epsilon(rho, DELTA)
    assert ours <= theirs * (1 + 1e-6) + 1e-9
    if steps <= 40:  # a numerical accountant, which composes exactly
        coarse = PLDAccountant(value_discretization_interval=1e-3)  # which costs a little more
        assert oracle(coarse, *of) <= ours + 1e-6


def test_costs_of_different_events_add_up():
    one, other = Event("1", "0.0128", 39_000), Event("20", "1", 100)
    assert cost(one) == pytest.approx(20.39, abs=0.005)  # as Opacus has it by Rényi
    assert cost(one, other) == pytest.approx(20.68, abs=0.005)
    assert (a.spent([one, other]) == a.spent([one]) + a.spent([other])).all()


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert cost() == cost(Event("1", "0.5", 0)) == 0
    assert math.isinf(cost(Event("0", "0.5", 1)))
    assert a.shown(math.inf) == "inf"


def test_what_is_shown_is_never_too_little():
    assert a.shown(1.00001) == "1.0001"
    assert a.shown(0.0) == "0.0000"


def test_what_has_the_numbers_of_an_event_has_its_cost():
    found = a.cost(
        [SimpleNamespace(sigma="1", q="0.0128", steps=39_000, purpose="training")], DELTA
    )
    assert found == cost(Event("1", "0.0128", 39_000))
    assert a.covers("20.4", found)
    assert not a.covers("20.3", found)
    assert not a.covers("0.1", 0.1)  # the float is a little more
    with pytest.raises(LocalError, match="give a decimal"):
        a.cost([SimpleNamespace(sigma="x", q="1", steps=1)], DELTA)


@settings(max_examples=8)
@given(
    sigmas=st.tuples(st.integers(200, 20_000), st.integers(200, 20_000)),
    q=st.sampled_from(["0.001", "0.05", "0.9", "1"]),
    steps=st.integers(1, 20_000),
)
def test_more_noise_never_costs_more(sigmas, q, steps):
    less, more = (str(units * Decimal("0.001")) for units in sorted(sigmas))
    assert (a.spent([Event(more, q, steps)]) <= a.spent([Event(less, q, steps)])).all()


@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [("-1", "0.5", 1), ("nan", "0.5", 1), ("x", "0.5", 1), ("1e9", "1", 1), ("1", "0", 1), ("1",
    "1.1", 1),
     ("1", "inf", 1), ("1", "0.5", -1), ("1", "0.5", 10**10)],
)  # fmt: skip
def test_an_event_that_is_none_is_refused(sigma, q, steps):
    with pytest.raises(LocalError, match="give"):
        Event(sigma, q, steps)


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan])
def test_a_delta_that_is_none_is_refused(delta):
    with pytest.raises(LocalError, match="delta"):
        a.epsilon(a.spent([Event("1", "1", 1)]), delta)
