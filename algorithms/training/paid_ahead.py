"""A private round that one process pays for, and another trains.

All that a round may take of its data set follows from the signed job, so it is set aside before the
round begins: by whoever holds the budget, in the order in which the round itself would. The process
that trains has an account with that and nothing else. It says what it took, and the rest is free
again once the round is kept.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ...errors import LocalError
from ..data.dataset import Dataset
from ..job.job import Job
from ..job.privacy import Spend, round_spends, signed_sigma
from .accountant import Counts, MemorySpending, PrivateSilo, ReservedSteps


@dataclass(frozen=True)
class PaidAhead:
    """The account of one round where it is trained: counts that were released, steps set aside.

    ``reservation`` is None for a round that takes no step.
    """

    known: Counts | None = None
    reservation: int | None = None
    steps: Mapping[str, int] = field(default_factory=dict)  # by purpose

    def counts(self) -> Counts | None:
        """The counts that were released before the round."""
        return self.known

    def keep_counts(self, counts: Counts) -> NoReturn:
        """LocalError: counts are released before a round begins."""
        raise LocalError("counts are released where the budget is; this is a bug in Staddle")

    def reserve(self, round_: int, spends: Sequence[Spend]) -> MemorySpending:
        """The steps that were set aside; LocalError where the round asks for others."""
        asked = {spend.purpose: spend.steps for spend in spends}
        if self.reservation is None or asked != self.steps:
            raise LocalError(
                f"round {round_} asks for {asked}, and {dict(self.steps)} was set aside; install"
                " the same release of Staddle where the agent runs and where it trains"
            )
        return MemorySpending(self.reservation, Counter(asked))

    def commit(self, spending: ReservedSteps) -> NoReturn:
        """LocalError: whoever set the steps aside commits them."""
        raise LocalError("steps are committed where the budget is; this is a bug in Staddle")


def pay(
    job: Job, silo: str, round_: int, data: Dataset, private: PrivateSilo
) -> tuple[PaidAhead, ReservedSteps | None]:
    """Set aside all that a private round takes, and release its counts where none are yet.

    The delivery was checked. ExhaustedError where the budget does not cover it; nothing is set
    aside for the final round, which takes no step.
    """
    account = private.account
    if round_ == job.length:
        return PaidAhead(account.counts()), None
    known = None
    if not job.private.whole_silos:
        # Opacus takes two seconds to import.
        from .private_round import check_counts, release_counts  # noqa: PLC0415

        known = release_counts(job, round_, data, private)
        check_counts(job, silo, known)
    spends = round_spends(job, round_, signed_sigma(job))
    if not spends:
        return PaidAhead(known), None
    spending = account.reserve(round_, spends)
    steps = {spend.purpose: spend.steps for spend in spends}
    return PaidAhead(known, spending.id, steps), spending
