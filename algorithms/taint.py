"""What a tensor was computed from: nothing of a silo's records, what was paid for, or records themselves.

A private job's state tensors and gifts each have a taint, and what is computed from several has the worst of theirs.
Only a mechanism that adds noise and is paid for (privacy.py) makes what is DP of what is private.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Taint:
    """``private``: records show in it unprotected. ``ids``: reservations of the data set's budget that paid for it."""

    private: bool = False
    ids: frozenset[int] = frozenset()

    @property
    def name(self) -> Literal["public", "dp", "private"]:
        """As ledger and policy have it."""
        return "private" if self.private else "dp" if self.ids else "public"


PUBLIC = Taint()
PRIVATE = Taint(private=True)


def worst(taints: Iterable[Taint]) -> Taint:
    """Of what is computed from all of these."""
    found = tuple(taints)
    return Taint(any(taint.private for taint in found), frozenset().union(*(taint.ids for taint in found)))
