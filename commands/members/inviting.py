"""``staddle invite``: a file with which an institution joins."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ...files.documents import write_new
from ...security.identity import invitation as invitations
from ...security.identity.certificate import utc_now
from ...security.identity.invitation import DAY_SECONDS, LONGEST_DAYS
from ..terminal import printer
from . import membership_client
from .founding import FounderOption


def invite(
    member: Annotated[
        str, typer.Argument(metavar="ID", help="The new member's id, such as hospital-a.")
    ],
    founder: FounderOption,
    out: Annotated[
        Path | None, typer.Option(help="The file to write (default: ID.invitation).")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Invite somebody who signs jobs, not a silo.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=LONGEST_DAYS, help="Days until it expires.")] = 14,
) -> None:
    """Write the one file that a new member needs; send it to them in any way.

    It holds no secret but a token that is good for one entry. Whoever uses it becomes a member only
    once you have compared fingerprints, by telephone, and run: staddle federation admit.
    """
    file = membership_client.read(founder)
    role: invitations.InvitedRole = "operator" if operator else "silo"
    ticket = invitations.ticket(
        file.keys,
        file.roster.federation,
        member,
        role,
        os.urandom(32),
        int(utc_now().timestamp()) + days * DAY_SECONDS,
    )
    made = invitations.Invitation(
        version=1,
        coordinator=file.config.coordinator,
        trust=file.config.trust,
        roster=file.roster,
        ticket=ticket,
    )
    path = out or Path(f"{member}.invitation")
    write_new(path, made.encoded())
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ticket.expires))
    printer.show(
        f"{path}: send it to {member}, and read your fingerprint to them by telephone. They run:",
        f"  staddle join {path.name} --founder {file.keys.entry.protocol_fingerprint}",
        f"It expires on {until}.",
    )
