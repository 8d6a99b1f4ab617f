"""Whether sums by declared weights show a silo too much of another: rule 5, for a job before it begins."""

from collections.abc import Iterable, Mapping, Sequence

from .round_spec import concentration_fault


def weights_fault(counts: Mapping[str, int], cohorts: Iterable[Sequence[str]], min_cohort: int) -> str:
    """Which silo weighs too much in the first cohort that breaks rule 5, and what to do; empty if none does.

    ``counts`` are the declared ones of public weights, by silo; empty where nothing is weighted by them.
    """
    if not counts:
        return ""
    for cohort in dict.fromkeys(map(tuple, cohorts)):
        if fault := concentration_fault([counts[silo] for silo in cohort], min_cohort):
            heaviest = max(cohort, key=counts.__getitem__)
            return (
                f"silo {heaviest!r} weighs too much among {', '.join(cohort)}, with {counts[heaviest]} records of "
                f"{sum(counts[silo] for silo in cohort)}: {fault}; have more silos of its size, or leave it out"
            )
    return ""
