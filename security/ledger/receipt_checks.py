"""Whether the receipts in a ledger are what the coordinator signs for just these messages.

A receipt is under one roster: the one that the last ``start`` before its ``egress.outcome`` names.
Who vouches for a roster is the caller's to ask (``roster.vouchers``).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import PeerError
from ..identity import roster as rosters
from ..identity.roster import Roster
from ..log.chain import VerifiedLine
from ..log.merkle import Tree
from .receipt import Receipt

SIGNATURE = re.compile("[0-9a-f]{128}")


@dataclass(slots=True)
class Receipts:
    """What became of the receipts; the ledger does not hold with ``problems``."""

    good: set[int] = field(default_factory=set)  # seq of the intents
    without: int = 0  # messages that were sent and have none
    unchecked: int = 0  # under rosters that were not given
    problems: list[str] = field(default_factory=list)

    @property
    def told(self) -> str:
        """The counts in words."""
        other = (
            f"; {self.unchecked} are under rosters that were not given" if self.unchecked else ""
        )
        return (
            f"{len(self.good)} receipts hold; {self.without} messages that were sent have"
            f" none{other}"
        )


def check(lines: Iterable[VerifiedLine], given: Iterable[Roster]) -> Receipts:
    """Check the receipts in lines that hold (``ledger_view.lines``) against the coordinators of
    these rosters.
    """
    known = {rosters.digest(roster): roster for roster in given}
    found, current = Receipts(), ""
    intents: dict[int, Mapping[str, Any]] = {}
    # by seq of the intent: the record, root of the ledger up to it
    digests: dict[int, tuple[VerifiedLine, str]] = {}
    tree = Tree()
    for line in lines:
        tree.append(line.hash)
        record = line.record
        match record["type"]:
            case "start":
                current = record["roster"]
            case "egress.intent":
                intents[line.seq] = record
            case "egress.digest":
                digests[record["ref"]] = (line, tree.root().hex())
            case "egress.outcome":
                ref = record["ref"]
                intent, digest = intents.pop(ref), digests.pop(ref, None)
                if record["receipt"] is None:
                    found.without += record["status"] == "sent"
                elif current not in known:
                    found.unchecked += 1
                elif why := _fault(known[current], intent, digest, record["receipt"]):
                    found.problems.append(f"the receipt at seq {line.seq} {why}")
                else:
                    found.good.add(ref)
    return found


def _fault(
    roster: Roster,
    intent: Mapping[str, Any],
    digested: tuple[VerifiedLine, str] | None,
    receipt: str,
) -> str:
    """What is wrong with a receipt; empty if the coordinator signed it for this message."""
    coordinator, recipient = roster.coordinator, intent["recipient"]
    # (1) Somebody can have received all of the message.
    if digested is None:
        return "is for a message without digest, of which nobody can have received all"
    digest, root = digested
    # (2) The message went to the coordinator, who showed its TLS key.
    if (recipient["id"], recipient["spki"]) != (coordinator.id, coordinator.spki_sha256):
        return (
            f"is for a message to {recipient['id']!r}, who is not the coordinator with its TLS key"
        )
    # (3) The coordinator signed it, for just these bytes from this place of the ledger.
    try:
        Receipt(
            federation=roster.federation,
            roster=rosters.digest(roster),
            silo=intent["silo"],
            job=intent["job_digest"],
            round=intent["round"],
            size=digest.record["message"]["bytes"],
            sha256=digest.record["message"]["sha256"],
            ledger_seq=digest.seq,
            ledger_leaf=digest.leaf,
            ledger_root=root,
        ).verify(coordinator, bytes.fromhex(receipt) if SIGNATURE.fullmatch(receipt) else b"")
    except PeerError:
        return f"is not what {coordinator.id!r} signs for the digest at seq {digest.seq}"
    return ""
