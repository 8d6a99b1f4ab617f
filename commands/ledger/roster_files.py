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
    def told(self) -> str:
        """Who vouches for them, in words."""
        return "\n".join(
            f"roster version {roster.version}: "
            + (
                f"signed by {', '.join(rosters.signers(roster, self.founders))}, whose keys were"
                " named"
                if self.founders
                else (
                    "signed by founders that it names itself; for who vouches for it, give"
                    " --founder"
                )
            )
            for roster in self.each
        )


def read(
    files: Sequence[Path] | None, founders: Sequence[str] | None, threshold: int | None
) -> Rosters:
    """Read rosters and check their founders' signatures.

    LocalError or PeerError say what is wrong.
    """
    if (founders or threshold) and not files:
        raise LocalError("--founder and --threshold say who signed a roster; give it with --roster")
    if threshold and threshold > len(set(founders or [])):
        raise LocalError(
            f"--threshold {threshold}, but {len(set(founders or []))} founders are named; add"
            " --founder"
        )
    each = sorted((rosters.load(file) for file in files or []), key=lambda roster: roster.version)
    if len(federations := {roster.federation for roster in each}) > 1:
        raise LocalError(
            f"rosters of several federations: {', '.join(sorted(federations))}; give those of the"
            " ledger's"
        )
    for roster in each:
        rosters.verify_by(roster, founders or (), threshold or 0)
    return Rosters(tuple(each), tuple(founders or ()))
