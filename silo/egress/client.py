"""The silo's end of the channel: one method per call, and errors in our own words.

Only session.py makes a client, and only session.py, gate.py and protocol.py send through it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, cast

import grpc

from ...errors import AbsentError, PeerError, RefusedError, UnreachableError
from ...proto import federation_pb2 as pb
from ...proto import membership_pb2, secure_pb2
from ...proto.channel import (
    ERROR_METADATA,
    FETCH,
    GROUP_KEY,
    SECURE_NEXT,
    UPLOAD,
    absence,
    client_options,
    require_tls13,
    transfer_seconds,
)
from ...proto.convert import group_key
from ...proto.convert.secagg_received import read_delivery
from ...proto.federation_pb2_grpc import FederationStub
from ...proto.frames import Frame, decode, encode
from ...proto.membership_pb2_grpc import RenewalStub
from ...security.identity.certificate import server_name
from ...security.identity.keys import RosterEntry
from .call_end import CallEnd, Ended

CALL_SECONDS = 20.0
RECONNECT_MS = (500, 10_000)  # first and longest wait between two attempts of the channel
HOLD_GRACE_SECONDS = 15.0  # on top of the coordinator's hold time


class TurnedAwayError(RefusedError):
    """The coordinator refused a call of ours, with a code."""

    @property
    def passes(self) -> bool:
        """Whether a later greeting helps, or explains; then the round of the call may resume."""
        return self.code in ("SESSION", "STOPPING", "LIMIT", "STORAGE", "INTERRUPTED", "LEDGER")


class Client:
    """One channel to one coordinator, whose certificate is pinned by the roster.

    Each call raises UnreachableError or TurnedAwayError.
    """

    def __init__(
        self,
        address: str,
        coordinator: RosterEntry,
        pairs: Callable[[], list[tuple[bytes, bytes]]],
        hint: Callable[[], str],
        silos: int,
        proxy: str = "",
    ) -> None:
        """Open a channel to ``address`` on which ``coordinator`` alone can answer.

        ``pairs`` are ours (``tls_pairs``), of which the first is shown first. ``hint`` says what a
        handshake that fails now may fail by: the clocks, our key and roster. Messages that name
        more than ``silos`` silos are rejected. ``proxy`` as in ``client_options``.
        """
        require_tls13()
        self._peer = coordinator.id
        self._address = address
        self._hint = hint
        self._pairs = pairs
        self._unanswered = 0  # greetings
        self._open = partial(self._opened, coordinator.certificate, silos, proxy)
        self._open(*pairs()[0])

    def _opened(self, root: str, silos: int, proxy: str, key: bytes, own: bytes) -> None:
        self._channel = grpc.aio.secure_channel(
            self._address,
            grpc.ssl_channel_credentials(root.encode(), key, own),
            options=[
                *client_options(server_name(root), proxy),
                # The least backoff stays gRPC's 20 s: it limits one attempt, of three round trips.
                ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
                ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
            ],
        )
        self._stub = cast("Any", FederationStub)(self._channel)
        self._renewal = cast("Any", RenewalStub)(self._channel)

        # These have codecs of our own: the stub's copy each chunk twice, and parse a message whole
        # before its number of fields is bounded.
        self._fetch: Any = self._channel.unary_stream(
            FETCH, pb.FetchRequest.SerializeToString, decode
        )
        self._secure_next: Any = self._channel.unary_unary(
            SECURE_NEXT,
            secure_pb2.SecurePoll.SerializeToString,
            lambda data: read_delivery(data, silos),
        )
        self._group_key: Any = self._channel.unary_unary(
            GROUP_KEY,
            secure_pb2.KeyPoll.SerializeToString,
            lambda data: group_key.read_reply(data, silos),
        )
        self._upload: Any = self._channel.stream_unary(UPLOAD, encode, pb.Receipt.FromString)

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Open a session.

        If nobody answers, the next greeting shows another of our certificates, if there is one: the
        coordinator may have the next roster already, and refuses the one of ours.
        """
        try:
            return cast("pb.HelloReply", await self._unary(self._stub.Hello, request, CALL_SECONDS))
        except UnreachableError:
            self._unanswered += 1
            pairs = await asyncio.to_thread(self._pairs)
            if len(pairs) > 1:
                await self._channel.close()
                self._open(*pairs[self._unanswered % len(pairs)])
            raise

    async def renew(self, request: membership_pb2.RenewRequest) -> None:
        """Hand in a new certificate of ours."""
        await self._unary(self._renewal.Renew, request, CALL_SECONDS)

    async def poll(self, request: pb.PollRequest, hold: float) -> pb.Task:
        """Wait for a task, at most about ``hold`` seconds."""
        return cast(
            "pb.Task", await self._unary(self._stub.Poll, request, hold + HOLD_GRACE_SECONDS)
        )

    async def beat(self, request: pb.BeatRequest) -> pb.BeatReply:
        """Say that we are alive."""
        return cast("pb.BeatReply", await self._unary(self._stub.Beat, request, CALL_SECONDS))

    async def answer(self, request: pb.AnswerRequest) -> pb.AnswerReply:
        """Answer a task."""
        return cast("pb.AnswerReply", await self._unary(self._stub.Answer, request, CALL_SECONDS))

    async def standing(self, request: pb.StandingRequest) -> pb.StandingReply:
        """Ask what became of an upload."""
        return cast(
            "pb.StandingReply", await self._unary(self._stub.Standing, request, CALL_SECONDS)
        )

    async def attest(self, attestation: pb.Attestation) -> None:
        """Upload what we hold of another silo's ledger."""
        await self._unary(self._stub.Attest, attestation, CALL_SECONDS)

    async def secure(self, message: secure_pb2.SecureUpload) -> None:
        """Upload a message of a secure sum."""
        await self._unary(self._stub.Secure, message, CALL_SECONDS)

    async def secure_next(
        self, question: secure_pb2.SecurePoll, hold: float
    ) -> secure_pb2.SecureDelivery:
        """Wait for the next message of a round's secure sums, at most about ``hold`` seconds."""
        return cast(
            "secure_pb2.SecureDelivery",
            await self._unary(self._secure_next, question, hold + HOLD_GRACE_SECONDS),
        )

    async def contribute(self, message: secure_pb2.Contributed) -> None:
        """Upload this silo's contribution to the key of a job."""
        await self._unary(self._stub.Contribute, message, CALL_SECONDS)

    async def group_key(self, question: secure_pb2.KeyPoll) -> secure_pb2.KeyReply:
        """Fetch what the other silos uploaded for the key of a job."""
        return cast(
            "secure_pb2.KeyReply", await self._unary(self._group_key, question, CALL_SECONDS)
        )

    async def padded(self, word: secure_pb2.PaddedWordUpload) -> None:
        """Upload the signed word on a padded upload."""
        await self._unary(self._stub.Padded, word, CALL_SECONDS)

    async def fetch(self, request: pb.FetchRequest, largest: int) -> AsyncIterator[Frame]:
        """Download the frames of a delivery of at most ``largest`` bytes."""
        try:
            async for frame in self._fetch(request, timeout=transfer_seconds(largest)):
                yield self._present(frame)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None

    async def weights(self, request: pb.WeightsRequest, size: int) -> AsyncIterator[bytes]:
        """Download the rest of a job's file of weights of ``size`` bytes, piece by piece."""
        try:
            async for piece in self._stub.Weights(request, timeout=transfer_seconds(size)):
                yield self._present(piece).data
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None

    async def upload(self, frames: AsyncIterator[Frame], size: int) -> pb.Receipt:
        """Upload frames of ``size`` message bytes; returns the receipt.

        An error raised by ``frames`` ends the call and is raised here.
        """
        call = self._upload(timeout=transfer_seconds(size))
        end = CallEnd(call)
        try:
            async for frame in frames:
                await call.write(frame)  # waits while the coordinator is busy: back-pressure
            await call.done_writing()
            return cast("pb.Receipt", self._present(await call))
        # also where the call ended before all was written
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            raise self._ended(await end.told()) from None
        finally:
            # If ``frames`` raised, the call is still open; cancelling an ended call does nothing.
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _unary(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return self._present(await method(request, timeout=seconds))
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None

    def _present(self, message: Any) -> Any:
        """The message; gRPC returns None for bytes that are not one, or for no bytes at all."""
        if message is None:
            raise UnreachableError(
                self._peer, "answered with bytes that are not a message of this protocol"
            )
        return message

    def _explained(self, error: grpc.aio.AioRpcError) -> PeerError:
        code = str(dict(error.trailing_metadata() or ()).get(ERROR_METADATA, ""))
        return self._ended((error.code(), error.details() or "", code))

    def _ended(self, status: Ended) -> PeerError:
        """A refusal keeps its code; anything else means that the coordinator cannot be reached."""
        grpc_code, details, code = status
        if code in {name.removeprefix("ERROR_CODE_") for name in pb.ErrorCode.keys()}:  # noqa: SIM118 an enum wrapper
            return TurnedAwayError(self._peer, code, details)
        if why := absence(details, self._address):
            return AbsentError(self._peer, f"{why}; trying again")
        # gRPC's text is long: of it the end, last.
        why = f"no answer from {self._address}; trying again"
        if grpc_code is grpc.StatusCode.UNAVAILABLE:
            why += f". If it runs, the handshake may have failed: {self._hint()}"
        return UnreachableError(
            self._peer, f"{why} ({grpc_code.name}: {details.rpartition(': ')[2][:100]})"
        )
