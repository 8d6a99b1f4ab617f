"""One tensor that would leave, in the words that policy, gate, ledger and budget share."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ..errors import LocalError

ITEM_BYTES = {"float32": 4, "float64": 8, "int64": 8, "uint32": 4, "uint64": 8}  # the unsigned ones are masked words

PLAIN = "plain"
MASKED = "masked"
PADDED = "padded"
ROTATED = "rotated"
SUM_READER = "sum"  # who can open a masked tensor reads it only as a part of a sum over the cohort
MIX_READER = "mix"  # and a padded one as a part of a row; unless coordinator and a silo collude
GRAM_READER = "gram"  # of a rotated one the coordinator reads inner products; the same


@dataclass(frozen=True, slots=True)
class Release:
    """What leaves, before it does.

    ``dtype`` is that on the wire. ``taint`` says what it was computed from; only software that has tracked it may say
    less than ``private``. ``ledger_ids`` are the budget records that paid for it.
    """

    part: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str = PLAIN
    taint: Literal["public", "dp", "private"] = "private"
    ledger_ids: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()  # who can open it, where that is not who can open the rest of its message

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; LocalError for a dtype that cannot cross."""
        if self.dtype not in ITEM_BYTES:
            raise LocalError(f"tensor {self.part}/{self.name}: dtype {self.dtype!r} cannot cross; cast it")
        return self.elements * ITEM_BYTES[self.dtype]


def own_part(releases: Sequence[Release]) -> str:
    """The part of a padded or rotated message, which is one of its own; empty for any other message."""
    return next((release.part for release in releases if release.form in (PADDED, ROTATED)), "")
