"""Costs against hand-worked numbers, an integral and another library; errors on the safe side."""

import math
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import logsumexp

from staddle.errors import LocalError
from staddle.security.dp import rdp as a
from staddle.security.dp.rdp import Event
from staddle.security.dp.shared_noise import closeness

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
    found = a.cost([SimpleNamespace(sigma="1", q="0.0128", steps=39_000, shared=False)], DELTA)
    assert found == cost(Event("1", "0.0128", 39_000))
    assert a.covers("20.4", found)
    assert not a.covers("20.3", found)
    assert not a.covers("0.1", 0.1)  # the float is a little more
    with pytest.raises(LocalError, match="give a decimal"):
        a.cost([SimpleNamespace(sigma="x", q="1", steps=1, shared=False)], DELTA)


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


# Shared noise, against sums over integers.


def log_weights(at, centre, variance):
    """Of the discrete Gaussian around a centre, at integer vectors [n, d]."""
    logs = -((at - np.array(centre)) ** 2).sum(1) / (2 * variance)
    return logs - logsumexp(logs)


def integers(reach, dimensions=1):
    axes = [np.arange(-reach, reach + 1)] * dimensions
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, dimensions)


def divergence(one, other, order):
    return logsumexp(order * one + (1 - order) * other) / (order - 1)


def both_ways(at, moved, variance, q, order):
    """D(m ‖ μ_0) and D(μ_0 ‖ m) of the mixture with what is moved by one record."""
    without, moved = (log_weights(at, centre, variance) for centre in (np.zeros(len(moved)), moved))
    mixed = moved if q == 1 else np.logaddexp(math.log1p(-q) + without, math.log(q) + moved)
    return divergence(mixed, without, order), divergence(without, mixed, order)


def shared(sigma, q):
    return dict(zip(a.ORDERS, a.spent([Event(sigma, q, 1, shared=True)]), strict=True))


@pytest.mark.parametrize(("sigma", "units"), [("0.8", 1), ("1.1", 3), ("2", 1)])
@pytest.mark.parametrize("q", ["0.02", "0.2", "0.9", "1"])
def test_shared_noise_costs_what_it_does_on_integers(sigma, units, q):
    """The same at whole orders, and at others never less."""
    rho, deviation = shared(sigma, q), units * float(sigma)
    at = integers(round(60 * deviation) + 60)
    for order in (1.1, 1.5, 2, 2.7, 3, 6, 9.9, 14):
        found, back = both_ways(at, [units], deviation**2, float(q), order)
        assert back <= found + 1e-12
        assert found <= rho[order] <= (1 + 1e-8 if order == int(order) else 3) * found + 2e-11


@pytest.mark.parametrize("q", ["0.1", "1"])
def test_shared_noise_costs_the_same_in_each_direction_of_space(q):
    """A record that moves two numbers by 2 and 1 is as far as one that moves one by √5."""
    rho, at = shared("1.3", q), integers(40, 2)
    for order in (1.3, 2, 3.5, 5):
        found, back = both_ways(at, [2, 1], 5 * 1.3**2, float(q), order)
        assert back <= found + 1e-12
        assert found <= rho[order] + 1e-13
        assert order != int(order) or rho[order] == pytest.approx(found, rel=1e-8)


def test_continuous_noise_may_cost_less_between_whole_orders():
    """So the line between whole orders is needed."""
    found, _ = both_ways(integers(100), [1], 0.64, 0.2, 1.5)
    continuous = dict(zip(a.ORDERS, a.spent([Event("0.8", "0.2", 1)]), strict=True))[1.5]
    assert continuous * 1.00005 < found < shared("0.8", "0.2")[1.5]


@pytest.mark.parametrize("order", [1.1, 2, 5.5, 12])
def test_a_sum_that_is_only_close_costs_what_its_distance_allows(order):
    """Two shares of variance 1/2, which are far from one discrete Gaussian of variance 1."""
    at = integers(60)
    share = np.exp(log_weights(at, [0], 0.5))
    middle = slice(35, 86)  # -25 to 25; further out float64 has no such numbers
    total = np.log(np.convolve(share, share)[60:-60][middle])
    exact = log_weights(at, [0], 1)[middle]
    distance = np.abs(total - exact).max()
    assert 0.01 < distance < 5 * math.exp(-(math.pi**2) / 2)

    found, ideal = (divergence(one[:-1], one[1:], order) for one in (total, exact))
    assert found <= ideal + (2 * order - 1) / (order - 1) * distance


def test_what_is_charged_for_shares_is_exact():
    rho = shared("3", "1")
    for order in (1.1, 2, 7.5, 64 - 1, 512):
        expected = order / 18 * (1 + a.SLACK) + a.LEAST
        distance = (2 * order - 1) / (order - 1) * 1e-12
        assert rho[order] - expected == pytest.approx(distance, rel=1e-2)
    assert closeness(50, 8, 10**12) < a.CLOSE == 1e-12


@pytest.mark.parametrize(("units", "sigma", "q", "steps"), [
    (1, "2", "0.2", 20), (4, "1", "0.05", 50), (1, "1", "1", 2),
])  # fmt: skip
def test_shared_noise_costs_no_less_than_another_library_finds_on_integers(units, sigma, q, steps):
    one = from_discrete_gaussian_mechanism(
        units * float(sigma), units, value_discretization_interval=1e-3, sampling_prob=float(q)
    )
    theirs = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    ours = cost(Event(sigma, q, steps, shared=True))
    assert theirs <= ours <= 1.5 * theirs


@pytest.mark.parametrize(("sigma", "q", "steps", "more"), [
    ("1", "0.0128", 39_000, 0.04), ("1", "0.05", 200, 1e-3), ("20", "1", 100, 1e-9),
])  # fmt: skip
def test_shared_noise_costs_hardly_more(sigma, q, steps, more):
    event = Event(sigma, q, steps, shared=True)
    plain = cost(Event(sigma, q, steps))
    assert plain < cost(event) < (1 + more) * plain
    assert a.cost([event], DELTA) == cost(event)


def test_shared_noise_of_nothing_costs_everything():
    # the second one is so little that float64 loses it
    for sigma in ("0", "1e-153"):
        assert math.isinf(cost(Event(sigma, "0.1", 1, shared=True)))
    assert cost(Event("0", "0.5", 0, shared=True)) == 0
