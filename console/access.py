"""Who may see the page: every request passes these checks before anything else looks at it.

On loopback a request comes from a browser in which anybody's pages are open, and from a machine
that others may use. So the address that is printed holds a token, which buys one session and is
then dead. The session is a cookie that no script reads, no other site's request carries, and no
other path gets. Beyond loopback the TLS handshake has shown who it is (listener.py), and the
session only ties a form to its page.
"""

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_SECONDS = 600.0  # a token that nobody used may stand in a log or on a screen
SESSION_SECONDS = 12 * 3600.0  # a day's work
# Whatever arrives while a request is read and judged must be less: the event loop takes LISTENED
# connections in one turn, and a request needs about five.
MOST_STRANGERS, LISTENED = 256, 32
MOST_SESSIONS = 64  # the oldest ends: under TLS each browser without its cookie begins one
ENTER = "/enter"
HEADERS = {
    # No script and no style in a page's own text, nothing from elsewhere, and in no frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    # Other sites get none. With "no-referrer" a browser would hide the origin of our own forms.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ELSEWHERE = "this request comes from another site; open the console's own address"
UNKNOWN = (
    "no session: open the address that `staddle console` printed; it works once, so start the"
    " command again for another browser"
)


class Strangers:
    """The newest connections on which nobody has shown a session yet.

    The oldest is ended where a new one is too many. Whoever opens connections and holds them would
    else keep out the person who has the token; what a person has open is none of these.
    """

    def __init__(self) -> None:
        self._open: dict[object, socket.socket] = {}  # by peer, oldest first

    def arrived(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """Note a connection; nothing has been read from it."""
        # A peer's port is used again.
        self._open.pop(peer, None)
        self._open[peer] = connection
        if len(self._open) > MOST_STRANGERS:
            # It may have ended by itself.
            with suppress(OSError):
                self._open.pop(next(iter(self._open))).shutdown(socket.SHUT_RDWR)

    def known(self, peer: object) -> None:
        """A session was shown on this connection: it stays for as long as its browser likes."""
        self._open.pop(peer, None)


class Sessions:
    """The sessions of one process, in its memory alone."""

    def __init__(self, *, by_token: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Without ``by_token`` whoever comes this far gets a session: TLS has let them in."""
        self._clock = clock
        self._token = secrets.token_urlsafe(32) if by_token else ""
        self._dies = clock() + TOKEN_SECONDS
        self._ends: dict[str, float] = {}  # oldest first
        self._secret = secrets.token_bytes(32)
        self.by_token = by_token
        self.strangers = Strangers()
        self.notices: dict[str, str] = {}  # what a session's last action came to

    @property
    def token(self) -> str:
        """For the printed address; empty once it was used."""
        return self._token

    def exchange(self, token: str) -> str:
        """A new session for the token, which is dead from then on; empty for any other."""
        alive = bool(self._token) and self._clock() < self._dies
        if not (alive and hmac.compare_digest(token.encode(), self._token.encode())):
            return ""
        self._token = ""
        return self.begin()

    def begin(self) -> str:
        """A new session."""
        while len(self._ends) >= MOST_SESSIONS:
            self._end(next(iter(self._ends)))
        session = secrets.token_urlsafe(32)
        self._ends[session] = self._clock() + SESSION_SECONDS
        return session

    def holds(self, session: str) -> bool:
        """Whether it began here and has not ended."""
        holds = self._clock() < self._ends.get(session, 0.0)
        if not holds:
            self._end(session)
        return holds

    def form_token(self, session: str) -> str:
        """What a form of this session's pages carries (CSRF)."""
        return hmac.digest(self._secret, session.encode(), hashlib.sha256).hex()

    def _end(self, session: str) -> None:
        self._ends.pop(session, None)
        self.notices.pop(session, None)


class RequestGuard:
    """The checks around an application; each refusal has its number here and in its test."""

    def __init__(
        self, app: Asgi, sessions: Sessions, origins: tuple[str, ...], base: str, cookie: str
    ) -> None:
        """``origins``: those of this server, such as ``http://127.0.0.1:8765``.

        ``base`` is the path before all pages. ``cookie`` names the session's: browsers share
        cookies between the ports of a host, so each process has a name of its own.
        """
        self._app = app
        self._sessions = sessions
        self._origins = origins
        self._hosts = tuple(origin.partition("://")[2] for origin in origins)
        self._base = base
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            # Start and end of the server; there are no web sockets.
            await self._app(scope, receive, send)
            return

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        request = Request(scope, receive)
        answer = self._refusal(request) or self._session(request)
        await (answer or self._app)(scope, receive, sent)

    def _refusal(self, request: Request) -> Response | None:
        headers, path = request.headers, request.url.path
        # (1) The name is ours: a page elsewhere may have pointed its own name at this address.
        if headers.get("host", "") not in self._hosts:
            return _plain(HTTPStatus.MISDIRECTED_REQUEST, "unknown host; open the printed address")
        # (2) Another site's page neither leads here nor loads anything from here.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _plain(HTTPStatus.FORBIDDEN, ELSEWHERE)
        # (3) What acts comes from one of our own pages.
        reads = request.method in ("GET", "HEAD")
        if not reads and headers.get("origin", "") not in self._origins:
            return _plain(HTTPStatus.FORBIDDEN, ELSEWHERE)
        # (4) The path is below ours.
        if not path.startswith(f"{self._base}/"):
            return _plain(HTTPStatus.NOT_FOUND, "no such page")
        return None

    def _session(self, request: Request) -> Response | None:
        """(5) The session holds; else an answer that begins one, or says how."""
        sessions, session = self._sessions, request.cookies.get(self._cookie, "")
        if request.method == "GET" and request.url.path == self._base + ENTER:
            return self._begun(sessions.exchange(request.query_params.get("token", "")))
        if sessions.holds(session):
            # Routes and links are below ``root_path``.
            request.scope.update(console_session=session, root_path=self._base)
            sessions.strangers.known(request.client)
            return None
        # Under TLS the certificate is what counts.
        if request.method == "GET" and not sessions.by_token:
            return self._begun(sessions.begin())
        return _plain(HTTPStatus.UNAUTHORIZED, UNKNOWN)

    def _begun(self, session: str) -> Response:
        if not session:
            return _plain(HTTPStatus.UNAUTHORIZED, UNKNOWN)
        answer = RedirectResponse(f"{self._base}/", HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            self._cookie,
            session,
            path=f"{self._base}/",
            httponly=True,
            samesite="strict",
            secure=self._origins[0].startswith("https:"),
        )
        return answer


def _plain(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
