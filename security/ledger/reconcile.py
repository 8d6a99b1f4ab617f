"""Do a silo's ledger and the coordinator's say the same? Both folders may be read
while they are written.

Uploads are joined by the place of their DIGEST record, deliveries by what they were. A *difference*
is what no crash and no lost connection explains: one of the two was altered, or does not record. A
*gap* is what they do explain:

===================================================  ==========  ===================================
found                                                is a        because
===================================================  ==========  ===================================
received, and the silo has no such record            difference  DIGEST is durable before END leaves
received, and the silo has other bytes or job there  difference
received under a head that is not of this ledger     difference  the silo signed it
a receipt in the silo's ledger, nothing received     difference  the record is durable before the
                                                                 receipt
two receipts that differ, or one that does not hold  difference
one record of the silo's received twice              difference  each attempt has a record of its
                                                                 own
a refused head that is not of this ledger            difference  it was rolled back or forked, or
                                                                 nobody signed it
the coordinator's ledger lacks what a silo holds     difference  it signed that head
a refused head that is of this ledger                gap         the proof was from another head
                                                                 than the one held
received from a ledger under another log key         gap         the silo began a ledger, under a
                                                                 roster with a new key
received, and the silo has no receipt                gap         the connection broke before it came
digested, and not received                           gap         refused, or the connection broke
                                                                 before END
intended, and not digested                           gap         cut short
delivered, and not noted by the silo, or reversed    gap         killed or cut between the bytes and
                                                                 the record
===================================================  ==========  ===================================

What a silo's ledger and the coordinator's say of each other, read for ``reconcile``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import LocalError, PeerError, ProofError
from ..identity import roster as rosters
from ..identity.roster import Roster
from ..log import note as notes
from ..log import tree_head as checkpoints
from ..log.head import HeldHead, disagreement, log_key
from ..log.merkle import Tree
from ..log.note import VerifierKey
from ..log.tree_head import TreeHead
from .messages import Digested, LedgerFold, records
from .receipt import Receipt
from .records import (
    DeliveredRecord,
    HeadRefused,
    Ingress,
    Intent,
    KeyRotate,
    OutcomeRecord,
    Received,
    Serving,
    Start,
)


@dataclass(frozen=True, slots=True)
class LedgerUpload:
    """A message of the silo's ledger that has a digest."""

    intent: Intent
    digest: Digested
    outcome: OutcomeRecord | None

    @property
    def receipt(self) -> str | None:
        """The signature of the coordinator, in hex; None where no receipt came."""
        return self.outcome.receipt if self.outcome else None


class SiloSide:
    """One silo's ledger, read for the comparison."""

    def __init__(self, folder: Path) -> None:
        self.name = ""
        self.tree = Tree()
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
        self.past: list[VerifierKey] = []  # its log keys before the one of now
        left = LedgerFold()
        for line, record in records(folder):
            self.tree.append(line.hash)
            left.take(line, record)
            match record:
                case Start() | Intent():
                    self.name = record.silo
                case KeyRotate():
                    self.past.append(VerifierKey.parse(record.old))
                case Ingress():
                    self.deliveries[_delivery(record)] += 1

        # The coordinator accepted none of them: a digest is durable before the END frame leaves,
        # without which it accepts nothing.
        self.undigested: dict[int, Intent] = {}  # by seq of the intent
        uploads: dict[int, LedgerUpload] = {}
        for message in left.messages.values():
            if message.digest is None:
                self.undigested[message.seq] = message.intent
            else:
                upload = LedgerUpload(message.intent, message.digest, message.outcome)
                uploads[message.digest.seq] = upload
        # By seq of the DIGEST record, and in that order: the place that the coordinator names.
        self.uploads = dict(sorted(uploads.items()))

    def has_receipt(self, seq: int) -> bool:
        """True if the upload with this DIGEST record has one."""
        upload = self.uploads.get(seq)
        return upload is not None and upload.receipt is not None

    def keys(self, roster: Roster) -> dict[bytes, VerifierKey]:
        """The log keys that have signed this ledger, by key id."""
        now = log_key(roster.federation, self.name, roster[self.name].log_key)
        return {key.key_id: key for key in (*self.past, now)}


class CoordinatorSide:
    """The coordinator's ledger, read for the comparison with one silo's."""

    def __init__(self, folder: Path, silo: str) -> None:
        self.name = ""
        self.tree = Tree()
        self.received: list[tuple[int, Received]] = []
        self.refused: list[tuple[int, HeadRefused]] = []
        self.deliveries: Counter[tuple[str, int, int, str]] = Counter()
        for line, record in records(folder):
            # The tree takes all records, about every silo: heads are of the whole ledger.
            self.tree.append(line.hash)
            match record:
                case Serving():
                    self.name = record.coordinator
                case Received() if record.silo == silo:
                    self.received.append((line.seq, record))
                case HeadRefused() if record.silo == silo:
                    self.refused.append((line.seq, record))
                case DeliveredRecord() if record.silo == silo:
                    self.deliveries[_delivery(record)] += 1


def _delivery(record: Ingress | DeliveredRecord) -> tuple[str, int, int, str]:
    # Deliveries have no number; these fields are in the records of both sides.
    return record.job, record.round, record.message.bytes, record.message.sha256


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The comparison of two ledgers. They agree exactly when ``differences`` is empty."""

    silo: str
    coordinator: str
    uploads: int  # that both have
    bytes: int  # of these
    deliveries: int  # that both have
    unchecked: int  # receipts of these uploads under other rosters than the one given
    gaps: tuple[str, ...]
    differences: tuple[str, ...]


def reconcile(
    silo: Path, coordinator: Path, roster: Roster | None = None, held: Sequence[TreeHead] = ()
) -> Reconciled:
    """Compare two ledgers' folders; with a roster receipts and heads are checked as well.

    ``held`` are heads of the coordinator's ledger that the silo keeps. LocalError for a ledger that
    does not hold (``staddle ledger verify``), or is not what it is said to be.
    """
    # Both may grow meanwhile: who has a receipt now was received by then, what was received by then
    # has a digest later.
    before = SiloSide(silo)
    if not before.name:
        raise LocalError(f"{silo}: names no silo; is it a silo's ledger, and has its agent run?")
    theirs, ours = CoordinatorSide(coordinator, before.name), SiloSide(silo)
    if not theirs.name:
        raise LocalError(
            f"{coordinator}: is not a coordinator's ledger; name the folder of the coordinator's"
            " state"
        )

    # What is of a ledger that the silo kept under an earlier key is no sign of a forgery.
    matches = Matches(ours, theirs)
    earlier = _earlier(ours, theirs, matches, roster)
    differences = [
        *_strange(ours, matches, earlier),
        *_refused(ours, theirs, coordinator, roster, earlier),
        *_altered(ours, matches, roster),
        *_unreceived(before, ours, matches),
        *_lost(ours, theirs, held),
    ]
    return Reconciled(
        silo=ours.name,
        coordinator=theirs.name,
        uploads=len(matches.uploads),
        bytes=sum(upload.digest.message.bytes for upload in matches.uploads.values()),
        deliveries=sum((ours.deliveries & theirs.deliveries).values()),
        unchecked=_unchecked(ours, matches, roster),
        gaps=tuple(_gaps(ours, theirs, matches, earlier, roster)),
        differences=tuple(differences),
    )


class Matches:
    """The uploads that the coordinator received, matched with the silo's ledger.

    ``both`` are those that the silo's ledger has in the place that the coordinator names, with the
    same bytes. ``strange`` are the others, each with the seq of the coordinator's record.
    """

    def __init__(self, ours: SiloSide, theirs: CoordinatorSide) -> None:
        self.both: list[tuple[Received, LedgerUpload]] = []
        self.strange: list[tuple[int, Received]] = []
        # Joined by place, not by what was sent: equal uploads of two attempts are two.
        for seq, record in theirs.received:
            upload = ours.uploads.get(record.ledger_seq)
            if upload is not None and _same(upload, record):
                self.both.append((record, upload))
            else:
                self.strange.append((seq, record))
        self.uploads = {upload.digest.seq: upload for _, upload in self.both}


def _unchecked(ours: SiloSide, matches: Matches, roster: Roster | None) -> int:
    """How many uploads have a receipt of another roster, which does not hold under this one.

    Under another version the coordinator or the silo may have had other keys. Where both had the
    same, a receipt is the same under any version.
    """
    if roster is None:
        return 0
    digest = rosters.digest(roster)
    return sum(
        bool(_unfit(ours, record, roster))
        for record, upload in matches.both
        if upload.digest.roster != digest
    )


def _same(upload: LedgerUpload, record: Received) -> bool:
    """True if the silo's ledger has this upload in the place that it was received under."""
    ours = (
        upload.digest.leaf,
        upload.intent.job_digest,
        upload.intent.round,
        upload.digest.message,
    )
    return ours == (record.ledger_leaf, record.job_digest, record.round, record.message)


def _earlier(
    ours: SiloSide, theirs: CoordinatorSide, matches: Matches, roster: Roster | None
) -> set[int]:
    """Records of the coordinator's that are of a ledger under a log key that this one never had."""
    if roster is None:
        return set()
    suspects: list[tuple[int, Received | HeadRefused]] = [*matches.strange, *theirs.refused]
    return {seq for seq, record in suspects if _under_another_key(ours, record.checkpoint, roster)}


def _under_another_key(ours: SiloSide, text: str, roster: Roster) -> bool:
    try:
        return not _key_ids(text) & ours.keys(roster).keys()
    except ProofError:  # no head of any ledger
        return False


def _key_ids(text: str) -> set[bytes]:
    return {signature.key_id for signature in notes.parse(text.encode()).signatures}


def _strange(ours: SiloSide, matches: Matches, earlier: set[int]) -> Iterator[str]:
    for seq, record in matches.strange:
        if seq in earlier:
            continue
        at = ours.uploads.get(record.ledger_seq)
        found = f"has there {_of(at)}" if at else "has no such record"
        what = f"{record.message.bytes} bytes of job {record.job!r}, round {record.round}"
        yield (
            f"the coordinator received {what}, from record {record.ledger_seq} of the silo's"
            f" ledger (its own record {seq}), which {found}"
        )

    # Each attempt has a DIGEST record of its own: nothing honest is received twice from one.
    received = Counter(record.ledger_seq for record, _ in matches.both)
    for seq, times in received.items():
        if times > 1:
            yield f"record {seq}: the coordinator's ledger has {times} times that it received it"


def _unreceived(before: SiloSide, ours: SiloSide, matches: Matches) -> Iterator[str]:
    """Receipts for nothing: the coordinator's record is durable before its receipt leaves."""
    for seq, upload in ours.uploads.items():
        if seq not in matches.uploads and before.has_receipt(seq):
            yield (
                f"record {seq}: the silo has a receipt, and the coordinator received no such upload"
                f" ({_of(upload)})"
            )


def _lost(ours: SiloSide, theirs: CoordinatorSide, held: Sequence[TreeHead]) -> Iterator[str]:
    """Heads that the coordinator signed and that are not of its ledger."""
    for head in held:
        if problem := disagreement(theirs.tree, HeldHead(ours.name, head)):
            yield f"the coordinator's ledger: {problem}"


def _refused(
    ours: SiloSide, theirs: CoordinatorSide, folder: Path, roster: Roster | None, earlier: set[int]
) -> Iterator[str]:
    for seq, refused in theirs.refused:
        if seq not in earlier and (why := _not_of(ours, theirs, refused, roster)):
            yield f"{why}, in record {seq} of {folder}: {refused.why}"


def _not_of(
    ours: SiloSide, theirs: CoordinatorSide, refused: HeadRefused, roster: Roster | None
) -> str:
    """The difference that a refused head proves; empty if it is a head of this ledger."""
    try:
        head = _head(ours, refused.checkpoint, roster)
    except ProofError as error:
        return f"the coordinator says that it refused a head, which the silo did not sign ({error})"
    if disagreement(ours.tree, HeldHead(theirs.name, head)):
        return "the silo signed a head that the coordinator refused and that is not of this ledger"
    return ""


def _altered(ours: SiloSide, matches: Matches, roster: Roster | None) -> Iterator[str]:
    # The head is compared with the root at that place: records before it that were rewritten
    # show even where this one is as it was.
    for record, upload in matches.both:
        where = f"record {record.ledger_seq}"
        root = ours.tree.root(record.ledger_seq + 1)
        if fault := _head_fault(ours, record, root, roster):
            yield f"{where}: {fault}"
        # None is no difference but a gap: the connection broke before the receipt came.
        if upload.receipt not in (None, record.receipt):
            yield (
                f"{where}: the receipt in the silo's ledger is not the one that the coordinator"
                " recorded"
            )
        if roster is None:
            continue
        if fault := _receipt_fault(ours, record, upload, roster):
            yield f"{where}: {fault}"


def _head_fault(ours: SiloSide, record: Received, root: bytes, roster: Roster | None) -> str:
    # Only the silo can sign a head, so a coordinator that altered its records has none for them.
    try:
        head = _head(ours, record.checkpoint, roster)
    except ProofError as error:
        return f"the head that the coordinator holds is not the silo's: {error}"
    # An upload carries the head that ends with its digest.
    if (head.size, head.root) != (record.ledger_seq + 1, root):
        return (
            "the silo signed another head for the coordinator than its ledger has up to there: it"
            " was rewritten"
        )
    return ""


def _head(ours: SiloSide, text: str, roster: Roster | None) -> TreeHead:
    """The head that the silo signed; with a roster ProofError unless one of its keys did."""
    note = notes.parse(text.encode())
    if roster is not None:
        keys = ours.keys(roster)
        # If no known key is named, verifying by the present one raises the right error.
        now = log_key(roster.federation, ours.name, roster[ours.name].log_key)
        checkpoints.verify(note, next((keys[known] for known in _key_ids(text) & keys.keys()), now))
    return TreeHead.parse(note.text)


def _receipt_fault(ours: SiloSide, record: Received, upload: LedgerUpload, roster: Roster) -> str:
    # Under another version of the roster it is counted as unchecked (``_unchecked``).
    if upload.digest.roster != rosters.digest(roster):
        return ""
    return _unfit(ours, record, roster)


def _unfit(ours: SiloSide, record: Received, roster: Roster) -> str:
    """Why a receipt is not what the coordinator of this roster signs; empty if it is."""
    receipt = Receipt(
        federation=roster.federation,
        members=rosters.members_digest(roster, (ours.name,)),
        silo=ours.name,
        job=record.job_digest,
        round=record.round,
        size=record.message.bytes,
        sha256=record.message.sha256,
        ledger_seq=record.ledger_seq,
        ledger_leaf=record.ledger_leaf,
        ledger_root=ours.tree.root(record.ledger_seq + 1).hex(),
    )
    try:
        receipt.verify(roster.coordinator, bytes.fromhex(record.receipt))
    except PeerError as error:
        return str(error)
    return ""


def _gaps(
    ours: SiloSide,
    theirs: CoordinatorSide,
    matches: Matches,
    earlier: set[int],
    roster: Roster | None,
) -> Iterator[str]:
    if earlier:
        yield (
            f"{len(earlier)} records of the coordinator are of a ledger under another log key;"
            " compare that one too"
        )
    for seq, refused in theirs.refused:
        if seq not in earlier and not _not_of(ours, theirs, refused, roster):
            yield f"a head of this ledger was refused: {refused.why}"
    yield from _unsettled(ours, matches)
    # Counters, since a round may be delivered several times with the same bytes.
    unnoted, unsent = theirs.deliveries - ours.deliveries, ours.deliveries - theirs.deliveries
    for what, count in unnoted.items():
        yield f"{_deliveries(what, count)}: delivered, and the silo has not noted it"
    for what, count in unsent.items():
        yield f"{_deliveries(what, count)}: noted by the silo, not by the coordinator"


def _unsettled(ours: SiloSide, matches: Matches) -> Iterator[str]:
    """Uploads that a crash or a broken connection left somewhere on their way."""
    for seq, upload in matches.uploads.items():
        if upload.receipt is None:
            yield f"record {seq}: received, and the silo has no receipt ({_of(upload)})"
    for seq, upload in ours.uploads.items():
        if seq not in matches.uploads and upload.receipt is None:
            yield f"record {seq}: not received ({_of(upload)})"
    for seq, intent in ours.undigested.items():
        yield f"record {seq}: cut short, counts as left ({_place(intent)})"


def _deliveries(what: tuple[str, int, int, str], count: int) -> str:
    job, round_, size, _ = what
    return f"{count} × {size} bytes of job {job!r}, round {round_}"


def _of(upload: LedgerUpload) -> str:
    status = upload.outcome.status if upload.outcome else "without outcome"
    return f"{upload.digest.message.bytes} bytes of {_place(upload.intent)}, {status}"


def _place(intent: Intent) -> str:
    """The message of a job in words; a padded or rotated part is one of its own."""
    own = f", {intent.form} part {intent.part!r}" if intent.part else ""
    return f"job {intent.job!r}, round {intent.round}{own}"
