"""Rule 5 before a job begins: sums by declared weights must not show a silo too much of another."""

from collections.abc import Iterable, Mapping, Sequence

from ...algorithms.exchange.concentration import concentration_fault


def weights_fault(
    counts: Mapping[str, int], batches: Iterable[Sequence[str]], min_cohort: int
) -> str:
    """The silo that weighs too much in the first batch that breaks rule 5, and what to do.

    Empty if the rule holds for each batch: then it holds for sums over several of them.

    ``counts`` are the declared ones of public weights, by silo; empty where nothing is weighted by
    them.
    """
    if not counts:
        return ""
    for batch in batches:
        if fault := concentration_fault([counts[silo] for silo in batch], min_cohort):
            # The fault is the whole batch's; naming the heaviest tells the operator what to change.
            heaviest = max(batch, key=counts.__getitem__)
            return (
                f"silo {heaviest!r} weighs too much among {', '.join(batch)}, with"
                f" {counts[heaviest]} records of {sum(counts[silo] for silo in batch)}: {fault};"
                " have more silos of its size, or leave it out"
            )
    return ""
