"""The tables of the ledger report: rows of plain values from what the ledger says.

Pure functions.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Generic, TypeVar

from ...security.ledger.messages import At, LedgerMessage, Session, Totals
from ...security.ledger.overview import Flow, LedgerOverview, flows, parts
from ...security.ledger.records import (
    JobAccept,
    JobDecline,
    KeyRotate,
    PackageCode,
    PrivacyHead,
    RecoveryRecord,
    Start,
    StopRecord,
)
from .policies import rules_of

MAX_ROWS = 200  # of one table: five to fifteen pages of paper
MAX_SPANS = 40  # of rounds in one cell
MAX_COHORTS = 12  # of a job, one by one

RowT = TypeVar("RowT")
MEASURED = attrgetter("measured")  # of a message: bytes that left


@dataclass(frozen=True, slots=True)
class Listed(Generic[RowT]):
    """The newest rows of a table, and how many older ones are left out."""

    rows: tuple[RowT, ...]
    left_out: int


def newest(rows: Sequence[RowT], most: int | None = None) -> Listed[RowT]:
    """At most so many rows, by default MAX_ROWS.

    ``rows`` go from old to new.
    """
    most = MAX_ROWS if most is None else most
    return Listed(tuple(rows[-most:]), max(0, len(rows) - most))


def spans(numbers: Iterable[int]) -> str:
    """``0–3, 7``; of very many spans the first ones, and how many follow."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])

    shown = []
    for first, last in runs[:MAX_SPANS]:
        span = str(first)
        if last > first:
            span = f"{first}\u2013{last}"
        shown.append(span)
    # Hundreds of spans in one cell would fill a page.
    more = len(runs) - MAX_SPANS
    if more > 0:
        shown.append(f"and {more} more spans up to {runs[-1][-1]}")
    return ", ".join(shown)


# What left.


@dataclass(slots=True)
class JobFlows:
    """What left for one job: rows by flow, and their sum; ``messages`` are counted once each."""

    job: str
    rows: list[tuple[Flow, Totals]] = field(default_factory=list)
    total: Totals = field(default_factory=Totals)


def flow_table(view: LedgerOverview, *, control: bool) -> tuple[JobFlows, ...]:
    """One group per job; that of the control sessions last, if they are wanted.

    In the order in which the jobs first sent something.
    """
    shown = view
    if not control:
        # Leave out the control sessions.
        shown = LedgerOverview(view.verified, messages=view.messages, protocol=view.protocol)
    groups: dict[str, JobFlows] = {}
    for flow, totals in flows(shown).items():
        group = groups.setdefault(flow.job, JobFlows(flow.job))
        group.rows.append((flow, totals))
        group.total.add(totals)

    # a message of two parts stands in two rows, and counts once in their sum
    counted = Counter(message.intent.job for message in filter(MEASURED, view.messages))
    counted.update(sent.record.job for sent in view.protocol)
    for job in counted.keys() & groups.keys():
        groups[job].total.messages = counted[job]
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
    """Tensors that left, by job and taint.

    The taint is the silo software's own statement; nobody else can check it.
    """
    found: dict[tuple[str, str], Totals] = {}
    paid: dict[str, dict[str, set[int]]] = {}  # job → data set → reservations
    for message in messages:
        intent = message.intent
        pieces = message.pieces(lambda tensor: tensor.taint, "")
        # What is of no tensor has no taint.
        pieces.pop("", None)
        for taint, totals in pieces.items():
            found.setdefault((intent.job, taint), Totals()).add(totals)
        if intent.dp:
            of_job = paid.setdefault(intent.job, {})
            of_job.setdefault(intent.dp.dataset, set()).update(intent.dp.ids)

    # only differentially private tensors were paid for, whatever else the job sent
    rows = []
    for (job, taint), t in found.items():
        payments = []
        if taint == "noised":
            payments = [f"{name}: {spans(ids)}" for name, ids in paid.get(job, {}).items()]
        taint_row = TaintRow(
            job=job,
            taint=taint,
            tensors=t.tensors,
            elements=t.elements,
            bytes=t.bytes,
            paid="; ".join(payments),
        )
        rows.append(taint_row)
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """State of a data set's privacy budget by its last head; ``heads`` counts them."""

    last: At[PrivacyHead]
    heads: int
    first: str  # time of the first


def budget_table(heads: Sequence[At[PrivacyHead]]) -> tuple[BudgetRow, ...]:
    """One row per data set, in the order in which they were first used.

    ``heads`` are in the order of the ledger.
    """
    sets: dict[str, list[At[PrivacyHead]]] = {}
    for at in heads:
        sets.setdefault(at.record.dataset, []).append(at)
    rows = []
    for own in sets.values():
        # Each head has the total spent so far, so the last one says all.
        first, last = own[0], own[-1]
        rows.append(BudgetRow(last=last, heads=len(own), first=first.time))
    return tuple(rows)


# Jobs, rounds, sessions.


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as the ledger knows it.

    ``decisions`` are all answers to its offer; the silo downloaded ``received_bytes``.
    """

    job: str
    methods: tuple[str, ...]
    datasets: tuple[str, ...]  # of this silo; older messages name none
    packages: tuple[PackageCode, ...]  # that are not Staddle's, as messages name them
    decisions: tuple[At[JobAccept] | At[JobDecline], ...]
    rounds: str  # in which something left
    cohorts: "Cohorts | None"  # None where no message says which silos took part
    received_rounds: str
    received_bytes: int


def job_table(view: LedgerOverview) -> tuple[JobRow, ...]:
    """One row per job, in the order in which the ledger first names them.

    Cohorts are those that the coordinator announced.
    """
    return tuple(_job_row(view.of(job), job) for job in view.jobs)


def _job_row(view: LedgerOverview, job: str) -> JobRow:
    methods: dict[str, None] = {}
    datasets: dict[str, None] = {}
    packages: dict[PackageCode, None] = {}
    rounds, cohorts = set(), []
    for message in view.messages:
        intent = message.intent
        methods[intent.method] = datasets[intent.dataset] = None
        packages |= dict.fromkeys(intent.packages)
        rounds.add(intent.round)
        # Not every message names its cohort.
        if intent.cohort:
            cohorts.append((intent.round, intent.cohort))
    received = view.received.get(job, Counter())
    return JobRow(
        job=job,
        methods=tuple(methods),
        datasets=tuple(filter(None, datasets)),
        packages=tuple(packages),
        decisions=tuple(view.decisions),
        rounds=spans(rounds),
        cohorts=_cohorts(cohorts),
        received_rounds=spans(received),
        received_bytes=received.total(),
    )


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Which silos took part in the rounds of a job, this one among them."""

    smallest: int  # silos
    largest: int
    # rounds whose cohort was another one than the round's before in which this silo contributed
    changes: int
    sizes: tuple[tuple[int, str], ...]  # silos, rounds; empty where all are of one size
    members: Listed[tuple[str, str]]  # names, rounds; the newest cohort last


def _cohorts(rounds: Sequence[tuple[int, tuple[str, ...]]]) -> Cohorts | None:
    """The cohort of each round, as the coordinator reported it; None where it reported none."""
    if not rounds:
        return None
    sizes: dict[int, list[int]] = {}
    members: dict[tuple[str, ...], list[int]] = {}
    for number, cohort in rounds:
        sizes.setdefault(len(cohort), []).append(number)
        members[cohort] = [*members.pop(cohort, []), number]  # the newest cohort last

    # who changes between two sums can be told from their difference, so changes are counted
    changes = 0
    for (_, before), (_, after) in pairwise(rounds):
        changes += before != after

    rows = [(", ".join(cohort), spans(numbers)) for cohort, numbers in members.items()]
    by_size: list[tuple[int, str]] = []
    if len(sizes) > 1:
        by_size = [(size, spans(numbers)) for size, numbers in sorted(sizes.items())]
    return Cohorts(
        smallest=min(sizes),
        largest=max(sizes),
        changes=changes,
        sizes=tuple(by_size),
        members=newest(rows, MAX_COHORTS),
    )


def session_table(sessions: Sequence[Session]) -> tuple[Listed[Session], Totals]:
    """The newest sessions, and the totals of all sessions, listed or not."""
    return newest(sessions), added(session.totals for session in sessions)


def added(totals: Iterable[Totals]) -> Totals:
    """The sum of several totals, as a new object."""
    sum_of_all = Totals()
    for each in totals:
        sum_of_all.add(each)
    return sum_of_all


def event_table(view: LedgerOverview) -> Listed[tuple[int, str, str, str]]:
    """Starts, stops, recoveries and new keys: seq, time, name and text, newest last."""
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
    """Return whether messages are grouped by round, and the rows.

    ``receipts`` are seqs of those whose receipt was checked.
    """
    # A row for each of very many messages would fill hundreds of pages.
    grouped = len(messages) > MAX_ROWS
    groups: dict[tuple[str, int], list[LedgerMessage]] = {}
    for message in messages:
        # Ungrouped, each message is its own group.
        row = ("", message.seq)
        if grouped:
            row = (message.intent.job, message.intent.round)
        groups.setdefault(row, []).append(message)
    rows = [_message_row(group, receipts) for group in groups.values()]
    return grouped, newest(rows)


def _message_row(group: Sequence[LedgerMessage], receipts: Collection[int] | None) -> MessageRow:
    first = group[0]
    seqs, size = [], 0
    sizes: Counter[str] = Counter()
    open_ended: Counter[str] = Counter()  # bytes that may have left besides
    outcomes: Counter[str] = Counter()
    recipients: dict[str, None] = {}
    for message in group:
        seqs.append(message.seq)
        for part, piece in parts(message).items():
            sizes[part] += piece.bytes
            open_ended[part] += piece.assumed
        size += message.measured
        recipients[message.intent.recipient.id] = None
        outcome = message.status
        if not message.digested:
            outcome += ", no digest"
        outcome += ", assumed" * bool(message.assumed)
        outcomes[outcome] += 1

    # one message has one outcome, which needs no count
    outcome = "; ".join(f"{count} {name}" for name, count in outcomes.items())
    if len(group) == 1:
        (outcome,) = outcomes
    return MessageRow(
        seq=spans(seqs),
        time=first.time,
        job=first.intent.job,
        round=first.intent.round,
        parts=", ".join(_bounded(part, sizes[part], open_ended[part]) for part in sizes),
        bytes=size,
        recipient=", ".join(recipients),
        rules=tuple(dict.fromkeys(rules_of(group))),
        outcome=outcome,
        receipt=_receipts(group, receipts),
    )


def _bounded(part: str, measured: int, assumed: int) -> str:
    """``model 176``, or ``model 176 to 352`` where more may have left."""
    return f"{part}\u00a0{measured:,}" + f" to {measured + assumed:,}" * bool(assumed)


def _receipts(group: Sequence[LedgerMessage], good: Collection[int] | None) -> str:
    """How many messages of a row have a receipt, and how many of these were checked.

    A page is drawn only where no receipt is wrong.
    """
    held = {message.seq for message in group if message.receipt is not None}
    # A receipt under a roster that was not given counts as held, but not as checked.
    checked = held.intersection(good or ())
    count = f"{len(held)} of {len(group)}"
    if len(group) > 1:
        unchecked = good is None or not held
        return count if unchecked else f"{count}, {len(checked)} checked"
    if not held:
        return "no"
    return "holds" if checked else "not checked"
