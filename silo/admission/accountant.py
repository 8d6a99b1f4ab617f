"""One private job's spending of this silo's data set, from the budget on disk.

``JobAccount`` is the account of algorithms/training/accountant.py.

::

    reserve      in the budget's log, then its head in the silo's ledger: both durable before the
                 first step
    keep_counts  <directory>/jobs/<job>/counts.json: the noisy counts, drawn once; sent again for
                 nothing
    commit       once what came of the steps is durable in the job's folder

A process that dies between any two of them leaves a reservation open, and that is spent for ever.
What a round gave is in the outbox then, or the round is trained again out of another reservation.
Where training was stopped in the middle, the steps that it had taken are spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import Spend, decimal
from ...algorithms.tasks.task import cells
from ...algorithms.training.accountant import Counts, ReservedSteps
from ...errors import LocalError
from ...files import checked_file
from ...files.documents import Strict
from ...security.dp.budget import Ceiling, Steppers
from ...security.dp.budget_records import Count
from ..job_folder import JobFolder
from .budget import DatasetBudget

COUNTS = "counts.json"


class KeptCounts(Strict):
    """``counts.json``: ``{"counts":[12,0,31],"reservation":3}``, with its digest.

    files/checked_file.py adds the digest.
    """

    counts: tuple[Count, ...]
    reservation: Count


@dataclass(frozen=True)
class OpenSpending:
    """Steps that were set aside, by purpose."""

    steppers: Steppers
    purposes: Sequence[str]  # of the events of the reservation

    @property
    def id(self) -> int:
        """The reservation's place in the budget's log."""
        return self.steppers.reservation.seq

    def take(self, purpose: str) -> None:
        """Take one step for this purpose; LocalError for one without a reservation.

        The step counts as spent, whatever comes of it.
        """
        if purpose not in self.purposes:
            raise LocalError(
                f"reservation {self.id} has no step for {purpose!r}; this is a bug in Staddle"
            )
        self.steppers.take(self.purposes.index(purpose))


class JobAccount:
    """The privacy account of one job at this silo.

    ``folder`` is the job's, which holds its counts.
    """

    def __init__(self, budget: DatasetBudget, job: Job, folder: JobFolder) -> None:
        self._budget = budget
        self._job = job
        self._path = folder.path / COUNTS
        # The job must keep its own target even if the budget has room for more.
        self._ceiling = Ceiling(decimal(job.private.epsilon), decimal(job.private.delta))

    def counts(self) -> Counts | None:
        """The counts that this job released, also before a restart; None before any.

        LocalError for counts that this job did not pay for.
        """
        if not self._path.exists():
            return None

        # Counts that another job paid for would be released without a cost of this job's own.
        kept = checked_file.read_json(self._path, KeptCounts)
        known = cells(self._job.task, self._job.model.width)
        if len(kept.counts) != known or not self._budget.paid(kept.reservation, self._job.digest):
            raise LocalError(
                f"{self._path}: not the counts that this job released here; restore it from a"
                " backup"
            )
        return Counts(torch.tensor(kept.counts, dtype=torch.int64), kept.reservation)

    def keep_counts(self, counts: Counts) -> None:
        """Write the counts; durable before they are used.

        Their noise is drawn once, so they may be sent again at no cost.
        """
        kept = KeptCounts(counts=tuple(counts.counts.tolist()), reservation=counts.id)
        checked_file.write_json(self._path, kept)

    def reserve(self, round_: int, spends: Sequence[Spend]) -> OpenSpending:
        """Set steps aside; ExhaustedError where the job's target or the budget does not do.

        Budget and ledger have the reservation when it returns.
        """
        steppers = self._budget.reserve(self._job, round_, spends, self._ceiling)
        return OpenSpending(steppers, [spend.purpose for spend in spends])

    def commit(self, spending: ReservedSteps) -> None:
        """Commit the steps that were taken, whose results are durable; the rest is free again.

        LocalError where the reservation is not open in this process.
        """
        self._budget.commit(self._job, spending.id)
