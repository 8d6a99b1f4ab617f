"""The privacy account of a silo in one job: it pays for every release about the silo's records.

The silo agent pays from its data set's budget, which is on disk and never overdrawn; a simulation
only keeps count.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ExhaustedError
from ..job.privacy import Spend, job_spends, signed_sigma
from ..numerics.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from ..job.job import Job


class Random(Protocol):
    """The random numbers of one step.

    Each step takes a fresh object, so that no release repeats the noise of another.
    """

    def normal(self, count: int) -> NDArray[np.float64]:
        """Independent standard normal numbers [count].

        They are float64. In a federation they come from a cryptographic generator
        (security/dp/noise.py): whoever could make the noise again could subtract it.
        """
        ...

    def discrete_gaussian(self, count: int, variance: int) -> NDArray[np.int64]:
        """Independent discrete Gaussians [count] of this variance and mean 0.

        They are int64, and exact: no float decides a value (security/dp/discrete_gaussian.py).
        """
        ...

    def drawn(self, records: int, q: float) -> NDArray[np.int64]:
        """Indices of the records of a step, each drawn with probability q.

        They are int64, each at most once; a step may draw no record at all.
        """
        ...


class ReservedSteps(Protocol):
    """Steps that were set aside before the first of them is taken.

    A round that crashes has spent all of them, since nobody can know which it used (security
    rule 25).
    """

    @property
    def id(self) -> int:
        """The reservation, as taints name it."""
        ...

    def take(self, purpose: str) -> None:
        """Use one step for this purpose; ExhaustedError where none is left.

        Call it before any record is read.
        """
        ...


@dataclass(frozen=True)
class Counts:
    """Noisy counts of training records by class [classes] int64 (without classes [1], of all).

    They are released once in a job.
    """

    counts: Tensor
    id: int


class PrivacyAccount(Protocol):
    """The account of one silo in one job."""

    def counts(self) -> Counts | None:
        """The counts released before; None before the first release.

        A job releases counts once, and later rounds use them again.
        """
        ...

    def keep_counts(self, counts: Counts) -> None:
        """Store the counts for good: they are never drawn again."""
        ...

    def reserve(self, round_: int, spends: Sequence[Spend]) -> ReservedSteps:
        """Set steps aside.

        Call it before any record is read. ExhaustedError if the job's target or the budget does not
        cover all of them; then none are set aside.
        """
        ...

    def commit(self, spending: ReservedSteps) -> None:
        """Release the steps that were not taken; the results of the others must be durable."""
        ...


@dataclass(frozen=True)
class PrivateSilo:
    """The needs of a private round: an account, and randomness that no seed reproduces.

    ``fresh`` makes a new generator for every step and every other release. Where several processes
    compute the round (``ranks``), it makes the same numbers in each.
    """

    account: PrivacyAccount
    fresh: Callable[[], Random]
    ranks: Ranks = ALONE


@dataclass
class MemorySpending:
    """Steps that were set aside in a ``MemoryAccount``."""

    id: int
    left: Counter[str]
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, purpose: str) -> None:
        """Use one step for this purpose; ExhaustedError where none is left."""
        if not self.left[purpose]:
            raise ExhaustedError(
                f"reservation {self.id} holds no more steps for {purpose!r}, {self.taken[purpose]}"
                " are taken"
            )
        self.left[purpose] -= 1
        self.taken[purpose] += 1


class MemoryAccount:
    """An account without a budget, for simulations: it allows the steps that the job plans.

    It is in memory only.
    """

    def __init__(self, job: "Job") -> None:
        self._free: Counter[str] = Counter()
        # ``job_spends`` covers the silo that is drawn most often, and interrupted rounds.
        for spend in job_spends(job, signed_sigma(job)):
            self._free[spend.purpose] += spend.steps
        self._job = job.name
        self._counts: Counts | None = None
        self.spendings: list[MemorySpending] = []

    def counts(self) -> Counts | None:
        """The counts released before; None before the first release.

        They are lost with this object.
        """
        return self._counts

    def keep_counts(self, counts: Counts) -> None:
        """Store the counts."""
        self._counts = counts

    def reserve(self, round_: int, spends: Sequence[Spend]) -> MemorySpending:
        """Set steps aside; ExhaustedError for more than the job plans."""
        # All are checked before any is taken: a reservation holds whole or not at all.
        for spend in spends:
            if spend.steps > self._free[spend.purpose]:
                raise ExhaustedError(
                    f"round {round_} of job {self._job!r} takes {spend.steps} steps for"
                    f" {spend.purpose!r}, of those planned {self._free[spend.purpose]} are left"
                )
        reserved = Counter({spend.purpose: spend.steps for spend in spends})
        # ``commit`` returns what is not taken.
        self._free -= reserved
        self.spendings.append(MemorySpending(len(self.spendings), reserved))
        return self.spendings[-1]

    def commit(self, spending: ReservedSteps) -> None:
        """Release the steps that were not taken.

        Later rounds may take them.
        """
        kept = self.spendings[spending.id]
        # ``left`` is emptied, so a second commit releases nothing.
        self._free += kept.left
        kept.left.clear()
