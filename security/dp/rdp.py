"""The cost of a series of noisy releases, by Rényi differential privacy.

The mechanism is the sampled Gaussian. An event is a number of equal steps. Each step is a sum over
records, bounded in Euclidean norm by the sensitivity S, under noise of standard deviation σ S;
every record is drawn with probability q (Poisson). Neighbours differ by one record that is there or
not. A step at order α costs ρ(α; σ, q) (Mironov, Talwar, Zhang, "Rényi differential privacy of the
sampled Gaussian mechanism", 2019; q = 1 is the Gaussian mechanism, α / 2σ²), and costs add up. At
any one order they do so too where later events were chosen in view of earlier releases, as long as
their sum stays below a bound that was set before (a filter; Feldman, Zrnic, "Individual privacy
accounting via a Rényi filter", 2021)::

    ε(δ) = min over α of  ρ(α) + log((α - 1) / α) - (log δ + log α) / (α - 1)

(Balle, Barthe, Gaboardi, Hsu, Sato, "Hypothesis testing interpretations and Rényi differential
privacy", 2020). Which α that is may then depend on the releases. Split by it, all that can come out
is as many parts as there are ORDERS, each within e^ε and δ: so what is proven of events that were
so chosen is ε at len(ORDERS) · δ. The functions are Opacus's. Every figure is rounded up: a step's
ρ by SLACK for what float64 loses, an ε to four digits. Noise of 0 costs infinity.

Noise that silos share is in integers, and almost a discrete Gaussian. At integer orders that costs
the same; at others a line between these is taken, and CLOSE is charged for "almost". The proof is
in shared_noise.py.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Protocol

import numpy as np

from ...errors import check_local
from ..arithmetic.fixedpoint import Reals

ORDERS = (
    *(1 + step / 10 for step in range(1, 100)),
    *range(11, 64),
    72,
    80,
    96,
    128,
    192,
    256,
    384,
    512,
)
DIGITS = Decimal("0.0001")  # of an ε that is shown
LARGEST_SIGMA = 100_000
MOST_STEPS = 10**9
MOST_EXPONENT = 700  # of e in float64
# Relative, absolute: ρ of a step is a sum of up to 512 terms in logarithms.
SLACK, LEAST = 1e-9, 1e-14
CLOSE = 1e-12  # charged for the distance of shared noise from a discrete Gaussian


@dataclass(frozen=True, slots=True)
class Event:
    """Equal steps of the sampled Gaussian mechanism.

    ``sigma`` and ``q`` are decimals, so that a ledger holds them. ``shared`` noise is a sum of
    discrete Gaussians on integers, within CLOSE of one, and costs a little more.
    """

    sigma: str  # standard deviation of the noise, in units of the sensitivity
    q: str  # probability that a record is drawn; "1" for all
    steps: int
    shared: bool = False

    def __post_init__(self) -> None:
        check_local(
            0 <= _decimal(self.sigma) <= LARGEST_SIGMA,
            f"an event with sigma = {self.sigma!r}; give a decimal from 0 to {LARGEST_SIGMA}",
        )
        drawn = 0 < _decimal(self.q) <= 1
        check_local(drawn, f"an event with q = {self.q!r}; give a decimal above 0, at most 1")
        some = 0 <= self.steps <= MOST_STEPS
        check_local(some, f"an event of {self.steps} steps; give 0 to {MOST_STEPS}")


class Priced(Protocol):
    """Anything with an event's numbers: an item of a job's plan, or a record of a budget."""

    @property
    def sigma(self) -> str:
        """As an event's."""
        ...

    @property
    def q(self) -> str:
        """As an event's."""
        ...

    @property
    def steps(self) -> int:
        """As an event's."""
        ...

    @property
    def shared(self) -> bool:
        """As an event's."""
        ...


def cost(priced: Iterable[Priced], delta: float) -> float:
    """The ε at δ of all of these together; ``math.inf`` where one of them has no noise.

    LocalError for a δ that is not between 0 and 1, or for values that ``Event`` does not allow.
    """
    return epsilon(spent(list(map(event_of, priced))), delta)


def event_of(one: Priced) -> Event:
    """The event of anything with its numbers."""
    return Event(one.sigma, one.q, one.steps, one.shared)


def group(value: float, delta: float, records: int) -> tuple[float, float]:
    """ε and δ for ``records`` records together, such as one person's: k ε and k e^((k - 1) ε) δ.

    A δ above 1 promises nothing. Dwork, Roth, "The algorithmic foundations of differential
    privacy", 2014, theorem 2.2; Vadhan, "The complexity of differential privacy", 2017, lemma 2.2.
    """
    exponent = (records - 1) * value
    # ``math.exp`` raises OverflowError above 709.
    growth = math.exp(exponent) if exponent < MOST_EXPONENT else math.inf
    return records * value, records * delta * growth


def covers(most: str, value: float) -> bool:
    """True if an ε is at most this decimal; never for infinity."""
    # Decimal(float) is exact, so nothing is rounded before the comparison.
    return Decimal(value) <= Decimal(most)


def spent(events: Sequence[Event]) -> Reals:
    """ρ of all events together, by Rényi order [orders]; infinity where one has no noise."""
    total = np.zeros(len(ORDERS))
    for event in events:
        # 0 steps without noise cost 0, but 0 times infinity is NaN.
        if event.steps:
            # At each Rényi order costs add up, even where an event was chosen in view of earlier
            # results.
            step = _shared_step if event.shared else _step
            total += event.steps * step(event.sigma, event.q)
    return total


def epsilon(rho: Reals, delta: float) -> float:
    """The ε at δ of what was spent, 0 for nothing; ``math.inf`` where no ε bounds it."""
    check_local(0 < delta < 1, f"delta = {delta:g}; give a number between 0 and 1")
    if not rho.any():
        return 0.0

    # At each order by itself, and the least of all: see the module's docstring for the price in δ.
    orders = np.array(ORDERS)
    bounds = rho + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(float(bounds.min()), 0.0)


def shown(value: float) -> str:
    """An ε with four digits after the point, rounded up; "inf" for infinity.

    So the ε that people read is never below the computed one.
    """
    if math.isinf(value):
        return "inf"
    return str(Decimal(value).quantize(DIGITS, ROUND_CEILING))


@lru_cache(maxsize=4096)
def _step(sigma: str, q: str) -> Reals:
    """ρ of one step, order by order."""
    if not Decimal(sigma):
        return np.full(len(ORDERS), np.inf)

    from opacus.accountants.analysis import (  # noqa: PLC0415 two seconds that plain jobs need not
        rdp as analysis,
    )

    # A bound that numpy computed with an overflow could be too low, so a warning is an error.
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        made = analysis.compute_rdp(
            q=float(q), noise_multiplier=float(sigma), steps=1, orders=list(ORDERS)
        )
    # Raised by more than float64 can have lost: a step whose cost rounds to 0 would be free.
    rho = np.maximum(np.asarray(made, np.float64), 0) * (1 + SLACK) + LEAST
    # Read-only, since the cache returns the same array to all callers.
    rho.setflags(write=False)
    return rho


@lru_cache(maxsize=4096)
def _shared_step(sigma: str, q: str) -> Reals:
    """ρ of one step with shared noise, order by order (shared_noise.py)."""
    orders = np.array(ORDERS)
    whole = orders == np.floor(orders)
    knots, heights = orders[whole], (orders[whole] - 1) * _step(sigma, q)[whole]
    # Between infinite heights there is no line, but NaN.
    if not np.isfinite(heights).all():
        return np.full(len(ORDERS), np.inf)

    # Lines of (α - 1) ρ(α) between the integer orders, from 0 at order 1. The SLACK of ``_step``
    # covers what float64 loses here as well.
    lines = np.interp(orders, np.append(1, knots), np.append(0, heights)) / (orders - 1)
    # A step that draws all records costs no less, and its cost is known at every order.
    rho: Reals = np.minimum(lines, _step(sigma, "1")) + (2 * orders - 1) / (orders - 1) * CLOSE
    rho.setflags(write=False)
    return rho


def _decimal(text: str) -> Decimal:
    """The number; -1, which no field of an event may be, for any text that is no finite one."""
    try:
        value = Decimal(text)
    except ArithmeticError:
        return Decimal(-1)
    return value if value.is_finite() else Decimal(-1)
