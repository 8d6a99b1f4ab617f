"""``staddle federation``: found a federation, and say who is in it."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...proto.channel import checked_address
from ...security.identity import roster as rosters
from ...security.identity.certificate import validity
from ...security.identity.keys import Role, RosterEntry, create_keys, load_keys
from ...security.identity.roster import Pins, Roster
from ..terminal import printer
from ..terminal.examples import filled, write
from . import membership_client
from .membership_client import FounderFile

FounderOption = Annotated[
    Path, typer.Option("--founder", metavar="FILE", help="The founder's file, founder.toml.")
]
BEGUN = """\
Federation {name} founded in {folder}. Its folders, each for one person or machine:
  founder/      the founder's keys, and founder.toml: keep them off the coordinator's machine
  operator/     the operator's keys, and operator.toml: for jobs
  coordinator/  the coordinator's keys and coordinator.toml: for the machine of {address}
Next:
  staddle coordinator run --config {folder}/coordinator/coordinator.toml
  staddle invite hospital-a --founder {folder}/founder/founder.toml"""
RENEWS, CANNOT_RENEW = "renews its certificate", "renews its certificate, but cannot"
RENEWED = "Renews {role} {id}, of {organisation!r}: certificate until {end}."
ADMITS = "Admits {role} {id}, of {organisation!r}, on a host of {host_operator!r}."


def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    name: Annotated[str, typer.Option(help="Name of the federation: a-z, 0-9 and '-'.")],
    address: Annotated[
        str, typer.Option(help="Where silos reach the coordinator, host:port; nothing dials out.")
    ],
    organisation: Annotated[
        str, typer.Option(help="Who founds it, and runs the coordinator, as people write it.")
    ],
) -> None:
    """Found a federation: keys of a founder, an operator and the coordinator, and a signed roster.

    One founder, who may add others to the roster later. Institutions join by invitation.
    """
    checked_address(address)
    # No key is overwritten.
    if folder.exists() and any(folder.iterdir()):
        raise LocalError(f"{folder}: not empty; choose a new folder")
    roles = (Role.FOUNDER, Role.OPERATOR, Role.COORDINATOR)
    entries = {
        role: create_keys(folder / role / "keys", str(role), role, organisation) for role in roles
    }
    roster = rosters.new(name, [entries[Role.FOUNDER]], 1)
    for role in roles[1:]:
        roster = rosters.add(roster, entries[role])
    roster = rosters.sign(roster, load_keys(folder / Role.FOUNDER / "keys"))

    # Each folder is whole, so that it can be carried to where it belongs.
    trust = Pins(
        federation=name, threshold=1, founders=(entries[Role.FOUNDER].protocol_fingerprint,)
    )
    files = {Role.FOUNDER: "operator", Role.OPERATOR: "operator", Role.COORDINATOR: "coordinator"}
    for role, template in files.items():
        rosters.save(roster, folder / role / "roster.json")
        write(folder / role / f"{role}.toml", filled(template, trust, address), 0o600)
    printer.show(*BEGUN.format(name=name, folder=folder, address=address).splitlines())


def members(founder: FounderOption) -> None:
    """Show the members, and who waits to be admitted; keep the newest roster in the founder's file.

    The roster is the coordinator's, checked against the founder's pins.
    """
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        found = calls.waiting()
    columns = ("id", "role", "organisation", "host run by", "protocol key", "certificate ends", "")
    said = dict.fromkeys(found.renewed, RENEWS) | dict.fromkeys(found.refused, CANNOT_RENEW)
    rows = [(*_described(entry), said.get(entry.id, "member")) for entry in found.roster.entries]
    rows += [
        (*_described(entry), f"waits, invited by {ticket.founder}")
        for entry, ticket in found.joining
    ]
    printer.show(printer.PrintedTable(columns, rows, width=260))
    _tell(found.roster, file)


def _described(entry: RosterEntry) -> tuple[str, ...]:
    shown = entry.id, str(entry.role), entry.organisation, entry.host_operator
    return *shown, entry.protocol_fingerprint, _end(entry)


def _end(entry: RosterEntry) -> str:
    return validity(entry.certificate)[1].date().isoformat()


def admit(
    member: Annotated[str, typer.Argument(metavar="ID", help="Whom to admit.")],
    founder: FounderOption,
    fingerprint: Annotated[
        str, typer.Option(help="SHA256:… as the member reads it out by telephone.")
    ],
) -> None:
    """Admit somebody who has joined: the roster gets its entry, and every daemon the roster.

    The member reads out its fingerprint, by telephone, to whom you have called. Whoever intercepted
    the invitation has another one.
    """
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        waiting = calls.waiting()
        roster = waiting.roster
        joining = (each for each in waiting.joining if each[0].id == member)
        found = {each[0].protocol_fingerprint: each for each in joining}
        if not found:
            raise LocalError(
                f"{member!r} does not wait to be admitted; it runs: staddle join INVITATION"
            )
        if fingerprint not in found:
            raise LocalError(
                f"{fingerprint}: not the fingerprint of the {member!r} that waits. Compare it again"
                " by telephone. If it is right, somebody else has used the invitation: admit"
                " nobody, and send another one"
            )
        # The coordinator could pass on what the member signed for it alone: an operator's entry
        # from somebody who was invited as a silo.
        entry, ticket = found[fingerprint]
        ticket.check_signed(roster)
        ticket.check_entry(entry)
        printer.show(ADMITS.format_map(entry.model_dump()))
        # New keys of a member take the place of the old ones.
        _publish(rosters.add(roster, entry, replace=True), file, calls)


def remove(
    member: Annotated[str, typer.Argument(metavar="ID", help="Whom to remove.")],
    founder: FounderOption,
) -> None:
    """Remove a member, for instance because its keys are lost: every daemon lets it in no more."""
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        _publish(rosters.remove(calls.waiting().roster, member), file, calls)


def renew(founder: FounderOption) -> None:
    """Admit all new certificates that wait, for instance each night; says nothing where none does.

    Members make them in good time by themselves. Nobody is telephoned: each is signed with the key
    that your own roster has for its member, and changes nothing else. Exit code 1 if one cannot be
    admitted; the others are.
    """
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        found = calls.waiting()
        for entry in found.renewed.values():
            printer.show(RENEWED.format(**entry.model_dump(), end=_end(entry)))
        if found.renewed:
            _publish(rosters.renew(found.roster, found.renewed), file, calls)
    for why in found.refused.values():
        printer.show(f"not admitted: {why}", err=True)
    if found.refused:
        raise typer.Exit(1)


def publish(
    founder: FounderOption,
    path: Annotated[
        Path, typer.Option("--roster", help="A roster that enough founders have signed.")
    ],
) -> None:
    """Hand a roster to the coordinator, from which every daemon takes it over without a restart."""
    file, roster = membership_client.read(founder), rosters.load(path)
    rosters.verify(roster, file.config.trust)
    with membership_client.connected(file) as calls:
        calls.publish(roster)
    rosters.save(roster, file.roster_path)
    _tell(roster, file)


def _publish(roster: Roster, file: FounderFile, calls: membership_client.FounderCalls) -> None:
    """Sign a roster and hand it in, or say who has to sign it first."""
    # A founder renews its own certificate, too.
    signed = rosters.sign(roster, load_keys(file.keys.home, roster.entries))
    if len(signed.signatures) < signed.threshold:
        path = file.roster_path.with_name(f"roster-{signed.version}.json")
        rosters.save(signed, path)
        printer.show(
            f"{path}: signed by {file.keys.entry.id}, and {signed.threshold} founders must sign."
            " The others run: staddle roster sign; then staddle federation publish --roster"
        )
        return
    calls.publish(signed)
    rosters.save(signed, file.roster_path)
    _tell(signed, file)


def _tell(roster: Roster, file: FounderFile) -> None:
    printer.show(
        f"federation {roster.federation}, version {roster.version}, {len(roster.entries)} members,"
        f" signed by {', '.join(sorted(roster.signatures))}; kept in {file.roster_path}"
    )
