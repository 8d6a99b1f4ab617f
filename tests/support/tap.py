"""A tap between silos and their coordinator: it holds the keys of both sides and knows nothing of
what it passes on.

Every call, of whatever method, goes through one handler that takes bytes and gives bytes; messages
and metadata of both directions are kept by silo. One upload may be cut midway.
"""

import asyncio
import contextlib
import hashlib
import threading

import grpc
from support.explained import UPLOAD, Call

from staddle.proto.channel import OPTIONS, SERVER_OPTIONS
from staddle.security.identity.certificate import subject_key

SECONDS = 30
ENDED = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)  # by the other end


class Tap(grpc.GenericRpcHandler):
    """Runs in a thread of its own while its block runs; ``address`` is where silos dial."""

    def __init__(self, target, roster, coordinator, silos):
        """``coordinator`` are its keys, ``silos`` the keys of the silos by name."""
        self.address = ""
        self.calls = {silo: [] for silo in silos}
        self._target, self._roster = target, roster
        self._coordinator, self._silos = coordinator, silos
        self._cuts = {}  # silo → the frame at which its next upload is cut, and what is waited for
        self._stalled = []  # calls to the coordinator whose silo's side was cut
        self._open = {silo: [] for silo in silos}
        self._changed = threading.Condition()
        self._channels = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="tap")

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(SECONDS)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SECONDS)

    # What a test asks for.

    def cut_next_upload(self, silo, frames, arrived=lambda: True):
        """End the silo's next upload at the frame of this number, which is not passed on.

        Not before ``arrived`` says that the coordinator has what was: gRPC may hold it back.
        """
        self._cuts[silo] = frames, arrived

    def wait_for(self, condition):
        """Until ``condition()`` holds; it is asked again at every message."""
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS * 4)

    def open(self, silo):
        """Methods of the calls that run."""
        return [call.method for call in self._open[silo]]

    # What passes.

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self._passing(details.method))

    def _passing(self, method):
        async def passing(requests, context):
            certificate = context.auth_context()["x509_pem_cert"][0].decode()
            silo = self._roster.by_spki(hashlib.sha256(subject_key(certificate)).hexdigest()).id
            call = Call(method, tuple(context.invocation_metadata()), cut=True)
            self.calls[silo].append(call)
            self._open[silo].append(call)
            try:
                await self._pass(silo, call, requests, context)
                call.cut = False
            finally:
                self._open[silo].remove(call)
                self._tell()

        return passing

    async def _pass(self, silo, call, requests, context):
        onward = self._channels[silo].stream_stream(call.method)(timeout=context.time_remaining())
        down = asyncio.create_task(self._down(call, onward, context))
        try:
            with contextlib.suppress(*ENDED):  # its status is passed on below
                async for data in requests:
                    call.sent.append(data)
                    self._tell()
                    frames, arrived = self._cuts.get(silo, (0, None))
                    if call.method == UPLOAD and len(call.sent) == frames:
                        del self._cuts[silo]
                        while not arrived():  # noqa: ASYNC110 a file's size has no event
                            await asyncio.sleep(0.01)
                        # as a line that fails on one side first; Standing ends it
                        self._stalled.append(onward)
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
                    await onward.write(data)
                await onward.done_writing()
            await down
            call.answered += tuple(await onward.trailing_metadata() or ())
            code, details = await onward.code(), await onward.details()
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details, trailing_metadata=call.answered)
        finally:
            down.cancel()
            if onward not in self._stalled:
                onward.cancel()

    async def _down(self, call, onward, context):
        with contextlib.suppress(*ENDED):
            call.answered += tuple(await onward.initial_metadata() or ())
            async for data in onward:
                call.received.append(data)
                await context.write(data)
                self._tell()

    def _tell(self):
        with self._changed:
            self._changed.notify_all()

    # Both ends of the line.

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        root = self._roster.coordinator.certificate.encode()
        name = f"{self._roster.coordinator.id}.staddle"
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        for silo, keys in self._silos.items():
            credentials = grpc.ssl_channel_credentials(
                root, keys.tls_key, keys.entry.certificate.encode()
            )
            self._channels[silo] = grpc.aio.secure_channel(
                self._target, credentials, options=options
            )
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        server.add_generic_rpc_handlers((self,))
        pair = (self._coordinator.tls_key, self._coordinator.entry.certificate.encode())
        credentials = grpc.ssl_server_credentials(
            [pair], self._roster.bundle().encode(), require_client_auth=True
        )
        self.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0.5)
        for channel in self._channels.values():
            await channel.close()
