"""The roster by which one member acts, and which other one may take its place.

A configuration names a file, which may be read-only. A daemon keeps the newest roster that it had
in its own folder, and the newer of the two counts: neither an older file in the first place nor a
coordinator brings back a member that was removed. Operators and founders have no daemon; the file
of their configuration is replaced.
"""

from pathlib import Path

from ...errors import LocalError, PeerError
from ...files.documents import read_bytes
from . import roster as rosters
from .keys import Keys, held_keys
from .roster import Pins, Roster

FILE = "roster.json"  # in a daemon's folder


class RosterInUse:
    """The present roster of one member, which its founders signed, and the member's keys in it.

    Keys are read where they are needed, and again where a roster has another certificate of ours.
    """

    def __init__(
        self, given: Path, kept: Path, pins: Pins, keys: Path, renewed: Path | None = None
    ) -> None:
        """``given`` is the configuration's file, ``kept`` where newer ones go, perhaps the same.

        ``keys`` and ``renewed`` are as for ``held_keys``.

        LocalError for a file that cannot be read, or a roster that the pins do not fit.
        """
        self._given, self._kept = given, kept
        self._pins = pins
        self._keys, self._renewed = keys, renewed
        self._held: tuple[Keys, ...] = ()
        self._saved: Roster | None = None
        self.present = self.on_disk()

    def contents(self) -> dict[bytes, Path]:
        """What its files hold now, that of the configuration first; LocalError as ``read_bytes``.

        There need be none that was kept.
        """
        found = {read_bytes(self._given): self._given}
        try:
            found[read_bytes(self._kept)] = self._kept
        except LocalError as error:
            # Whatever else is in the way must not bring an older roster back.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        return found

    def on_disk(self) -> Roster:
        """The newest of the files as they are now; LocalError unless our founders signed it.

        An older one does not take its place, or whoever spoils a file brings that one back.
        """
        self._contents = self.contents()
        found = {path: rosters.parse(data, str(path)) for data, path in self._contents.items()}
        self._saved = found.get(self._kept)
        # Of two with one version, the one that was in use.
        path, newest = max(reversed(found.items()), key=lambda each: each[1].version)
        try:
            rosters.verify(newest, self._pins)
        except (LocalError, PeerError) as error:
            raise LocalError(f"{path}: {error}") from error
        return newest

    def look(self) -> bool:
        """Read the files again; whether they have another roster, which is present from then on.

        LocalError or PeerError where it may not follow.
        """
        if self.contents() == self._contents:
            return False
        found = self.on_disk()
        changed, self.present = self.offered(found), found
        return changed

    def held(self, roster: Roster) -> tuple[Keys, ...]:
        """Our keys, with each of our TLS keys; LocalError where they cannot be read."""
        # Read once: a daemon continues while its files are being replaced.
        if not any(keys.entry in roster.entries for keys in self._held):
            self._held = held_keys(self._keys, self._renewed)
        return self._held

    @property
    def keys(self) -> Keys:
        """Our keys, with the TLS key that the present roster has; the first where it has none."""
        entries = self.present.entries
        return max(self.held(self.present), key=lambda keys: keys.entry in entries)

    def offered(self, roster: Roster) -> bool:
        """Whether a roster, from anybody, is another one than the present, which it may follow.

        LocalError or PeerError say why it may not.
        """
        if roster == self.present:
            return False
        rosters.check_next(roster, self.present, self._pins, self.held(roster))
        return True

    def keep(self, roster: Roster) -> None:
        """Make it the present one, once it is on the disk; UnwritableError if that fails."""
        # A full disk must not keep a daemon from starting with what it has.
        if roster != self._saved:
            rosters.save(roster, self._kept)
        self._saved = self.present = roster

    def newer(self, roster: Roster) -> bool:
        """Whether a coordinator's roster, like ``offered``, is newer.

        An older one may be that of a coordinator which missed a change.
        """
        return roster.version > self.present.version and self.offered(roster)

    def take_over(self, roster: Roster) -> bool:
        """Keep a coordinator's roster if it is newer; whether it is."""
        newer = self.newer(roster)
        if newer:
            self.keep(roster)
        return newer
