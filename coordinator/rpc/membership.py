"""The Enrolment and Membership services: how a stranger hands in an entry, and a founder a roster.

The coordinator decides nothing here. A founder's signature lets an entry wait, and the founders'
signatures make a roster; every silo checks these against its own pins.
"""

import asyncio

from ... import log
from ...errors import LocalError, PeerError, RefusedError
from ...files.documents import canonical_json
from ...proto import membership_pb2 as pb
from ...security.identity import invitation
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ..daemon import Daemon
from ..enrolment import Enrolments
from .guard import GUEST, Context, caller


class MembershipService:
    """The calls of membership.proto.

    The guard lets founders into Membership, and anybody into Enrolment.
    """

    def __init__(self, daemon: Daemon, enrolments: Enrolments, renewed: asyncio.Event) -> None:
        """``renewed`` is set once another roster lies on the disk."""
        self._daemon = daemon
        self._enrolments = enrolments
        self._renewed = renewed
        # On the disk already, while the daemon with the roster before still ends.
        self._newest = daemon.roster
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
        """Return the entries that wait, and the present roster."""
        entries = await asyncio.to_thread(lambda: list(self._enrolments.waiting()))
        return pb.WaitingReply(
            entries=[
                pb.WaitingEntry(
                    entry=canonical_json(each.entry.model_dump(mode="json")),
                    ticket=canonical_json(each.ticket.model_dump()),
                )
                for each in entries
            ],
            roster=rosters.encoded(self._daemon.roster),
        )

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishReply:  # noqa: N802
        """Continue under the next version of the roster, which is on the disk when this returns.

        RefusedError ROSTER for one that this coordinator's pins do not vouch for.
        """
        founder = caller(context, self._daemon.roster).id
        try:
            # One at a time: of two founders at once the second must find the first one's roster.
            async with self._publishing:
                await self._publish(request.roster, founder)
        except (LocalError, PeerError) as error:
            raise RefusedError(founder, "ROSTER", str(error)) from error
        return pb.PublishReply()

    async def _publish(self, data: bytes, founder: str) -> None:
        # In a thread: thousands of entries take seconds, and one founder's key may be stolen.
        roster = await asyncio.to_thread(rosters.parse, data, "the published roster")
        newest, config = self._newest, self._daemon.config
        # The answer to the same roster may have been lost.
        if roster == newest:
            return
        await asyncio.to_thread(
            rosters.check_next, roster, newest, config.trust, newest.coordinator
        )
        # Not in a thread: a caller that hangs up must not leave a saved roster unused.
        rosters.save(roster, config.roster)
        self._newest = roster
        log.event("roster.published", version=roster.version, founder=founder)
        self._renewed.set()
