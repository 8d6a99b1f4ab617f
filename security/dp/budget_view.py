"""The state of a data set's privacy budget, read from its folder.

It needs no lock: the agent may be writing at the same time.
"""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from ...errors import LocalError
from ..log.head import Agreement, HeldHead, stored_by
from ..log.note import SignatureKind, VerifierKey
from ..log.segments import CHECKPOINT, Reading
from ..log.tree_head import TreeHead
from .budget import ORIGIN, Budget, JobSpending
from .budget_records import Limit
from .rdp import Event, shown


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget as it stood when it was read."""

    dataset: str
    limit: Limit
    spent: float  # ε at the limit's δ, of what was committed and of what is open
    jobs: tuple[JobSpending, ...]
    records: int

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of all jobs."""
        return tuple(event for job in self.jobs for event in job.events)

    @property
    def left(self) -> Decimal:
        """The ε that is left up to the limit, rounded down.

        It is 0 where more is spent than a limit that was lowered since.
        """
        # ``shown`` rounds up, so what is left is never said to be more than it is.
        return max(Decimal(self.limit.epsilon) - Decimal(shown(self.spent)), Decimal(0))


def key_of(federation: str, silo: str, dataset: str, log_key: str) -> VerifierKey:
    """The key that the head of a budget is signed with: the silo's log key, given in hex."""
    origin = ORIGIN.format(federation=federation, silo=silo, dataset=dataset)
    return VerifierKey(origin, SignatureKind.ED25519, bytes.fromhex(log_key))


def read(folder: Path, dataset: str, key: VerifierKey, known: TreeHead | None = None) -> BudgetView:
    """Check a budget from its first record to its last, in order.

    ``known`` is the head that the silo's ledger has.

    LocalError for one that is broken, altered, another data set's, or older than its checkpoint or
    that head.
    """
    # (1) The checkpoint is the silo's; it is read before the records, which only grow.
    own = stored_by(folder, key)
    if own is None:
        raise LocalError(
            f"{folder / CHECKPOINT}: is missing; restore the folder from the newest backup"
        )
    # A restored folder agrees with its own checkpoint; only the silo's ledger shows that it is old.
    held = [HeldHead("the folder itself", own)]
    if known:
        held.append(HeldHead("the silo's ledger", known))

    # (2) The records hold, and each may follow those before it.
    budget, reading, agreement = Budget(dataset), Reading(folder), Agreement(held)
    for line in reading:
        agreement.append(line.hash)
        try:
            budget.replay(line)
        except LocalError as error:
            raise LocalError(f"{folder}: {error}; restore it from the newest backup") from None

    # (3) They are those of the checkpoints: an older copy would have forgotten what was spent.
    problems = list(agreement.problems())
    if problems:
        raise LocalError(
            f"{folder}: was rolled back or altered: {problems[0]}; what was spent on data set"
            f" {dataset!r} cannot be known from it: restore the newest copy"
        )
    return BudgetView(dataset, budget.limit, budget.epsilon(), tuple(budget.jobs()), reading.count)
