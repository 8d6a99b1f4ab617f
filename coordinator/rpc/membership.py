"""The services about members: how they hand in entries and certificates, and founders rosters.

The coordinator decides nothing here. A founder's signature lets an entry wait, and the founders'
signatures make a roster; every silo checks these against its own pins. What the coordinator
refuses here it would only pass on to a founder, who checks it again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from ... import log
from ...errors import LocalError, PeerError, RefusedError
from ...files.documents import canonical_json, validate
from ...proto import membership_pb2 as pb
from ...security.identity import invitation
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ...security.identity.renewal import Renewal, own_renewal
from ...security.identity.roster_in_use import RosterInUse
from ..daemon import Daemon
from ..enrolment import Enrolments, Renewals
from .guard import GUEST, Context, caller

MOST_RENEWALS = 200  # in one answer, whose size is bounded; the others come once these are admitted


@contextmanager
def _own_files(founder: str) -> Iterator[None]:
    """Errors of this machine's files, whose paths are for its own log, not for a founder."""
    try:
        yield
    except LocalError as error:
        log.problem("roster.unpublished", founder=founder, why=str(error))
        why = "the coordinator cannot read its keys or keep the roster; its log says why"
        raise RefusedError(founder, "ROSTER", why) from error


class MembershipService:
    """The calls of membership.proto.

    The guard lets founders into Membership, members into Renewal, and anybody into Enrolment.
    """

    def __init__(
        self,
        daemon: Daemon,
        in_use: RosterInUse,
        enrolments: Enrolments,
        renewals: Renewals,
        renewed: asyncio.Event,
    ) -> None:
        """``renewed`` is set once ``in_use`` is another roster than the daemon's."""
        self._daemon = daemon
        self._in_use = in_use
        self._enrolments = enrolments
        self._renewals = renewals
        self._renewed = renewed
        self._publishing = asyncio.Lock()

    async def Enrol(self, request: pb.EnrolRequest, context: Context) -> pb.EnrolReply:  # noqa: N802 gRPC's name
        """Keep the entry of an invited stranger until a founder admits it.

        The reply has the roster once the entry stands in it. RefusedError MANIFEST or IDENTITY.
        """
        try:
            ticket = invitation.read_ticket(request.ticket)
            entry = invitation.read_entry(request.entry)
        except LocalError as error:
            raise RefusedError(GUEST, "MANIFEST", str(error)) from error
        now = utc_now().timestamp()
        try:
            found = await asyncio.to_thread(self._enrolments.take, ticket, entry, now)
        except PeerError as error:
            raise RefusedError(GUEST, "IDENTITY", str(error)) from error
        # Once: whoever waits asks again and again.
        if found == "new":
            log.event("enrolment.waits", member=entry.id, key=entry.protocol_fingerprint)
        roster = rosters.encoded(self._daemon.roster) if found == "member" else b""
        return pb.EnrolReply(roster=roster)

    async def Waiting(self, request: pb.WaitingRequest, context: Context) -> pb.WaitingReply:  # noqa: N802
        """Return the entries and renewals that wait, the jobs that run, and the present roster."""
        entries = await asyncio.to_thread(lambda: list(self._enrolments.waiting()))
        renewals = await asyncio.to_thread(self._waiting_renewals)
        return pb.WaitingReply(
            entries=[
                pb.WaitingEntry(
                    entry=canonical_json(each.entry.model_dump(mode="json")),
                    ticket=canonical_json(each.ticket.model_dump()),
                )
                for each in entries
            ],
            renewals=[
                pb.WaitingRenewal(
                    member=member,
                    certificate=each.certificate,
                    signature=bytes.fromhex(each.signature),
                )
                for member, each in renewals
            ],
            begun=[
                pb.BegunJob(name=run.job.name, silos=run.job.silos)
                for run in self._daemon.runs
                # A stopped one could resume, but not without one of its silos.
                if run.state.runs or run.state.stage == "stopped"
            ],
            roster=rosters.encoded(self._daemon.roster),
        )

    def _waiting_renewals(self) -> list[tuple[str, Renewal]]:
        """The renewals of members, and this coordinator's own.

        Nobody but a founder can do anything with it, so it is made when one asks.
        """
        own, config = self._daemon.roster.coordinator, self._daemon.config
        try:
            renewal = own_renewal(config.keys, own, utc_now(), config.directory)
            if renewal is not None:
                self._take(own.id, renewal)
        # The others' wait for no disk of ours.
        except (LocalError, PeerError) as error:
            log.problem("renewal.failed", member=own.id, why=str(error))
        return list(islice(self._renewals.waiting(), MOST_RENEWALS))

    def _take(self, member: str, renewal: Renewal) -> None:
        # Once: it is handed in again and again until a founder has admitted it.
        if self._renewals.take(member, renewal, utc_now()):
            log.event("renewal.waits", member=member)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:  # noqa: N802
        """Keep the caller's new certificate until a founder admits it.

        RefusedError MANIFEST for one that cannot take the place of its present one.
        """
        member = caller(context, self._daemon.roster).id
        document = {"certificate": request.certificate, "signature": request.signature.hex()}
        try:
            renewal = validate(document, Renewal, "the renewal")
        except LocalError as error:
            raise RefusedError(member, "MANIFEST", str(error)) from error
        try:
            await asyncio.to_thread(self._take, member, renewal)
        except PeerError as error:
            raise RefusedError(member, "MANIFEST", error.why) from error
        return pb.RenewReply()

    async def Newest(self, request: pb.NewestRequest, context: Context) -> pb.NewestReply:  # noqa: N802
        """Return the present roster."""
        return pb.NewestReply(roster=rosters.encoded(self._daemon.roster))

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishReply:  # noqa: N802
        """Continue under the next version of the roster, which is on the disk when this returns.

        RefusedError ROSTER for one that this coordinator's pins do not vouch for.
        """
        founder = caller(context, self._daemon.roster).id
        try:
            # One at a time: of two founders at once the second must find the first one's roster.
            async with self._publishing:
                await self._publish(request.roster, founder)
        except RefusedError:
            raise
        except (LocalError, PeerError) as error:
            raise RefusedError(founder, "ROSTER", str(error)) from error
        return pb.PublishReply()

    async def _publish(self, data: bytes, founder: str) -> None:
        # In a thread: thousands of entries take seconds, and one founder's key may be stolen.
        roster = await asyncio.to_thread(rosters.parse, data, "the published roster")
        # The daemon with the roster before may still be about to end.
        in_use = self._in_use
        with _own_files(founder):
            in_use.held(roster)
        # The answer to the same roster may have been lost.
        if not await asyncio.to_thread(in_use.offered, roster):
            return
        # Not in a thread: a caller that hangs up must not leave a saved roster unused.
        with _own_files(founder):
            in_use.keep(roster)
        log.event("roster.published", version=roster.version, founder=founder)
        self._renewed.set()
