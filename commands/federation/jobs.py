"""``staddle job``: jobs at a coordinator, for its operator."""

import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.job.job import Job
from ...algorithms.models.pretrained import StartWeights
from ...coordinator.rounds.events import NOT_APPROVED, WAITING, in_words
from ...errors import AbortedError, LocalError
from ...files.documents import parse_json, read_bytes, validate
from ...proto import operations_pb2 as pb
from ...security.blind.plan import JobPlan
from ...security.identity import roster as rosters
from ...security.identity.domains import JOB
from ...security.identity.keys import Role
from ...security.identity.signed_document import read_signed, verify_document
from ..policy.overview import overview
from ..terminal import printer
from ..terminal.package_option import Packages
from ..terminal.printer import Screen
from . import round_text
from .operator_client import Operator, connected
from .round_text import reading, round_fields

OperatorFile = Annotated[
    Path, typer.Option("--operator", metavar="FILE", help="The operator's TOML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]


def show(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB.json|NAME", help="A signed job, or a job's name with --operator."
        ),
    ],
    roster: Annotated[
        Path | None, typer.Option(help="The roster that a file's signature is checked against.")
    ] = None,
    operator: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The operator's TOML file.")
    ] = None,
    package: Packages = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All rounds that have closed, not only the last five.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of text; of a file the whole document.")
    ] = False,
) -> None:
    """Show a signed job file, whose signature is checked first, or a coordinator's job.

    Of a file: who signed it, its silos, what leaves each and who can read it, and what noise it
    has. No record is opened, and no policy is asked.
    """
    if (roster is None) == (operator is None):
        raise LocalError(
            "give --roster for a signed job file, or --operator for the name of a job at the"
            " coordinator"
        )
    if roster is not None:
        _show_file(job, rosters.load(roster), package or (), as_json)
        return

    # a name says nothing by itself: the coordinator has the job
    with connected(given_file(operator)) as here:
        report = here.show(job)
    if as_json:
        printer.show_json(
            {**status_fields(report.status), "rounds": round_fields(report)}, indent=1
        )
        return
    fields = status_fields(report.status)
    # Codes are for programs; people get the words for them.
    fields["failed"] = {silo: in_words(code) for silo, code in fields["failed"].items()}
    for key, value in fields.items():
        printer.show(f"{key:<10} {_shown(value)}")
    rounds, known = round_fields(report), reading(report)
    newest = max(0, len(rounds) - SHOWN_ROUNDS) * (not everything)
    printer.show(*[f"{newest} earlier rounds: --all shows them"] * bool(newest))
    for closed in rounds[newest:]:
        said = f"{_shown(closed['members'])}: {round_text.in_words(closed, known)}"
        printer.show(f"round {closed['round']}: {said}")
    if rounds and (table := round_text.class_table(rounds[-1], known)):
        printer.show(table)


def _show_file(
    path: str, members: rosters.Roster, packages: Collection[str], as_json: bool
) -> None:
    # Verified before it is printed: an unsigned job may say anything.
    signed = parse_json(read_bytes(Path(path)), path)
    document = verify_document(signed, members, Role.OPERATOR, JOB)
    if as_json:
        printer.show_json(document, indent=1)
        return
    job = Job.from_document(document, path, packages)
    printer.show(*overview(JobPlan(job), signed["signer"], members))


def submit(
    signed_job: Annotated[Path, typer.Argument(metavar="JOB.json", help="A signed job.")],
    operator: OperatorFile,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of weights that the job begins with."),
    ] = None,
) -> None:
    """Queue a signed job at the coordinator.

    Submitting the same file again changes nothing; once the job has ended, it is an error.
    """
    signed = read_signed(signed_job)
    if weights is not None:
        _check_file(signed, signed_job, weights)
    with connected(operator) as here:
        status = here.submit_weights(signed, weights) if weights else here.submit(signed)
    printer.show(status_line(status))
    # The coordinator answers a second submission with the job's status; a script must not take
    # that for a new run.
    if status.stage == "ended":
        raise LocalError(
            f"{signed_job}: job {status.job!r} has ended, and its name stays taken; to run it"
            " again, have it signed under a new name"
        )


def _check_file(signed: bytes, origin: Path, weights: Path) -> None:
    """LocalError for another file than the signed job's, before it is sent."""
    match parse_json(signed, str(origin)):
        case {"document": {"model": {"weights": written}}}:
            table = validate(written, StartWeights, str(origin))
        case _:
            raise LocalError(f"{origin}: the job names no file of weights; leave out --weights")
    if not weights.is_file():
        raise LocalError(f"{weights}: not a file; give the one that the job was signed with")
    if not table.is_at(weights):
        digest, nbytes = table.expected
        raise LocalError(
            f"{weights}: not the file that {origin} was signed with, which has {nbytes} bytes and"
            f" SHA-256 {digest}; take that one, or have the job signed again under a new name"
        )


def list_(operator: OperatorFile, as_json: AsJson = False) -> None:
    """All jobs of the coordinator, in the order in which they run."""
    with connected(operator) as here:
        jobs = here.jobs()
    if as_json:
        printer.show_json([status_fields(status) for status in jobs], indent=1)
        return
    printer.show(*map(status_line, jobs) if jobs else ("no jobs",))


def watch(job: Name, operator: OperatorFile, as_json: AsJson = False) -> None:
    """Follow a job until it has ended; exit code 1 if it failed."""
    pace = WatchedPace()
    with connected(operator) as here:
        # Printed as they come: a job may run for days.
        for report in here.watch(job):
            if as_json:
                document = {**status_fields(report.status), "closed": round_fields(report)}
                printer.show_json(document)
                continue
            printer.show(*_closed(report))
            status = report.status
            printer.show(status_line(status, pace.told(status, time.monotonic())))
    # The last report is the job's end: a watch that breaks off raises.
    if report.status.outcome != "completed":
        raise typer.Exit(1)


def _closed(report: pb.JobReport) -> list[str]:
    """A line per round that closed since the report before."""
    # Whoever begins to watch late is not told all that has passed.
    rounds = round_fields(report)[-SHOWN_ROUNDS:]
    return [
        f"round {closed['round']} closed: {_shown(closed['members'])}:"
        f" {round_text.in_words(closed, reading(report))}"
        for closed in rounds
    ]


SHOWN_ROUNDS = 5
# What a person at a silo thought stands in no log.
ASK = {
    NOT_APPROVED: "ask the people there",
    "POLICY": "its policy does not allow it; the people there may have it allow it",
}
UNDECIDED = (
    "people there have yet to decide: the policy has no rule for this job yet, or asks a person"
)
LONGEST_LEFT = 10**9  # seconds


class WatchedPace:
    """How far a job is, and when it will end at the pace of the rounds that were watched."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def told(self, status: pb.JobStatus, now: float) -> str:
        """In words, empty for a job that has ended; ``now`` in seconds, by any steady clock."""
        if status.stage == "ended":
            return ""
        began, first = self._first = self._first or (now, status.round)
        text = f"; {status.round / max(1, status.rounds):.0%}"
        # Before a round has closed nobody knows how long one takes.
        if status.round > first:
            seconds = (now - began) / (status.round - first) * (status.rounds - status.round)
            # A coordinator may name any numbers.
            bounded = max(0, min(round(seconds), LONGEST_LEFT))
            text += f", about {timedelta(seconds=bounded)} left"
        return text


def follow(screen: Screen, operator: Operator, name: str) -> None:
    """Wait for a job's end, and show how far it is; AbortedError where it failed.

    Without a terminal, whose bar moves, each round is a line.
    """
    shown = ""
    with screen.progress(elapsed=True) as progress:
        bar = progress.add_task(name, total=None, note="")
        for report in operator.watch(name):
            status = report.status
            progress.update(bar, total=status.rounds, completed=status.round, note=status.stage)
            if not screen.is_terminal:
                screen.show(*_closed(report))
            # Whom it waits for is for the operator to call, and a stopped job to be resumed.
            line = status_line(status)
            if status.stage in ("admitting", "stopped") and line != shown:
                screen.show(line)
                shown = line
    screen.show(status_line(status))
    if status.outcome != "completed":
        raise AbortedError(f"job {name} did not complete; see above, and the silos' logs")


def _awaited(status: pb.JobStatus) -> str:
    """The silos without which a stage does not end yet, and why; empty where none is awaited."""
    why: dict[str, str] = {}
    if status.stage == "admitting":
        answers = {silo: status.answers.get(silo, "") for silo in status.silos}
        known = {"": "not answered", WAITING: UNDECIDED}
        why = {silo: known[code] for silo, code in answers.items() if code in known}
    elif status.stage == "round":
        over = {*status.given, *status.failed}
        why = {silo: "training" for silo in status.cohort if silo not in over}
    why |= dict.fromkeys(set(status.unheard).intersection(why), "not connected")
    groups: dict[str, list[str]] = {}
    for silo, text in why.items():
        groups.setdefault(text, []).append(silo)
    listed = ", ".join(f"{', '.join(own)} ({text})" for text, own in groups.items())
    return f"; awaited: {listed}" if listed else ""


def stop(job: Name, operator: OperatorFile) -> None:
    """Stop a job until it is resumed: silos stop training, and their uploads are kept."""
    with connected(operator) as here:
        printer.show(status_line(here.stop(job)))


def resume(job: Name, operator: OperatorFile) -> None:
    """Resume a stopped job when its turn comes."""
    with connected(operator) as here:
        printer.show(status_line(here.resume(job)))


def withdraw(job: Name, operator: OperatorFile) -> None:
    """End a job that has not begun its first round.

    Its name is free again: the same file, or another one of this name, may be submitted. A job that
    has begun is stopped instead.
    """
    with connected(operator) as here:
        printer.show(status_line(here.withdraw(job)))


def status_fields(status: pb.JobStatus) -> dict[str, Any]:
    """A job's status as plain values.

    The digest is in hex. ``answers`` has every silo, in job order, with "" where none came.
    """
    return {
        "job": status.job,
        "method": status.method,
        "digest": status.job_digest.hex(),
        "stage": status.stage,
        "round": status.round,
        "rounds": status.rounds,
        "outcome": status.outcome,
        "reason": status.reason,
        "answers": {silo: status.answers.get(silo, "") for silo in status.silos},
        "cohort": list(status.cohort),
        "given": list(status.given),
        "failed": dict(status.failed),
        "unheard": list(status.unheard),
    }


def status_line(status: pb.JobStatus, pace: str = "") -> str:
    """A job's status for people; ``pace`` says how long it still takes."""
    stage = status.outcome if status.stage == "ended" else status.stage
    line = f"{status.job:<24} {stage:<18} {status.round} of {status.rounds} rounds"
    if status.stage == "round":
        line += f", {len(status.given)} of {len(status.cohort)} silos uploaded"
    if status.reason:
        line += f": {status.reason}"
    declined = [
        f"{silo} ({in_words(code)}: {ASK.get(code, 'its own log says why')})"
        for silo, code in sorted(status.answers.items())
        if code not in ("accepted", WAITING)
    ]
    if declined:
        line += f"; declined by {', '.join(declined)}"
    # After a restart of the coordinator, all silos are in here until they call.
    if status.unheard:
        line += f"; not seen since the coordinator started: {', '.join(status.unheard)}"
    return f"{line}{pace}{_awaited(status)}"


def _shown(value: Any) -> str:
    """A value of a job's status as text; "-" where there is nothing."""
    if isinstance(value, Mapping):
        value = [f"{key} {_shown(item)}" for key, item in sorted(value.items())]
    if isinstance(value, list):
        value = ", ".join(value)
    return str(value) or "-"


def given_file(path: Path | None) -> Path:
    """The operator's file; LocalError where none was given.

    For commands with another source, where --operator is optional.
    """
    if path is None:
        raise LocalError("--operator is missing")
    return path
