"""Checks that a weighted sum shows no silo too much of another: SECURITY.md rules 4 and 5.

They compute in whole numbers, so that all machines judge alike.
"""

from collections.abc import Sequence

SLACK_BITS = 20  # weights in steps of 2^-32 are judged to 2^-20


def concentration_fault(counts: Sequence[int], min_cohort: int) -> str:
    """Why a weighted sum shows a silo too much of another, by rule 5; empty if it does not.

    Any silo that sees the sum may subtract its own part from it. ``counts`` are all silos' weights,
    in any order; they may be of any size, as Python's integers are exact.
    """
    # The silo with the most records sees the others without its own, so the second counts for it.
    total, squares = sum(counts), _squares(counts)
    second, first = sorted((0, 0, *counts))[-2:]
    # Each silo in turn reads the sum without its own part, so each must find the others even
    # enough.
    for own in counts:
        largest_other = second if own == first else first
        fault = _seen(total - own, squares - own * own, largest_other, min_cohort)
        if fault:
            return fault
    return ""


def row_fault(weights: Sequence[int], min_cohort: int) -> str:
    """Why a row of these weights shows its reader, who is not mixed, too much (rules 4 and 5).

    The weights are whole steps of 2^-32.
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
    # Twice the bits of the total shifts any slack to 0: counts are judged exactly.
    slack = SLACK_BITS if rounded else total.bit_length() * 2
    # A total of 0 has no shares: all that is left is the reader's own part.
    if 2 * largest > total + (total >> slack) or not total:
        return (
            f"one silo has {largest} of the {total} that all but another have together, more than"
            " half"
        )
    # 1 / Σ s² ≥ min_cohort - 1 without a division: T² ≥ (min_cohort - 1) Σ w².
    if total * total + (total * total >> slack) < (min_cohort - 1) * squares:
        return (
            f"they count as {total * total / squares:.2f} equal ones, fewer than {min_cohort - 1}"
        )
    return ""
