"""``staddle invite``: a file with which an institution joins."""

import os
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ...errors import check_local
from ...files.documents import write_new
from ...security.identity import invitation as invitations
from ...security.identity.certificate import utc_now
from ...security.identity.invitation import DAY_SECONDS, LONGEST_DAYS
from ...security.identity.keys import ID_PATTERN
from ...security.identity.selection import among
from ..terminal import printer
from . import membership_client
from .membership_client import FounderFile, FounderOption

SENT = """\
{path}: send it to {member}, with this line:
  staddle join {file}{organisation}{records}"""
# What a silo's CSV file needs; with other records, its people leave it out and edit silo.toml.
RECORDS = {"silo": " --data FILE.csv --label COLUMN", "operator": ""}
UNNAMED = "NAME OF YOUR ORGANISATION"
USUAL_DAYS = 14  # until an invitation expires


def invite(
    members: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The new members' ids, such as hospital-a."),
    ],
    founder: FounderOption,
    organisation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What a new member's organisation is called, so that it need not type it; once per"
            " ID, in their order.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write, for one ID (default: ID.invitation).")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Invite somebody who signs jobs, not a silo.")
    ] = False,
    days: Annotated[
        int, typer.Option(min=1, max=LONGEST_DAYS, help="Days until it expires.")
    ] = USUAL_DAYS,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Members may be invited, too, who then get new keys."),
    ] = False,
) -> None:
    """Write the one file that each new member needs; send it to them in any way.

    It holds no secret but a token that is good for one entry. Whoever uses it becomes a member only
    once you have compared fingerprints, by telephone, and run: staddle federation admit.
    """
    file = membership_client.read(founder, alone=True)
    names = organisation or [""] * len(members)
    paths = paths_of(members) if out is None else dict.fromkeys(members, out)
    _check(members, names, file, replace=replace)
    check_new(members, paths)
    check_local(out is None or len(paths) == 1, "--out names one file; leave it out for several")
    write_invitations(file, paths, names, "operator" if operator else "silo", days)


def write_invitations(
    file: FounderFile,
    paths: Mapping[str, Path],
    names: Sequence[str] | None = None,
    role: invitations.InvitedRole = "silo",
    days: int = USUAL_DAYS,
) -> None:
    """Write the invitations, and say what is to be done with them.

    ``paths`` by the new members' ids; ``names`` of their organisations in that order, where each
    may be empty.
    """
    expires = int(utc_now().timestamp()) + days * DAY_SECONDS
    for (member, path), name in zip(paths.items(), names or [""] * len(paths), strict=True):
        _write(file, member, role, expires, name, path)
        # What the file says need not be typed.
        typed = "" if name else f" --organisation {quote(UNNAMED)}"
        words = {"file": path.name, "organisation": typed, "records": RECORDS[role]}
        lines = SENT.format(path=path, member=member, **words)
        printer.show(*lines.splitlines())
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
    # Not in the line to send: whoever changes the invitation on its way would change it as well.
    printer.show(
        "staddle join asks for your fingerprint. Read it out by telephone, do not send it:",
        f"  {file.keys.entry.protocol_fingerprint}",
        f"They read you theirs. Then admit them: staddle federation admit --founder {file.path}",
        f"Good until {until}.",
    )


def paths_of(members: Sequence[str]) -> dict[str, Path]:
    """Where the invitations are written, by id."""
    return {member: Path(f"{member}.invitation") for member in members}


def check_new(members: Sequence[str], paths: Mapping[str, Path]) -> None:
    """LocalError for ids that nobody can have, and for files that are there already."""
    for member in members:
        check_local(
            re.fullmatch(ID_PATTERN, member) is not None,
            f"{member!r}: an id has 1 to 64 small letters a-z, digits and '-', such as"
            f" {_suggested(member)}",
        )
    check_local(len({*members}) == len(members), "an ID stands twice; name each once")
    # Nothing is written where one of them would be missing.
    taken = ", ".join(str(path) for path in paths.values() if path.exists())
    check_local(not taken, f"{taken}: exists already; move it away, or choose another with --out")


def _check(
    members: Sequence[str], names: Sequence[str], file: FounderFile, *, replace: bool
) -> None:
    """LocalError for ids of members, and for names that do not go with the ids."""
    known = ", ".join(among(members, file.roster))
    check_local(
        replace or not known,
        f"{known}: in roster version {file.roster.version} already. If the keys there are lost, say"
        " --replace: once admitted, the new ones take their place. Otherwise choose another id",
    )
    check_local(
        len(names) == len(members),
        f"--organisation was given {len(names)} times for {len(members)} ids; give it once for"
        " each, in their order, or leave it out",
    )


def _suggested(member: str) -> str:
    """An id like a name that is none."""
    plain = unicodedata.normalize("NFKD", member.lower()).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:64] or "hospital-a"


def _write(
    file: FounderFile,
    member: str,
    role: invitations.InvitedRole,
    expires: int,
    organisation: str,
    path: Path,
) -> None:
    ticket = invitations.ticket(
        file.keys, file.roster.federation, member, role, os.urandom(32), expires
    )
    made = invitations.Invitation(
        version=1,
        coordinator=file.config.coordinator,
        trust=file.config.trust,
        roster=file.roster,
        ticket=ticket,
        organisation=organisation,
    )
    write_new(path, made.encoded())
