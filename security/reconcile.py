"""Do a silo's ledger and the coordinator's say the same? Read from both folders, beside whoever writes them.

Uploads are joined by the place of their DIGEST record, deliveries by what they were. A *difference* is what no crash
and no lost connection explains: one of the two was altered, or does not record. A *gap* is what they do explain:

===================================================  ==========  ==========================================
found                                                is a        because
===================================================  ==========  ==========================================
received, and the silo has no such record            difference  DIGEST is durable before END leaves
received, and the silo has other bytes or job there  difference
received under a head that is not of this ledger     difference  the silo signed it
a receipt in the silo's ledger, nothing received     difference  the record is durable before the receipt
two receipts that differ, or one that does not hold  difference
a head that the silo signed and that was refused     difference  its ledger was rolled back or forked
received, and the silo has no receipt                gap         the connection broke before it came
digested, and not received                           gap         refused, or the connection broke before END
intended, and not digested                           gap         cut short
delivered, and not noted by the silo, or reversed    gap         killed or cut between the bytes and the record
===================================================  ==========  ==========================================
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import LocalError, PeerError, ProofError
from . import checkpoint as checkpoints
from . import note as notes
from . import roster as rosters
from .checkpoint import Checkpoint
from .head import log_key
from .ledger_view import records
from .merkle import Tree
from .receipt import Receipt
from .records import Delivered, Digest, HeadRefused, Ingress, Intent, Outcome, Payload, Received, Serving, Start
from .roster import Roster


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What two ledgers say together. They agree exactly when ``differences`` is empty."""

    silo: str
    coordinator: str
    uploads: int  # that both have
    bytes: int  # of these
    deliveries: int  # that both have
    gaps: tuple[str, ...]
    differences: tuple[str, ...]


@dataclass(slots=True)
class _Upload:
    """A message of the silo's ledger that has a digest."""

    intent: Intent
    message: Payload
    leaf: str
    roster: str  # digest, of the start before it
    outcome: Outcome | None = None


class _Silo:
    """What the silo's ledger says."""

    def __init__(self, folder: Path) -> None:
        self.name, roster = "", ""
        self.tree = Tree()
        self.uploads: dict[int, _Upload] = {}  # seq of the DIGEST record → what it is of
        self.undigested: dict[int, Intent] = {}
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
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
                    self.uploads[line.seq] = _Upload(intent, record.message, line.leaf, roster)
                case Outcome() if record.ref in digested:
                    self.uploads[digested[record.ref]].outcome = record
                case Ingress():
                    self.deliveries[record.job, record.round, record.message.bytes, record.message.sha256] += 1


class _Coordinator:
    """What the coordinator's ledger says of one silo."""

    def __init__(self, folder: Path, silo: str) -> None:
        self.name = ""
        self.received: list[tuple[int, Received]] = []
        self.refused: list[tuple[int, HeadRefused]] = []
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
        for line, record in records(folder):
            match record:
                case Serving():
                    self.name = record.coordinator
                case Received() if record.silo == silo:
                    self.received.append((line.seq, record))
                case HeadRefused() if record.silo == silo:
                    self.refused.append((line.seq, record))
                case Delivered() if record.silo == silo:
                    self.deliveries[record.job, record.round, record.message.bytes, record.message.sha256] += 1


def reconcile(silo: Path, coordinator: Path, roster: Roster | None = None) -> Reconciled:
    """Compare two ledgers' folders; with a roster receipts and heads are checked as well.

    LocalError for one that does not hold (``staddle ledger verify``), or is not what it is said to be.
    """
    ours = _Silo(silo)
    if not ours.name:
        raise LocalError(f"{silo}: names no silo; is it a silo's ledger, and has its agent run?")
    theirs = _Coordinator(coordinator, ours.name)
    if not theirs.name:
        raise LocalError(f"{coordinator}: is no coordinator's ledger; name the folder of the coordinator's state")
    both = [(seq, record, ours.uploads[record.ledger_seq]) for seq, record in theirs.received if _same(ours, record)]
    matched = {record.ledger_seq for _, record, _ in both}
    differences = [
        *_strange(ours, theirs, coordinator),
        *_altered(ours, both, roster),
        *(
            f"record {seq}: the silo has a receipt, and the coordinator received no such upload ({_of(upload)})"
            for seq, upload in ours.uploads.items()
            if seq not in matched and upload.outcome is not None and upload.outcome.receipt is not None
        ),
    ]
    return Reconciled(
        silo=ours.name,
        coordinator=theirs.name,
        uploads=len(both),
        bytes=sum(record.message.bytes for _, record, _ in both),
        deliveries=sum((ours.deliveries & theirs.deliveries).values()),
        gaps=tuple(_gaps(ours, theirs, both)),
        differences=tuple(differences),
    )


def _same(ours: _Silo, record: Received) -> bool:
    """Whether the silo's ledger has this upload in the place that it was received under."""
    upload = ours.uploads.get(record.ledger_seq)
    return upload is not None and (upload.leaf, upload.intent.job_digest, upload.intent.round, upload.message) == (
        record.ledger_leaf,
        record.job_digest,
        record.round,
        record.message,
    )


def _strange(ours: _Silo, theirs: _Coordinator, folder: Path) -> Iterator[str]:
    for seq, record in theirs.received:
        if not _same(ours, record):
            at = ours.uploads.get(record.ledger_seq)
            here = f"has there {_of(at)}" if at else "has no such record"
            what = f"{record.message.bytes} bytes of job {record.job!r}, round {record.round}"
            yield (
                f"the coordinator received {what}, from record {record.ledger_seq} of the silo's ledger (its own "
                f"record {seq}), which {here}"
            )
    for seq, refused in theirs.refused:
        yield f"the silo signed a head that the coordinator refused, kept in record {seq} of {folder}: {refused.why}"


def _altered(ours: _Silo, both: list[tuple[int, Received, _Upload]], roster: Roster | None) -> Iterator[str]:
    for _, record, upload in both:
        where = f"record {record.ledger_seq}"
        root = ours.tree.root(record.ledger_seq + 1)
        if fault := _head_fault(ours.name, record, root, roster):
            yield f"{where}: {fault}"
        receipt = upload.outcome.receipt if upload.outcome else None
        if receipt not in (None, record.receipt):
            yield f"{where}: the receipt in the silo's ledger is not the one that the coordinator recorded"
        if roster is not None and (fault := _receipt_fault(ours.name, record, upload, root, roster)):
            yield f"{where}: {fault}"


def _head_fault(silo: str, record: Received, root: bytes, roster: Roster | None) -> str:
    try:
        note = notes.parse(record.checkpoint.encode())
        head = Checkpoint.parse(note.text)
        if roster is not None:
            checkpoints.verify(note, log_key(roster.federation, silo, roster[silo].log_key))
    except (ProofError, PeerError) as error:
        return f"the head that the coordinator holds is not the silo's: {error}"
    if (head.size, head.root) != (record.ledger_seq + 1, root):
        return "the silo signed another head for the coordinator than its ledger has up to there: it was written anew"
    return ""


def _receipt_fault(silo: str, record: Received, upload: _Upload, root: bytes, roster: Roster) -> str:
    if upload.roster != rosters.digest(roster):
        return ""  # of another version: give that one
    receipt = Receipt(
        federation=roster.federation,
        roster=upload.roster,
        silo=silo,
        job=record.job_digest,
        round=record.round,
        size=record.message.bytes,
        sha256=record.message.sha256,
        ledger_seq=record.ledger_seq,
        ledger_leaf=record.ledger_leaf,
        ledger_root=root.hex(),
    )
    try:
        receipt.verify(roster.coordinator, bytes.fromhex(record.receipt))
    except PeerError as error:
        return str(error)
    return ""


def _gaps(ours: _Silo, theirs: _Coordinator, both: list[tuple[int, Received, _Upload]]) -> Iterator[str]:
    matched = {record.ledger_seq: upload for _, record, upload in both}
    for seq, upload in matched.items():
        if upload.outcome is None or upload.outcome.receipt is None:
            yield f"record {seq}: received, and the silo has no receipt ({_of(upload)})"
    for seq, upload in ours.uploads.items():
        if seq not in matched and (upload.outcome is None or upload.outcome.receipt is None):
            yield f"record {seq}: not received ({_of(upload)})"
    for seq, intent in ours.undigested.items():
        yield f"record {seq}: cut short, counts as left (job {intent.job!r}, round {intent.round})"
    for (job, round_, size, _), count in (theirs.deliveries - ours.deliveries).items():
        yield f"{count} × {size} bytes of job {job!r}, round {round_}: delivered, and the silo has not noted it"
    for (job, round_, size, _), count in (ours.deliveries - theirs.deliveries).items():
        yield f"{count} × {size} bytes of job {job!r}, round {round_}: noted by the silo, not by the coordinator"


def _of(upload: _Upload) -> str:
    intent = upload.intent
    status = upload.outcome.status if upload.outcome else "without outcome"
    return f"{upload.message.bytes} bytes of job {intent.job!r}, round {intent.round}, {status}"
