"""The privacy budgets of this silo's data sets, while its agent runs (security/dp/budget.py).

``<directory>/privacy/<data set>/`` stands next to the silo's ledger, which has a ``privacy.head``
of it for each reservation. The agent opens it at its start, where the policy has a table for the
data set: the head in the ledger says whether the folder was lost or an older copy of it put back,
and others hold the head of the ledger (silo/egress/witness.py). The policy's limit is set then,
too; a policy that says something else is a record.

``read`` reports what jobs have cost this silo's data sets, whether an agent runs or not.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import Spend, job_spends, signed_sigma
from ...errors import LocalError
from ...security.dp import budget_view
from ...security.dp.budget import ORIGIN, Budget, Ceiling, Steppers, check_covered
from ...security.dp.budget_records import MechanismSteps, NoiseSharing
from ...security.dp.budget_view import BudgetView
from ...security.dp.rdp import Event, event_of, shown
from ...security.identity.keys import ENTRY_FILE, Keys, RosterEntry, load_entry
from ...security.ledger import messages
from ...security.ledger.audit import LEDGER
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import PrivacyHead
from ...security.log.head import HeldHead
from ...security.log.segments import segments
from ...security.log.tree_head import TreeHead
from ...security.policy import policy as policies
from ...security.policy.data_sets import DataSets
from ...security.policy.file import BudgetTable
from ...security.policy.policy import Policy, SiloPolicy
from ...security.policy.release import PaidBy
from ..config import SiloConfig

FOLDER = "privacy"


class DatasetBudget:
    """The budget, and the ledger that keeps its head; safe to share between threads."""

    def __init__(self, budget: Budget, ledger: Ledger) -> None:
        self._budget = budget
        self._ledger = ledger
        self._open: dict[str, Steppers] = {}  # by job, of this process
        self._mutex = threading.Lock()  # heads come into the ledger in their order

    def check_room(
        self,
        job: Job,
        planned: Sequence[Spend],
        beside: Mapping[str, Sequence[Spend]] = MappingProxyType({}),
    ) -> None:
        """ExhaustedError, with the numbers, where what is left does not cover all that a job is to
        spend.

        ``beside`` has the plans of jobs that run at the same time, by digest.
        """
        plans = {digest: list(map(event_of, spends)) for digest, spends in beside.items()}
        self._budget.check_room(job.name, job.digest, list(map(event_of, planned)), plans)

    def reserve(self, job: Job, round_: int, spends: Sequence[Spend], ceiling: Ceiling) -> Steppers:
        """Set steps aside, durably in the budget and then in the ledger.

        ExhaustedError where they are not covered. An earlier try of the job in this process is
        over: what it had not taken is free again.
        """
        events = [
            MechanismSteps(sigma=each.sigma, q=each.q, steps=each.steps, shared=each.shared)
            for each in spends
        ]
        purpose, budget = ", ".join(each.purpose for each in spends), self._budget
        sharing = None
        if job.private.shared:
            sharing = NoiseSharing(unit=job.private.unit, dishonest=job.private.dishonest)
        with self._mutex:
            self._let_go(job.digest)
            reservation = budget.reserve(
                job.name, job.digest, round_, purpose, events, ceiling, sharing
            )
            limit, spent = budget.limit, shown(budget.epsilon())
            record = PrivacyHead.of(
                budget.dataset, budget.head(), epsilon=spent, delta=limit.delta, limit=limit.epsilon
            )
            # Behind the reservation: a head without its record would look like a rollback.
            self._ledger.append(record)
            self._open[job.digest] = Steppers(reservation)
            return self._open[job.digest]

    def commit(self, job: Job, reservation: int) -> None:
        """Commit a reservation of the job, whose results are durable; it allows no further steps.

        LocalError for a reservation that is not open in this process.
        """
        with self._mutex:
            steppers = self._open.get(job.digest)
            if steppers is None or steppers.reservation.seq != reservation:
                raise LocalError(
                    f"commit of reservation {reservation}, which is not open; this is a bug in"
                    " Staddle"
                )
            self._let_go(job.digest)

    def close(self) -> None:
        """Free the steps that were not taken; call it when nothing trains any more."""
        with self._mutex:
            for digest in tuple(self._open):
                self._let_go(digest)

    def _let_go(self, job_digest: str) -> None:
        steppers = self._open.pop(job_digest, None)
        if steppers is not None:
            # ``end`` returns how many steps were taken, and allows no more.
            self._budget.commit(steppers.reservation, steppers.end())

    def paid(self, reservation: int, job_digest: str) -> bool:
        """Whether there is such a reservation, and it is of this job: the gate asks before anything
        leaves.
        """
        return self._budget.paid(reservation, job_digest)


def check_names(names: DataSets, heads: Collection[str]) -> None:
    """LocalError where a data set that has a budget is now said to have the records of another.

    ``heads`` are the data sets with budgets in the ledger.
    """
    for name in sorted(names.records.keys() & set(heads) - set(names.own)):
        of = names.of(name)
        raise LocalError(
            f"data set {name!r} has a budget in the ledger, and with records_of = {of!r} what was"
            " spent from it would be forgotten: give it another name in [datasets], and lower"
            f" epsilon and delta in [dataset.{of}] of the policy by what staddle privacy show says"
            f" of {name!r}. Sums that were opened under the old name are then forgotten: take part"
            " only in blind jobs for the same silos as before"
        )


def check_config(config: SiloConfig) -> None:
    """``check_names`` of a configuration, by the ledger in its folder."""
    check_names(config.names, _heads(config))


def paid_by(budgets: Mapping[str, DatasetBudget]) -> PaidBy:
    """What the gate asks before anything leaves, of the open budgets by data set."""

    def paid(dataset: str, reservation: int, job_digest: str) -> bool:
        budget = budgets.get(dataset)
        return budget is not None and budget.paid(reservation, job_digest)

    return paid


@contextlib.contextmanager
def opened(
    directory: Path, policy: Policy, ledger: Ledger, federation: str, keys: Keys
) -> Iterator[DatasetBudget]:
    """The budget of the policy's data set, closed at the end.

    LocalError where it is gone, rolled back or altered since the ledger last had a head of it.
    """
    asked, dataset, silo = policy.budget, policy.dataset, keys.entry.id
    if asked is None:
        raise LocalError(f"the policy has no [dataset.{dataset}]; this is a bug in Staddle")
    head = ledger.privacy_heads.get(dataset)
    folder = directory / FOLDER / dataset
    with Budget.open(folder, dataset, federation, silo, keys.log, known=head is not None) as budget:
        # An older copy of the folder would have forgotten what was spent.
        if head is not None:
            # The origin names federation, silo and data set, so no other budget's head fits.
            origin = ORIGIN.format(federation=federation, silo=silo, dataset=dataset)
            budget.check_held(
                HeldHead("the silo's ledger", TreeHead(origin, head.size, bytes.fromhex(head.root)))
            )

        # The policy of now counts: an owner may lower what may be spent below what was.
        budget.set_limit(format(asked.epsilon, "f"), format(asked.delta, "f"), policy.digest)
        ours = DatasetBudget(budget, ledger)
        yield ours
        # Not after an error: an open reservation counts as spent.
        ours.close()


@dataclass(frozen=True)
class BudgetReport:
    """One data set: what the policy says of it now, None for nothing, and its budget, None before
    anything was spent.

    The budget has the limit that was in force when the agent ran last. ``lost`` says that there was
    one, which is gone.
    """

    dataset: str
    policy: BudgetTable | None
    budget: BudgetView | None
    lost: str = ""


def read(config: SiloConfig) -> tuple[BudgetReport, ...]:
    """All data sets that the policy, the ledger or the folder knows, by name.

    LocalError for a budget that is broken.
    """
    return _reports(config, policies.load(config.policy, config.names))


def checked_policy(config: SiloConfig, data: bytes) -> SiloPolicy:
    """The policy that these bytes are, for a silo that has run before.

    LocalError for an invalid one, or one that sets a budget whose folder is lost or broken.
    """
    policy = policies.parse(data, str(config.policy), config.names)
    for report in _reports(config, policy):
        if report.lost and report.policy is not None:
            raise LocalError(report.lost)
    return policy


def _reports(config: SiloConfig, policy: SiloPolicy) -> tuple[BudgetReport, ...]:
    entry = load_entry(config.keys / ENTRY_FILE)
    # read first: what is spent meanwhile is in the budget before it is in the ledger
    heads = _heads(config)
    folder = config.directory / FOLDER
    present: set[str] = set()
    if folder.is_dir():
        present.update(path.name for path in folder.iterdir() if path.is_dir())
    found = []
    # From all three: a lost budget is only in the ledger, one that the policy dropped on the disk.
    for dataset in sorted({*policy.file.dataset, *heads, *present}):
        head, asked = heads.get(dataset), policy.file.dataset.get(dataset)
        if (path := folder / dataset).is_dir() and segments(path):
            found.append(BudgetReport(dataset, asked, _budget(path, config, entry, dataset, head)))
        else:
            found.append(
                BudgetReport(dataset, asked, None, _lost(path, dataset, head) if head else "")
            )
    return tuple(found)


def check_room(job: Job, policy: Policy, config: SiloConfig) -> None:
    """ExhaustedError where what the policy lets be spent does not cover all of a job that would be
    offered now.
    """
    asked = policy.budget
    # which costs nothing, or is declined for another reason
    if job.privacy is None or asked is None:
        return

    # All of the job is asked for, so what it reserved before would count twice.
    budgets = [report.budget for report in read(config) if report.dataset == policy.dataset]
    others: list[Event] = []
    for budget in filter(None, budgets):
        for spending in budget.jobs:
            if spending.job_digest != job.digest:
                others += spending.events
    planned = list(map(event_of, job_spends(job, signed_sigma(job))))
    most = Ceiling(format(asked.epsilon, "f"), format(asked.delta, "f"))
    check_covered(policy.dataset, f"all of job {job.name!r}", most, others, planned)


def _heads(config: SiloConfig) -> Mapping[str, PrivacyHead]:
    """The last head of each budget that the silo's ledger has."""
    ledger = config.directory / LEDGER
    # The agent makes it at its first start.
    if not ledger.is_dir():
        return {}
    return {head.dataset: head for _, head in messages.of_type(ledger, PrivacyHead)}


def _lost(folder: Path, dataset: str, head: PrivacyHead) -> str:
    return (
        f"{folder}: gone, and with it what was spent on data set {dataset!r}, epsilon"
        f" {head.epsilon} of {head.limit} by the ledger; restore it from the newest backup"
    )


def _budget(
    folder: Path, config: SiloConfig, entry: RosterEntry, dataset: str, head: PrivacyHead | None
) -> BudgetView:
    key = budget_view.key_of(config.trust.federation, entry.id, dataset, entry.log_key)
    known = TreeHead(key.name, head.size, bytes.fromhex(head.root)) if head else None
    return budget_view.read(folder, dataset, key, known)
