"""The tables of the ledger report: rows of plain values from what the ledger says.

Pure functions.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Generic, TypeVar

from ...security.ledger.messages import At, LedgerMessage, Session, Totals
from ...security.ledger.overview import Flow, LedgerOverview, flows, parts
from ...security.ledger.records import (
    JobAccept,
    JobDecline,
    KeyRotate,
    PrivacyHead,
    RecoveryRecord,
    Start,
    StopRecord,
)

MAX_ROWS = 200  # of one table: five to fifteen pages of paper
MAX_SPANS = 40  # of rounds in one cell
MAX_COHORTS = 12  # of a job, one by one

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Listed(Generic[RowT]):
    """The newest rows of a table, and how many older ones are left out."""

    rows: tuple[RowT, ...]
    left_out: int


def newest(rows: Sequence[RowT], most: int | None = None) -> Listed[RowT]:
    """At most so many rows, by default MAX_ROWS."""
    most = MAX_ROWS if most is None else most
    return Listed(tuple(rows[-most:]), max(0, len(rows) - most))


def spans(numbers: Iterable[int]) -> str:
    """``0–3, 7``; of very many spans the first ones, and how many follow."""
    ordered = sorted(set(numbers))
    runs = [list(run) for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    shown = [
        str(run[0][1]) if len(run) == 1 else f"{run[0][1]}\u2013{run[-1][1]}"
        for run in runs[:MAX_SPANS]
    ]
    more = (
        [f"and {len(runs) - MAX_SPANS} more spans up to {ordered[-1]}"]
        if len(runs) > MAX_SPANS
        else []
    )
    return ", ".join(shown + more)


# What left.


@dataclass(slots=True)
class JobFlows:
    """What left for one job: rows by flow, and their sum; ``messages`` are counted once each."""

    job: str
    rows: list[tuple[Flow, Totals]] = field(default_factory=list)
    total: Totals = field(default_factory=Totals)


def flow_table(view: LedgerOverview, *, control: bool) -> tuple[JobFlows, ...]:
    """One group a job; that of the control sessions last, if they are wanted."""
    groups: dict[str, JobFlows] = {}
    shown = (
        view
        if control
        else LedgerOverview(view.verified, messages=view.messages, protocol=view.protocol)
    )
    for flow, totals in flows(shown).items():
        group = groups.setdefault(flow.job, JobFlows(flow.job))
        group.rows.append((flow, totals))
        group.total.add(totals)
    counted = Counter(message.intent.job for message in view.messages)
    counted.update(sent.record.job for sent in view.protocol)
    for job, group in groups.items():
        if job in counted:  # a message of two parts stands in two rows
            group.total.messages = counted[job]
    return tuple(groups.values())


@dataclass(frozen=True, slots=True)
class TaintRow:
    """What the tensors of one job were computed from, as the silo's software said."""

    job: str
    taint: str
    tensors: int
    elements: int
    bytes: int
    paid: str  # of what is dp: reservations of which data set's budget


def taint_table(messages: Iterable[LedgerMessage]) -> tuple[TaintRow, ...]:
    """Tensors that left, by job and taint."""
    found: dict[tuple[str, str], Totals] = {}
    paid: dict[str, dict[str, set[int]]] = {}  # job → data set → reservations
    for message in messages:
        intent = message.intent
        for tensor, count in intent.leaving:
            row = found.setdefault((intent.job, tensor.taint), Totals())
            row.add(Totals(0, 1, tensor.elements, count))
        if intent.dp:
            paid.setdefault(intent.job, {}).setdefault(intent.dp.dataset, set()).update(
                intent.dp.ids
            )
    told = {
        job: "; ".join(f"{name}: {spans(ids)}" for name, ids in by.items())
        for job, by in paid.items()
    }
    return tuple(
        TaintRow(
            job, taint, t.tensors, t.elements, t.bytes, told.get(job, "") if taint == "dp" else ""
        )
        for (job, taint), t in found.items()
    )


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """What a data set's privacy budget came to, by the last of its heads."""

    last: At[PrivacyHead]
    heads: int
    first: str  # time of the first


def budget_table(heads: Sequence[At[PrivacyHead]]) -> tuple[BudgetRow, ...]:
    """One row a data set."""
    sets: dict[str, list[At[PrivacyHead]]] = {}
    for at in heads:
        sets.setdefault(at.record.dataset, []).append(at)
    return tuple(BudgetRow(own[-1], len(own), own[0].time) for own in sets.values())


# Jobs, rounds, sessions.


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as the ledger knows it."""

    job: str
    methods: tuple[str, ...]
    decisions: tuple[At[JobAccept] | At[JobDecline], ...]
    rounds: str  # in which something left
    cohorts: "Cohorts | None"  # None where no message says which silos took part
    received_rounds: str
    received_bytes: int


def job_table(view: LedgerOverview) -> tuple[JobRow, ...]:
    """One row a job, in the order in which the ledger comes to them."""
    return tuple(_job_row(view.of(job), job) for job in view.jobs)


def _job_row(view: LedgerOverview, job: str) -> JobRow:
    received = view.received.get(job, Counter())
    return JobRow(
        job=job,
        methods=tuple(dict.fromkeys(message.intent.method for message in view.messages)),
        decisions=tuple(view.decisions),
        rounds=spans(message.intent.round for message in view.messages),
        cohorts=_cohorts(
            [(m.intent.round, m.intent.cohort) for m in view.messages if m.intent.cohort]
        ),
        received_rounds=spans(received),
        received_bytes=sum(received.values()),
    )


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Which silos took part in the rounds of a job, this one among them."""

    smallest: int  # silos
    largest: int
    # rounds whose cohort was another one than the round's before in which this silo gave
    changes: int
    sizes: tuple[tuple[int, str], ...]  # silos, rounds; empty where all are of one size
    members: Listed[tuple[str, str]]  # names, rounds; the newest cohort last


def _cohorts(told: Sequence[tuple[int, tuple[str, ...]]]) -> Cohorts | None:
    if not told:
        return None
    sizes: dict[int, list[int]] = {}
    members: dict[tuple[str, ...], list[int]] = {}
    for number, cohort in told:
        sizes.setdefault(len(cohort), []).append(number)
        members[cohort] = [*members.pop(cohort, []), number]
    rows = [(", ".join(cohort), spans(numbers)) for cohort, numbers in members.items()]
    return Cohorts(
        smallest=min(sizes),
        largest=max(sizes),
        changes=sum(before[1] != after[1] for before, after in pairwise(told)),
        sizes=(
            tuple((size, spans(numbers)) for size, numbers in sorted(sizes.items()))
            if len(sizes) > 1
            else ()
        ),
        members=newest(rows, MAX_COHORTS),
    )


def session_table(sessions: Sequence[Session]) -> tuple[Listed[Session], Totals]:
    """Sessions, and the sum of all of them."""
    total = Totals()
    for session in sessions:
        total.add(session.totals)
    return newest(sessions), total


def event_table(view: LedgerOverview) -> Listed[tuple[int, str, str, str]]:
    """Starts, stops, recoveries and new keys: seq, time, name and what it says."""
    return newest([(e.seq, e.time, e.record.type, _event(e.record)) for e in view.events])


def _event(record: Start | StopRecord | RecoveryRecord | KeyRotate) -> str:
    match record:
        case Start():
            return f"{record.software}, policy {record.policy}, roster {record.roster}"
        case StopRecord():
            return record.reason
        case KeyRotate():
            return f"from now on signs {record.new}; so far {record.old} did"
        case RecoveryRecord():
            return (
                f"{record.dropped_bytes} bytes of a torn last line put aside, behind seq"
                f" {record.last_good_seq}"
            )


# Messages.


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message, or in a long ledger all messages of a job's round."""

    seq: str
    time: str
    job: str
    round: int
    parts: str
    bytes: int
    recipient: str
    rules: tuple[str, ...]
    outcome: str
    receipt: str


def message_table(
    messages: Sequence[LedgerMessage], receipts: Collection[int] | None = None
) -> tuple[bool, Listed[MessageRow]]:
    """Whether messages are grouped by round, and the rows.

    ``receipts`` are seqs of those whose receipt was checked.
    """
    if len(messages) <= MAX_ROWS:
        return False, newest([_message_row([message], receipts) for message in messages])
    rounds: dict[tuple[str, int], list[LedgerMessage]] = {}
    for message in messages:
        rounds.setdefault((message.intent.job, message.intent.round), []).append(message)
    return True, newest([_message_row(group, receipts) for group in rounds.values()])


def _message_row(group: Sequence[LedgerMessage], receipts: Collection[int] | None) -> MessageRow:
    first, many = group[0], len(group) > 1
    sizes: Counter[str] = Counter()
    for message in group:
        sizes.update(parts(message))
    outcomes = Counter(m.status if m.digested else f"{m.status}, no digest" for m in group)
    return MessageRow(
        seq=spans(message.seq for message in group),
        time=first.time,
        job=first.intent.job,
        round=first.intent.round,
        parts=", ".join(f"{part}\u00a0{count:,}" for part, count in sizes.items()),
        bytes=sum(message.intent.message.bytes for message in group),
        recipient=", ".join(dict.fromkeys(message.intent.recipient.id for message in group)),
        rules=tuple(
            dict.fromkeys(
                rule for message in group for rule in message.intent.policy.rule.split(", ")
            )
        ),
        outcome="; ".join(f"{count} {name}" if many else name for name, count in outcomes.items()),
        receipt=_receipts(group, receipts),
    )


def _receipts(group: Sequence[LedgerMessage], good: Collection[int] | None) -> str:
    """How many of some messages have a receipt, and how many of these were checked.

    None is wrong on a page.
    """
    held = [message.seq for message in group if message.receipt is not None]
    checked = sum(seq in good for seq in held) if good is not None else 0
    if len(group) > 1:
        return f"{len(held)} of {len(group)}" + (
            f", {checked} checked" if held and good is not None else ""
        )
    if not held:
        return "no"
    return "holds" if checked else "not checked"
