"""How somebody becomes a member: a founder's invitation, and what the coordinator accepts.

An invitation is one small file, which the founder sends and need not hide: canonical JSON of
``Invitation``. It says where the coordinator is and what the roster was, and has a ticket, here
broken::

    {"expires":1767139200,"federation":"lung","founder":"ministry","member":"hospital-a",
     "role":"silo","signature":"5c1f…","token":"9f86…"}

A founder signs the ticket, so the coordinator takes it without having heard of it before. The
invited member makes its own keys and hands in its public entry with the ticket, once. A founder
compares fingerprints, by telephone, before the entry comes into a roster: the ticket alone makes
nobody a member.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from ...errors import LocalError, PeerError, check_local
from ...files.documents import Strict, canonical_json, parse_canonical, validate
from .domains import INVITATION
from .keys import Hex32, Hex64, Id, Keys, Role, RosterEntry
from .roster import Pins, Roster

MOST_BYTES = 16_384  # of a ticket, or of an entry: what a stranger may send
LONGEST_DAYS = 90
DAY_SECONDS = 86_400

InvitedRole = Literal["silo", "operator"]


class Ticket(Strict):
    """Who may hand in an entry, as which member, until when (seconds since 1970, UTC)."""

    federation: Id
    member: Id
    role: InvitedRole
    token: Hex32  # random: two invitations of one member are two
    expires: Annotated[int, Field(strict=True, ge=0, lt=2**53)]
    founder: Id
    signature: Hex64

    def signed_bytes(self) -> bytes:
        """The bytes that the founder signs, behind the label."""
        return canonical_json(self.model_dump(exclude={"signature"}))

    @property
    def name(self) -> str:
        """SHA-256 (hex) of the signed bytes: names the ticket without its token."""
        return hashlib.sha256(self.signed_bytes()).hexdigest()

    def check(self, roster: Roster, now: float) -> None:
        """PeerError unless a founder of this roster signed it and it has not expired.

        ``now`` in seconds since 1970. The steps run in order.
        """
        # (1) A founder of our federation signed it.
        self.check_signed(roster)
        # (2) It is still good.
        # A stolen founder's key would sign tickets for ever. A day more, as clocks differ.
        if self.expires > now + (LONGEST_DAYS + 1) * DAY_SECONDS:
            raise PeerError(
                self.member,
                f"its invitation is good for more than {LONGEST_DAYS} days, which no founder's"
                " software signs; ask a founder for another one",
            )
        if now >= self.expires:
            raise PeerError(
                self.member, "its invitation has expired; ask a founder for another one"
            )

    def check_signed(self, roster: Roster) -> None:
        """PeerError unless a founder of this roster signed it."""
        founder = roster[self.founder]
        signed = founder.has_signed(INVITATION, self.signed_bytes(), bytes.fromhex(self.signature))
        if not (signed and founder.role is Role.FOUNDER and self.federation == roster.federation):
            raise PeerError(
                self.member,
                f"its ticket is not signed by a founder of {roster.federation!r}; ask a founder for"
                " another invitation",
            )

    def check_entry(self, entry: RosterEntry) -> None:
        """PeerError unless it is the entry of the member that was invited, in the same role."""
        if (entry.id, entry.role) != (self.member, self.role):
            raise PeerError(
                self.member,
                f"was invited as {self.role} {self.member!r}, and the entry is of {entry.role}"
                f" {entry.id!r}; join with the name and role of the invitation",
            )


def _address(text: str) -> str:
    # It comes to stand between quotation marks, in a configuration.
    if not text.isprintable() or {*text} & {*' "\\'} or ":" not in text:
        raise ValueError("not host:port, such as federation.example:7443")
    return text


class Invitation(Strict):
    """The file that a founder sends. Nothing in it is secret but the ticket's token."""

    version: Literal[1]
    coordinator: Annotated[str, Field(max_length=300), AfterValidator(_address)]
    trust: Pins
    roster: Roster
    ticket: Ticket
    organisation: Annotated[str, Field(max_length=200)] = ""  # as the founder would write it

    def encoded(self) -> bytes:
        """The file's bytes."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Self:
        """The invitation in a file; LocalError for any other content."""
        check_local(
            data.startswith(b"{"), f"{path}: not an invitation; give the file that the founder sent"
        )
        return parse_canonical(data, cls, str(path))


def ticket(
    keys: Keys, federation: str, member: str, role: InvitedRole, token: bytes, expires: int
) -> Ticket:
    """A ticket signed by a founder; ``token`` are 32 random bytes."""
    fields: dict[str, Any] = {
        "federation": federation,
        "member": member,
        "role": role,
        "token": token.hex(),
        "expires": expires,
        "founder": keys.entry.id,
    }
    # A placeholder of the right form, which the signed bytes leave out.
    unsigned = validate({**fields, "signature": "0" * 128}, Ticket, "the invitation")
    signature = keys.sign(INVITATION, unsigned.signed_bytes()).hex()
    return unsigned.model_copy(update={"signature": signature})


def read_ticket(data: bytes) -> Ticket:
    """The ticket that a stranger sends; LocalError for anything else."""
    return parse_canonical(_bounded(data, "ticket"), Ticket, "the ticket")


def read_entry(data: bytes) -> RosterEntry:
    """The entry that a stranger sends, checked as any entry; LocalError for anything else."""
    return parse_canonical(_bounded(data, "entry"), RosterEntry, "the entry")


def _bounded(data: bytes, what: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise LocalError(f"the {what} has {len(data)} bytes, more than {MOST_BYTES}")
    return data
