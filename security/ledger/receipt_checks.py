"""Checks that the receipts in a ledger are what the coordinator signs for just these messages.

A receipt is checked under the roster of its message: the one that the last ``start`` before its
``egress.digest`` names. The caller asks who vouches for a roster (``roster.verify_by``).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import PeerError
from ..identity import roster as rosters
from ..identity.roster import Roster
from ..log.chain import VerifiedLine
from ..log.merkle import Tree
from .fast_decoder import parse_any
from .messages import LedgerFold, LedgerMessage
from .receipt import Receipt
from .records import Digest, Intent, OutcomeRecord, Start

SIGNATURE = re.compile("[0-9a-f]{128}")


@dataclass(slots=True)
class Receipts:
    """The receipts of a ledger, judged; the ledger does not hold with ``problems``."""

    good: set[int] = field(default_factory=set)  # seq of the intents
    without: int = 0  # messages that were sent and have none
    unchecked: int = 0  # under rosters that were not given
    problems: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The counts in words, for people."""
        other = (
            f"; {self.unchecked} are under rosters that were not given" if self.unchecked else ""
        )
        return (
            f"{len(self.good)} receipts hold; {self.without} messages that were sent have"
            f" none{other}"
        )


def check(lines: Iterable[VerifiedLine], given: Iterable[Roster]) -> Receipts:
    """Check the receipts in lines that hold (``messages.lines``) against the coordinators of
    these rosters.
    """
    # A receipt holds under the roster of its time: later ones may have another coordinator key.
    known = {rosters.digest(roster): roster for roster in given}
    found, left, tree = Receipts(), LedgerFold(), Tree()
    roots: dict[int, str] = {}  # by seq of the intent: root of the ledger up to its digest, in hex
    for line in lines:
        tree.append(line.hash)
        record = parse_any(line)
        # What has no receipt is not kept: a ledger of a year has millions of polls and steps.
        if isinstance(record, Start | Intent | Digest | OutcomeRecord):
            left.take(line, record)
        if isinstance(record, Digest):
            # Taken now, while the tree ends with the digest: a receipt names this root.
            roots[record.ref] = tree.root().hex()
        if not isinstance(record, OutcomeRecord):
            continue
        # No record follows up on an outcome, so the message need not be kept.
        message, root = left.messages.pop(record.ref), roots.pop(record.ref, "")
        roster = message.digest.roster if message.digest else left.roster
        if record.receipt is None:
            found.without += record.status == "sent"
        elif roster not in known:
            found.unchecked += 1
        elif why := _fault(known[roster], message, root):
            found.problems.append(f"the receipt at seq {line.seq} {why}")
        else:
            found.good.add(record.ref)
    return found


def _fault(roster: Roster, message: LedgerMessage, root: str) -> str:
    """The fault of a receipt; empty if the coordinator signed it for this message."""
    coordinator, recipient = roster.coordinator, message.intent.recipient
    digest, receipt = message.digest, message.receipt or ""
    # (1) Somebody can have received all of the message: the digest is durable before its last frame
    # leaves (rule 27).
    if digest is None:
        return "is for a message without digest, of which nobody can have received all"

    # (2) The message went to the coordinator, who showed its TLS key.
    if (recipient.id, recipient.spki) != (coordinator.id, coordinator.spki_sha256):
        return f"is for a message to {recipient.id!r}, who is not the coordinator with its TLS key"

    # (3) The coordinator signed it, for just these bytes from this place of the ledger.
    signature = bytes.fromhex(receipt) if SIGNATURE.fullmatch(receipt) else b""
    try:
        Receipt(
            federation=roster.federation,
            members=rosters.members_digest(roster, (message.intent.silo,)),
            silo=message.intent.silo,
            job=message.intent.job_digest,
            round=message.intent.round,
            size=digest.message.bytes,
            sha256=digest.message.sha256,
            ledger_seq=digest.seq,
            ledger_leaf=digest.leaf,
            ledger_root=root,
        ).verify(coordinator, signature)
    except PeerError:
        return f"is not what {coordinator.id!r} signs for the digest at seq {digest.seq}"
    return ""
