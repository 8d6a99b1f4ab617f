"""Rosters that somebody gives to check a ledger with, and the founders who vouch for them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError, PeerError
from ...security.identity import roster as rosters
from ...security.identity.roster import Roster
from ...security.ledger import kept_rosters

RosterFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--roster",
        metavar="FILE",
        help="A roster of the time, for keys and names; may be repeated.",
    ),
]
Founders = Annotated[
    list[str] | None,
    typer.Option(
        "--founder",
        metavar="SHA256:…",
        help="Fingerprint of a founder's key, not from the roster; may be repeated.",
    ),
]
Threshold = Annotated[
    int | None,
    typer.Option(
        "--threshold", min=1, metavar="K", help="How many of them must have signed (default: all)."
    ),
]


@dataclass(frozen=True, slots=True)
class Rosters:
    """Rosters whose signatures hold, and the founders' fingerprints by which they were checked.

    Empty where the user named none.
    """

    each: tuple[Roster, ...] = ()  # oldest first
    founders: tuple[str, ...] = ()

    @property
    def newest(self) -> Roster | None:
        """The one with the highest version; None without rosters."""
        if not self.each:
            return None
        return self.each[-1]

    @property
    def vouchers(self) -> list[str]:
        """Who vouches for them: one line per roster."""
        return list(map(self._voucher, self.each))

    def _voucher(self, roster: Roster) -> str:
        version = f"roster version {roster.version}"
        # The signatures are valid, but a forger could have named founders of their own.
        if not self.founders:
            return (
                f"{version}: signed by founders that it names itself; for who vouches for it, give"
                " --founder"
            )
        # Only founders whose fingerprints the user gave.
        signers = ", ".join(rosters.signers(roster, self.founders))
        return f"{version}: signed by {signers}, whose keys were named"


def read(
    files: Sequence[Path] | None,
    founders: Sequence[str] | None,
    threshold: int | None,
    ledger: Path | None = None,
) -> Rosters:
    """Read rosters and check their founders' signatures.

    With founders, those that a ``ledger`` keeps, too, as far as these signed them. LocalError or
    PeerError say what is wrong.
    """
    fingerprints = tuple(founders or ())
    # ``verify_by`` takes 0 for all that are named.
    least = threshold or 0
    kept = of_ledger(ledger, fingerprints, least) if ledger and fingerprints else []
    _check_options(files or kept, fingerprints, least)

    loaded = list(map(rosters.load, files or ()))
    further = [roster for roster in kept if roster not in loaded]
    each = sorted([*loaded, *further], key=attrgetter("version"))
    # A ledger belongs to one federation.
    federations = sorted({roster.federation for roster in each})
    if len(federations) > 1:
        raise LocalError(
            f"rosters of several federations: {', '.join(federations)}; give those of the ledger's"
        )

    # a roster that is not vouched for would let anyone name the keys that it is checked with
    for roster in each:
        rosters.verify_by(roster, fingerprints, least)
    return Rosters(tuple(each), fingerprints)


def of_ledger(ledger: Path, founders: Sequence[str], least: int) -> list[Roster]:
    """The rosters of a ledger that these founders signed."""
    found = []
    for roster in kept_rosters.kept(ledger):
        # Others may be of before these were founders; their receipts count as not checked.
        with contextlib.suppress(LocalError, PeerError):
            rosters.verify_by(roster, founders, least)
            found.append(roster)
    return found


def _check_options(given: Sequence[object] | None, founders: Sequence[str], threshold: int) -> None:
    has_founders = bool(founders or threshold)
    if has_founders and not given:
        raise LocalError(
            f"no roster here is signed by {', '.join(founders) or 'a named founder'}: ask the"
            " founder for the fingerprint, by telephone, or give a roster of theirs with --roster"
        )
    # A repeated fingerprint is no second founder.
    named = len(set(founders))
    if threshold > named:
        raise LocalError(f"--threshold {threshold}, but {named} founders are named; add --founder")


def read_one(file: Path | None, founders: Sequence[str] | None, threshold: int | None) -> Rosters:
    """Like ``read``, for a command that takes at most one roster."""
    files = []
    if file is not None:
        files.append(file)
    return read(files, founders, threshold)
