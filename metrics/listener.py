"""The HTTP listener for metrics: one thread, however many connect and whatever they then do.

A scraper sends one request and reads one answer. Whoever else connects, and sends nothing, or
slowly, or does not read, holds neither a thread nor a file descriptor for long: a connection has
``SECONDS`` in all, its TLS handshake included, and of more than ``MOST_CONNECTIONS`` the oldest is
closed.
"""

import asyncio
import contextlib
import http.client
import io
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

SECONDS = 10.0  # from a connection's start to the last byte of its answer
MOST_CONNECTIONS = 64  # a few scrapers need as many as they are
MOST_BYTES = 16 * 1024  # of a request's first line and headers

# of WSGI: environment, start_response → body
App: TypeAlias = Callable[[dict[str, Any], Callable[..., object]], Any]
Read: TypeAlias = Callable[[int], Awaitable[bytes]]  # some bytes, at most as many as asked for
Write: TypeAlias = Callable[[bytes], None]
T = TypeVar("T")


@dataclass
class ClientTls:
    """TLS for whoever holds the key of one of these certificates (DER), and for nobody else.

    ``context`` may be replaced: each connection takes the one of when it begins.
    """

    context: ssl.SSLContext
    certificates: frozenset[bytes]


class _Secured:
    """TLS over a connection's own streams.

    Not asyncio's: it would shake hands before the connection is ours to count and to close.
    """

    def __init__(self, tls: ClientTls, read: Read, write: Write) -> None:
        self._read = read
        self._write = write
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.context.wrap_bio(self._received, self._sent, server_side=True)

    async def certificate(self) -> bytes | None:
        """Shake hands; what the other side shows.

        OSError where it has no key of a certificate that is known here.
        """
        await self._through(self._tls.do_handshake)
        return self._tls.getpeercert(binary_form=True)

    async def read(self, most: int) -> bytes:
        """Some bytes of what was sent; OSError at its end."""
        return await self._through(lambda: self._tls.read(most))

    def write(self, data: bytes) -> None:
        """Send all of it."""
        while data:
            # One record at a time.
            data = data[self._tls.write(data) :]
        self._write(self._sent.read())

    async def _through(self, step: Callable[[], T]) -> T:
        """The result of one step of TLS, for which more bytes may have to come first."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                wanted = self._read(MOST_BYTES)
            finally:
                # After an error, too: an alert says why.
                self._write(self._sent.read())
            self._received.write(_some(await wanted))


def _some(received: bytes) -> bytes:
    if not received:
        raise ConnectionResetError("the other side left")
    return received


@contextlib.contextmanager
def listening(host: str, port: int, app: App, tls: ClientTls | None = None) -> Iterator[int]:
    """Answer by a WSGI application while the block runs; with ``tls``, over TLS.

    The application must need only the request's line and headers. Yields the port; raises OSError
    where the address cannot be bound.

    The application runs in the listener's thread, one request at a time.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS) as bound:
        listener = _Listener(app, tls)
        # daemon: it must not keep the process from ending.
        thread = threading.Thread(target=listener.run, args=(bound,), name="metrics", daemon=True)
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            # After the join the port is free.
            listener.stop()
            thread.join()


class _Listener:
    """An event loop of its own, which never waits for one connection alone."""

    def __init__(self, app: App, tls: ClientTls | None) -> None:
        self._app = app
        self._client_tls = tls
        # Not the daemon's own loop: a slow scraper must not delay silos.
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first

    def run(self, bound: socket.socket) -> None:
        """Serve until stopped."""
        try:
            self._loop.run_until_complete(self._serve(bound))
        finally:
            self._loop.close()

    def stop(self) -> None:
        """Ask the loop to end, from another thread."""
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, bound: socket.socket) -> None:
        # ``limit`` bounds the bytes that are buffered per request.
        server = await asyncio.start_server(self._connected, sock=bound, limit=MOST_BYTES)
        await self._stop.wait()
        # before close(), with which asyncio forgets what it is just accepting
        self._loop.remove_reader(bound)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in list(self._open):
                _reset(writer)
            await asyncio.wait(others)
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        # Drop the oldest, so that idle connections cannot keep a scraper out.
        if len(self._open) > MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]  # now: the next to come must not find it again
            _reset(oldest)
        try:
            async with asyncio.timeout(SECONDS):
                # Where the handshake fails, its alert is still sent.
                with contextlib.suppress(ssl.SSLError):
                    await self._answer_one(reader.read, writer.write)
                writer.close()
                await writer.wait_closed()
        # it left, is slow (TimeoutError), or was the oldest
        except OSError:
            pass
        finally:
            self._open.pop(writer, None)
            _reset(writer)
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer_one(self, read: Read, write: Write) -> None:
        if self._stop.is_set():
            return
        if self._client_tls is None:
            write(await self._answered(read))
            return
        secured = _Secured(self._client_tls, read, write)
        # One that an accepted certificate vouches for is not accepted itself.
        opens = await secured.certificate() in self._client_tls.certificates
        refused = _response(HTTPStatus.FORBIDDEN)
        secured.write(await self._answered(secured.read) if opens else refused)

    async def _answered(self, read: Read) -> bytes:
        request = b""
        while b"\r\n\r\n" not in request:
            request += _some(await read(MOST_BYTES))
            if len(request) > MOST_BYTES:
                return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        head, end, _ = request.partition(b"\r\n\r\n")
        return self._answer(head + end)

    def _answer(self, request: bytes) -> bytes:
        # Request line and headers; a body is never read.
        line, _, headers = request.partition(b"\r\n")
        try:
            method, target, _ = line.decode("ascii").split(" ")
            fields, where = http.client.parse_headers(io.BytesIO(headers)), urlsplit(target)
        except (ValueError, http.client.HTTPException):
            return _response(HTTPStatus.BAD_REQUEST)
        # The part of WSGI that the metrics application uses.
        environment = {
            "REQUEST_METHOD": method,
            "PATH_INFO": where.path,
            "QUERY_STRING": where.query,
            "HTTP_ACCEPT": fields.get("Accept"),
            "HTTP_ACCEPT_ENCODING": fields.get("Accept-Encoding"),
        }
        started: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(
            self._app(environment, lambda status, fields: started.append((status, fields)))
        )
        return _written(*started[0], body)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and drop what the kernel still holds for a peer that does not read."""
    own = writer.get_extra_info("socket")
    if own.fileno() != -1:  # not closed already
        # With linger 0 the kernel drops unsent bytes and sends a reset.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _response(status: HTTPStatus) -> bytes:
    return _written(f"{status.value} {status.phrase}", [], b"")


def _written(status: str, fields: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields)]
    # One answer per connection, so that it can be closed at once.
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("ascii") + body
