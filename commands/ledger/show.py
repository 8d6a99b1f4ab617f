"""``staddle ledger show`` and ``summary``: what left a silo, message by message and added up."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ...errors import LocalError
from ...security.ledger import messages, receipt_checks
from ...security.ledger.audit import ledger_folder
from ...security.ledger.messages import PROTOCOL, Group, LedgerMessage, Totals
from ...security.ledger.receipt_checks import Receipts
from ...security.ledger.records import (
    Deny,
    Intent,
    JobAccept,
    JobDecline,
    PolicyChange,
    PrivacyHead,
    ProtocolMessage,
    SumEnd,
    SumOpened,
    SumSigned,
)
from ...security.log.chain import VerifiedLine
from ...security.policy.release import PADDED
from ..terminal import printer
from ..terminal.output import number
from . import received, roster_files
from .roster_files import Founders, RosterFiles, Threshold

LedgerPath = Annotated[
    Path, typer.Argument(metavar="DIR", help="A silo's folder, or its folder 'state' or 'ledger'.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
OfSum: TypeAlias = ProtocolMessage | SumEnd | SumSigned | SumOpened
SUMS: tuple[type[OfSum], ...] = (ProtocolMessage, SumEnd, SumSigned, SumOpened)
OfJob: TypeAlias = OfSum | Deny
Decided: TypeAlias = JobAccept | JobDecline
Other: TypeAlias = OfJob | PrivacyHead | Decided  # records that are shown next to the messages

NOISE = {"local": "", "shared": ", under a share of the noise"}
COLUMNS = (
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

    For a coordinator's ledger, show what it received and delivered; --recipient then selects the
    silo that uploaded or received it.

    Also shown: protocol messages of secure sums and mixes (as the part "(protocol)"), how each
    attempt at a sum ended, and what the policy held back. The privacy budget of a data set belongs
    to no job, so it is shown only if no option selects messages.
    """
    folder = ledger_folder(path)

    # the coordinator's ledger has other records: what it received, not what left
    if received.is_coordinators(folder):
        if part is not None:
            raise LocalError("--part: a coordinator's ledger does not name parts; see the silo's")
        received.show(folder, job, round_number, recipient, as_json=as_json)
        return

    # a job's name with a slip of the pen would select nothing, which reads as "nothing left"
    if job is not None:
        _check_job(folder, job)

    wanted = Wanted(job, round_number, part, recipient)
    left = [message for message in messages.messages(folder) if wanted.has_message(message)]
    others = _others(folder, wanted)
    if as_json:
        documents = [_document(message) for message in left]
        documents += [_document_of_other(line, record) for line, record in others]
        # Sorted by seq, as in the ledger.
        printer.show_json(sorted(documents, key=lambda document: int(document["seq"])))
        return
    _print(left, others)
    _print_policies(folder)


def _print(left: Sequence[LedgerMessage], others: Sequence[tuple[VerifiedLine, Other]]) -> None:
    """Print a table of messages and other records, in the order of the ledger."""
    rows, sizes, assumed = [], [], 0
    for message in left:
        rows.append(_row(message))
        sizes.append(message.measured)
        assumed += message.assumed
    for line, record in others:
        rows.append(_row_of_other(line, record))
        # Keys, shares and notes are messages that left; the end of a sum is none.
        if isinstance(record, ProtocolMessage):
            sizes.append(record.message.bytes)
    printer.show(printer.PrintedTable(COLUMNS, sorted(rows, key=lambda row: int(row[0]))))
    sent = number(len(sizes) - sizes.count(0), "message")
    printer.show(f"{sent}, {sum(sizes):,} bytes{besides(assumed)}")


def besides(assumed: int) -> str:
    """What else may have left, behind a number of bytes that did; empty where all was measured."""
    return f"; at most {assumed:,} bytes more, which no record counts" * bool(assumed)


def _check_job(folder: Path, job: str) -> None:
    jobs = messages.jobs(folder)
    if job not in jobs:
        raise LocalError(
            f"{folder}: no record is of job {job!r}; its jobs: {', '.join(jobs) or 'none'}"
        )


@dataclass(frozen=True)
class Wanted:
    """What the user selected; None selects all."""

    job: str | None
    round: int | None
    part: str | None
    recipient: str | None

    @property
    def everything(self) -> bool:
        """True if no option was given."""
        return {self.job, self.round, self.part, self.recipient} == {None}

    def is_persons(self, record: Decided) -> bool:
        """True if it is of a selected job, and one of the silo's people was asked."""
        of_no_job = {self.round, self.part, self.recipient} == {None}
        return record.person is not None and of_no_job and self.job in (None, record.job)

    def has_message(self, message: LedgerMessage) -> bool:
        """True if the message is selected."""
        intent = message.intent
        return self.has(intent, _parts(message), intent.recipient.id)

    def has(self, record: Intent | OfJob, parts: Sequence[str], recipient: str) -> bool:
        """True if a record of a job is selected.

        ``parts`` are those of its tensors. An empty ``recipient``: it went to nobody.
        """
        if self.part is not None and self.part not in parts:
            return False
        # an option that is left out selects all
        pairs = (
            (self.job, record.job),
            (self.round, record.round),
            (self.recipient, recipient),
        )
        return all(selected in (None, value) for selected, value in pairs)


def _others(folder: Path, wanted: Wanted) -> list[tuple[VerifiedLine, Other]]:
    """The selected records that are not messages of a round."""
    found: list[tuple[VerifiedLine, Other]] = []
    for line, record in messages.of_type(folder, *SUMS):
        if wanted.has(record, [PROTOCOL], _recipient(record)):
            found.append((line, record))
    # A denial has no part and no recipient: nothing left.
    for line, denial in messages.of_type(folder, Deny):
        if wanted.has(denial, [], ""):
            found.append((line, denial))
    if wanted.everything:
        found += messages.of_type(folder, PrivacyHead)  # of a data set: they belong to no job
    decided: tuple[type[Decided], ...] = (JobAccept, JobDecline)
    for line, decision in messages.of_type(folder, *decided):
        if wanted.is_persons(decision):
            found.append((line, decision))
    return found


GROUPS: Sequence[Group] = ("job", "dataset", "method", "part", "taint", "recipient")


def summary(
    path: LedgerPath,
    roster: RosterFiles = None,
    founder: Founders = None,
    threshold: Threshold = None,
    as_json: Json = False,
) -> None:
    """Add up what left, by job, data set, method, part, taint and recipient.

    With --founder check the receipts too, under the rosters that the ledger keeps; with --roster
    under those of files.

    The taint says what tensors were computed from. "exact": records, without noise. "noised":
    records, with noise that the data set's privacy budget paid for; the last lines say how much of
    the budget is spent. "public": none of this silo's records.

    Bytes are those that left. "assumed" bytes may have left besides, at most: those that a message
    declared whose end nobody saw, and the cap of a control session that is open or was killed.
    Exit code 1 if a receipt is not what the coordinator signed.
    """
    folder = ledger_folder(path)
    received.check_silos(folder)
    rosters = roster_files.read(roster, founder, threshold, folder)

    # on standard error: the table of totals, or the JSON, may be read by a program
    receipts = Receipts()
    if rosters.each:
        receipts = receipt_checks.check(messages.lines(folder), rosters.each)
    for problem in receipts.problems:
        printer.show(f"problem: {problem}", err=True)

    # By taint and recipient as well: readers want to see what left without noise, and to whom.
    totals = messages.summary(folder, GROUPS)
    if as_json:
        printer.show_json(_totals_document(folder, totals))
    else:
        _print_totals(folder, totals)
        if rosters.each:
            printer.show(*rosters.vouchers, receipts.summary)

    # the totals are shown all the same: they are of the silo's own records
    if receipts.problems:
        raise typer.Exit(1)


def _totals_document(
    folder: Path, totals: Mapping[tuple[str, ...], Totals]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, total in totals.items():
        group: dict[str, str] = dict(zip(GROUPS, key, strict=True))
        rows.append({**group, **asdict(total)})
    # Each head has the total spent so far, so the last one is enough.
    for line, head in _last_budgets(folder):
        rows.append(_document_of_other(line, head))
    return rows


def _print_totals(folder: Path, totals: Mapping[tuple[str, ...], Totals]) -> None:
    columns = (*GROUPS, "messages", "tensors", "elements", "bytes", "assumed")
    cells = []
    everything = assumed = 0
    for key, t in totals.items():
        numbers = (t.messages, t.tensors, t.elements, t.bytes, t.assumed)
        cells.append([*key, *map("{:,}".format, numbers)])
        everything += t.bytes
        assumed += t.assumed
    printer.show(printer.PrintedTable(columns, cells))
    printer.show(f"{everything:,} bytes in all{besides(assumed)}")
    for line, head in _last_budgets(folder):
        printer.show(f"{spent(head)}, as of record {line.seq}")
    _print_policies(folder)


def _print_policies(folder: Path) -> None:
    for line, change in messages.of_type(folder, PolicyChange):
        since = f"from {line.record['time']} on"
        printer.show(f"policy {change.after} in force {since} (record {line.seq}, with its text)")


def _last_budgets(folder: Path) -> list[tuple[VerifiedLine, PrivacyHead]]:
    last: dict[str, tuple[VerifiedLine, PrivacyHead]] = {}
    for line, head in messages.of_type(folder, PrivacyHead):
        last[head.dataset] = (line, head)
    return list(last.values())


def spent(head: PrivacyHead) -> str:
    """How far the budget of a data set is spent, in a line."""
    return (
        f"data set {head.dataset!r}: epsilon {head.epsilon} of {head.limit} spent or reserved, at"
        f" delta {head.delta}"
    )


def _parts(message: LedgerMessage) -> list[str]:
    # A message without tensors counts as a part called "(message)".
    parts = dict.fromkeys(tensor.part for tensor in message.intent.tensors)
    return list(parts) or [messages.MESSAGE]


def _document(message: LedgerMessage) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time,
        **message.intent.model_dump(mode="json"),
        "digested": message.digested,
        "handed": message.handed,
        "outcome": message.status,
        "receipt": message.receipt,
    }


def _row(message: LedgerMessage) -> list[str]:
    intent = message.intent
    return [
        str(message.seq),
        message.time,
        intent.job,
        str(intent.round),
        ", ".join(_parts(message)),
        str(len(intent.tensors)),
        f"{message.most:,}",
        intent.recipient.id,
        intent.policy.rule,
        "; ".join(_outcome(message)),
    ]


def _outcome(message: LedgerMessage) -> Iterator[str]:
    """How a message ended, and what hides or pays for it."""
    intent = message.intent

    # where nobody saw its end, the ledger says only how much left at most
    digest = ", no digest" * (not message.digested)
    yield f"{message.status}{digest}{', assumed' * bool(message.assumed)}"
    masked = intent.secagg
    if masked:
        yield f"masked among {', '.join(masked.members)}, threshold {masked.threshold}"

    # by part, where they are not all who can open something of the message
    readers = {tensor.part: tensor.readers for tensor in intent.tensors if tensor.readers}
    for part, names in readers.items():
        yield f"{part} read by {', '.join(names)}"

    hidden = intent.hidden
    if hidden:
        # Padded uploads have a version, which rows refer to; rotated ones are used once.
        use = "to be compared"
        if intent.form == PADDED:
            use = f"version {hidden.number}"
        yield f"{intent.form}, {use}"

    for taint, parts in _taints(intent).items():
        yield f"{taint}: {', '.join(parts)}"
    paid = intent.dp
    if paid:
        reservations = ", ".join(map(str, paid.ids))
        yield f"paid by {reservations} of data set {paid.dataset!r}{NOISE[paid.noise]}"


def _taints(intent: Intent) -> dict[str, dict[str, None]]:
    """The parts of each taint; nothing where all is exact, as in a job without [privacy]."""
    found: dict[str, dict[str, None]] = {}
    for tensor in intent.tensors:
        found.setdefault(tensor.taint, {})[tensor.part] = None
    if found.keys() == {"exact"}:
        return {}
    return found


def _recipient(record: Other) -> str:
    return record.recipient.id if isinstance(record, ProtocolMessage) else ""


def _document_of_other(line: VerifiedLine, record: Other) -> dict[str, Any]:
    return {"seq": line.seq, "time": line.record["time"], **record.model_dump(mode="json")}


def _row_of_other(line: VerifiedLine, record: Other) -> list[str]:
    stamp = [str(line.seq), line.record["time"]]
    # A budget belongs to a data set, so job, round and recipient stay empty.
    if isinstance(record, PrivacyHead):
        return [*stamp, *[""] * 7, spent(record)]
    if isinstance(record, JobAccept | JobDecline):
        return [*stamp, record.job, *[""] * 6, persons(record)]

    part, size, recipient = PROTOCOL, "", ""
    if isinstance(record, Deny):
        part = ""
    if isinstance(record, ProtocolMessage):
        size, recipient = f"{record.message.bytes:,}", record.recipient.id
    of_job = [record.job, str(record.round), part, "", size, recipient, ""]
    return [*stamp, *of_job, _event(record)]


def persons(record: Decided) -> str:
    """Who approved or declined a job, and when; empty where nobody was asked."""
    if record.person is None:
        return ""
    said = "approved" if isinstance(record, JobAccept) else "declined"
    return f"{said} by {record.person.by or 'a person'} at {record.person.time}"


def _event(record: OfJob) -> str:
    match record:
        case ProtocolMessage():
            return f"{record.kind}, counts as left"
        case SumEnd():
            code = str(record.code)
            if record.blame:
                code = f"{code}, blamed: {record.blame}"
            return f"attempt {record.ctx[:8]} ended, {code}: {record.why}"
        case SumSigned():
            silos = ", ".join(record.survivors)
            return f"sum {record.ctx[:8]} may be open over {silos} from here on"
        case SumOpened():
            return f"sum {record.ctx[:8]} opened over {', '.join(record.survivors)}"
        case Deny():
            return f"held back by the policy: {'; '.join(record.reasons)}"
