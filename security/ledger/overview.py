"""A ledger gathered in one walk for those who report on it: messages, sessions, decisions, totals.

The view is a pure function of what ``verify`` found and of the records. It adds up as
``messages.summary`` does, in finer rows: by who could read what, and by what became of it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, TypeVar

from ...errors import LocalError
from ..log.chain import VerifiedLine
from .audit import AuditResult
from .fast_decoder import Record
from .messages import CONTROL, MESSAGE, PROTOCOL, At, LedgerFold, LedgerMessage, Session, Totals
from .records import (
    Deny,
    Ingress,
    JobAccept,
    JobDecline,
    KeyRotate,
    PolicyChange,
    PrivacyHead,
    ProtocolMessage,
    RecoveryRecord,
    Start,
    StopRecord,
    SumEnd,
    SumOpened,
    WitnessRecord,
)

# what is of one job
OfJob: TypeAlias = (
    LedgerMessage
    | At[JobAccept]
    | At[JobDecline]
    | At[Deny]
    | At[ProtocolMessage]
    | At[SumEnd]
    | At[SumOpened]
)
OfJobT = TypeVar("OfJobT", bound=OfJob)


@dataclass(slots=True)
class LedgerOverview:
    """A ledger that holds; everything in the order of its records."""

    verified: AuditResult
    first: str = ""  # times of the first and the last record, by the silo's own clock
    last: str = ""
    starts: list[At[Start]] = field(default_factory=list)
    events: list[At[Start] | At[StopRecord] | At[RecoveryRecord] | At[KeyRotate]] = field(
        default_factory=list
    )  # starts among them
    # what names a policy in force
    policies: list[At[Start] | At[PolicyChange]] = field(default_factory=list)
    decisions: list[At[JobAccept] | At[JobDecline]] = field(default_factory=list)
    denials: list[At[Deny]] = field(default_factory=list)
    messages: list[LedgerMessage] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    protocol: list[At[ProtocolMessage]] = field(default_factory=list)
    # how attempts at secure sums ended
    sums: list[At[SumEnd] | At[SumOpened]] = field(default_factory=list)
    # by job: bytes delivered to the silo, by round
    received: dict[str, Counter[int]] = field(default_factory=dict)
    witnesses: dict[str, At[WitnessRecord]] = field(
        default_factory=dict
    )  # by member: the last head that it said to hold
    # heads of privacy budgets, of all jobs together
    budgets: list[At[PrivacyHead]] = field(default_factory=list)

    @property
    def silo(self) -> str:
        """The silo whose ledger it is; empty where no record says so."""
        if self.starts:
            return self.starts[0].record.silo
        return self.messages[0].intent.silo if self.messages else ""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of all jobs that any record is of."""
        entries = (
            *self.decisions,
            *self.denials,
            *self.messages,
            *self.protocol,
            *self.sums,
        )
        return tuple(dict.fromkeys([*map(_job, entries), *self.received]))

    def of(self, job: str) -> "LedgerOverview":
        """The records of one job.

        Starts, sessions and budgets are of all jobs, and stay.
        """
        received = self.received.get(job)
        return replace(
            self,
            decisions=_of_job(job, self.decisions),
            denials=_of_job(job, self.denials),
            messages=_of_job(job, self.messages),
            protocol=_of_job(job, self.protocol),
            sums=_of_job(job, self.sums),
            received={} if received is None else {job: received},
        )


def _job(entry: OfJob) -> str:
    return entry.intent.job if isinstance(entry, LedgerMessage) else entry.record.job


def _of_job(job: str, entries: Iterable[OfJobT]) -> list[OfJobT]:
    return [entry for entry in entries if _job(entry) == job]


def view(verified: AuditResult, records: Iterable[tuple[VerifiedLine, Record]]) -> LedgerOverview:
    """The overview of the records up to the head that was verified.

    LocalError unless they are just those.
    """
    # The records are read a second time, after they were verified: the head shows that they are
    # the same, and what was written since is left out.
    found, left = LedgerOverview(verified), LedgerFold()
    head: str | None = None
    for line, record in records:
        if line.seq == verified.records:  # written since
            break
        left.take(line, record)
        _take(found, line, record)
        head = line.leaf
    if head != verified.head:
        raise LocalError("the ledger was exchanged while it was read; leave it alone and try again")
    found.messages, found.sessions = list(left.messages.values()), list(left.sessions.values())
    found.protocol = left.protocol
    return found


# records that stand for themselves, and in which lists of a view
_LISTS: Mapping[type[Record], tuple[str, ...]] = {
    Start: ("starts", "policies", "events"),
    StopRecord: ("events",),
    KeyRotate: ("events",),
    RecoveryRecord: ("events",),
    PolicyChange: ("policies",),
    JobAccept: ("decisions",),
    JobDecline: ("decisions",),
    Deny: ("denials",),
    SumEnd: ("sums",),
    SumOpened: ("sums",),
    PrivacyHead: ("budgets",),
}


def _take(found: LedgerOverview, line: VerifiedLine, record: Record) -> None:
    at = At(line.seq, line.record["time"], record)
    found.first, found.last = found.first or at.time, at.time
    for name in _LISTS.get(type(record), ()):
        getattr(found, name).append(at)
    match record:
        case WitnessRecord():
            found.witnesses[record.by] = At(at.seq, at.time, record)
        case Ingress():
            found.received.setdefault(record.job, Counter())[record.round] += record.message.bytes


# What left, added up.


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of one part and kind to one recipient, which the same readers can open, with the same
    end.
    """

    job: str
    part: str
    kind: str  # of its tensors, or of the protocol's message; empty for bytes that are of none
    recipient: str
    readers: tuple[str, ...]
    form: str
    status: str


def flows(view: LedgerOverview) -> dict[Flow, Totals]:
    """Totals by flow, control and protocol messages included: the same in all as ``summary``."""
    # Polls and heartbeats are among them, so that the bytes are all that crossed.
    found: dict[Flow, Totals] = {}
    flowing = chain(
        chain.from_iterable(map(_of_message, view.messages)),
        map(_of_protocol, view.protocol),
        map(_of_session, view.sessions),
    )
    for flow, totals in flowing:
        found.setdefault(flow, Totals()).add(totals)
    return found


def _of_message(message: LedgerMessage) -> Iterator[tuple[Flow, Totals]]:
    intent = message.intent
    # A tensor names readers only if they differ from those of its message.
    pieces = message.pieces(
        lambda tensor: (tensor.part, tensor.kind, tensor.readers or intent.readers),
        (MESSAGE, "", intent.readers),
    )
    for (part, kind, readers), totals in pieces.items():
        peer, status = intent.recipient.id, message.status
        yield Flow(intent.job, part, kind, peer, readers, intent.form, status), totals


def _of_protocol(sent: At[ProtocolMessage]) -> tuple[Flow, Totals]:
    record = sent.record
    peer = record.recipient.id
    # A protocol message has no outcome; it counts as left.
    flow = Flow(record.job, PROTOCOL, record.kind, peer, (peer,), "plain", "no outcome")
    return flow, Totals(messages=1, bytes=record.message.bytes)


def _of_session(session: Session) -> tuple[Flow, Totals]:
    peer = session.opened.recipient.id
    # An open session has no totals yet, and its cap is assumed.
    status = "sent" if session.closed else "no outcome"
    return Flow(CONTROL, CONTROL, "", peer, (peer,), "plain", status), session.totals


def parts(message: LedgerMessage) -> dict[str, Totals]:
    """Totals of a message by part."""
    return message.pieces(lambda tensor: tensor.part, MESSAGE)
