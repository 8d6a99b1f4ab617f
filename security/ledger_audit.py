"""Reading a ledger: whether it holds, and what left. Needs no lock, no key and no network.

``verify`` checks the chain and the rules; it says nothing of whole records cut off the end (ledger.py). ``summary``
counts by rule 27: an intent without digest left with all bytes that it declared. Of a payload that goes on at an
offset only the bytes behind it count again, with all elements of the tensors that they are of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import LocalError
from .chain import Line, Reading
from .ledger_rules import Rules
from .records import ControlClose, ControlOpen, Digest, Intent, Outcome, Record, Start, parse_record

LEDGER_FILE = Path("ledger") / "egress.jsonl"  # inside a silo's folder
MESSAGE = "(message)"  # bytes of a message that belong to no tensor
CONTROL = "(control)"  # polls and heartbeats


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify`` found. The ledger holds exactly when ``problems`` is empty.

    ``torn_bytes`` is an unfinished last line, which a running writer or a crash leaves; it was promised to nobody.
    ``undigested`` and ``open_intents`` are no faults: messages cut short, counted as left.
    """

    records: int
    head: str | None
    torn_bytes: int
    problems: tuple[str, ...]
    open_intents: tuple[int, ...]  # seq of intents without outcome
    undigested: tuple[int, ...]  # seq of intents without digest, whatever their outcome
    open_control: int | None  # seq of a control session that is not closed

    @property
    def ok(self) -> bool:
        """Whether chain and rules hold throughout."""
        return not self.problems


def verify(path: Path, known: Mapping[int, str] | None = None) -> Verified:
    """Check a ledger from its first byte to its last; a broken chain ends the walk, a broken rule does not.

    ``known`` has leaf hashes by seq that another party holds, such as those in receipts: with them records that were
    cut off the end, or written anew, are found as well.
    """
    rules = Rules()
    problems: list[str] = []
    undigested: dict[int, None] = {}
    silos: set[str] = set()
    missing = dict(known or {})
    reading = Reading(path)
    try:
        for line in reading:
            if (leaf := missing.pop(line.seq, line.leaf)) != line.leaf:
                problems.append(f"seq {line.seq}: leaf hash is {line.leaf}, another party knows it as {leaf}")
            try:
                record = parse_record(line)
            except LocalError as error:
                problems.append(str(error))
                continue
            if problem := rules.check(record):
                problems.append(f"seq {line.seq}: {problem}")
                continue
            rules.accept(line.seq, record)
            match record:
                case Intent():
                    undigested[line.seq] = None
                case Digest():
                    undigested.pop(record.ref, None)
            if isinstance(record, Start | Intent):
                silos.add(record.silo)
    except LocalError as error:
        problems.append(str(error))
    if missing:
        seqs = ", ".join(str(seq) for seq in sorted(missing))
        problems.append(f"ends before seq {seqs}, which another party knows: records were cut off")
    if len(silos) > 1:
        problems.append(f"records of several silos in one ledger: {', '.join(sorted(silos))}")
    return Verified(
        records=reading.count,
        head=reading.head if reading.count else None,
        torn_bytes=len(reading.torn),
        problems=tuple(problems),
        open_intents=tuple(rules.intents),
        undigested=tuple(undigested),
        open_control=rules.control[0] if rules.control else None,
    )


@dataclass(frozen=True, slots=True)
class Message:
    """One message that left, or counts as left: its intent, and what became of it."""

    seq: int
    time: str
    intent: Intent
    digested: bool
    status: str  # "sent", "failed" or "unknown"; "no outcome" where the ledger has none
    receipt: str | None


def messages(path: Path) -> tuple[Message, ...]:
    """All messages in the order of their intents; LocalError for a ledger that does not hold."""
    found: dict[int, Message] = {}
    for line, record in records(path):
        match record:
            case Intent():
                found[line.seq] = Message(line.seq, line.record["time"], record, False, "no outcome", None)
            case Digest():
                found[record.ref] = replace(found[record.ref], digested=True)
            case Outcome():
                found[record.ref] = replace(found[record.ref], status=record.status, receipt=record.receipt)
    return tuple(found.values())


@dataclass(slots=True)
class Totals:
    """What left of one part of one job; ``assumed`` of the bytes are of intents without digest."""

    messages: int = 0
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    assumed: int = 0

    def add(self, more: "Totals") -> None:
        """Count ``more`` as well."""
        self.messages += more.messages
        self.tensors += more.tensors
        self.elements += more.elements
        self.bytes += more.bytes
        self.assumed += more.assumed


def summary(path: Path) -> dict[tuple[str, str], Totals]:
    """Totals by (job, part), all bytes that left among them; LocalError for a ledger that does not hold.

    Bytes of a message beyond its tensors stand under ``(message)``, polls under ``("(control)", "(control)")``: an
    unclosed control session counts with its cap.
    """
    totals: dict[tuple[str, str], Totals] = {}
    for message in messages(path):
        intent = message.intent
        rest = intent.message.bytes
        for part in dict.fromkeys(tensor.part for tensor, _ in intent.leaving):
            tensors = [(tensor, size) for tensor, size in intent.leaving if tensor.part == part]
            size = sum(size for _, size in tensors)
            rest -= size
            elements = sum(tensor.elements for tensor, _ in tensors)
            _add(totals, (intent.job, part), Totals(1, len(tensors), elements, size, 0 if message.digested else size))
        if rest or not intent.tensors:
            _add(totals, (intent.job, MESSAGE), Totals(1, 0, 0, rest, 0 if message.digested else rest))
    for session in _control(path):
        _add(totals, (CONTROL, CONTROL), session)
    return totals


def _add(totals: dict[tuple[str, str], Totals], key: tuple[str, str], more: Totals) -> None:
    totals.setdefault(key, Totals()).add(more)


def _control(path: Path) -> Iterator[Totals]:
    opened: dict[int, ControlOpen] = {}
    for line, record in records(path):
        match record:
            case ControlOpen():
                opened[line.seq] = record
            case ControlClose():
                del opened[record.ref]
                yield Totals(messages=record.messages, bytes=record.bytes)
    for record in opened.values():
        yield Totals(messages=record.max_messages, bytes=record.max_bytes, assumed=record.max_bytes)


def records(path: Path) -> Iterator[tuple[Line, Record]]:
    """Lines with their records, each checked as ``verify`` does; LocalError at the first that does not hold."""
    rules = Rules()
    for line in Reading(path):
        record = parse_record(line)
        if problem := rules.check(record):
            raise LocalError(f"{path}: seq {line.seq}: {problem}; run: staddle ledger verify {path}")
        rules.accept(line.seq, record)
        yield line, record


def ledger_file(path: Path) -> Path:
    """The ledger that a silo's folder, its ledger folder or the file itself stands for."""
    for candidate in (path / LEDGER_FILE, path / LEDGER_FILE.name):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise LocalError(f"{path}: no {LEDGER_FILE} in this folder; name a silo's folder or its ledger file")
    return path
