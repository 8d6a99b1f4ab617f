"""Rosters that somebody gives to check a ledger with, and the founders who vouch for them."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Rosters whose signatures hold, and the founders' fingerprints by which they were checked."""

    each: tuple[Roster, ...] = ()  # oldest first
    founders: tuple[str, ...] = ()

    @property
    def newest(self) -> Roster | None:
        """The one with the highest version."""
        return self.each[-1] if self.each else None

    @property
    def vouchers(self) -> str:
        """Who vouches for them, in words."""
        return "\n".join(map(self._voucher, self.each))

    def _voucher(self, roster: Roster) -> str:
        version = f"roster version {roster.version}"
        if not self.founders:
            return (
                f"{version}: signed by founders that it names itself; for who vouches for it, give"
                " --founder"
            )
        signers = ", ".join(rosters.signers(roster, self.founders))
        return f"{version}: signed by {signers}, whose keys were named"


def read(
    files: Sequence[Path] | None, founders: Sequence[str] | None, threshold: int | None
) -> Rosters:
    """Read rosters and check their founders' signatures.

    LocalError or PeerError say what is wrong.
    """
    fingerprints, least = tuple(founders or ()), threshold or 0
    _check_options(files, fingerprints, least)
    each = sorted(map(rosters.load, files or ()), key=lambda roster: roster.version)
    federations = sorted({roster.federation for roster in each})
    if len(federations) > 1:
        raise LocalError(
            f"rosters of several federations: {', '.join(federations)}; give those of the ledger's"
        )
    for roster in each:
        rosters.verify_by(roster, fingerprints, least)
    return Rosters(tuple(each), fingerprints)


def _check_options(files: Sequence[Path] | None, founders: Sequence[str], threshold: int) -> None:
    if not files and (founders or threshold):
        raise LocalError("--founder and --threshold say who signed a roster; give it with --roster")
    named = len(set(founders))
    if threshold > named:
        raise LocalError(f"--threshold {threshold}, but {named} founders are named; add --founder")


def read_one(file: Path | None, founders: Sequence[str] | None, threshold: int | None) -> Rosters:
    """Like ``read``, for a command that takes at most one roster."""
    files = [] if file is None else [file]
    return read(files, founders, threshold)
