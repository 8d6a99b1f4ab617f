"""Calls about members to a coordinator: those of a founder, and the one of a stranger."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from ...errors import StaddleError
from ...files.documents import canonical_json, read_toml, validate
from ...proto import membership_pb2 as pb
from ...proto.membership_pb2_grpc import EnrolmentStub, MembershipStub
from ...security.identity import invitation as invitations
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ...security.identity.guest import GUEST_CERTIFICATE, guest_key
from ...security.identity.invitation import Ticket
from ...security.identity.keys import Keys, Role, RosterEntry
from ...security.identity.renewal import Renewal
from ...security.identity.roster import Roster
from ...security.identity.roster_in_use import RosterInUse
from ..federation.operator_client import (
    CALL_SECONDS,
    OperatorConfig,
    current_member,
    dialled,
    explaining,
)

FounderOption = Annotated[
    Path, typer.Option("--founder", metavar="FILE", help="The founder's file, founder.toml.")
]


@dataclass(frozen=True, slots=True)
class FounderFile:
    """A founder's configuration, and what it names."""

    path: Path
    config: OperatorConfig
    in_use: RosterInUse

    @property
    def keys(self) -> Keys:
        """The founder's keys."""
        return self.in_use.keys

    @property
    def roster(self) -> Roster:
        """The newest that the founder has."""
        return self.in_use.present

    @property
    def roster_path(self) -> Path:
        """The founder's copy of it."""
        return self.path.parent / self.config.roster


def read_founded(path: Path) -> FounderFile:
    """A founder's file of a federation whose coordinator has not begun, and is not asked."""
    config = read_toml(path, OperatorConfig)
    place = path.parent / config.roster
    return FounderFile(
        path, config, RosterInUse(place, place, config.trust, path.parent / config.keys)
    )


def read(path: Path, *, alone: bool = False) -> FounderFile:
    """A founder's file; LocalError for keys that are not those of a founder in the roster.

    ``alone`` as in ``current_member``.
    """
    config = read_toml(path, OperatorConfig)
    return FounderFile(path, config, current_member(path, config, Role.FOUNDER, alone=alone))


@dataclass(frozen=True, slots=True)
class WaitingForFounder:
    """What a coordinator has for a founder."""

    roster: Roster  # the newest: the founder's own, or the coordinator's, which is checked
    joining: list[tuple[RosterEntry, Ticket]]  # unchecked
    renewed: dict[str, RosterEntry]  # by id: as in the roster, but for the certificate
    refused: dict[str, str]  # why a renewal is not among these, by what the coordinator calls it
    begun: dict[str, frozenset[str]]  # jobs that run, as the coordinator says, and their silos


class FounderCalls:
    """The calls of the Membership service; RefusedError or PeerError say what came of one."""

    def __init__(self, channel: grpc.Channel, file: FounderFile) -> None:
        stub: Any = MembershipStub
        self._stub = stub(channel)
        self._file = file

    def waiting(self) -> WaitingForFounder:
        """What waits. The coordinator's roster is kept in the founder's file if it is newer."""
        reply = self._call(self._stub.Waiting, pb.WaitingRequest())
        found = [
            (invitations.read_entry(each.entry), invitations.read_ticket(each.ticket))
            for each in reply.entries
        ]
        in_use = self._file.in_use
        in_use.take_over(rosters.parse(reply.roster, "the coordinator's roster"))
        newest = in_use.present
        begun = {job.name: frozenset(job.silos) for job in reply.begun}
        return WaitingForFounder(newest, found, *_renewed(reply.renewals, newest), begun)

    def publish(self, roster: Roster) -> None:
        """Hand in the next version of the roster."""
        self._call(self._stub.Publish, pb.PublishRequest(roster=rosters.encoded(roster)))

    def _call(self, method: Any, request: Any) -> Any:
        file = self._file
        with explaining(file.roster.coordinator.id, file.config.coordinator):
            return method(request, timeout=CALL_SECONDS)


def _renewed(
    renewals: Iterable[pb.WaitingRenewal], roster: Roster
) -> tuple[dict[str, RosterEntry], dict[str, str]]:
    """The entries that renewals make of this roster's, and why others make none.

    A coordinator could show anything, so nothing but certificate and signature is read.
    """
    now = utc_now()
    renewed, refused = {}, {}
    for each in renewals:
        document = {"certificate": each.certificate, "signature": each.signature.hex()}
        try:
            renewal = validate(document, Renewal, f"{each.member}: its renewal")
            renewed[each.member] = renewal.renewed(roster[each.member], now)
        # Nor must one member keep the others from theirs.
        except StaddleError as error:
            refused[each.member] = str(error)
    return renewed, refused


@contextmanager
def connected(file: FounderFile) -> Iterator[FounderCalls]:
    """The founder of a file, connected while the block runs."""
    pair = file.keys.tls_key, file.keys.entry.certificate.encode()
    proxy = file.config.proxy
    with dialled(file.config.coordinator, file.roster.coordinator, *pair, proxy) as channel:
        yield FounderCalls(channel, file)


@contextmanager
def guest(invitation: invitations.Invitation, proxy: str) -> Iterator[grpc.Channel]:
    """A stranger's connection to the coordinator of an invitation, while the block runs."""
    pair = guest_key(), GUEST_CERTIFICATE.encode()
    coordinator = invitation.roster.coordinator
    with dialled(invitation.coordinator, coordinator, *pair, proxy) as channel:
        yield channel


def enrol(
    channel: grpc.Channel, invitation: invitations.Invitation, entry: RosterEntry
) -> Roster | None:
    """Hand in an entry, or ask again; the roster once the entry stands in it, not checked yet.

    RefusedError or PeerError say why it was not taken.
    """
    stub: Any = EnrolmentStub
    request = pb.EnrolRequest(
        ticket=canonical_json(invitation.ticket.model_dump()),
        entry=canonical_json(entry.model_dump(mode="json")),
    )
    with explaining(invitation.roster.coordinator.id, invitation.coordinator):
        reply = stub(channel).Enrol(request, timeout=CALL_SECONDS)
    return rosters.parse(reply.roster, "the coordinator's roster") if reply.roster else None
