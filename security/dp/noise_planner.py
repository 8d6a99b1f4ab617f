"""The noise of a job: the least that keeps all its releases of a silo's records within its target.

A job takes the same steps whatever the noise σ of one is; some of its releases have noise of their
own. The cost falls as σ grows, so bisection finds the least σ, in steps of 0.001, that is enough.
The cost of that very σ was computed, so the target is never exceeded. A plan is for a whole job,
before its first round: noise chosen round by round, as if nothing had been spent before, keeps no
target.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Protocol, TypeAlias, TypeVar

from ...errors import LocalError
from .rdp import LARGEST_SIGMA, Priced, cost, covers, shown

STEP = Decimal("0.001")
BEGIN = 1024  # steps of the first σ that is tried: most are not far from 1


class PricedNoise(Priced, Protocol):
    """Priced, and what it is for."""

    @property
    def purpose(self) -> str:
        """Such as "histogram"; a job sets its noise by ``<purpose>_sigma``, unless σ implies it.

        Where silos share this noise, "-shared" follows, which is not in the key.
        """
        ...


Spends: TypeAlias = Callable[[str], Sequence[PricedNoise]]  # σ → all that the job takes with it
T = TypeVar("T", bound=PricedNoise)


def least_sigma(spends: Spends, most: str, delta: float, largest: int = LARGEST_SIGMA) -> str:
    """The least σ, up to ``largest``, with which all of this costs at most ε = ``most`` at δ.

    LocalError says what to change where no σ does.
    """

    def enough(units: int) -> bool:
        return covers(most, cost(spends(str(units * STEP)), delta))

    # Doubled until it is enough, then halved: each price takes a computation of its own.
    top = _top(spends, largest)
    low, high = 0, min(BEGIN, top)  # of which low is never enough
    while not enough(high):
        if high == top:
            raise LocalError(_hopeless(spends, str(top * STEP), most, delta))
        low, high = high, min(2 * high, top)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return str(high * STEP)


def overspent(
    spends: Spends, sigma: str, most: str, delta: float, largest: int = LARGEST_SIGMA
) -> str:
    """Why a job must not have this σ, and which one, up to ``largest``, would do.

    Empty if it costs at most ε = ``most`` at δ.
    """
    # A job's own figures are never believed: what it costs is computed here.
    found = cost(spends(sigma), delta)
    if covers(most, found):
        return ""
    try:
        fix = f"{least_sigma(spends, most, delta, largest)!r} would do, and left out it is planned"
    except LocalError as error:
        fix = str(error)
    return (
        f"sigma = {sigma!r} costs epsilon = {shown(found)} at delta = {delta:g}, and the job may"
        f" cost {most}; {fix}"
    )


def by_purpose(spends: Sequence[T]) -> dict[str, list[T]]:
    """The releases by purpose, in order."""
    found: dict[str, list[T]] = {}
    for one in spends:
        found.setdefault(one.purpose, []).append(one)
    return found


def _fixed(spends: Spends) -> list[PricedNoise]:
    """Releases whose noise is the same whatever σ is."""
    # Planned with two values of σ: releases that are the same in both do not depend on it.
    other = spends(str(2 * STEP))
    return [one for one in spends(str(STEP)) if one in other]


def _top(spends: Spends, largest: int) -> int:
    """The largest σ, in steps, for which all noise that follows from it stays in range."""
    fixed = _fixed(spends)
    follows = [one for one in spends(str(STEP)) if one not in fixed]
    # At σ of one step: the noise of these releases is proportional to σ.
    most = max((Decimal(one.sigma) for one in follows), default=STEP)
    # Rounded down, so that the largest noise stays in range.
    return int(largest / most)


def _hopeless(spends: Spends, top: str, most: str, delta: float) -> str:
    within = f"within epsilon = {most} at delta = {delta:g}"
    fixed = _fixed(spends)
    alone = cost(fixed, delta)
    if covers(most, alone):
        least = shown(cost(spends(top), delta))
        return (
            f"no noise keeps the job {within}: even sigma = {top} costs {least}; raise epsilon, or"
            " take fewer steps"
        )
    groups = by_purpose(fixed)
    costs = {purpose: cost(group, delta) for purpose, group in groups.items()}
    single = [
        f"{_key(purpose)} = {groups[purpose][0].sigma} costs {shown(value)}"
        for purpose, value in costs.items()
    ]
    dearest = max(costs, key=lambda purpose: costs[purpose])
    return (
        f"no noise of its steps keeps the job {within}: what else is released costs"
        f" {shown(alone)} by itself ({', '.join(single)}); raise {_key(dearest)}, or epsilon"
    )


def _key(purpose: str) -> str:
    """The key of [privacy] that sets the noise of a purpose."""
    return f"{purpose.removesuffix('-shared')}_sigma"
