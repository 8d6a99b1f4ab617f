"""What jobs have cost this silo's data sets, read beside a running agent or without one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import job_spends, signed_sigma
from ...security.dp import budget_view
from ...security.dp.budget import Ceiling, check_covered
from ...security.dp.budget_view import View
from ...security.dp.rdp import Event
from ...security.identity.keys import ENTRY_FILE, Entry, load_entry
from ...security.ledger import messages as ledger_view
from ...security.ledger.audit import LEDGER
from ...security.ledger.records import PrivacyHead
from ...security.log.checkpoint import Checkpoint
from ...security.log.segments import segments
from ...security.policy import policy as policies
from ...security.policy.file import Dataset
from ...security.policy.policy import Policy
from ..config import SiloConfig
from .budget import FOLDER


@dataclass(frozen=True)
class Spent:
    """One data set: what the policy says of it now, None for nothing, and its budget, None before anything was spent.

    The budget has the limit that was in force when the agent ran last. ``lost`` says that there was one, which is gone.
    """

    dataset: str
    policy: Dataset | None
    budget: View | None
    lost: str = ""


def read(config: SiloConfig) -> tuple[Spent, ...]:
    """All data sets that the policy, the ledger or the folder knows, by name.

    LocalError for a budget that is broken.
    """
    policy = policies.load(config.policy, config.dataset)
    entry = load_entry(config.keys / ENTRY_FILE)
    heads = _heads(config)  # read first: what is spent meanwhile is in the budget before it is in the ledger
    folder = config.directory / FOLDER
    there = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set[str]()
    found = []
    for dataset in sorted({*policy.file.dataset, *heads, *there}):
        head, asked = heads.get(dataset), policy.file.dataset.get(dataset)
        if (path := folder / dataset).is_dir() and segments(path):
            found.append(Spent(dataset, asked, _budget(path, config, entry, dataset, head)))
        else:
            found.append(Spent(dataset, asked, None, _lost(path, dataset, head) if head else ""))
    return tuple(found)


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


def _lost(folder: Path, dataset: str, head: PrivacyHead) -> str:
    return (
        f"{folder}: gone, and with it what was spent on data set {dataset!r}, epsilon {head.epsilon} of {head.limit} "
        "by the ledger; restore it from the newest backup"
    )


def _budget(folder: Path, config: SiloConfig, entry: Entry, dataset: str, head: PrivacyHead | None) -> View:
    key = budget_view.key_of(config.trust.federation, entry.id, dataset, entry.log_key)
    known = Checkpoint(key.name, head.size, bytes.fromhex(head.root)) if head else None
    return budget_view.read(folder, dataset, key, known)
