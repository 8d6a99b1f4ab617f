"""``staddle status``: what runs here, read from disk beside the daemon."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..coordinator import config as coordinator_configs
from ..coordinator import status as coordinator
from ..coordinator.rounds.events import in_words
from ..coordinator.status import CoordinatorJobStatus as CoordinatorJob
from ..coordinator.status import CoordinatorStatus
from ..errors import LocalError
from ..files.documents import Disk, read_bytes
from ..files.toml_document import parse_document
from ..silo import config as silo_configs
from ..silo import status as silo
from ..silo.status import LedgerStatus, SiloStatus
from ..silo.status import SiloJobStatus as SiloJob
from .console import printer
from .console.output import size
from .console.printer import PrintedTable
from .ledger import show as ledger_show

WIDTH = 100
WAITS_FOR = {"admitting": ("accepted", "no answer"), "finishing": ("confirmed", "not yet")}


def status(
    config: Annotated[Path, typer.Option(help="coordinator.toml or silo.toml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show what runs here: jobs, rounds, who is missing, what left.

    Reads the disk and disturbs no daemon.

    Rounds are numbered from 0, as in the logs.
    """
    lines: Sequence[str | PrintedTable]
    if _is_coordinator(config):
        at_coordinator = coordinator.read(coordinator_configs.load(config))
        document, lines = _coordinator_document(at_coordinator), _coordinator(at_coordinator)
    else:
        at_silo = silo.read(silo_configs.load(config))
        document, lines = _silo_document(at_silo), _silo(at_silo)
    if as_json:
        printer.show_json(document)
        return
    printer.show(*lines)


def _is_coordinator(config: Path) -> bool:
    """By the key that only one of the two files has."""
    document = parse_document(read_bytes(config), str(config))
    if ("listen" in document) == ("coordinator" in document):
        raise LocalError(
            f"{config}: neither a coordinator's configuration (with 'listen') nor a silo's (with"
            " 'coordinator'); name the file that the daemon runs with"
        )
    return "listen" in document


# The coordinator.


def _coordinator_document(found: CoordinatorStatus) -> dict[str, Any]:
    return {"role": "coordinator", **asdict(found), "directory": str(found.directory)}


def _coordinator(found: CoordinatorStatus) -> list[str | PrintedTable]:
    shown: list[str | PrintedTable] = [
        _head("coordinator", found.running, found.directory, found.disk)
    ]
    if not found.jobs:
        return [*shown, "no jobs"]
    rows = [
        (job.job, job.stage, f"{job.closed} of {job.rounds}", job.outcome, _metrics(job))
        for job in found.jobs
    ]
    shown.append(_table(("job", "stage", "closed", "outcome", "last closed round"), rows))
    return [*shown, *(line for job in found.jobs for line in _stage(job))]


def _metrics(job: CoordinatorJob) -> str:
    if job.last is None:
        return "-"
    metrics = job.last.metrics
    silos = f"{len(job.last.members)} silos"
    if not metrics.get("tested"):
        return silos
    delivered, trained = (
        metrics[f"correct.{model}"] / metrics["tested"] for model in ("delivered", "trained")
    )
    return f"{silos}, {delivered:.1%} right as delivered, {trained:.1%} as trained"


def _stage(job: CoordinatorJob) -> list[str]:
    """Who is awaited in a job that runs; why a job failed."""
    lines = [f"{job.job}: {job.reason}"] if job.reason else []
    if job.relayed:
        lines.append(
            f"{job.job}: {', '.join(job.relayed)}: passed on to its silos, which alone can open it"
        )
    if job.stage not in ("queued", "ended"):
        gave, missing = WAITS_FOR.get(job.stage, ("gave", "missing"))
        where = (
            f"{job.stage}, round {job.closed}"
            if job.stage in ("drawing", "round", "folding")
            else job.stage
        )
        if job.attempt is not None:
            where = f"{where}, secure sum, attempt {job.attempt + 1}"
        dropped = [f"{silo} ({in_words(code)})" for silo, code in job.dropped.items()]
        told = ((gave, job.gave), (missing, job.missing), ("dropped", dropped))
        lines.append(
            f"{job.job}: {where}: "
            + "; ".join(f"{name}: {', '.join(who) or '-'}" for name, who in told)
        )
    return lines


# A silo.


def _silo_document(found: SiloStatus) -> dict[str, Any]:
    totals = [
        {"job": job, "part": part, **asdict(total)}
        for (job, part), total in found.ledger.totals.items()
    ]
    verified = {"ok": found.ledger.verified.ok, **asdict(found.ledger.verified)}
    return {
        "role": "silo",
        "directory": str(found.directory),
        "running": found.running,
        "disk": asdict(found.disk),
        "jobs": [asdict(job) for job in found.jobs],
        "ledger": {**verified, "totals": totals},
        "privacy": [
            {"dataset": name, "epsilon": head.epsilon, "limit": head.limit, "delta": head.delta}
            for name, head in found.ledger.budgets.items()
        ],
    }


def _silo(found: SiloStatus) -> list[str | PrintedTable]:
    shown: list[str | PrintedTable] = [_head("silo", found.running, found.directory, found.disk)]
    if found.jobs:
        rows = [
            (job.job, job.method, f"{job.done} of {job.rounds}", _state(job), _accuracy(job))
            for job in found.jobs
        ]
        shown.append(_table(("job", "method", "rounds", "state", "own held-out records"), rows))
        shown += [f"{job.job}: {job.problem}" for job in found.jobs if job.problem]
    else:
        shown.append("no jobs")
    return [*shown, *_ledger(found.ledger)]


def _state(job: SiloJob) -> str:
    if job.problem:
        return "unreadable"
    return "finished" if job.finished else "failed" if job.failed else "open"


def _accuracy(job: SiloJob) -> str:
    if not job.tested or job.correct is None:
        return "-"
    return f"{job.correct} of {job.tested} right ({job.correct / job.tested:.1%})"


def _ledger(ledger: LedgerStatus) -> list[str | PrintedTable]:
    verified = ledger.verified
    if not verified.ok:
        return [f"ledger: DOES NOT HOLD: {problem}" for problem in verified.problems]
    top = f"{verified.records - 1}:{verified.head}" if verified.head else "none"
    total = sum(total.bytes for total in ledger.totals.values())
    assumed = sum(total.assumed for total in ledger.totals.values())
    left = f"{total:,} bytes left" + (f", {assumed:,} of these assumed" if assumed else "")
    rows = [
        (*key, *(f"{n:,}" for n in (total.messages, total.tensors, total.bytes)))
        for key, total in ledger.totals.items()
    ]
    table = _table(("job", "part", "messages", "tensors", "bytes that left"), rows, numbers=3)
    spent = map(ledger_show.spent, ledger.budgets.values())
    return [f"ledger: holds, {verified.records} records, {left}", f"head {top}", *spent, table]


# Both.


def _head(role: str, running: bool, directory: Path, disk: Disk) -> str:
    runs = "runs" if running else "does not run"
    return f"{role} {runs}: {directory}, {size(disk.used)} used, {size(disk.free)} free"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> PrintedTable:
    """A plain table; the last ``numbers`` columns to the right."""
    right = range(len(columns) - numbers, len(columns))
    return PrintedTable(columns, rows, right, frame="none", width=WIDTH)
