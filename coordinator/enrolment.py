"""What waits for a founder: entries of invited strangers, and members' new certificates.

::

    <directory>/enrolments/<name of the ticket>.json     the entry, canonical JSON, 0600
    <directory>/renewals/<member>.json                   the renewal, canonical JSON, 0600

A stranger can write nothing else, and only with a ticket that a founder signed, so founders bound
how many files there are, and ``MOST_BYTES`` does where a founder's key was stolen. A ticket's file
stays as long as the ticket could be used again: it is good for one entry. A founder admits an entry
by a roster (commands/members). A member has one renewal, the last that it handed in.
"""

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeVar

from .. import log
from ..errors import PeerError, StaddleError
from ..files.documents import Strict, canonical_json, parse_canonical, read_bytes, write_atomic
from ..proto.channel import MAX_MESSAGE_BYTES
from ..security.identity.invitation import Ticket
from ..security.identity.keys import RosterEntry
from ..security.identity.renewal import Renewal
from ..security.identity.roster import Roster

# Of all files together: one founder's stolen key could sign any number of tickets. All entries go
# to founders in one message, whose other half is for the roster.
MOST_BYTES = MAX_MESSAGE_BYTES // 2


ReadT = TypeVar("ReadT")


def _readable(folder: Path, read: Callable[[Path], ReadT]) -> dict[str, ReadT]:
    """What the files of a folder say, by their names without the ending.

    One that the disk changed is logged, and keeps founders from none of the others. It goes when
    the coordinator starts; whoever waits hands in the same again.
    """
    found = {}
    for path in folder.glob("*.json"):
        try:
            found[path.stem] = read(path)
        except StaddleError as error:
            log.problem("waiting.damaged", why=str(error))
    return found


class WaitingMember(Strict):
    """An entry that was handed in, and the ticket with which it was."""

    ticket: Ticket
    entry: RosterEntry


class Enrolments:
    """The entries that were handed in to one coordinator, under its present roster."""

    def __init__(self, directory: Path, roster: Roster) -> None:
        """``directory`` is the coordinator's state folder."""
        self._lock = threading.Lock()  # calls come in threads: a ticket is good for one entry
        self._folder = directory / "enrolments"
        self._roster = roster

    def take(
        self, ticket: Ticket, entry: RosterEntry, now: float
    ) -> Literal["new", "waiting", "member"]:
        """Keep an entry durably; returns whether it is new, waits already, or is a member's by now.

        The same entry again changes nothing, also after the ticket has expired. ``now`` in seconds
        since 1970. PeerError says what the stranger did wrong. The steps run in order.
        """
        # (1) The ticket is for this entry.
        ticket.check_entry(entry)
        with self._lock:
            return self._take(ticket, entry, now)

    def _take(
        self, ticket: Ticket, entry: RosterEntry, now: float
    ) -> Literal["new", "waiting", "member"]:
        # (2) It was not used for another one.
        path = self._folder / f"{ticket.name}.json"
        used = path.exists() and self._read(path).entry != entry
        if used:
            raise PeerError(
                entry.id,
                "its invitation was used already, with other keys; if that was not you, tell a"
                " founder, and ask for another invitation",
            )
        # (3) A founder signed the ticket: a member's entry is public, and the roster is not for
        # everybody who has one.
        ticket.check_signed(self._roster)
        if entry in self._roster.entries:
            return "member"

        # (4) It is still good.
        ticket.check(self._roster, now)
        if path.exists():
            return "waiting"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        document = WaitingMember(ticket=ticket, entry=entry).model_dump(mode="json")
        data = canonical_json(document) + b"\n"
        kept = sum(each.stat().st_size for each in self._folder.glob("*.json"))
        if kept + len(data) > MOST_BYTES:
            raise PeerError(
                entry.id,
                f"entries of {kept:,} bytes were handed in already with invitations that have not"
                " expired, and there is no room for another; tell a founder",
            )
        write_atomic(path, data)
        return "new"

    def waiting(self) -> Iterator[WaitingMember]:
        """The entries that are not in the roster, by id."""
        read = _readable(self._folder, self._read).values()
        found = (each for each in read if each.entry not in self._roster.entries)
        yield from sorted(found, key=lambda each: (each.entry.id, each.ticket.name))

    def forget(self, now: float) -> None:
        """Remove what was handed in with tickets that nobody can use again.

        They have expired, or their founder was removed or has other keys by now. A file that the
        disk changed goes, too: whoever waits hands its entry in again.
        """
        for path in self._folder.glob("*.json"):
            try:
                self._read(path).ticket.check(self._roster, now)
            except StaddleError:
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> WaitingMember:
        return parse_canonical(read_bytes(path), WaitingMember, str(path))


class Renewals:
    """The certificates that members of the present roster handed in."""

    def __init__(self, directory: Path, roster: Roster) -> None:
        """``directory`` is the coordinator's state folder."""
        self._folder = directory / "renewals"
        self._roster = roster

    def take(self, member: str, renewal: Renewal, now: dt.datetime) -> bool:
        """Keep a member's renewal, durably; False where it waits already, or is in the roster.

        PeerError says what is wrong with it.
        """
        path, present = self._folder / f"{member}.json", self._roster[member]
        data = canonical_json(renewal.model_dump()) + b"\n"
        if renewal == Renewal.of(present) or (path.exists() and read_bytes(path) == data):
            return False
        renewal.renewed(present, now)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, data)
        return True

    def waiting(self) -> Iterator[tuple[str, Renewal]]:
        """The renewals, by member."""
        yield from sorted(_readable(self._folder, self._read).items(), key=itemgetter(0))

    def forget(self, now: dt.datetime) -> None:
        """Remove what no founder can admit: it stands in the roster, or its member left.

        A file that the disk changed goes, too: whoever waits hands its renewal in again.
        """
        for path in self._folder.glob("*.json"):
            try:
                self._read(path).renewed(self._roster[path.stem], now)
            except StaddleError:
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Renewal:
        return parse_canonical(read_bytes(path), Renewal, str(path))
