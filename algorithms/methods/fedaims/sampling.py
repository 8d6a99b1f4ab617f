"""Which middle block each silo of a cohort supervises in FedAIMS: dealt out at random, or by its Algorithm 2."""

from collections.abc import Sequence

from torch import Tensor

from ...numerics.streams import Seed, permutation, stream


def balanced(cohort: Sequence[str], middle: int, seed: Seed, round_: int) -> dict[str, int]:
    """A block 1 … ``middle`` for each silo, dealt out from the deepest to silos in random order, as far as they go."""
    order = permutation(stream(seed, "", round_, "fedaims/blocks"), len(cohort)).tolist()
    return {cohort[i]: middle - place % middle for place, i in enumerate(order)}


def supervision_sampling(similarity: Tensor, middle: int) -> list[int]:
    """Algorithm 2: a block 1 … ``middle`` for each silo of a cohort, from their cosines [n, n].

    In order, each silo joins that one of the smallest groups to which it is least similar; ties go to the earlier.
    """
    cosines: list[list[float]] = similarity.tolist()
    groups: list[list[int]] = [[] for _ in range(middle)]
    for i, row in enumerate(cosines):
        smallest = min(len(group) for group in groups)  # the constraint of Eq. 10
        added = [sum(row[j] for j in group) / max(len(group), 1) for group in groups]  # (11), 0 for an empty group
        candidates = [k for k in range(middle) if len(groups[k]) == smallest]
        groups[min(candidates, key=added.__getitem__)].append(i)
    groups.sort(key=len)  # more silos for deeper blocks
    block_of = {i: block for block, group in enumerate(groups, start=1) for i in group}
    return [block_of[i] for i in range(len(cosines))]
