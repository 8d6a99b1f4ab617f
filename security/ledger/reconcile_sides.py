"""What a silo's ledger and the coordinator's say of each other, read for ``reconcile``."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..identity.roster import Roster
from ..log.head import log_key
from ..log.merkle import Tree
from ..log.note import VerifierKey
from .messages import records
from .records import (
    Delivered,
    Digest,
    HeadRefused,
    Ingress,
    Intent,
    KeyRotate,
    Outcome,
    Payload,
    Received,
    Serving,
    Start,
)


@dataclass(slots=True)
class Upload:
    """A message of the silo's ledger that has a digest."""

    intent: Intent
    message: Payload
    leaf: str
    roster: str  # digest, of the start before it
    outcome: Outcome | None = None


class SiloSide:
    """What the silo's ledger says."""

    def __init__(self, folder: Path) -> None:
        self.name, roster = "", ""
        self.tree = Tree()
        self.uploads: dict[int, Upload] = {}  # seq of the DIGEST record → what it is of
        self.undigested: dict[int, Intent] = {}
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
        self.past: list[VerifierKey] = []  # its log keys before the one of now
        digested: dict[int, int] = {}  # seq of an intent → of its digest
        for line, record in records(folder):
            self.tree.append(line.hash)
            match record:
                case Start():
                    self.name, roster = record.silo, record.roster
                case Intent():
                    self.name = record.silo
                    self.undigested[line.seq] = record
                case Digest():
                    intent = self.undigested.pop(record.ref)
                    digested[record.ref] = line.seq
                    self.uploads[line.seq] = Upload(intent, record.message, line.leaf, roster)
                case Outcome() if record.ref in digested:
                    self.uploads[digested[record.ref]].outcome = record
                case KeyRotate():
                    self.past.append(VerifierKey.parse(record.old))
                case Ingress():
                    self.deliveries[record.job, record.round, record.message.bytes, record.message.sha256] += 1

    def has_receipt(self, seq: int) -> bool:
        """Whether the upload with this DIGEST record has one."""
        upload = self.uploads.get(seq)
        return upload is not None and upload.outcome is not None and upload.outcome.receipt is not None

    def keys(self, roster: Roster) -> dict[bytes, VerifierKey]:
        """By key id, the log keys that have signed this ledger."""
        now = log_key(roster.federation, self.name, roster[self.name].log_key)
        return {key.key_id: key for key in (*self.past, now)}


class CoordinatorSide:
    """What the coordinator's ledger says of one silo."""

    def __init__(self, folder: Path, silo: str) -> None:
        self.name = ""
        self.tree = Tree()
        self.received: list[tuple[int, Received]] = []
        self.refused: list[tuple[int, HeadRefused]] = []
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
        for line, record in records(folder):
            self.tree.append(line.hash)
            match record:
                case Serving():
                    self.name = record.coordinator
                case Received() if record.silo == silo:
                    self.received.append((line.seq, record))
                case HeadRefused() if record.silo == silo:
                    self.refused.append((line.seq, record))
                case Delivered() if record.silo == silo:
                    self.deliveries[record.job, record.round, record.message.bytes, record.message.sha256] += 1
