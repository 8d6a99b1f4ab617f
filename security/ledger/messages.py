"""The messages that left, read from a ledger: one by one, and added up.

Needs no lock, no key and no network.

``summary`` counts by rule 27: an intent without digest left with all bytes that it declared. Of a
message that continues at an offset only the bytes behind it count again, with all elements of the
tensors that they are of. Masked and padded tensors count as any, by their words on the wire.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

from ...errors import LocalError
from ..log.chain import VerifiedLine
from ..log.segments import Reading
from .fast_decoder import Record, checked, parse_any, well_formed
from .records import (
    ControlClose,
    ControlOpen,
    Digest,
    Intent,
    MessageDigest,
    OutcomeRecord,
    ProtocolMessage,
    Start,
)
from .rules import Rules

# bytes of a message that belong to no tensor, canaries of a masked one among them
MESSAGE = "(message)"
CONTROL = "(control)"  # polls and heartbeats
PROTOCOL = "(protocol)"  # messages of the protocols of secure sums and mixes

Group = Literal["job", "dataset", "method", "part", "taint", "recipient"]
RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True, slots=True)
class At(Generic[RecordT]):
    """A record that stands for itself, and where it stands."""

    seq: int
    time: str
    record: RecordT


@dataclass(frozen=True, slots=True)
class Digested:
    """The DIGEST record of a message."""

    seq: int
    leaf: str  # hash of the record, in hex
    roster: str  # digest of the roster that the last start before it names
    message: MessageDigest


@dataclass(frozen=True, slots=True)
class LedgerMessage:
    """One message that left, or counts as left: its intent, and what became of it."""

    seq: int
    time: str
    intent: Intent
    digest: Digested | None = None
    outcome: OutcomeRecord | None = None

    @property
    def digested(self) -> bool:
        """True if all its bytes were handed to the transport, and their hash is recorded."""
        return self.digest is not None

    @property
    def status(self) -> str:
        """One of "sent", "failed" or "unknown"; "no outcome" where the ledger has none."""
        return self.outcome.status if self.outcome else "no outcome"

    @property
    def receipt(self) -> str | None:
        """The signature of the recipient, in hex; None where no receipt came."""
        return self.outcome.receipt if self.outcome else None


@dataclass(frozen=True, slots=True)
class Session:
    """Control messages of one session; not closed, it counts with its caps."""

    seq: int
    time: str
    opened: ControlOpen
    closed: ControlClose | None = None

    @property
    def totals(self) -> "Totals":
        """Messages and bytes that left, or may have."""
        if self.closed is None:
            # It still runs or a crash ended it, so all of its cap counts (rule 32).
            most = self.opened.max_bytes
            return Totals(messages=self.opened.max_messages, bytes=most, assumed=most)
        return Totals(messages=self.closed.messages, bytes=self.closed.bytes)


class LedgerFold:
    """Everything that left, gathered from the records of a walk.

    A record says what became of an earlier one: here they are put together, for all who read a
    ledger.
    """

    def __init__(self) -> None:
        self.messages: dict[int, LedgerMessage] = {}  # by seq of the intent
        self.sessions: dict[int, Session] = {}  # by seq of the record that opens them
        self.protocol: list[At[ProtocolMessage]] = []
        self.ended: list[Session | At[ProtocolMessage]] = []  # in the order in which they were over
        self.roster = ""  # digest, as the last start names it

    def take(self, line: VerifiedLine, record: Record) -> None:
        """The next record of a ledger whose rules hold."""
        seq, time = line.seq, line.record["time"]
        match record:
            case Start():
                self.roster = record.roster
            case Intent():
                self.messages[seq] = LedgerMessage(seq, time, record)
            case Digest(ref=ref):
                # The rules hold, so the intent was taken before.
                digest = Digested(seq, line.leaf, self.roster, record.message)
                self.messages[ref] = replace(self.messages[ref], digest=digest)
            case OutcomeRecord(ref=ref):
                self.messages[ref] = replace(self.messages[ref], outcome=record)
            case ProtocolMessage():
                self.protocol.append(At(seq, time, record))
                self.ended.append(self.protocol[-1])
            case ControlOpen():
                self.sessions[seq] = Session(seq, time, record)
            case ControlClose(ref=ref):
                self.sessions[ref] = replace(self.sessions[ref], closed=record)
                self.ended.append(self.sessions[ref])


def fold(folder: Path) -> LedgerFold:
    """Everything that left by a ledger; LocalError for one that does not hold."""
    found = LedgerFold()
    for line, record in records(folder):
        found.take(line, record)
    return found


def messages(folder: Path) -> tuple[LedgerMessage, ...]:
    """All messages in the order of their intents; LocalError for a ledger that does not hold."""
    return tuple(fold(folder).messages.values())


def of_type(folder: Path, *types: type[RecordT]) -> tuple[tuple[VerifiedLine, RecordT], ...]:
    """All records of these types; LocalError for a ledger that does not hold."""
    return tuple((line, record) for line, record in records(folder) if isinstance(record, types))


def jobs(folder: Path) -> tuple[str, ...]:
    """Names of all jobs that any record is of; LocalError for a ledger that does not hold.

    In the order in which the ledger first names them.
    """
    return tuple(
        # Read from the stored fields, so that every type of record with a job counts.
        dict.fromkeys(line.record["job"] for line in lines(folder) if "job" in line.record)
    )


@dataclass(slots=True)
class Totals:
    """The amounts that left under one key of a summary.

    ``elements`` counts the numbers in the tensors, ``bytes`` what crosses. ``assumed`` of the bytes
    belong to intents without digest.
    """

    messages: int = 0
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    assumed: int = 0

    def add(self, more: "Totals") -> None:
        """Count what another one counts."""
        self.messages += more.messages
        self.tensors += more.tensors
        self.elements += more.elements
        self.bytes += more.bytes
        self.assumed += more.assumed


def summary(folder: Path, by: Sequence[Group] = ("job", "part")) -> dict[tuple[str, ...], Totals]:
    """Totals of all that left, grouped; LocalError for a ledger that does not hold.

    Bytes of a message beyond its tensors stand under the part ``(message)``, messages of the
    protocol of a sum or mix under ``(protocol)`` as method and part, polls under ``(control)`` as
    job, method and part: an unclosed control session counts with its cap. What is of no tensor has
    no taint.
    """
    totals: dict[tuple[str, ...], Totals] = {}

    def add(group: Mapping[Group, str], more: Totals) -> None:
        totals.setdefault(tuple(group.get(name, "") for name in by), Totals()).add(more)

    found = fold(folder)
    for message in found.messages.values():
        intent = message.intent
        group: dict[Group, str] = {
            "job": intent.job,
            "dataset": intent.dataset,
            "method": intent.method,
            "recipient": intent.recipient.id,
        }
        for part, taint, piece in _pieces(message, by_taint="taint" in by):
            add({**group, "part": part, "taint": taint}, piece)

    # A session that a crash left open counts with its caps, behind all that ended.
    running = [session for session in found.sessions.values() if session.closed is None]
    for small in (*found.ended, *running):
        add(*_small(small))
    return totals


def _pieces(message: LedgerMessage, *, by_taint: bool) -> list[tuple[str, str, Totals]]:
    """Part, taint and totals of the pieces of a message; one per part unless ``by_taint``."""
    # Bytes beyond the tensors are counted too, so that the totals are all that left.
    found: dict[tuple[str, str], Totals] = {}
    rest = message.intent.message.bytes
    for tensor, size in message.intent.leaving:
        key = (tensor.part, tensor.taint if by_taint else "")
        # Adds 0 messages: a part counts as one message, however many tensors it has.
        found.setdefault(key, Totals(messages=1)).add(Totals(0, 1, tensor.elements, size))
        # The rest belongs to no tensor, such as the canaries of a masked message.
        rest -= size
    pieces = [(part, taint, totals) for (part, taint), totals in found.items()]
    if rest or not message.intent.tensors:
        pieces.append((MESSAGE, "", Totals(messages=1, bytes=rest)))

    # Nothing proves how far a message without digest came: it counts as left (rule 27).
    if message.digest is None:
        for *_, totals in pieces:
            totals.assumed = totals.bytes
    return pieces


def _small(found: Session | At[ProtocolMessage]) -> tuple[dict[Group, str], Totals]:
    """Group and totals of a control session, or of a message of a protocol."""
    if isinstance(found, Session):
        job, part, recipient, totals = CONTROL, CONTROL, found.opened.recipient, found.totals
    else:
        record = found.record
        job, part, recipient = record.job, PROTOCOL, record.recipient
        totals = Totals(messages=1, bytes=record.message.bytes)
    return {"job": job, "method": part, "part": part, "recipient": recipient.id}, totals


def records(folder: Path) -> Iterator[tuple[VerifiedLine, Record]]:
    """Like ``lines``, with the typed record of each."""
    for line in lines(folder):
        yield line, parse_any(line)


def lines(folder: Path) -> Iterator[VerifiedLine]:
    """Lines whose form, chain and rules are checked as ``verify`` does; their checkpoint is not.

    LocalError comes when the fault is reached, after the lines before it were handed on. A torn
    last line is left out.
    """
    # Totals of a ledger that breaks its rules would be believed, so the fault ends the walk.
    rules = Rules()
    for line in Reading(folder, well_formed):
        record = checked(line)
        if problem := rules.check(record):
            raise LocalError(
                f"{folder}: seq {line.seq}: {problem}; run: staddle ledger verify {folder}"
            )
        rules.accept(line.seq, record)
        yield line
