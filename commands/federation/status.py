"""``staddle status``: what runs here, read from disk while the daemon runs or not."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.tasks.counting import flattened
from ...coordinator import config as coordinator_configs
from ...coordinator import status as coordinator
from ...coordinator.live_status import LiveStatus
from ...coordinator.rounds.events import in_words
from ...coordinator.status import CoordinatorJobStatus as CoordinatorJob
from ...coordinator.status import CoordinatorStatus
from ...errors import LocalError
from ...files.documents import Disk, read_bytes, write_atomic
from ...files.toml_document import parse_document
from ...security.ledger.messages import CONTROL, PROTOCOL
from ...silo import config as silo_configs
from ...silo import status as silo
from ...silo.status import LedgerStatus, SiloStatus
from ...silo.status import SiloJobStatus as SiloJob
from ..ledger import show as ledger_show
from ..terminal import printer
from ..terminal.output import size
from ..terminal.printer import PrintedTable
from .round_text import in_numbers

WIDTH = 100
IDLE = ("queued", "ended")  # stages in which nobody is awaited
OF_A_ROUND = ("drawing", "round", "folding")
WAITS_FOR = {"admitting": ("accepted", "no answer"), "finishing": ("confirmed", "not yet")}


def status(
    config: Annotated[Path, typer.Option(help="coordinator.toml or silo.toml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it as one web page that loads nothing else."),
    ] = None,
) -> None:
    """Show what runs here: silos, jobs, rounds, who is missing, what left.

    Reads the disk and disturbs no daemon.

    Rounds are numbered from 0, as in the logs.
    """
    lines: Sequence[str | PrintedTable]
    if is_coordinator(config):
        at_coordinator = coordinator.read(coordinator_configs.load(config))
        document, lines = _coordinator_document(at_coordinator), coordinator_lines(at_coordinator)
    else:
        at_silo = silo.read(silo_configs.load(config))
        document, lines = _silo_document(at_silo), _silo(at_silo)
    if html is not None:
        # By name: the console's templates lie above the commands, which do without them.
        rendering = import_module("...console.rendering", __package__)
        write_atomic(html, rendering.status_page(f"{document['role']}: {config}", lines))
        printer.show(f"wrote {html}")
    elif as_json:
        printer.show_json(document)
    else:
        printer.show(*lines)


def is_coordinator(config: Path) -> bool:
    """By the key that only one of the two files has."""
    document = parse_document(read_bytes(config), str(config))
    listens = "listen" in document
    connects = "coordinator" in document
    if listens == connects:
        raise LocalError(
            f"{config}: neither a coordinator's configuration (with 'listen') nor a silo's (with"
            " 'coordinator'); name the file that the daemon runs with"
        )
    return listens


# The coordinator.


def _coordinator_document(found: CoordinatorStatus) -> dict[str, Any]:
    return {"role": "coordinator", **asdict(found), "directory": str(found.directory)}


def coordinator_lines(found: CoordinatorStatus) -> list[str | PrintedTable]:
    """A coordinator's jobs, for people."""
    head = _head("coordinator", found.running, found.directory, found.disk)
    silos = _silos(found.live)
    if not found.jobs:
        return [head, *silos, "no jobs"]

    rows = []
    stages: list[str] = []
    for job in found.jobs:
        closed = f"{job.closed} of {job.rounds}"
        rows.append((job.job, job.stage, closed, job.outcome, _metrics(job)))
        stages += _stage(job)
    columns = ("job", "stage", "closed", "outcome", "last closed round")
    return [head, *silos, _table(columns, rows), *stages]


def _silos(live: LiveStatus) -> list[PrintedTable]:
    """Which silos are here, where a coordinator runs and tells."""
    rows = []
    for name, own in live.silos.items():
        state = "connected" if own.connected else "not connected"
        heard = own.seen or "not since the coordinator started"
        rows.append((name, state, heard, own.software or "-", own.clock or "-"))
    columns = ("silo", "state", "last seen", "software", "clock")
    return [_table(columns, rows)] if rows else []


def _metrics(job: CoordinatorJob) -> str:
    if job.last is None:
        return "-"
    silos = f"{len(job.last.members)} silos"
    said, form = job.last.measures, job.last.score
    # Silos of a private job without ``metrics_sigma`` send zeros: there is nothing to show.
    if not said or form is None:
        return silos

    text = f"{silos}; {in_numbers(flattened(said), form)}"
    if job.last.noisy:
        text += ", with noise"
    return text


def _stage(job: CoordinatorJob) -> list[str]:
    """Who is awaited in a job that runs; why a job failed."""
    lines = []
    if job.reason:
        lines.append(f"{job.job}: {job.reason}")
    if job.relayed:
        relayed = ", ".join(job.relayed)
        # The coordinator keeps these sums, but only silos can open them.
        lines.append(f"{job.job}: {relayed}: passed on to its silos, which alone can open it")
    if job.stage in IDLE:
        return lines

    where = job.stage
    if job.stage in OF_A_ROUND:
        where += f", round {job.closed}"
    # People count from 1, logs from 0.
    if job.attempt is not None:
        where += f", secure sum, attempt {job.attempt + 1}"

    # an operator who waits needs the names: to call the silo that is missing
    uploaded, missing = WAITS_FOR.get(job.stage, ("uploaded", "missing"))
    dropped = [f"{silo} ({in_words(code)})" for silo, code in job.dropped.items()]
    groups = {uploaded: job.uploaded, missing: job.missing, "dropped": dropped}
    counted = []
    for name, silos in groups.items():
        listed = ", ".join(silos) or "-"
        counted.append(f"{name}: {listed}")
    lines.append(f"{job.job}: {where}: {'; '.join(counted)}")
    return lines


# A silo.


def _silo_document(found: SiloStatus) -> dict[str, Any]:
    ledger = found.ledger
    totals = []
    for (job, part), total in ledger.totals.items():
        row = {"job": job, "part": part, **asdict(total)}
        totals.append(row)
    budgets = []
    for name, head in ledger.budgets.items():
        row = {"dataset": name, "epsilon": head.epsilon, "limit": head.limit, "delta": head.delta}
        budgets.append(row)
    # ``ok`` is a property, which ``asdict`` leaves out.
    verified = {"ok": ledger.verified.ok, **asdict(ledger.verified)}
    return {
        "role": "silo",
        "directory": str(found.directory),
        "running": found.running,
        "disk": asdict(found.disk),
        "jobs": [asdict(job) for job in found.jobs],
        "ledger": {**verified, "totals": totals},
        "privacy": budgets,
        "policy": asdict(found.policy),
    }


def _silo(found: SiloStatus) -> list[str | PrintedTable]:
    head = _head("silo", found.running, found.directory, found.disk)
    ledger = _ledger(found.ledger)
    policy = _policy(found)
    if not found.jobs:
        return [head, policy, "no jobs", *ledger]

    rows = []
    problems = []
    for job in found.jobs:
        done = f"{job.done} of {job.rounds}"
        rows.append((job.job, job.method, done, _state(job), _score(job)))
        # One damaged job does not hide the others.
        if job.why:
            problems.append(f"{job.job}: {job.why}")
    columns = ("job", "method", "rounds", "state", "own held-out records")
    return [head, policy, _table(columns, rows), *problems, *ledger]


def _policy(found: SiloStatus) -> str:
    """Which policy decides, and why it is not the file's."""
    policy = found.policy
    kept = f"{policy.in_force[:12]}… stays in force" if policy.in_force else "none is in force"
    waits = f"the file's, {policy.file[:12]}…, is not in force yet; {kept}"
    if policy.problem:
        return f"policy NOT USED: {policy.problem}; {kept}"
    if policy.file != policy.in_force:
        return f"policy: {waits}"
    return f"policy: {policy.in_force[:12]}… in force"


def _state(job: SiloJob) -> str:
    # a job's files may be damaged: then they say neither that it finished nor that it failed
    return "unreadable" if job.problem else {"runs": "open"}.get(job.stage, job.stage)


def _score(job: SiloJob) -> str:
    form = job.form
    # No test records, or no evaluation yet, or a report of an earlier release.
    if not job.tested or job.score is None or job.baseline is None or form is None:
        return "-"
    text = f"{form.name} {form.text(job.score)} on {job.tested}"
    if job.balanced is not None:
        text += f"; balanced {job.balanced:.1%}"
    return f"{text}; {form.constant} {form.text(job.baseline)}"


def _ledger(ledger: LedgerStatus) -> list[str | PrintedTable]:
    verified = ledger.verified
    # No totals of a broken ledger: its numbers prove nothing.
    if not verified.ok:
        return [f"ledger: DOES NOT HOLD: {problem}" for problem in verified.problems]

    # SEQ:LEAF, as ``ledger verify --known`` takes it.
    top = "none"
    if verified.head:
        top = f"{verified.records - 1}:{verified.head}"
    rows = []
    everything = assumed = of_jobs = open_cap = 0
    for key, total in ledger.totals.items():
        numbers = (total.messages, total.tensors, total.bytes, total.assumed)
        rows.append((*key, *map("{:,}".format, numbers)))
        everything += total.bytes
        of_jobs += total.bytes * (key[1] not in (CONTROL, PROTOCOL))
        open_cap += total.assumed * (key[1] == CONTROL)
        assumed += total.assumed

    left = f"{everything:,} bytes left{ledger_show.besides(assumed - open_cap)}"
    rest = everything - of_jobs
    parts = [f"messages of jobs: {of_jobs:,} bytes; keys, greetings and polls: {rest:,} bytes"]
    # Nothing is wrong: the running session's polls are counted when it ends.
    parts += [f"polls of sessions that have not ended: at most {open_cap:,} bytes more"] * bool(
        open_cap
    )
    columns = ("job", "part", "messages", "tensors", "bytes that left", "assumed")
    table = _table(columns, rows, numbers=4)
    spent = map(ledger_show.spent, ledger.budgets.values())
    return [
        f"ledger: holds, {verified.records} records, {left}",
        *parts,
        f"head {top}",
        *spent,
        table,
    ]


# Both.


def _head(role: str, running: bool, directory: Path, disk: Disk) -> str:
    runs = "runs" if running else "does not run"
    return f"{role} {runs}: {directory}, {size(disk.used)} used, {size(disk.free)} free"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> PrintedTable:
    """A plain table; the last ``numbers`` columns to the right."""
    right = range(len(columns) - numbers, len(columns))
    return PrintedTable(columns, rows, right, frame="none", width=WIDTH)
