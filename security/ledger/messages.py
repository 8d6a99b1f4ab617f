"""The messages that left, read from a ledger: one by one, and added up.

Needs no lock, no key and no network.

What was measured stands apart from what is assumed. A message with a digest left in full, and one
that was cut short with the bytes that its outcome counted. Where neither is there, nobody knows how
far it came: all bytes that it declared are assumed (rule 27), as is the cap of a control session
that was not closed. Of a message that continues at an offset only the bytes behind it count again,
with all elements of the tensors that they are of. Masked and padded tensors count as any, by their
words on the wire.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Tensor,
)
from .rules import Rules

# bytes of a message that belong to no tensor, canaries of a masked one among them
MESSAGE = "(message)"
CONTROL = "(control)"  # polls and heartbeats
PROTOCOL = "(protocol)"  # messages of the protocols of secure sums and mixes

Group = Literal["job", "dataset", "method", "part", "taint", "recipient"]
RecordT = TypeVar("RecordT", bound=Record)
KeyT = TypeVar("KeyT")


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
    def handed(self) -> int | None:
        """Bytes that were handed to the transport; None where nobody knows how many."""
        declared = self.intent.message.bytes
        if self.digest is not None:
            return declared
        # An agent that started again does not know how far a message came, and its outcome repeats
        # what the intent declared (silo/egress/outcomes.py).
        done = self.outcome
        if done is None or (done.status, done.bytes_sent) == ("unknown", declared):
            return None
        return done.bytes_sent

    @property
    def most(self) -> int:
        """Bytes that left, or that may have left at most where nobody knows how many did."""
        return self.intent.message.bytes if self.handed is None else self.handed

    @property
    def measured(self) -> int:
        """Bytes that are known to have left."""
        return self.handed or 0

    @property
    def assumed(self) -> int:
        """Bytes that may have left besides, at most."""
        return self.most - self.measured

    @property
    def leaving(self) -> tuple[tuple[Tensor, int], ...]:
        """The tensors of which something left, or may have, and at most how many bytes of each."""
        return self.intent.leaving(self.most) if self.most or self.digested else ()

    def pieces(self, key: Callable[[Tensor], KeyT], rest: KeyT) -> "dict[KeyT, Totals]":
        """Totals by a key of its tensors; bytes that are of none stand under ``rest``.

        Several tensors of a key count as one message. Nothing where nothing left.
        """
        found: dict[KeyT, Totals] = {}
        beyond = self.most
        for tensor, size in self.leaving:
            found.setdefault(key(tensor), Totals()).add(Totals(0, 1, tensor.elements, size))
            # What no tensor has, such as the canaries of a masked message.
            beyond -= size
        if beyond or (self.digested and not self.intent.tensors):
            found.setdefault(rest, Totals()).add(Totals(bytes=beyond))
        if self.handed is None:
            return {name: Totals(assumed=totals.bytes) for name, totals in found.items()}
        return {name: replace(totals, messages=1) for name, totals in found.items()}

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
    """Control messages of one session; not closed, its cap is assumed."""

    seq: int
    time: str
    opened: ControlOpen
    closed: ControlClose | None = None

    @property
    def totals(self) -> "Totals":
        """Messages and bytes that left; bytes that may have left where nobody counted them."""
        if self.closed is None:
            # It still runs or a crash ended it, so it may have sent all that it may (rule 32).
            return Totals(assumed=self.opened.max_bytes)
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

    ``elements`` counts the numbers in the tensors, ``bytes`` what crosses. ``assumed`` bytes are
    not among these: so many more may have left at most, by records that do not tell.
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
    job, method and part: the cap of a session that was not closed is assumed. What is of no tensor
    has no taint. What did not leave has no row.
    """
    totals: dict[tuple[str, ...], Totals] = {}

    def add(group: Mapping[Group, str], more: Totals) -> None:
        totals.setdefault(tuple(group.get(name, "") for name in by), Totals()).add(more)

    def key(tensor: Tensor) -> tuple[str, str]:
        # Tensors of two taints are one message of their part where taints are not told apart.
        return tensor.part, tensor.taint if "taint" in by else ""

    found = fold(folder)
    for message in found.messages.values():
        intent = message.intent
        group: dict[Group, str] = {
            "job": intent.job,
            "dataset": intent.dataset,
            "method": intent.method,
            "recipient": intent.recipient.id,
        }
        for (part, taint), piece in message.pieces(key, (MESSAGE, "")).items():
            add({**group, "part": part, "taint": taint}, piece)

    # A session that a crash left open stands behind all that ended.
    running = [session for session in found.sessions.values() if session.closed is None]
    for small in (*found.ended, *running):
        add(*_small(small))
    return {group: total for group, total in totals.items() if total != Totals()}


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
