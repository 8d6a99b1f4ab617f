"""Who calls, and may they: checked before any method of any service runs.

(1) the connection is TLS 1.3; (2) its certificate's public key is that of a roster entry; (3) that
entry's role fits the service: silos have Federation, operators Operations, founders Membership, all
of them Renewal and the health service, and strangers Enrolment alone;
(4) the member is within its limits;
(5) what it sends are messages. Errors leave here as gRPC status codes with a code of the closed
list, by one table.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from ... import log
from ...errors import LateError, PeerError, RefusedError, StaddleError
from ...proto import federation_pb2 as pb
from ...proto import membership_pb2, secure_pb2
from ...proto.channel import CONTRIBUTE, ENROL, ERROR_METADATA, FETCH, PADDED, SECURE, UPLOAD
from ...proto.convert.group_key import read_contributed
from ...proto.convert.mix import read_padded
from ...proto.convert.secagg_sent import read_contribution
from ...proto.frames import decode, encode
from ...security.identity.certificate import UNREADABLE, subject_key
from ...security.identity.keys import Role, RosterEntry
from ...security.identity.roster import Roster
from .limits import STRANGERS_LOGGED, CallLimits, LoggedStrangers

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its type stubs only

STATUS = {
    "PROTOCOL_VERSION": grpc.StatusCode.FAILED_PRECONDITION,
    "ROSTER": grpc.StatusCode.FAILED_PRECONDITION,
    "IDENTITY": grpc.StatusCode.PERMISSION_DENIED,
    "SESSION": grpc.StatusCode.UNAUTHENTICATED,
    "LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNKNOWN_JOB": grpc.StatusCode.NOT_FOUND,
    "ROUND_CLOSED": grpc.StatusCode.FAILED_PRECONDITION,
    "MANIFEST": grpc.StatusCode.INVALID_ARGUMENT,
    "LENGTH": grpc.StatusCode.INVALID_ARGUMENT,
    "DIGEST": grpc.StatusCode.DATA_LOSS,
    "NOT_FINITE": grpc.StatusCode.INVALID_ARGUMENT,
    "WEIGHT": grpc.StatusCode.INVALID_ARGUMENT,
    "BOUNDS": grpc.StatusCode.INVALID_ARGUMENT,
    "LEDGER": grpc.StatusCode.FAILED_PRECONDITION,
    "SECURE": grpc.StatusCode.FAILED_PRECONDITION,
    "STORAGE": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INTERRUPTED": grpc.StatusCode.ABORTED,
    "STOPPING": grpc.StatusCode.UNAVAILABLE,
    "JOB_SIGNATURE": grpc.StatusCode.PERMISSION_DENIED,
    "JOB_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
}
# characters of a reason, which may quote what was sent: status texts have room for a few KiB
LONGEST_WHY = 1000
# Nobody may call a service that is not listed.
MAY_CALL = {
    "/staddle.v1.Federation": (Role.SILO,),
    "/staddle.v1.Operations": (Role.OPERATOR,),
    "/staddle.v1.Membership": (Role.FOUNDER,),
    "/staddle.v1.Renewal": (Role.SILO, Role.OPERATOR, Role.FOUNDER),
    "/grpc.health.v1.Health": (Role.SILO, Role.OPERATOR),
}
# Strangers may call this service alone: all of them are one caller, whose name no member can have.
ENROLMENT, GUEST = "/staddle.v1.Enrolment", "(guest)"
# what a stranger sends: bytes of its message, and seconds until it is here
MOST_GUEST_BYTES, GUEST_SECONDS = 40_000, 10.0
Context = grpc.aio.ServicerContext[Any, Any]


def codecs(silos: int) -> dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]]:
    """Functions that read and write in place of protobuf's own, by method.

    ``silos``: the most that one message may name.

    Chunks cross without protobuf's copies (proto/frames.py).
    """
    # Fields are counted before protobuf makes anything of a message (proto/field_limits.py).
    return {
        ENROL: (_enrolment, membership_pb2.EnrolReply.SerializeToString),
        FETCH: (pb.FetchRequest.FromString, encode),
        UPLOAD: (decode, pb.Receipt.SerializeToString),
        SECURE: (
            lambda data: read_contribution(data, silos),
            secure_pb2.SecureTaken.SerializeToString,
        ),
        CONTRIBUTE: (
            lambda data: read_contributed(data, silos),
            secure_pb2.SecureTaken.SerializeToString,
        ),
        PADDED: (lambda data: read_padded(data, silos), secure_pb2.SecureTaken.SerializeToString),
    }


def _enrolment(data: bytes) -> membership_pb2.EnrolRequest:
    if len(data) > MOST_GUEST_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {MOST_GUEST_BYTES}")
    return membership_pb2.EnrolRequest.FromString(data)


def check_tls(auth: Mapping[str, Sequence[bytes]], peer: str) -> None:
    """RefusedError IDENTITY for an old TLS version."""
    # gRPC accepts 1.2 by default, and Python has no option against it (proto/channel.py).
    version = b"".join(auth.get("ssl_tls_version", ()))
    if version != b"TLSv1.3":
        raise RefusedError(
            peer, "IDENTITY", f"the connection is {version.decode(errors='replace')}, not TLSv1.3"
        )


def identify(auth: Mapping[str, Sequence[bytes]], roster: Roster, peer: str) -> RosterEntry:
    """The roster entry behind a connection.

    RefusedError IDENTITY for a stranger or an old TLS version.
    """
    # (1) TLS 1.3.
    check_tls(auth, peer)
    # (2) A certificate whose public key stands in the roster.
    certificates = list(auth.get("x509_pem_cert", ()))
    # Exactly one certificate: a second one would not be checked.
    if len(certificates) != 1:
        raise RefusedError(peer, "IDENTITY", "no client certificate; start the silo with its keys")
    try:
        # Identified by public key: no CA has checked the names in a certificate.
        return roster.by_spki(hashlib.sha256(subject_key(certificates[0].decode())).hexdigest())
    except (PeerError, *UNREADABLE) as error:
        raise RefusedError(peer, "IDENTITY", str(error)) from error


def caller(context: Context, roster: Roster) -> RosterEntry:
    """The roster entry behind a call.

    RefusedError IDENTITY for a connection that is not a member's.
    """
    return identify(_auth(context), roster, context.peer())


def _auth(context: Context) -> Mapping[str, Sequence[bytes]]:
    return cast("Mapping[str, Sequence[bytes]]", context.auth_context())


class Guard(grpc.aio.ServerInterceptor):
    """Runs the checks around every handler.

    A server has one for all its services. Limits are per member, not per connection.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._codecs = codecs(len(roster.entries))
        self.limits = CallLimits()
        self._strangers = LoggedStrangers()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the handler of one call.

        Handlers are wrapped as those of streams of requests, which gRPC runs before a message has
        come. One of a single request it runs after it only, and not at all for a call that is
        opened and reset, which would never be counted.
        """
        handler: Any = await continuation(handler_call_details)
        # gRPC itself answers UNIMPLEMENTED to an unknown method.
        if handler is None:
            return None
        method = handler_call_details.method
        reads, writes = self._codecs.get(
            method, (handler.request_deserializer, handler.response_serializer)
        )
        given = _read_stream if handler.request_streaming else _read_one
        if handler.response_streaming:
            guarded = self._guarded(method, given, handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(guarded, _readable(reads), writes)
        guarded = self._guarded(method, given, handler.stream_unary or handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(guarded, _readable(reads), writes)

    @contextmanager
    def _admitted(self, method: str, context: Context) -> Iterator[float | None]:
        """Count a call in while the block runs; gives how long its request may take (seconds)."""
        service, _, rpc = method.rpartition("/")
        member: str = GUEST
        seconds: float | None = GUEST_SECONDS
        if service == ENROLMENT:
            check_tls(_auth(context), context.peer())
        else:
            entry = caller(context, self._roster)
            # (3) The role fits the service.
            # Before the limits, so that a call to the wrong service uses up no tokens.
            if entry.role not in MAY_CALL.get(service, ()):
                raise RefusedError(entry.id, "IDENTITY", f"role {entry.role} may not call {method}")
            member, seconds = entry.id, None
        # (4) Within limits.
        self.limits.enter(member, rpc, time.monotonic())
        try:
            yield seconds
        finally:
            self.limits.leave(member, rpc)

    def _guarded(
        self,
        method: str,
        given: Callable[[Context], Awaitable[Any]],
        behaviour: Callable[[Any, Context], Awaitable[Any]],
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """The handler of one method.

        Those that answer with a stream write to the context, like those of the health service.
        """

        async def guarded(_: Any, context: Context) -> Any:
            try:
                with self._admitted(method, context) as seconds:
                    return await behaviour(await _within(seconds, given(context)), context)
            # Outside of this function gRPC would answer UNKNOWN, with the exception's text.
            except RefusedError as error:
                if self._is_logged(context, method, error):
                    log_refusal(method, error)
                else:
                    log.unwritten("refused", peer=error.peer, method=method, code=error.code)
                await refuse(context, error)
            except StaddleError as error:
                await fail(context, method, error)

        return guarded

    def _is_logged(self, context: Context, method: str, error: RefusedError) -> bool:
        # Who is known by an address alone was no member.
        unknown = error.code == "IDENTITY" and error.peer == context.peer()
        if not unknown and not method.startswith(ENROLMENT):
            return True
        count = self._strangers.one_more(time.monotonic())
        if count == STRANGERS_LOGGED:
            why = "strangers are refused again and again; the others of this minute are not logged"
            log.problem("refused.many", count=count, why=why)
        return count < STRANGERS_LOGGED


async def _within(seconds: float | None, request: Awaitable[Any]) -> Any:
    """A request; RefusedError LIMIT where it takes longer. Members have no time limit (None)."""
    try:
        async with asyncio.timeout(seconds):
            return await request
    except TimeoutError:
        why = f"sent nothing for {GUEST_SECONDS:g} seconds"
        raise RefusedError(GUEST, "LIMIT", why) from None


def _readable(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return the error for bytes that are no message."""

    # gRPC decodes before the guard runs, and would end the call with a status of its own.
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        # Returned, not raised, so that the refusal gets our code and a log line.
        except (DecodeError, ValueError) as error:  # also: text that is no UTF-8
            return error

    return read


def _read(request: Any, context: Context) -> Any:
    """A request; RefusedError MANIFEST where (5) fails."""
    if isinstance(request, DecodeError | ValueError):
        raise RefusedError(
            context.peer(),
            "MANIFEST",
            f"sent bytes that are not a message of this protocol: {request}",
        )
    return request


async def _read_one(context: Context) -> Any:
    """The one request of a call; RefusedError MANIFEST where the call ended without."""
    request = await context.read()
    if request is grpc.aio.EOF:
        raise RefusedError(context.peer(), "MANIFEST", "ended the call before its request arrived")
    return _read(request, context)


async def _read_stream(context: Context) -> AsyncIterator[Any]:
    """The requests of a call, as they come."""
    return _each(context)


async def _each(context: Context) -> AsyncIterator[Any]:
    while (request := await context.read()) is not grpc.aio.EOF:
        yield _read(request, context)


async def fail(context: Context, method: str, error: StaddleError) -> None:
    """End a call with INTERNAL, since the coordinator failed; its log says why."""
    # A text of ours may name paths or values of this machine.
    log.problem("call.failed", method=method, why=str(error))
    await context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; its log says why")


def _told(error: RefusedError) -> str:
    """Why a call is refused; the text may quote input of any length."""
    return error.why if len(error.why) <= LONGEST_WHY else f"{error.why[:LONGEST_WHY]}…"


def log_refusal(method: str, error: RefusedError) -> None:
    """One line on a call that is refused."""
    why = _told(error)
    # Enough others were faster: nothing that an operator has to act on.
    if isinstance(error, LateError):
        log.event("late", peer=error.peer, method=method, why=why)
    else:
        log.problem("refused", peer=error.peer, method=method, code=error.code, why=why)


async def refuse(context: Context, error: RefusedError) -> None:
    """End a call with the status of the error's code.

    The peer reads the code from the metadata; the text is for people.
    """
    # No status can follow where the peer has reset the call, or where a message that it does not
    # read is still on its way. The call is over for us; the peer's own deadline ends it there.
    with suppress(grpc.aio.InternalError):
        await context.abort(
            STATUS[error.code], _told(error), trailing_metadata=((ERROR_METADATA, error.code),)
        )
