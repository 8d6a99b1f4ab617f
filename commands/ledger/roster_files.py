"""Rosters that somebody gives to check a ledger with, and the founders who vouch for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...security.identity import roster as rosters
from ...security.identity.roster import Roster

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
    def vouchers(self) -> str:
        """Who vouches for them: one line per roster."""
        return "\n".join(map(self._voucher, self.each))

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
    files: Sequence[Path] | None, founders: Sequence[str] | None, threshold: int | None
) -> Rosters:
    """Read rosters and check their founders' signatures.

    LocalError or PeerError say what is wrong.
    """
    fingerprints = tuple(founders or ())
    # ``verify_by`` takes 0 for all that are named.
    least = threshold or 0
    _check_options(files, fingerprints, least)

    loaded = map(rosters.load, files or ())
    each = sorted(loaded, key=attrgetter("version"))
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


def _check_options(files: Sequence[Path] | None, founders: Sequence[str], threshold: int) -> None:
    has_founders = bool(founders or threshold)
    if has_founders and not files:
        raise LocalError("--founder and --threshold say who signed a roster; give it with --roster")
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
