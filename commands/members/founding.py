"""``staddle federation``: found a federation, and say who is in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ...errors import LocalError, check_local
from ...proto.channel import checked_address
from ...security.identity import roster as rosters
from ...security.identity.certificate import validity
from ...security.identity.invitation import Ticket
from ...security.identity.keys import Role, RosterEntry, create_keys, load_keys
from ...security.identity.roster import Pins, Roster
from ..terminal import printer
from ..terminal.examples import filled, write
from . import membership_client
from .inviting import check_new, paths_of, write_invitations
from .membership_client import FounderFile, FounderOption

BEGUN = """\
Federation {name} founded in {folder}. Its folders, each for one person or machine:
  founder/      the founder's keys, and founder.toml: keep them off the coordinator's machine
  operator/     the operator's keys, and operator.toml: for jobs
  coordinator/  the coordinator's keys and coordinator.toml: for the machine of {address}
operator/ and coordinator/ hold private keys: move each to its machine, and keep no copy here.
Next:
  staddle coordinator run --config {folder}/coordinator/coordinator.toml"""
NEXT_INVITE = "  staddle invite hospital-a hospital-b --founder {founder}"
RENEWS, CANNOT_RENEW = "renews its certificate", "renews its certificate, but cannot"
RENEWED = "Renews {role} {id}, of {organisation!r}: certificate until {end}."
UNLIKE = (
    "not the fingerprint of the {member!r} that waits. Compare it again by telephone. If it is"
    " right, somebody else has used the invitation: admit nobody, and send another one"
)
Waiting: TypeAlias = tuple[RosterEntry, Ticket]
# What the example of an operator's file says, in a founder's.
FOUNDERS_WORDS = {
    "An operator's access": "A founder's access",
    "The operator's key folder": "The founder's key folder",
    "run staddle job list --operator": "run staddle federation members --founder",
}
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
    invited: Annotated[
        list[str] | None,
        typer.Option(
            "--invite",
            metavar="ID",
            help="A silo to invite, as staddle invite does; once for each. The files are written"
            " here.",
        ),
    ] = None,
) -> None:
    """Found a federation: keys of a founder, an operator and the coordinator, and a signed roster.

    One founder, who may add others to the roster later. Institutions join by invitation.
    """
    checked_address(address)
    ids = invited or []
    check_new(ids, paths_of(ids))
    # No key is overwritten.
    check_local(not folder.is_file(), f"{folder}: a file; choose a new folder")
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
        content = filled(template, trust, address)
        for operators, founders in FOUNDERS_WORDS.items() if role is Role.FOUNDER else ():
            content = content.replace(operators, founders)
        write(folder / role / f"{role}.toml", content, 0o600)
    printer.show(*BEGUN.format(name=name, folder=folder, address=address).splitlines())
    founder = folder / Role.FOUNDER / "founder.toml"
    if ids:
        write_invitations(membership_client.read_founded(founder), paths_of(ids))
    else:
        printer.show(NEXT_INVITE.format(founder=founder))


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
    founder: FounderOption,
    member: Annotated[
        str, typer.Argument(metavar="[ID]", help="Whom to admit; left out, all who wait.")
    ] = "",
    fingerprint: Annotated[
        str,
        typer.Option(
            help="As the member reads it out by telephone, for an ID; left out, you are asked."
        ),
    ] = "",
) -> None:
    """Admit those who have joined: one new roster gets their entries, and every daemon the roster.

    Each member reads out its fingerprint, by telephone, to whom you have called. Whoever
    intercepted the invitation has another one. Type it with or without SHA256: and spaces;
    whoever is not to be admitted yet is left out by pressing Enter.
    """
    check_local(bool(member) or not fingerprint, "--fingerprint is for one ID; name it, too")
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        waiting = calls.waiting()
        roster = waiting.roster
        # Several may wait under one id: whoever used an invitation that was intercepted, too.
        found: dict[str, dict[str, Waiting]] = {}
        for each in waiting.joining:
            found.setdefault(each[0].id, {})[each[0].protocol_fingerprint] = each
        ids = [member] if member else sorted(found)
        for name in ids:
            check_local(
                name in found,
                f"{name!r} does not wait to be admitted; it runs: staddle join INVITATION",
            )
        if fingerprint:
            asked = rosters.as_read_out(fingerprint)
            check_local(asked in found[member], UNLIKE.format(member=member))
            matched = [found[member][asked]]
        else:
            matched = [each for name in ids for each in _compared(found[name])]
        for entry, ticket in matched:
            # The coordinator could pass on what the member signed for it alone: an operator's entry
            # from somebody who was invited as a silo.
            ticket.check_signed(roster)
            ticket.check_entry(entry)
            printer.show(ADMITS.format_map(entry.model_dump()))
        if not matched:
            printer.show("nobody was admitted" if ids else "nobody waits to be admitted")
            return
        # New keys of a member take the place of the old ones.
        _publish(rosters.add(roster, *(entry for entry, _ in matched), replace=True), file, calls)


def _compared(waiting: Mapping[str, Waiting]) -> Iterator[Waiting]:
    """The entry and ticket under one id whose fingerprint a person types; none for an empty answer.

    ``waiting`` by fingerprint, which is not shown: a tired person would read it back.
    """
    for entry, _ in waiting.values():
        printer.show(f"{entry.id} waits: {entry.role} of {entry.organisation!r}. Call them.")
    while answer := printer.ask(f"  fingerprint that {entry.id} reads out (Enter: not now)"):
        if found := waiting.get(rosters.as_read_out(answer)):
            yield found
            return
        printer.show(f"  {UNLIKE.format(member=entry.id)}")


def remove(
    member: Annotated[str, typer.Argument(metavar="ID", help="Whom to remove.")],
    founder: FounderOption,
    now: Annotated[bool, typer.Option("--now", help="Ask nothing, whatever runs.")] = False,
) -> None:
    """Remove a member, for instance because its keys are lost: no daemon admits it any more.

    It asks first where a job that runs would end by it.
    """
    file = membership_client.read(founder)
    with membership_client.connected(file) as calls:
        found = calls.waiting()
        following = rosters.remove(found.roster, member)
        ending = ", ".join(sorted(job for job, silos in found.begun.items() if member in silos))
        if ending and not now:
            printer.confirm(
                f"these jobs run with {member!r}, and end without it: {ending}. Remove it now?"
            )
        _publish(following, file, calls)


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
    file.in_use.keep(roster)
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
    file.in_use.keep(signed)
    _tell(signed, file)


def _tell(roster: Roster, file: FounderFile) -> None:
    printer.show(
        f"federation {roster.federation}, version {roster.version}, {len(roster.entries)} members,"
        f" signed by {', '.join(sorted(roster.signatures))}; kept in {file.roster_path}"
    )
