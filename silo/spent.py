"""What jobs have cost this silo's data sets, read beside a running agent or without one."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..algorithms.job import Job
from ..algorithms.privacy import job_spends, signed_sigma
from ..errors import LocalError
from ..security import budget_view, ledger_view
from ..security import policy as policies
from ..security.accounting import Event
from ..security.budget import Ceiling, check_covered
from ..security.budget_view import View
from ..security.checkpoint import Checkpoint
from ..security.identity import ENTRY_FILE, Entry, load_entry
from ..security.ledger_audit import LEDGER
from ..security.policy import Policy
from ..security.policy_file import Dataset
from ..security.records import PrivacyHead
from ..security.segments import segments
from .budgets import FOLDER
from .config import SiloConfig


@dataclass(frozen=True)
class Spent:
    """One data set: what the policy says of it now, None for nothing, and its budget, None before anything was spent.

    The budget has the limit that was in force when the agent ran last.
    """

    dataset: str
    policy: Dataset | None
    budget: View | None


def read(config: SiloConfig) -> tuple[Spent, ...]:
    """All data sets that the policy, the ledger or the folder knows, by name.

    LocalError for a budget that is broken, or gone while the ledger knows of it.
    """
    policy = policies.load(config.policy, config.dataset)
    entry = load_entry(config.keys / ENTRY_FILE)
    heads = _heads(config)  # read first: what is spent meanwhile is in the budget before it is in the ledger
    folder = config.directory / FOLDER
    there = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set[str]()
    return tuple(
        Spent(dataset, policy.file.dataset.get(dataset), _budget(config, entry, dataset, heads.get(dataset)))
        for dataset in sorted({*policy.file.dataset, *heads, *there})
    )


def check_room(job: Job, policy: Policy, config: SiloConfig) -> None:
    """ExhaustedError where what the policy lets be spent does not cover all of a job that would be offered now."""
    asked = policy.budget
    if job.privacy is None or asked is None:  # which costs nothing, or is declined for another reason
        return
    budget = next((found.budget for found in read(config) if found.dataset == policy.dataset), None)
    others = [event for one in (budget.jobs if budget else ()) if one.job_digest != job.digest for event in one.events]
    planned = [Event(one.sigma, one.q, one.steps) for one in job_spends(job, signed_sigma(job))]
    most = Ceiling(format(asked.epsilon, "f"), format(asked.delta, "f"))
    check_covered(policy.dataset, f"all of job {job.name!r}", most, others, planned)


def _heads(config: SiloConfig) -> Mapping[str, PrivacyHead]:
    """The last head of each budget that the silo's ledger has."""
    ledger = config.directory / LEDGER
    if not ledger.is_dir():
        return {}
    found = (record for _, record in ledger_view.records(ledger))
    return {record.dataset: record for record in found if isinstance(record, PrivacyHead)}


def _budget(config: SiloConfig, entry: Entry, dataset: str, head: PrivacyHead | None) -> View | None:
    folder, federation = config.directory / FOLDER / dataset, config.trust.federation
    if not (folder.is_dir() and segments(folder)):
        if head is None:
            return None
        raise LocalError(
            f"{folder}: gone, and with it what was spent on data set {dataset!r}; restore it from the newest backup"
        )
    key = budget_view.key_of(federation, entry.id, dataset, entry.log_key)
    known = Checkpoint(key.name, head.size, bytes.fromhex(head.root)) if head else None
    return budget_view.read(folder, dataset, key, known)
