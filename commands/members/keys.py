"""``staddle keys``: a member's keys."""

from pathlib import Path
from typing import Annotated

import typer

from ...security.identity.keys import ENTRY_FILE, Role, RosterEntry, create_keys, load_keys
from ..terminal import printer


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
    entry = load_keys(folder).entry
    # The fingerprint is not a field of the entry, but computed from its key.
    if as_json:
        printer.show_json(
            {**entry.model_dump(mode="json"), "protocol_fingerprint": entry.protocol_fingerprint}
        )
    else:
        _show(entry)


def _show(entry: RosterEntry) -> None:
    printer.show(f"id            {entry.id}")
    printer.show(f"role          {entry.role}")
    printer.show(f"organisation  {entry.organisation}")
    printer.show(f"host run by   {entry.host_operator}")
    printer.show(f"TLS key       {entry.tls_fingerprint}")
    printer.show(f"protocol key  {entry.protocol_fingerprint}")
