"""The contents of a silo's folder, read whether an agent runs or not.

For the silo's own eyes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..algorithms.job.foreign_code import Allowed, runs_others_code
from ..algorithms.job.job import Job
from ..algorithms.tasks.counting import ScoreForm
from ..algorithms.tasks.registry import guard
from ..errors import LocalError
from ..files.documents import Disk, disk, parse_json, read_bytes
from ..security.ledger.audit import LEDGER, AuditResult, verify
from ..security.ledger.messages import Totals, of_type, summary
from ..security.ledger.records import PolicyChange, PrivacyHead
from ..security.log.head import own_log_key
from ..security.log.lock import held
from ..security.policy import policy as policies
from .admission import budget as budgets
from .config import SiloConfig
from .ingress import coordinator_word
from .ingress.coordinator_word import CoordinatorWord
from .job_folder import JobFolder


@dataclass(frozen=True)
class SiloJobStatus:
    """One job that the silo accepted.

    With a ``problem``, all numbers are defaults.
    """

    job: str
    finished: bool = False
    failed: bool = False  # it ended without its result
    method: str = ""
    done: int = 0  # rounds that are over here
    rounds: int = 0
    tested: int | None = None  # held-out records in the last entry of the report
    score: float | None = None  # on these, with the model that the silo keeps
    balanced: float | None = None  # the same with each class counting the same, 0…1
    baseline: float | None = None  # the score of the best answer that is the same for all
    form: ScoreForm | None = None  # what the score is
    problem: str = ""  # why its files cannot be read
    reason: str = ""  # why it stopped, or ended without its result, in the coordinator's words
    since: float = 0.0  # when it was accepted, or ended; seconds since 1970
    digest: str = ""  # the job's, SHA-256 in hex
    stopped: bool = False  # by an operator, until one resumes it, as the coordinator says
    lost: str = ""  # why no round can come, since the coordinator gives no session

    @property
    def why(self) -> str:
        """What is known of why there is no result, or no next round."""
        said = f"the coordinator says: {self.reason}" * bool(self.reason)
        return self.problem or self.lost or said

    @property
    def stage(self) -> str:
        """Where it stands here."""
        stages = {
            "finished": self.finished,
            "failed": self.failed,
            "no session": bool(self.lost),
            "stopped": self.stopped,
        }
        return next((stage for stage, holds in stages.items() if holds), "runs")


@dataclass(frozen=True)
class LedgerStatus:
    """The ledger, checked from its first byte to its last.

    A ledger that fails the check has no totals.
    """

    verified: AuditResult
    # (job, part) → what left; empty where the ledger does not hold
    totals: Mapping[tuple[str, ...], Totals]
    # by data set, what its last head says was spent
    budgets: Mapping[str, PrivacyHead] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyStatus:
    """The policy file, next to the policy under which the agent decides.

    Digests are SHA-256 in hex, empty where there is none.
    """

    in_force: str  # by the ledger: the last one that an agent ran with
    file: str
    problem: str = ""  # why the file is not used; an agent that runs keeps the policy of before


@dataclass(frozen=True)
class SiloStatus:
    """The status of a silo's folder.

    ``running``: an agent holds the folder's lock. ``jobs`` are in the order of acceptance.
    """

    directory: Path
    running: bool
    disk: Disk
    jobs: tuple[SiloJobStatus, ...]
    ledger: LedgerStatus
    policy: PolicyStatus


def read(config: SiloConfig) -> SiloStatus:
    """Read the folder; LocalError where there is none yet."""
    folder = config.directory / LEDGER
    if not folder.is_dir():
        raise LocalError(
            f"{folder}: no such folder; the agent makes it when it is run for the first time"
        )

    # Totals of a ledger that does not hold would be taken for what left.
    verified = verify(folder, key=own_log_key(config.trust.federation, config.keys))
    ledger = LedgerStatus(verified, {})
    if verified.ok:
        spent = {head.dataset: head for _, head in of_type(folder, PrivacyHead)}
        ledger = LedgerStatus(verified, summary(folder), spent)
    running, room, policy = (
        held(config.directory),
        disk(config.directory),
        _policy(config, verified),
    )
    return SiloStatus(config.directory, running, room, jobs(config), ledger, policy)


def jobs(config: SiloConfig) -> tuple[SiloJobStatus, ...]:
    """The jobs that were accepted, in that order; none in a folder without any."""
    # The file is written when a job is accepted, so its time gives the order.
    kept = sorted(
        (config.directory / "jobs").glob("*/job.json"), key=lambda path: path.stat().st_mtime_ns
    )
    word = coordinator_word.read(config.directory)
    return tuple(_told(_job(JobFolder(path.parent), config), word) for path in kept)


def _told(job: SiloJobStatus, word: CoordinatorWord) -> SiloJobStatus:
    """A job with what the coordinator says of one that has not ended."""
    if job.finished or job.failed:
        return job
    stopped, why = job.digest in word.stopped, word.stopped.get(job.digest, "")
    return replace(job, stopped=stopped, reason=why, lost=word.lost)


def _policy(config: SiloConfig, verified: AuditResult) -> PolicyStatus:
    in_force = ""
    # A ledger that does not hold says nothing.
    if verified.ok:
        for _, change in of_type(config.directory / LEDGER, PolicyChange):
            in_force = change.after
    try:
        policy = budgets.checked_policy(config, read_bytes(config.policy))
    except LocalError as error:
        return PolicyStatus(in_force, "", str(error))
    return PolicyStatus(in_force, policy.digest)


def _job(folder: JobFolder, config: SiloConfig) -> SiloJobStatus:
    name, path = folder.path.name, folder.path / "job.json"
    try:
        signed = parse_json(read_bytes(path), str(path))
        document = signed.get("document") if isinstance(signed, dict) else None
        job = Job.from_document(document, str(path), _allowed(document, config))
        # A finished job is over even if this silo missed its last rounds.
        done = job.length if folder.finished else folder.rounds_done
        with guard(job.task):
            counts = _score(folder.report(), job)
    # One damaged job does not hide the others.
    except LocalError as error:
        state, problem = (folder.finished, folder.failed), str(error)
        return SiloJobStatus(name, *state, problem=problem, since=folder.since)
    state = (folder.finished, folder.failed)
    found = SiloJobStatus(name, *state, job.method_name, done, job.length, **counts)
    return replace(found, digest=job.digest, reason=folder.failure, since=folder.since)


def _allowed(document: object, config: SiloConfig) -> Allowed:
    """Packages whose code may run; the policy is read only for jobs that name one."""
    if not isinstance(document, Mapping) or not runs_others_code(document):
        return ()
    return policies.load(config.policy, config.names).file.packages


def _score(report: Mapping[str, Any], job: Job) -> Mapping[str, Any]:
    """The score on the held-out records in the final evaluation.

    Before that, in the last round after local training; empty before the first.
    """
    final, rounds = report["final"], report["rounds"]
    # The final entry has the score of both models; ``product`` names the one that is kept.
    entry, model = final, job.method().product
    if not final:
        entry, model = (rounds[-1] if rounds else {}), "trained"
    if not entry:
        return {}
    return {
        "tested": entry["tested"],
        # An earlier release's report has other keys.
        "score": entry.get(f"score_{model}"),
        "balanced": entry.get(f"balanced_{model}"),
        "baseline": entry.get("baseline"),
        "form": job.counting.score,
    }
