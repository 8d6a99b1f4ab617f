"""Where a silo pays for what is released of its records, in one job: what the runner of a private round asks.

The silo agent pays from its data set's budget, which is on disk and never overdrawn; a simulation keeps count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .privacy import Spend
from .private import Random


class Spending(Protocol):
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
    """Noisy counts of training records by class [classes] int64, released once in a job, and what paid for them."""

    counts: Tensor
    id: int


class Account(Protocol):
    """One silo's, in one job."""

    def counts(self) -> Counts | None:
        """The counts that were released before."""
        ...

    def keep_counts(self, counts: Counts) -> None:
        """Keep them for good: they are never drawn again."""
        ...

    def reserve(self, round_: int, spends: Sequence[Spend]) -> Spending:
        """Set steps aside; ExhaustedError, and nothing is, where the job's target or the budget does not cover them."""
        ...

    def commit(self, spending: Spending) -> None:
        """No more steps of it are taken; what came of them is durable. The rest is free again."""
        ...


@dataclass(frozen=True)
class PrivateSilo:
    """What a private round takes beside a plain one: an account, and randomness that no seed makes again."""

    account: Account
    fresh: Callable[[], Random]
