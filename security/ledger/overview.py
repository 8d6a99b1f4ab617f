"""What a ledger says, gathered in one walk for those who report on it: messages, sessions,
decisions, totals.

The view is a pure function of what ``verify`` found and of the records. It adds up as
``ledger_audit.summary`` does, in finer rows: by who could read what, and by what became of it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
        """Whose ledger it is; empty where no record says so."""
        if self.starts:
            return self.starts[0].record.silo
        return self.messages[0].intent.silo if self.messages else ""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of all jobs that any record is of."""
        said = [at.record.job for at in (*self.decisions, *self.denials)]
        gave = [message.intent.job for message in self.messages]
        summed = [at.record.job for at in (*self.protocol, *self.sums)]
        return tuple(dict.fromkeys([*said, *gave, *summed, *self.received]))

    def of(self, job: str) -> "LedgerOverview":
        """What the records say of one job.

        Starts, sessions and budgets are of all jobs, and stay.
        """
        messages = [message for message in self.messages if message.intent.job == job]
        return replace(
            self,
            decisions=[decision for decision in self.decisions if decision.record.job == job],
            denials=[denial for denial in self.denials if denial.record.job == job],
            messages=messages,
            protocol=[sent for sent in self.protocol if sent.record.job == job],
            sums=[end for end in self.sums if end.record.job == job],
            received={name: rounds for name, rounds in self.received.items() if name == job},
        )


def view(verified: AuditResult, records: Iterable[tuple[VerifiedLine, Record]]) -> LedgerOverview:
    """What the records say up to the head that was verified.

    LocalError unless they are just those.
    """
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
    found: dict[Flow, Totals] = {}
    for message in view.messages:
        intent = message.intent
        for (part, kind, readers), totals in _pieces(message):
            flow = Flow(
                intent.job, part, kind, intent.recipient.id, readers, intent.form, message.status
            )
            found.setdefault(flow, Totals()).add(totals)
    for sent in view.protocol:
        record = sent.record
        peer = record.recipient.id
        flow = Flow(record.job, PROTOCOL, record.kind, peer, (peer,), "plain", "no outcome")
        found.setdefault(flow, Totals()).add(Totals(messages=1, bytes=record.message.bytes))
    for session in view.sessions:
        peer = session.opened.recipient.id
        flow = Flow(
            CONTROL, CONTROL, "", peer, (peer,), "plain", "sent" if session.closed else "no outcome"
        )
        found.setdefault(flow, Totals()).add(session.totals)
    return found


def _pieces(message: LedgerMessage) -> Iterator[tuple[tuple[str, str, tuple[str, ...]], Totals]]:
    """A message by part, kind and readers; what is of no tensor under ``(message)``."""
    pieces: dict[tuple[str, str, tuple[str, ...]], Totals] = {}
    whole = message.intent.readers
    for tensor, size in message.intent.leaving:
        piece = pieces.setdefault(
            (tensor.part, tensor.kind, tensor.readers or whole), Totals(messages=1)
        )
        piece.add(Totals(0, 1, tensor.elements, size))
    rest = message.intent.message.bytes - sum(piece.bytes for piece in pieces.values())
    if rest or not message.intent.tensors:
        pieces.setdefault((MESSAGE, "", whole), Totals(messages=1)).add(Totals(bytes=rest))
    for piece in pieces.values():
        piece.assumed = 0 if message.digest else piece.bytes
    yield from pieces.items()


def parts(message: LedgerMessage) -> Counter[str]:
    """Bytes of a message by part."""
    found: Counter[str] = Counter()
    for (part, *_), totals in _pieces(message):
        found[part] += totals.bytes
    return found
