"""One tensor that would leave, in the words that policy, gate, ledger and budget share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Literal, TypeAlias

from ...errors import LocalError

# The unsigned ones are masked words; those of a job's codec are of uploads in the clear.
ITEM_BYTES = {"float32": 4, "float64": 8, "int64": 8, "uint32": 4, "uint64": 8, "bfloat16": 2}
ITEM_BYTES |= {"int8": 1, "int32": 4}

PLAIN = "plain"
MASKED = "masked"
PADDED = "padded"
ROTATED = "rotated"
# A masked tensor is read only as part of a sum over the cohort.
SUM_READER = "sum"
# So is a padded sum, and by silos alone, unless the coordinator and a silo collude.
SILOS_READER = "silos"
# A padded tensor is read only as part of a row, unless the coordinator and a silo collude.
MIX_READER = "mix"
# The coordinator reads inner products only: of rotated tensors unless it and a silo collude, of
# masked ones in any case.
GRAM_READER = "gram"
SHOWN = 3  # tensors that a reason names one by one


# Whether a budget holds the reservation of this number, made by the job of this digest.
Paid: TypeAlias = Callable[[int, str], bool]
# The same of the budget of the data set that is named first.
PaidBy: TypeAlias = Callable[[str, int, str], bool]


@dataclass(frozen=True, slots=True)
class Release:
    """One tensor that would leave.

    ``dtype`` is that on the wire. ``taint`` says what it was computed from; only software that has
    tracked it may say less than ``exact``. ``ledger_ids`` are reservations of the data set's
    budget (security/dp/budget.py) that paid for it, of what is ``noised`` and of nothing else.
    ``readers`` are those who can open this tensor, where they are not all who can open its message.
    """

    part: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str = PLAIN
    taint: Literal["public", "noised", "exact"] = "exact"
    ledger_ids: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_row(self) -> bool:
        """True if it is masked for single silos, which its readers are then."""
        # These three name groups of readers; any other reader is the id of one silo.
        of_sums = {SUM_READER, SILOS_READER, GRAM_READER}
        return self.form == MASKED and not of_sums.issuperset(self.readers)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; LocalError for a dtype that cannot cross."""
        if self.dtype not in ITEM_BYTES:
            raise LocalError(
                f"tensor {self.part}/{self.name}: dtype {self.dtype!r} cannot cross; cast it"
            )
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Reasons:
    """Reasons against what would leave, in the order of the checks; none: it may leave."""

    about: str = ""  # what each of them begins with, such as the tensor
    found: list[str] = field(default_factory=list)

    def require(self, holds: bool, reason: str) -> None:
        """Add the reason unless it holds; later checks still run, so all are reported at once."""
        if not holds:
            self.found.append(self.about + reason)


def own_part(releases: Sequence[Release]) -> str:
    """The part of a padded or rotated message, which is one of its own.

    Empty for any other message.
    """
    own = (release.part for release in releases if release.form in (PADDED, ROTATED))
    return next(own, "")


def shown_exact(releases: Sequence[Release]) -> str:
    """Names of what is ``exact``, the first few one by one; empty where nothing is."""
    exact = [release for release in releases if release.taint == "exact"]
    names = ", ".join(f"{release.part}/{release.name}" for release in exact[:SHOWN])
    hidden = len(exact) - SHOWN
    return f"{names} and {hidden} more" if hidden > 0 else names


def nothing_paid(_: str, __: int, ___: str) -> bool:
    """``PaidBy`` for a silo whose data sets have no budgets."""
    return False


def unpaid(releases: Sequence[Release], job_digest: str, paid: Paid) -> tuple[str, ...]:
    """Every reason why this private job has not paid for all that leaves.

    A reservation of another job counts for nothing: its privacy is spent there.
    """
    reasons = Reasons()
    names = shown_exact(releases)
    reasons.require(
        not names,
        f"{names} would leave as computed from records without noise, and the job is private:"
        " its epsilon would not hold; bring no weights to it that are not public, or ask for a"
        " job without [privacy]",
    )

    # A release that names no reservation would pass the check of the reservations below.
    for release in releases:
        reasons.require(
            release.taint != "noised" or bool(release.ledger_ids),
            f"tensor {release.part}/{release.name} is noised, and names no reservation that paid"
            " for it",
        )

    numbers = set(chain.from_iterable(release.ledger_ids for release in releases))
    for number in sorted(numbers):
        reasons.require(
            paid(number, job_digest),
            f"reservation {number} is said to have paid for it; the data set's budget has no such"
            " one of this job",
        )
    return tuple(reasons.found)
