"""Checks that a weighted sum shows no silo too much of another: security rules 4 and 5.

They compute in whole numbers, so that all machines judge alike.
"""

from collections.abc import Sequence

SLACK_BITS = 20  # weights in steps of 2^-32 are judged to 2^-20


def concentration_fault(counts: Sequence[int], min_cohort: int) -> str:
    """Why a weighted sum shows a silo too much of another, by rule 5; empty if it does not.

    Any silo that sees the sum may subtract its own part from it. ``counts`` has the weights of all
    silos in the sum, in any order.
    """
    # The silo with the most records sees the others without its own, so the second counts for it.
    total, squares = sum(counts), _squares(counts)
    second, first = sorted((0, 0, *counts))[-2:]
    # Every silo can subtract its own part, so the rule must hold for the others of each.
    for own in counts:
        largest_other = second if own == first else first
        fault = _seen(total - own, squares - own * own, largest_other, min_cohort)
        if fault:
            return fault
    return ""


def row_fault(weights: Sequence[int], min_cohort: int) -> str:
    """Why a row of these weights shows its reader, who is not mixed, too much (rules 4 and 5).

    The weights are integers, in steps of 2^-32.
    """
    mixed = sum(weight > 0 for weight in weights)
    if mixed < min_cohort:
        return f"{mixed} silos are mixed, fewer than min_cohort {min_cohort}"
    return seen_fault(weights, min_cohort, rounded=True)


def seen_fault(others: Sequence[int], min_cohort: int, *, rounded: bool = False) -> str:
    """``concentration_fault`` for one silo that sees the sum, by what the others weigh.

    With their shares s, max s <= 1/2 and 1 / Σ s² >= min_cohort - 1. Exact, in whole numbers;
    ``rounded`` weights, which were made whole in 2^32 steps, may exceed either by a part of 2^-20,
    as equal ones differ by a step.
    """
    largest = max(others, default=0)
    return _seen(sum(others), _squares(others), largest, min_cohort, rounded=rounded)


def _squares(counts: Sequence[int]) -> int:
    return sum(count * count for count in counts)


def _seen(total: int, squares: int, largest: int, min_cohort: int, *, rounded: bool = False) -> str:
    # Counts are judged exactly: a shift by twice the bits of the total makes any slack 0.
    slack = SLACK_BITS if rounded else total.bit_length() * 2
    # At a total of 0 the sum is the reader's own part, and there are no shares to judge.
    if 2 * largest > total + (total >> slack) or not total:
        return (
            f"one silo has {largest} of the {total} that all but another have together, more than"
            " half"
        )
    # 1 / Σ s² ≥ min_cohort − 1 in integers: T² ≥ (min_cohort − 1) Σ w².
    if total * total + (total * total >> slack) < (min_cohort - 1) * squares:
        return (
            f"they count as {total * total / squares:.2f} equal ones, fewer than {min_cohort - 1}"
        )
    return ""
