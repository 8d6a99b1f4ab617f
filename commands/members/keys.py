"""``staddle keys``: a member's keys."""

from pathlib import Path
from typing import Annotated

import typer

from ...security.identity.certificate import validity
from ...security.identity.keys import (
    ENTRY_FILE,
    Role,
    RosterEntry,
    create_keys,
    held_keys,
    renew_keys,
)
from ..terminal import printer

MADE = """\
Made in {folder}. A running daemon hands it in within the hour, or once it is started again. Then
the founder runs: staddle federation renew --founder founder.toml
A founder may also get its {entry} by hand."""


def new(
    member: Annotated[
        str,
        typer.Argument(metavar="ID", help="The member's id in the federation, such as hospital-a."),
    ],
    role: Annotated[Role, typer.Option(help="What this member is.")],
    organisation: Annotated[
        str, typer.Option(help="The organisation it belongs to, as people write it.")
    ],
    out: Annotated[
        Path, typer.Option(help="A new folder for the keys; only you will be able to read it.")
    ],
    host_operator: Annotated[
        str, typer.Option(help="The organisation that runs its machine, if it is another one.")
    ] = "",
) -> None:
    """Make the keys of a member on this machine, which they never leave.

    Hand the file entry.json to whoever keeps the roster, and read the fingerprints to them over the
    telephone.
    """
    entry = create_keys(out, member, role, organisation, host_operator)
    # A swapped entry.json would show other fingerprints.
    _show(entry)
    keep = f"Give {out / ENTRY_FILE} to the keeper of the roster; keep the rest to yourself."
    printer.show("", f"Keys made in {out}. {keep}")


def show(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that 'staddle keys new' made.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the public entry as JSON.")
    ] = False,
) -> None:
    """Check a folder of keys, and show its public half."""
    entry, *later = (keys.entry for keys in held_keys(folder))
    # The fingerprint is not a field of the entry, but computed from its key.
    if as_json:
        printer.show_json(
            {**entry.model_dump(mode="json"), "protocol_fingerprint": entry.protocol_fingerprint}
        )
    else:
        _show(entry)
        for each in later:
            _show_tls(each)


def renew(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that 'staddle keys new' made.")
    ],
) -> None:
    """Make another TLS key and certificate now, for instance because the TLS key was stolen.

    In good time daemons and commands do this by themselves. All other keys stay. A running daemon
    hands the certificate in within the hour; it counts once a founder has admitted it: staddle
    federation renew.
    """
    keys = renew_keys(folder)
    _show_tls(keys.entry)
    printer.show("", *MADE.format(folder=keys.folder, entry=ENTRY_FILE).splitlines())


def _show_tls(entry: RosterEntry) -> None:
    end = validity(entry.certificate)[1].date().isoformat()
    printer.show(f"TLS key       {entry.tls_fingerprint}, certificate until {end}")


def _show(entry: RosterEntry) -> None:
    printer.show(f"id            {entry.id}")
    printer.show(f"role          {entry.role}")
    printer.show(f"organisation  {entry.organisation}")
    printer.show(f"host run by   {entry.host_operator}")
    _show_tls(entry)
    printer.show(f"protocol key  {entry.protocol_fingerprint}")
