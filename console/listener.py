"""Where the page is served: on loopback, or anywhere by mutual TLS with roster certificates."""

import contextlib
import ipaddress
import secrets
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ..errors import LocalError, reason
from ..security.identity.keys import TLS_CERTIFICATE, TLS_KEY, Keys, RosterEntry
from .access import (
    ENTER,
    LISTENED,
    MOST_STRANGERS,
    Asgi,
    RequestGuard,
    Sessions,
    Strangers,
)

GRACE_SECONDS = 1  # for answers that are being sent; a stream of changes never ends on its own
QUEUED = 1024  # whoever comes while as many wait is heard a second later at the earliest
# 128 of people with a session. Strangers' that were ended take some turns to go.
MOST_CONNECTIONS = MOST_STRANGERS + 8 * LISTENED + 128


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 is a free one."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Address":
        """The address of a command line; LocalError for what is not host:port."""
        # The last colon, since IPv6 addresses contain others.
        host, _, port = text.rpartition(":")
        good = host and port.isascii() and port.isdecimal() and int(port) <= 65535
        if not good:
            raise LocalError(f"--listen {text!r}: not host:port, such as 127.0.0.1:0")
        return cls(host.strip("[]"), int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@contextlib.contextmanager
def bound(address: Address) -> Iterator[tuple[socket.socket, Address]]:
    """A listening socket, and its address with the port that it got."""
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(where[:2], family=family)
    except OSError as error:
        why = f"cannot listen there: {reason(error)}; choose another port"
        raise LocalError(f"--listen {address}: {why}") from error
    with listening:
        yield listening, Address(address.host, listening.getsockname()[1])


def tls_context(folder: Path, readers: Iterable[RosterEntry]) -> ssl.SSLContext:
    """TLS 1.3 with the daemon's own key; only these members' certificates complete a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Each certificate is its own anchor, and none may vouch for another: all say CA:FALSE.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT
    context.load_verify_locations(cadata="".join(entry.certificate for entry in readers))
    context.load_cert_chain(folder / TLS_CERTIFICATE, folder / TLS_KEY)
    # A resumed session would skip the look at the certificate.
    context.num_tickets = 0
    return context


class CountedListener(socket.socket):
    """A listening socket that notes who connects, before TLS and before a request is read."""

    def __init__(self, listening: socket.socket, strangers: Strangers) -> None:
        """It listens on after ``listening`` is closed."""
        super().__init__(fileno=listening.dup().detach())
        self._strangers = strangers

    def listen(self, backlog: int = QUEUED) -> None:
        """Let more wait than the event loop takes in one turn, for which ``backlog`` is meant."""
        super().listen(max(backlog, QUEUED))

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, and who it is."""
        connection, peer = super().accept()
        self._strangers.arrived(connection, peer[:2])
        return connection, peer


@dataclass(frozen=True)
class Served:
    """One process's way in: what is printed, and what uvicorn runs."""

    url: str
    server: uvicorn.Server
    sessions: Sessions

    async def answer(self, listening: socket.socket) -> None:
        """Answer on a copy of this socket, until the server is told to end."""
        await self.server.serve([CountedListener(listening, self.sessions.strangers)])


def loopback(app: Asgi, sessions: Sessions, address: Address) -> Served:
    """Plain HTTP for this machine, below a path that nobody guesses.

    The path keeps the cookie from servers at other ports of this host.
    """
    base, origin = f"/{secrets.token_urlsafe(16)}", f"http://{address}"
    guard = RequestGuard(app, sessions, (origin,), base, f"staddle-{secrets.token_hex(4)}")
    url = f"{origin}{base}{ENTER}?token={sessions.token}"
    return Served(url, uvicorn.Server(_config(guard)), sessions)


def mutual_tls(
    app: Asgi, sessions: Sessions, address: Address, keys: Keys, readers: Iterable[RosterEntry]
) -> Served:
    """HTTPS for the holders of these certificates; the server shows that of ``keys``."""
    context = tls_context(keys.folder, readers)
    origins = tuple(
        f"https://{host}" for host in (f"{keys.entry.id}.staddle:{address.port}", address)
    )
    guard = RequestGuard(app, sessions, origins, "", "__Host-staddle")
    config = _config(guard)
    config.ssl_context_factory = lambda _config, _default: context
    return Served(f"{origins[0]}/", uvicorn.Server(config), sessions)


def _config(app: Asgi) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",  # whose turns are as access.py counts them
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody else's word on who calls
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        backlog=LISTENED,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
