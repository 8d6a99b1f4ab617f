"""``staddle roster``: who is in the federation."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...files.documents import validate
from ...security.identity import roster as rosters
from ...security.identity.keys import Role, load_entry, load_keys
from ..terminal import printer

RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster file.")]


def new(
    federation: Annotated[str, typer.Option(help="Name of the federation: a-z, 0-9 and '-'.")],
    founder: Annotated[
        list[Path], typer.Option(help="A founder's entry.json; once for each founder.")
    ],
    threshold: Annotated[int, typer.Option(help="How many founders must sign a roster.")],
    out: Annotated[Path, typer.Option(help="The roster file to make.")],
) -> None:
    """Begin a roster with its founders.

    Add the coordinator, the silos and the operators, then have it signed.
    """
    # Do not overwrite a roster that members may be using.
    if out.exists():
        raise LocalError(f"{out}: exists already; to change it, use: staddle roster add, remove")
    roster = rosters.new(federation, [load_entry(path) for path in founder], threshold)
    rosters.save(roster, out)
    _tell(roster)


def add(
    path: RosterFile,
    entry: Annotated[Path, typer.Argument(metavar="ENTRY", help="The new member's entry.json.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a member of the same id these new keys.")
    ] = False,
) -> None:
    """Add a member. The roster gets a new version and loses its signatures."""
    # Not verified here: a roster under construction has no signatures yet.
    roster = rosters.add(rosters.load(path), load_entry(entry), replace=replace)
    rosters.save(roster, path)
    _tell(roster)


def remove(
    path: RosterFile, member: Annotated[str, typer.Argument(metavar="ID", help="Whom to remove.")]
) -> None:
    """Remove a member, for instance because its keys are lost. The roster loses its signatures."""
    roster = rosters.remove(rosters.load(path), member)
    rosters.save(roster, path)
    _tell(roster)


def sign(
    path: RosterFile, keys: Annotated[Path, typer.Option(help="A founder's folder of keys.")]
) -> None:
    """Sign the roster as a founder. Look at it first with 'staddle roster show'."""
    roster = rosters.load(path)
    roster = rosters.sign(roster, load_keys(keys, roster.entries))
    rosters.save(roster, path)
    _tell(roster)


def show(
    path: RosterFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print the roster as JSON.")] = False,
) -> None:
    """Show the members.

    This checks the entries, but not the founders' signatures: 'staddle roster verify' does.
    """
    roster = rosters.load(path)
    # Silos and coordinator compare this digest when they connect.
    if as_json:
        printer.show_json({**roster.model_dump(mode="json"), "digest": rosters.digest(roster)})
        return
    columns = ("id", "role", "organisation", "host run by", "TLS key", "protocol key")
    rows = [
        (e.id, e.role, e.organisation, e.host_operator, e.tls_fingerprint, e.protocol_fingerprint)
        for e in roster.entries
    ]
    printer.show(printer.PrintedTable(columns, rows, width=240))
    _tell(roster)


def verify(
    path: RosterFile,
    federation: Annotated[str, typer.Option(help="The federation that you belong to.")],
    founder: Annotated[
        list[str],
        typer.Option(help="Fingerprint SHA256:… of a founder's protocol key; once for each."),
    ],
    threshold: Annotated[int, typer.Option(help="How many founders must have signed.")],
    minimum_version: Annotated[int, typer.Option(help="The oldest version to accept.")] = 1,
) -> None:
    """Check the roster against facts that you learned independently of this file."""
    document = {
        "federation": federation,
        "threshold": threshold,
        "founders": founder,
        "minimum_version": minimum_version,
    }
    # Pins come from the command line: a roster's own list of founders proves nothing.
    roster = rosters.load(path)
    pins = validate(document, rosters.Pins, "command line")
    rosters.verify(roster, pins, "on the command line")
    _tell(roster)
    printer.show("verified")


def _tell(roster: rosters.Roster) -> None:
    # After each change, show how many signatures are missing.
    founders = roster.having(Role.FOUNDER)
    printer.show(
        f"federation {roster.federation}, version {roster.version}, {len(roster.entries)} members, "
        f"signed by {', '.join(sorted(roster.signatures)) or 'nobody'} "
        f"({roster.threshold} of {len(founders)} founders must sign)",
        f"digest {rosters.digest(roster)}",
    )
