"""``staddle silo jobs``, ``approve`` and ``decline``: the last word of the silo's own people."""

import datetime as dt
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...algorithms.job.job import Job
from ...errors import LocalError
from ...files.documents import parse_json, read_bytes
from ...security.blind.plan import JobPlan
from ...security.identity.keys import ENTRY_FILE, load_entry
from ...security.identity.roster import Roster
from ...security.ledger.audit import LEDGER
from ...security.ledger.messages import of_type
from ...security.ledger.records import JobDecline
from ...security.policy import policy as policies
from ...security.policy.policy import Policy, SiloPolicy
from ...silo import config as configs
from ...silo import status
from ...silo.admission import approvals, checks
from ...silo.admission.approvals import ShownJob
from ...silo.check import spent_of
from ...silo.config import SiloConfig
from ..policy.review import ReviewedJob, review
from ..terminal import printer
from ..terminal.printer import PrintedTable

ConfigFile = Annotated[Path, typer.Option(help="The silo's TOML file.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")]
DecidedBy = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Who decides, for the ledger; left out, the user of this machine."
    ),
]
COLUMNS = ("job", "state", "since", "why")


def jobs(
    config: ConfigFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List the jobs that wait for a person, are no longer offered, were declined, run or ended.

    Reads the disk and disturbs no agent.
    """
    rows = list(_rows(configs.load(config)))
    if as_json:
        printer.show_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
        return
    table = PrintedTable(COLUMNS, rows, frame="none", width=100)
    printer.show(table if rows else "no jobs")


def approve(job: JobName, config: ConfigFile, by: DecidedBy = "", yes: Sure = False) -> None:
    """Show what will leave this silo in a job and who reads it, then let it take part.

    The approval is for this signed file under the policy of now: another file of the same name
    needs another, and so does this one if the policy changes before the silo has accepted it.
    The silo's ledger records who decided and when.
    """
    loaded = configs.load(config)
    shown = _shown(loaded, job)
    if not yes:
        printer.confirm(f"let this silo take part in job {job!r}?")
    approvals.approve(loaded, shown, by)
    printer.show(f"approved; the agent accepts job {job!r} when it connects next, within seconds")


def decline(
    job: JobName,
    config: ConfigFile,
    reason: Annotated[str, typer.Option(help="For this silo's people; it never leaves.")] = "",
    by: DecidedBy = "",
    yes: Sure = False,
) -> None:
    """Show a job that waits, like approve, and keep this silo out of it.

    The coordinator learns the code NOT_APPROVED, and not the reason.
    """
    loaded = configs.load(config)
    shown = _shown(loaded, job)
    if not yes:
        printer.confirm(f"keep this silo out of job {job!r}?")
    approvals.decline(loaded, shown, reason, by)
    printer.show(f"declined; job {job!r} may still be approved while it is offered")


def _shown(config: SiloConfig, name: str) -> ShownJob:
    """Show a job that waits; what was shown, and the policy under which."""
    signed, policy, lines = reviewed(config, name)
    printer.show(*lines)
    return ShownJob(name, signed, policy.digest)


def reviewed(config: SiloConfig, name: str) -> tuple[bytes, SiloPolicy, list[str]]:
    """The bytes of a job that waits, the policy of now, and what a person reads of both.

    LocalError where no such job waits, or it cannot be read any more.
    """
    # Read once: what is approved is what was shown, whatever is offered meanwhile.
    signed = approvals.offered(config, name)
    roster = config.roster_in_use().present
    policy = policies.load(config.policy, config.names)
    return signed, policy, reviewed_under(policy, signed, name, config, roster)


def reviewed_under(
    policy: SiloPolicy, signed: bytes, name: str, config: SiloConfig, roster: Roster
) -> list[str]:
    """What a person reads of a signed job under a policy."""
    job, signer = checks.read_job(signed, roster, policy.file.packages, f"job {name!r}")
    own = checks.on_data_set(job, policy, roster.coordinator.id)
    silo = load_entry(config.keys / ENTRY_FILE).id
    seen = partial(_reviewed, roster=roster, policy=own)
    before = _accepted_before(config, job, signer, policy)
    lines = list(review(seen(job, signer), silo, own, seen(*before) if before else None))
    if job.privacy is not None and own.budget is not None:
        _, spent = spent_of(own.dataset, own.budget, config)
        lines.append(spent)
    return lines


def _reviewed(job: Job, signer: str, roster: Roster, policy: Policy) -> ReviewedJob:
    plan = JobPlan(job)
    return ReviewedJob(plan, signer, checks.outflows(plan, roster, policy))


def _accepted_before(
    config: SiloConfig, job: Job, signer: str, policy: SiloPolicy
) -> tuple[Job, str] | None:
    """An accepted job on the same data set that is not this one, and who signed it.

    The last one with a name like this one's, such as lung-2 and lung-1; else the last of the same
    operator; else the last.
    """
    dataset = policy.on(job.dataset).dataset
    for path in _likest(config.directory / "jobs", job.name, signer):
        # One that this release, policy or configuration cannot read is not compared with.
        with suppress(LocalError):
            signed = parse_json(read_bytes(path), str(path))
            other = Job.from_document(signed.get("document"), str(path), policy.file.packages)
            if other.digest != job.digest and policy.on(other.dataset).dataset == dataset:
                return other, str(signed.get("signer"))
    return None


def _likest(jobs: Path, name: str, signer: str) -> list[Path]:
    """The signed files that this silo keeps, those first that may be the same people's job."""

    def likeness(path: Path) -> tuple[bool, bool, int]:
        found = ""
        with suppress(LocalError):
            found = str(parse_json(read_bytes(path), str(path)).get("signer"))
        alike = _stem(path.parent.name) == _stem(name)
        return alike, found == signer, path.stat().st_mtime_ns

    return sorted(jobs.glob("*/job.json"), key=likeness, reverse=True)


def _stem(name: str) -> str:
    """A job's name without its number or date."""
    return re.sub(r"[-0-9]+$", "", name)


def _rows(config: SiloConfig) -> Iterator[tuple[str, str, str, str]]:
    """Name, state, since when and why, of each job that this silo knows."""
    waiting = approvals.waiting(config)
    for each in waiting:
        decision = each.decision
        row = ("waits for a person", _time(each.since), "")
        if decision is not None:
            row = (decision.answer, decision.time, decision.reason)
        yield each.job, *row

    found = status.read(config)
    for own in found.jobs:
        rounds = f"round {own.done} of {own.rounds}" * bool(own.rounds)
        said = "; ".join(filter(None, (rounds, own.why)))
        yield own.job, own.stage, _time(own.since), said
    # Accepted later, or asked about by now, is no longer declined.
    known = {each.job for each in waiting} | {own.job for own in found.jobs}
    kept = approvals.declined(config.directory)
    answer = {True: "declined; silo accept", False: "declined"}
    others = {
        name: ("no longer offered", _time(since), "")
        for name, since in approvals.gone(config.directory).items()
    }
    for name, since in kept.items():
        unruled = approvals.UNRULED.format(what="it yet", job=name)
        others[name] = ("waits for a person", _time(since), unruled)
    for name, why in _declined(config.directory / LEDGER).items():
        others[name] = (answer[name in kept], "", why)
    yield from ((name, *row) for name, row in others.items() if name not in known)


def _time(since: float) -> str:
    return dt.datetime.fromtimestamp(since, dt.UTC).isoformat(timespec="seconds")


def _declined(ledger: Path) -> dict[str, str]:
    """By job, why the silo declined it last."""
    return {record.job: "; ".join(record.reasons) for _, record in of_type(ledger, JobDecline)}
