"""Ways to deal records out to the silos of a simulation, as arguments of ``Experiment``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Partition: TypeAlias = dict[str, Any]  # a [partition] table


def Dirichlet(  # noqa: N802 - names a distribution
    alpha: float, silos: int, *, convention: str = "per-class", **keys: Any
) -> Partition:
    """Each class is spread over the silos by a Dirichlet draw: the smaller alpha, the more uneven.

    ``convention`` names the rule: "per-class", "balanced", "hsu", or "pfllib", "fl-bench" or "ppfl"
    for the arrays that their code draws from the same seed. Further keys of the table, such as
    ``minimum`` and ``seed``, are in docs/simulate.md; so are those of the other functions.
    """
    of_all = {"silos": silos, "alpha": float(alpha), "convention": convention}
    return {"kind": "dirichlet", **of_all, **keys}


def Shards(each: int, silos: int, **keys: Any) -> Partition:  # noqa: N802 - as the others
    """Records sorted by class are cut into equal shards, so many per silo."""
    return {"kind": "shards", "silos": silos, "each": each, **keys}


def Classes(each: int, silos: int, **keys: Any) -> Partition:  # noqa: N802
    """Each silo holds so many of the classes."""
    return {"kind": "classes", "silos": silos, "each": each, **keys}


def LabelGroups(groups: Sequence[Sequence[int]], silos: int, **keys: Any) -> Partition:  # noqa: N802
    """Each silo belongs to one group of classes, and holds these alone."""
    return {"kind": "label-groups", "silos": silos, "groups": _lists(groups), **keys}


def GroupMixtures(  # noqa: N802
    groups: Sequence[Sequence[int]], alpha: float, silos: int, **keys: Any
) -> Partition:
    """The records of each group of classes are spread over all silos by one Dirichlet draw."""
    mixed = {"groups": _lists(groups), "alpha": float(alpha)}
    return {"kind": "group-mixtures", "silos": silos, **mixed, **keys}


def Sources(silos: Mapping[str, int], **keys: Any) -> Partition:  # noqa: N802
    """Records of each source go to so many silos of its own."""
    return {"kind": "sources", "silos": dict(silos), **keys}


def _lists(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(map(int, group)) for group in groups]
