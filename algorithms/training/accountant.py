"""The account from which a silo pays for what is released of its records, in one job.

The silo agent pays from its data set's budget, which is on disk and never overdrawn; a simulation
keeps count.
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

if TYPE_CHECKING:
    from ..job.job import Job


class Random(Protocol):
    """The random numbers of one step."""

    def normal(self, count: int) -> NDArray[np.float64]:
        """Independent standard normal numbers [count]."""
        ...

    def drawn(self, records: int, q: float) -> NDArray[np.int64]:
        """Which records a step takes."""
        ...


class ReservedSteps(Protocol):
    """Steps that were set aside before the first of them is taken."""

    @property
    def id(self) -> int:
        """The reservation, as taints name it."""
        ...

    def take(self, purpose: str) -> None:
        """One step for this purpose; ExhaustedError where none is left."""
        ...


@dataclass(frozen=True)
class Counts:
    """Noisy counts of training records by class [classes] int64, and what paid for them.

    They are released once in a job.
    """

    counts: Tensor
    id: int


class PrivacyAccount(Protocol):
    """One silo's, in one job."""

    def counts(self) -> Counts | None:
        """The counts that were released before."""
        ...

    def keep_counts(self, counts: Counts) -> None:
        """Keep them for good: they are never drawn again."""
        ...

    def reserve(self, round_: int, spends: Sequence[Spend]) -> ReservedSteps:
        """Set steps aside; ExhaustedError, and nothing is, where the job's target or the budget
        does not cover them.
        """
        ...

    def commit(self, spending: ReservedSteps) -> None:
        """No more steps of it are taken; what came of them is durable. The rest is free again."""
        ...


@dataclass(frozen=True)
class PrivateSilo:
    """What a private round takes besides: an account, and randomness that no seed makes again."""

    account: PrivacyAccount
    fresh: Callable[[], Random]


@dataclass
class MemorySpending:
    """Steps that were set aside in a ``MemoryAccount``."""

    id: int
    left: Counter[str]
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, purpose: str) -> None:
        """One step for this purpose."""
        if not self.left[purpose]:
            raise ExhaustedError(
                f"reservation {self.id} holds no more steps for {purpose!r}, {self.taken[purpose]}"
                " are taken"
            )
        self.left[purpose] -= 1
        self.taken[purpose] += 1


class MemoryAccount:
    """An account without a budget, as a simulation has it: it keeps count, and to what was planned
    for the job.
    """

    def __init__(self, job: "Job") -> None:
        self._free: Counter[str] = Counter()
        for spend in job_spends(job, signed_sigma(job)):
            self._free[spend.purpose] += spend.steps
        self._job = job.name
        self._counts: Counts | None = None
        self.spendings: list[MemorySpending] = []

    def counts(self) -> Counts | None:
        """The counts that were released before."""
        return self._counts

    def keep_counts(self, counts: Counts) -> None:
        """Keep them."""
        self._counts = counts

    def reserve(self, round_: int, spends: Sequence[Spend]) -> MemorySpending:
        """Set steps aside, of those that the job plans."""
        for spend in spends:
            if spend.steps > self._free[spend.purpose]:
                raise ExhaustedError(
                    f"round {round_} of job {self._job!r} takes {spend.steps} steps for"
                    f" {spend.purpose!r}, of those planned {self._free[spend.purpose]} are left"
                )
        asked = Counter({spend.purpose: spend.steps for spend in spends})
        self._free -= asked
        self.spendings.append(MemorySpending(len(self.spendings), asked))
        return self.spendings[-1]

    def commit(self, spending: ReservedSteps) -> None:
        """What was not taken is free again."""
        kept = self.spendings[spending.id]
        self._free += kept.left
        kept.left.clear()
