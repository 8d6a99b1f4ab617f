"""What left, read from a ledger: message by message, and added up.

Needs no lock, no key and no network.

``summary`` counts by rule 27: an intent without digest left with all bytes that it declared. Of a
payload that goes on at an offset only the bytes behind it count again, with all elements of the
tensors that they are of. Masked and padded tensors count as any, by their words on the wire.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...errors import LocalError
from ..log.chain import VerifiedLine
from ..log.segments import Reading
from .fast_decoder import Record, checked, parse_any, parse_record, well_formed
from .records import (
    ControlClose,
    ControlOpen,
    Deny,
    Intent,
    PolicyChange,
    PrivacyHead,
    ProtocolMessage,
    SumEnd,
    SumOpened,
    SumSigned,
)
from .rules import Rules

# bytes of a message that belong to no tensor, canaries of a masked one among them
MESSAGE = "(message)"
CONTROL = "(control)"  # polls and heartbeats
PROTOCOL = "(protocol)"  # messages of the protocols of secure sums and mixes

Group = Literal["job", "method", "part", "taint", "recipient"]


@dataclass(frozen=True, slots=True)
class LedgerMessage:
    """One message that left, or counts as left: its intent, and what became of it."""

    seq: int
    time: str
    intent: Intent
    digested: bool
    status: str  # "sent", "failed" or "unknown"; "no outcome" where the ledger has none
    receipt: str | None


def messages(folder: Path) -> tuple[LedgerMessage, ...]:
    """All messages in the order of their intents; LocalError for a ledger that does not hold."""
    found: dict[int, LedgerMessage] = {}
    for line in lines(folder):
        record = line.record
        match record["type"]:
            case "egress.intent":
                intent = parse_record(line, Intent)
                found[line.seq] = LedgerMessage(
                    line.seq, record["time"], intent, False, "no outcome", None
                )
            case "egress.digest":
                found[record["ref"]] = replace(found[record["ref"]], digested=True)
            case "egress.outcome":
                found[record["ref"]] = replace(
                    found[record["ref"]], status=record["status"], receipt=record["receipt"]
                )
    return tuple(found.values())


def sums(
    folder: Path,
) -> tuple[tuple[VerifiedLine, ProtocolMessage | SumEnd | SumSigned | SumOpened], ...]:
    """What the records say of secure sums and mixes beside the uploads.

    LocalError for a ledger that does not hold.
    """
    kinds = ProtocolMessage | SumEnd | SumSigned | SumOpened
    return tuple((line, record) for line, record in records(folder) if isinstance(record, kinds))


def denials(folder: Path) -> tuple[tuple[VerifiedLine, Deny], ...]:
    """What the policy held back; LocalError for a ledger that does not hold."""
    return tuple((line, record) for line, record in records(folder) if isinstance(record, Deny))


def jobs(folder: Path) -> tuple[str, ...]:
    """Names of all jobs that any record is of; LocalError for a ledger that does not hold."""
    return tuple(
        dict.fromkeys(line.record["job"] for line in lines(folder) if "job" in line.record)
    )


def policies(folder: Path) -> tuple[tuple[int, str, PolicyChange], ...]:
    """Seq, time and record of each policy that came into force.

    LocalError for a ledger that does not hold.
    """
    return tuple(
        (line.seq, line.record["time"], parse_record(line, PolicyChange))
        for line in lines(folder)
        if line.record["type"] == "policy.change"
    )


def budgets(folder: Path) -> tuple[tuple[VerifiedLine, PrivacyHead], ...]:
    """Each head of a data set's privacy budget; LocalError for a ledger that does not hold."""
    return tuple(
        (line, record) for line, record in records(folder) if isinstance(record, PrivacyHead)
    )


@dataclass(slots=True)
class Totals:
    """What left under one key of a summary.

    ``assumed`` of the bytes are of intents without digest.
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
    tell = "taint" in by
    totals: dict[tuple[str, ...], Totals] = {}

    def add(group: Mapping[Group, str], more: Totals) -> None:
        totals.setdefault(tuple(group.get(name, "") for name in by), Totals()).add(more)

    for message in messages(folder):
        intent = message.intent
        rest = intent.message.bytes
        group: dict[Group, str] = {
            "job": intent.job,
            "method": intent.method,
            "recipient": intent.recipient.id,
        }
        pieces: dict[tuple[str, str], Totals] = {}
        for tensor, size in intent.leaving:
            piece = pieces.setdefault(
                (tensor.part, tensor.taint if tell else ""), Totals(messages=1)
            )
            piece.add(Totals(0, 1, tensor.elements, size, 0 if message.digested else size))
            rest -= size
        for (part, taint), piece in pieces.items():
            add({**group, "part": part, "taint": taint}, piece)
        if rest or not intent.tensors:
            add({**group, "part": MESSAGE}, Totals(1, 0, 0, rest, 0 if message.digested else rest))
    for job, part, recipient, more in _small(folder):
        add({"job": job, "method": part, "part": part, "recipient": recipient}, more)
    return totals


def _small(folder: Path) -> Iterator[tuple[str, str, str, Totals]]:
    """Job, part, recipient and totals of each control session and of each protocol message."""
    opened: dict[int, ControlOpen] = {}
    for line in lines(folder):
        match line.record["type"]:
            case "control.open":
                opened[line.seq] = parse_record(line, ControlOpen)
            case "control.close":
                closed = parse_record(line, ControlClose)
                peer = opened.pop(closed.ref).recipient.id
                yield CONTROL, CONTROL, peer, Totals(messages=closed.messages, bytes=closed.bytes)
            case "egress.protocol":
                sent = parse_record(line, ProtocolMessage)
                yield (
                    sent.job,
                    PROTOCOL,
                    sent.recipient.id,
                    Totals(messages=1, bytes=sent.message.bytes),
                )
    for record in opened.values():
        cap = record.max_bytes
        yield (
            CONTROL,
            CONTROL,
            record.recipient.id,
            Totals(messages=record.max_messages, bytes=cap, assumed=cap),
        )


def records(folder: Path) -> Iterator[tuple[VerifiedLine, Record]]:
    """The same lines with their typed records."""
    for line in lines(folder):
        yield line, parse_any(line)


def lines(folder: Path) -> Iterator[VerifiedLine]:
    """Lines whose form, chain and rules are checked as ``verify`` does; their checkpoint is not."""
    rules = Rules()
    for line in Reading(folder, well_formed):
        record = checked(line)
        if problem := rules.check(record):
            raise LocalError(
                f"{folder}: seq {line.seq}: {problem}; run: staddle ledger verify {folder}"
            )
        rules.accept(line.seq, record)
        yield line
