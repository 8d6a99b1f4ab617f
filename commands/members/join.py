"""``staddle join``: keys, configuration and enrolment of a new member, from an invitation."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...errors import PeerError, RefusedError, check_local
from ...files.documents import read_bytes, write_atomic
from ...proto.channel import checked_proxy
from ...security.identity import roster as rosters
from ...security.identity.invitation import Invitation
from ...security.identity.keys import ENTRY_FILE, Keys, Role, create_keys, load_keys
from ...security.identity.roster import Roster
from ...security.identity.roster_in_use import RosterInUse
from ..silo.data import of_file
from ..terminal import printer
from ..terminal.examples import filled, text, write
from . import membership_client

ASK_SECONDS = 2.0
# The table [data] of the example, with the comments around it.
EXAMPLE = re.compile(r"^# The silo's records\.\n\[data\]\n.*?\n\n", re.MULTILINE | re.DOTALL)
FINAL = {"IDENTITY", "MANIFEST"}  # codes that the same entry gets again
JOINING = (
    "Invitation to federation {federation} as {role} {member} of {organisation!r}, by {founder}."
)
ASKED = "fingerprint that the founder reads out by telephone"
OTHER_FOUNDER = (
    "the invitation is of a founder with another fingerprint than the one you typed. Call the"
    " founder, and compare it again, letter by letter. If it is right, the invitation was changed"
    " on its way: do not join with it, and ask for another one"
)
OWN = """\
Your keys are in {folder}; the same command resumes with them, whatever stops it.
Read their fingerprint to the founder, who admits you with it:
  {fingerprint}"""
SILO = """\
Admitted. {roster} has roster version {version}. Next:
{data}
  staddle silo run --config {config}
    runs the agent, under a policy that lets nothing leave yet; keep it running, as a service
  staddle silo accept JOB --config {config}
    once an operator has submitted a job: shows what would leave, asks, and allows that
If something fails: staddle silo check --config {config}"""
SAID = "  look at [data] in {config}, which says how {file} is read"
UNSAID = """\
  edit [data] in {config}, which says where your records are; for a CSV file run the
  same command again, with --data FILE --label COLUMN"""
WAITS = "Handed in. Waits until the founder admits you; you may press Ctrl-C, and resume later."
OPERATOR = """\
Admitted. {roster} has roster version {version}. Next:
  staddle job list --operator {config}"""


def join(
    file: Annotated[
        Path, typer.Argument(metavar="INVITATION", help="The file that the founder sent.")
    ],
    founder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHA256:…",
            help="The founder's fingerprint, as read out by telephone; of several, once for each."
            " With or without SHA256: and spaces; left out, you are asked.",
        ),
    ] = None,
    organisation: Annotated[
        str,
        typer.Option(
            help="The organisation that joins, as people write it (default: as in the invitation)."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the new member (default: its id, in this folder)."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A silo's records, a CSV file; with --label."),
    ] = None,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Its column with the classes.")] = "",
    host_operator: Annotated[
        str, typer.Option(help="The organisation that runs this machine, if it is another one.")
    ] = "",
    proxy: Annotated[
        str, typer.Option(help="HTTP proxy by which this machine dials out, http://host:port.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the founder has admitted you.")
    ] = True,
) -> None:
    """Join a federation: make keys and configuration here, and hand the public half to the founder.

    The keys never leave this machine. Stop it at any time: the same command resumes with the same
    keys. It changes nothing that lies in the folder already but the roster.

    Ask the founder for the fingerprint, by telephone: whoever changed the invitation on its way has
    another one.
    """
    invitation = Invitation.parse(read_bytes(file), file)
    ticket = invitation.ticket
    named = founder or [printer.ask(ASKED)]
    _check_founders(invitation, list(map(rosters.as_read_out, named)))
    organisation = organisation or invitation.organisation
    check_local(bool(organisation), f"{file}: names no organisation; say --organisation NAME")
    folder = out or Path(ticket.member)
    # What is wrong with the records shows before anything is made.
    records = "" if data is None else of_file(data, label, folder)
    printer.show(JOINING.format(organisation=organisation, **ticket.model_dump()))
    keys = _keys(folder / "keys", invitation, organisation, host_operator)
    config = _configured(folder, invitation, proxy, records)
    fingerprint = keys.entry.protocol_fingerprint
    printer.show(*OWN.format(folder=folder / "keys", fingerprint=fingerprint).splitlines())

    # From here on the coordinator is asked, whose certificate the invitation pins.
    for roster in _answers(invitation, keys, proxy):
        if roster is not None:
            said = UNSAID if data is None else SAID
            _keep(folder, roster, invitation)
            _show_next(folder, config, roster, said.format(config=config, file=data))
            return
        if not wait:
            printer.show("Handed in. Once you are admitted, run the same command again.")
            return


def _check_founders(invitation: Invitation, named: Sequence[str]) -> None:
    """LocalError unless founders of these fingerprints vouch for all that the invitation says.

    Whoever had it last may have changed pins and roster, unless these founders signed the roster,
    which has the coordinator's certificate, and no other founders are pinned.
    """
    # The right-looking ones are not shown: whoever is tired would name them instead.
    own = {entry.protocol_fingerprint for entry in invitation.roster.having(Role.FOUNDER)}
    check_local(own.issuperset(named), OTHER_FOUNDER)
    where = "of the invitation"
    rosters.verify_by(invitation.roster, named)
    rosters.verify(invitation.roster, invitation.trust, where)
    unfit = rosters.unfit_pins(invitation.roster, invitation.trust.founders, where)
    check_local(not unfit, unfit)


def _keys(folder: Path, invitation: Invitation, organisation: str, host_operator: str) -> Keys:
    """The member's keys, made once."""
    member, role = invitation.ticket.member, Role(invitation.ticket.role)
    if not (folder / ENTRY_FILE).exists():
        create_keys(folder, member, role, organisation, host_operator)
    keys = load_keys(folder)
    entry = keys.entry
    said = (organisation, host_operator or organisation)
    check_local(
        (entry.id, entry.role) == (member, role)
        and (entry.organisation, entry.host_operator) == said,
        f"{folder}: these keys are of {entry.role} {entry.id!r} of {entry.organisation!r}, on a"
        f" host of {entry.host_operator!r}; give another folder with --out",
    )
    return keys


def _configured(folder: Path, invitation: Invitation, proxy: str, records: str) -> Path:
    """The member's configuration, written once; what was edited since stays.

    ``records`` is a silo's table [data], which takes the place of the example's.
    """
    role = invitation.ticket.role
    config = folder / f"{role}.toml"
    if not config.exists():
        content = filled(role, invitation.trust, invitation.coordinator, proxy)
        write(config, content, 0o600)
    if records:
        before = read_bytes(config).decode()
        write_atomic(config, EXAMPLE.sub(lambda _: f"{records}\n\n", before).encode(), 0o600)
    if role == "silo" and not (folder / "policy.toml").exists():
        write(folder / "policy.toml", text("policy"), 0o644)
    if not (folder / "roster.json").exists():
        rosters.save(invitation.roster, folder / "roster.json")
    return config


def _answers(invitation: Invitation, keys: Keys, proxy: str) -> Iterator[Roster | None]:
    """What the coordinator says, again and again: the roster once a founder has admitted us.

    RefusedError or PeerError where it does not take the entry. Later it may be away for a while, or
    busy.
    """
    with membership_client.guest(invitation, checked_proxy(proxy)) as channel:
        yield membership_client.enrol(channel, invitation, keys.entry)
        # Whoever asks again waits, for days where the founder is away.
        printer.show(WAITS)
        while True:
            time.sleep(ASK_SECONDS)
            try:
                found = membership_client.enrol(channel, invitation, keys.entry)
            except PeerError as error:
                # Other refusals pass: any stranger can bring the coordinator to its limit.
                if isinstance(error, RefusedError) and error.code in FINAL:
                    raise
                printer.show(f"still waiting: {error.why}", err=True)
                continue
            yield found


def _keep(folder: Path, roster: Roster, invitation: Invitation) -> None:
    place = folder / "roster.json"
    in_use = RosterInUse(place, place, invitation.trust, folder / "keys")
    # Run again, it may bring what is here already.
    if in_use.offered(roster):
        in_use.keep(roster)


def _show_next(folder: Path, config: Path, roster: Roster, data: str) -> None:
    said = {"silo.toml": SILO, "operator.toml": OPERATOR}[config.name]
    path = folder / "roster.json"
    lines = said.format(roster=path, version=roster.version, config=config, data=data)
    printer.show(*lines.splitlines())
