"""``staddle ledger show`` and ``summary``: what left a silo, message by message and added up."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ...errors import LocalError
from ...security.ledger import messages, receipt_checks
from ...security.ledger.audit import ledger_folder
from ...security.ledger.messages import PROTOCOL, Group, LedgerMessage, Totals
from ...security.ledger.records import (
    Deny,
    Intent,
    PolicyChange,
    PrivacyHead,
    ProtocolMessage,
    SumEnd,
    SumOpened,
    SumSigned,
)
from ...security.log.chain import VerifiedLine
from ...security.policy.release import PADDED
from ..console import printer
from . import received, roster_files
from .roster_files import Founders, RosterFiles, Threshold

LedgerPath = Annotated[
    Path, typer.Argument(metavar="DIR", help="A silo's folder, or its folder 'state' or 'ledger'.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def show(
    path: LedgerPath,
    round_number: Annotated[int | None, typer.Option("--round", help="Only this round.")] = None,
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    part: Annotated[
        str | None, typer.Option(help="Only messages with tensors of this part.")
    ] = None,
    recipient: Annotated[str | None, typer.Option(help="Only what went to this member.")] = None,
    as_json: Json = False,
) -> None:
    """Show every message that left, or counts as left.

    Of a coordinator's ledger, what it received and delivered.

    There --recipient is the silo that gave or got it. Of secure sums and mixes the messages of
    their protocols are shown too (as the part "(protocol)"), and how each attempt at a sum ended;
    and what the policy held back. What the privacy budget of a data set came to is of no job, and
    shown where nothing is asked for in particular.
    """
    folder = ledger_folder(path)
    if received.is_coordinators(folder):
        if part is not None:
            raise LocalError("--part: a coordinator's ledger does not name parts; see the silo's")
        received.show(folder, job, round_number, recipient, as_json=as_json)
        return
    if job is not None and job not in (jobs := messages.jobs(folder)):
        raise LocalError(
            f"{folder}: no record is of job {job!r}; its jobs: {', '.join(jobs) or 'none'}"
        )

    def wanted(record: Intent | OfJob, parts: Sequence[str], to: str) -> bool:
        of = round_number in (None, record.round) and job in (None, record.job)
        return of and (part is None or part in parts) and recipient in (None, to)

    rows = [
        m for m in messages.messages(folder) if wanted(m.intent, _parts(m), m.intent.recipient.id)
    ]
    beside: list[tuple[VerifiedLine, Beside]] = [
        (line, record)
        for line, record in messages.of_type(folder, *SUMS)
        if wanted(record, [PROTOCOL], _recipient(record))
    ]
    beside += [
        (line, record) for line, record in messages.of_type(folder, Deny) if wanted(record, [], "")
    ]
    if (job, round_number, part, recipient) == (None, None, None, None):
        beside += messages.of_type(folder, PrivacyHead)
    if as_json:
        documents = [_document(message) for message in rows] + [
            _document_beside(line, record) for line, record in beside
        ]
        printer.show_json(sorted(documents, key=lambda document: int(document["seq"])))
        return
    columns = (
        "seq",
        "time",
        "job",
        "round",
        "part",
        "tensors",
        "bytes",
        "recipient",
        "rule",
        "outcome",
    )
    cells = [_row(message) for message in rows] + [
        _row_beside(line, record) for line, record in beside
    ]
    printer.show(printer.PrintedTable(columns, sorted(cells, key=lambda row: int(row[0]))))
    sizes = [message.intent.message.bytes for message in rows]
    sizes += [record.message.bytes for _, record in beside if isinstance(record, ProtocolMessage)]
    printer.show(f"{len(sizes)} messages, {sum(sizes):,} bytes")
    _tell_policies(folder)


OfSum: TypeAlias = ProtocolMessage | SumEnd | SumSigned | SumOpened
SUMS: tuple[type[OfSum], ...] = (ProtocolMessage, SumEnd, SumSigned, SumOpened)
OfJob: TypeAlias = OfSum | Deny
Beside: TypeAlias = OfJob | PrivacyHead  # what is shown beside the messages


GROUPS: Sequence[Group] = ("job", "method", "part", "taint", "recipient")


def summary(
    path: LedgerPath,
    roster: RosterFiles = None,
    founder: Founders = None,
    threshold: Threshold = None,
    as_json: Json = False,
) -> None:
    """Add up what left, by job, method, part, taint and recipient.

    With --roster check the receipts too.

    The taint says what tensors were computed from: "private", records as they are; "dp", with noise
    that was paid for out of the data set's privacy budget, of which the last lines say how far it
    is spent; "public", nothing of this silo's. A message without digest counts with all bytes that
    it declared. Exit code 1 if a receipt is not what the coordinator signed.
    """
    folder = ledger_folder(path)
    received.check_silos(folder)
    given = roster_files.read(roster, founder, threshold)
    receipts = receipt_checks.check(messages.lines(folder), given.each) if given.each else None
    for problem in receipts.problems if receipts else []:
        printer.show(f"problem: {problem}", err=True)
    totals = messages.summary(folder, GROUPS)
    if as_json:
        rows: list[dict[str, Any]] = [
            {**dict(zip(GROUPS, key, strict=True)), **asdict(t)} for key, t in totals.items()
        ]
        printer.show_json(rows + [_document_beside(*last) for last in _last_budgets(folder)])
    else:
        _tell_totals(folder, totals)
        if receipts:
            printer.show(given.told, receipts.told)
    if receipts and receipts.problems:
        raise typer.Exit(1)


def _tell_totals(folder: Path, totals: Mapping[tuple[str, ...], Totals]) -> None:
    columns = (*GROUPS, "messages", "tensors", "elements", "bytes", "of these assumed")
    cells = [
        [*key, *(f"{n:,}" for n in (t.messages, t.tensors, t.elements, t.bytes, t.assumed))]
        for key, t in totals.items()
    ]
    printer.show(printer.PrintedTable(columns, cells))
    printer.show(f"{sum(total.bytes for total in totals.values()):,} bytes in all")
    for line, head in _last_budgets(folder):
        printer.show(f"{spent(head)}, as of record {line.seq}")
    _tell_policies(folder)


def _tell_policies(folder: Path) -> None:
    for line, change in messages.of_type(folder, PolicyChange):
        since = f"from {line.record['time']} on"
        printer.show(f"policy {change.after} in force {since} (record {line.seq}, with its text)")


def _last_budgets(folder: Path) -> list[tuple[VerifiedLine, PrivacyHead]]:
    heads = messages.of_type(folder, PrivacyHead)
    return list({head.dataset: (line, head) for line, head in heads}.values())


def spent(head: PrivacyHead) -> str:
    """How far the budget of a data set is spent, in a line."""
    return (
        f"data set {head.dataset!r}: epsilon {head.epsilon} of {head.limit} spent or reserved, at"
        f" delta {head.delta}"
    )


def _parts(message: LedgerMessage) -> list[str]:
    return list(dict.fromkeys(tensor.part for tensor in message.intent.tensors)) or [
        messages.MESSAGE
    ]


def _document(message: LedgerMessage) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time,
        **message.intent.model_dump(mode="json"),
        "digested": message.digested,
        "outcome": message.status,
        "receipt": message.receipt,
    }


def _row(message: LedgerMessage) -> list[str]:
    intent = message.intent
    outcome = message.status if message.digested else f"{message.status}, no digest"
    if masked := intent.secagg:
        outcome += f"; masked among {', '.join(masked.members)}, threshold {masked.threshold}"
    for part, readers in _readers(intent).items():
        outcome += f"; {part} read by {', '.join(readers)}"
    if hidden := intent.hidden:
        outcome += f"; {intent.form}, " + (
            f"version {hidden.number}" if intent.form == PADDED else "to be compared"
        )
    for taint, parts in _taints(intent).items():
        outcome += f"; {taint}: {', '.join(parts)}"
    if paid := intent.dp:
        outcome += f"; paid by {', '.join(map(str, paid.ids))} of data set {paid.dataset!r}"
    return [
        str(message.seq),
        message.time,
        intent.job,
        str(intent.round),
        ", ".join(_parts(message)),
        str(len(intent.tensors)),
        f"{intent.message.bytes:,}",
        intent.recipient.id,
        intent.policy.rule,
        outcome,
    ]


def _readers(intent: Intent) -> dict[str, tuple[str, ...]]:
    """By part, where they are not all who can open something of the message."""
    return {tensor.part: tensor.readers for tensor in intent.tensors if tensor.readers}


def _taints(intent: Intent) -> dict[str, list[str]]:
    """The parts of each taint; nothing where all is private, as in a job without [privacy]."""
    found: dict[str, dict[str, None]] = {}
    for tensor in intent.tensors:
        found.setdefault(tensor.taint, {})[tensor.part] = None
    return (
        {taint: list(parts) for taint, parts in found.items()} if found.keys() - {"private"} else {}
    )


def _recipient(record: Beside) -> str:
    return record.recipient.id if isinstance(record, ProtocolMessage) else ""


def _document_beside(line: VerifiedLine, record: Beside) -> dict[str, Any]:
    return {"seq": line.seq, "time": line.record["time"], **record.model_dump(mode="json")}


def _row_beside(line: VerifiedLine, record: Beside) -> list[str]:
    if isinstance(record, PrivacyHead):
        return [str(line.seq), line.record["time"], *[""] * 7, spent(record)]
    part, size, what = PROTOCOL, "", ""
    match record:
        case ProtocolMessage():
            size, what = f"{record.message.bytes:,}", f"{record.kind}, counts as left"
        case SumEnd():
            blame = f", blamed: {record.blame}" if record.blame else ""
            what = f"attempt {record.ctx[:8]} ended, {record.code}{blame}: {record.why}"
        case SumSigned():
            what = (
                f"sum {record.ctx[:8]} may be open over {', '.join(record.survivors)} from here on"
            )
        case SumOpened():
            what = f"sum {record.ctx[:8]} opened over {', '.join(record.survivors)}"
        case Deny():
            part, what = "", f"held back by the policy: {'; '.join(record.reasons)}"
    of = [str(line.seq), line.record["time"], record.job, str(record.round)]
    return [*of, part, "", size, _recipient(record), "", what]
