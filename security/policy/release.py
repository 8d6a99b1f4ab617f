"""One tensor that would leave, in the words that policy, gate, ledger and budget share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from ...errors import LocalError

# the unsigned ones are masked words
ITEM_BYTES = {"float32": 4, "float64": 8, "int64": 8, "uint32": 4, "uint64": 8}

PLAIN = "plain"
MASKED = "masked"
PADDED = "padded"
ROTATED = "rotated"
SUM_READER = "sum"  # who can open a masked tensor reads it only as a part of a sum over the cohort
# and where the sum is padded, silos alone can; unless the coordinator and a silo collude
SILOS_READER = "silos"
MIX_READER = "mix"  # and a padded one as a part of a row; unless coordinator and a silo collude
# of a rotated one the coordinator reads inner products, the same; of a masked one in any case
GRAM_READER = "gram"
SHOWN = 3  # tensors that a reason names one by one


# whether a budget has such a reservation, and of the job of this digest
Paid: TypeAlias = Callable[[int, str], bool]


@dataclass(frozen=True, slots=True)
class Release:
    """What leaves, before it does.

    ``dtype`` is that on the wire. ``taint`` says what it was computed from; only software that has
    tracked it may say less than ``private``. ``ledger_ids`` are reservations of the data set's
    budget (security/dp/budget.py) that paid for it, of what is ``dp`` and of nothing else.
    ``readers`` are those who can open this tensor, where they are not all who can open its message.
    """

    part: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str = PLAIN
    taint: Literal["public", "dp", "private"] = "private"
    ledger_ids: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_row(self) -> bool:
        """Whether it is masked for single silos, which its readers are then."""
        return self.form == MASKED and not {SUM_READER, SILOS_READER, GRAM_READER}.issuperset(
            self.readers
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; LocalError for a dtype that cannot cross."""
        if self.dtype not in ITEM_BYTES:
            raise LocalError(
                f"tensor {self.part}/{self.name}: dtype {self.dtype!r} cannot cross; cast it"
            )
        return self.elements * ITEM_BYTES[self.dtype]


def own_part(releases: Sequence[Release]) -> str:
    """The part of a padded or rotated message, which is one of its own.

    Empty for any other message.
    """
    return next((release.part for release in releases if release.form in (PADDED, ROTATED)), "")


def shown_private(releases: Sequence[Release]) -> str:
    """Names of what is ``private``, the first few one by one; empty where nothing is."""
    names = [f"{release.part}/{release.name}" for release in releases if release.taint == "private"]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def nothing_paid(_: int, __: str) -> bool:
    """Of a silo whose data set has no budget."""
    return False


def unpaid(releases: Sequence[Release], job_digest: str, paid: Paid) -> Iterator[str]:
    """Why what leaves of a private job was not paid for by this very job, reservation by
    reservation.
    """
    if names := shown_private(releases):
        yield (
            f"{names} would leave as computed from records without noise, and the job is private:"
            " its epsilon would not hold; bring no weights to it that are not public, or ask for a"
            " job without [privacy]"
        )
    for release in releases:
        if release.taint == "dp" and not release.ledger_ids:
            yield (
                f"tensor {release.part}/{release.name} is dp, and names no reservation that paid"
                " for it"
            )
    for number in sorted({number for release in releases for number in release.ledger_ids}):
        if not paid(number, job_digest):
            yield (
                f"reservation {number} is said to have paid for it; the data set's budget has no"
                " such one of this job"
            )
