"""The least noise that keeps a target, against a search of all."""

from dataclasses import dataclass, replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.errors import LocalError
from staddle.security.dp.noise_planner import STEP, by_purpose, least_sigma, overspent
from staddle.security.dp.rdp import LARGEST_SIGMA, cost, covers

DELTA = 1e-5


@dataclass(frozen=True)
class Spend:
    purpose: str
    sigma: str
    q: str
    steps: int
    shared: bool = False


HISTOGRAM = Spend("histogram", "10.0", "1", 1)
STATISTICS = Spend("statistics", "3.0", "1", 2)


def spends(q="0.05", steps=400, whole=0, others=(HISTOGRAM,)):
    """Steps of one noise, and of what it is on all records."""

    def made(sigma):
        found = [*others, Spend("training", sigma, q, steps)]
        if whole:
            wide = (Decimal(sigma) / Decimal(q)).quantize(STEP, "ROUND_CEILING")
            found.append(Spend("training-whole", str(wide), "1", whole))
        return found

    return made


@settings(max_examples=4)
@given(
    most=st.decimals("0.5", "20", places=2),
    q=st.sampled_from(["0.001", "0.05", "0.9", "1"]),
    steps=st.integers(1, 20_000),
    whole=st.integers(0, 40),
)
def test_planned_noise_keeps_the_target_and_a_step_less_does_not(most, q, steps, whole):
    made = spends(q, steps, whole)
    sigma = least_sigma(made, str(most), DELTA)
    assert covers(str(most), cost(made(sigma), DELTA))
    assert not covers(str(most), cost(made(str(Decimal(sigma) - STEP)), DELTA))
    assert overspent(made, sigma, str(most), DELTA) == ""


@pytest.mark.parametrize(("most", "sigma"), [("1000", "0.123"), ("0.38", "32.648")])
def test_very_little_and_very_much_noise(most, sigma):
    assert least_sigma(spends(steps=100), most, DELTA) == sigma


def test_what_is_released_beside_the_steps_may_cost_too_much():
    made = spends(
        others=(HISTOGRAM, STATISTICS, replace(STATISTICS, purpose="metrics", sigma="30.0"))
    )
    with pytest.raises(LocalError) as caught:
        least_sigma(made, "1", DELTA)
    assert (
        str(caught.value)
        == "no noise of its steps keeps the job within epsilon = 1 at delta = 1e-05: what"
        " else is released costs 2.0901 by itself (histogram_sigma = 10.0 costs 0.3753,"
        " statistics_sigma = 3.0 costs 2.0290, metrics_sigma = 30.0 costs 0.1666); raise"
        " statistics_sigma, or epsilon"
    )


def test_what_else_is_released_is_named_by_its_key_where_silos_share_its_noise():
    """A job whose sums take less noise than costs can be computed for fails by the same words."""
    made = spends(others=(replace(STATISTICS, purpose="metrics-shared"),))
    said = r"\(metrics_sigma = 3.0 costs 2.0290\); raise metrics_sigma, or epsilon"
    with pytest.raises(LocalError, match=said):
        least_sigma(made, "1", DELTA, 1000)
    with pytest.raises(LocalError, match=r"even sigma = 1000.000 costs"):
        least_sigma(spends(others=()), "0.005", DELTA, 1000)
    assert "even sigma = 1000.000" in overspent(spends(others=()), "1", "0.005", DELTA, 1000)


def test_a_target_below_what_the_accountant_can_tell():
    why = r"even sigma = 100000.000 costs 0\.00[0-9]+; raise epsilon, or take fewer"
    with pytest.raises(LocalError, match=why):
        least_sigma(spends(others=()), "0.005", DELTA)
    # the noise on all records is the largest
    with pytest.raises(LocalError, match=r"even sigma = 5000.000 costs"):
        least_sigma(spends(whole=1, others=()), "0.005", DELTA)
    assert LARGEST_SIGMA == 100_000


def test_noise_that_costs_too_much_is_told_with_what_would_do():
    assert (
        overspent(spends(), "0.9", "8", DELTA)
        == "sigma = '0.9' costs epsilon = 9.2302 at delta = 1e-05, and the job may cost 8; '0.965'"
        " would do, and left out it is planned"
    )
    assert "costs epsilon = inf at" in overspent(spends(), "0", "8", DELTA)
    assert "what else is released costs 2.0290" in overspent(
        spends(others=(STATISTICS,)), "4", "1", DELTA
    )


def test_groups_come_in_their_order():
    assert {
        key: len(group) for key, group in by_purpose([STATISTICS, HISTOGRAM, STATISTICS]).items()
    } == {"statistics": 2, "histogram": 1}
