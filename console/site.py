"""Pages and actions of either role as one application; templates escape whatever they show."""

import hmac
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from os import SEEK_END
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from ..commands.terminal.printer import printable
from ..errors import StaddleError
from ..log import KEPT
from .access import Sessions
from .changes import Stamp, changes
from .rendering import environment, packaged

MOST_BYTES = 16 * 1024  # of a form: its token, digests, and a reason
LOG_BYTES, LOG_LINES = 64 * 1024, 100  # of the log that are shown
STATIC = {  # no other file is served, whatever path is asked for
    "console.css": "text/css",
    "console.js": "text/javascript",
    "htmx.min.js": "text/javascript",
}
Parameters: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class ShownPage:
    """A page: its path, what the navigation calls it ("" for none), and what its template gets.

    ``view`` runs in a thread; KeyError where nothing has the name in the path.
    """

    path: str
    title: str
    template: str
    view: Callable[[Parameters], Mapping[str, Any]]


@dataclass(frozen=True)
class FormAction:
    """What a form does, in a thread; ``act`` returns what it came to, for the next page.

    ``back`` is the page after it. Errors of ours become that text.
    """

    path: str
    act: Callable[[Parameters], str]
    back: str = "/"


@dataclass(frozen=True)
class FileDownload:
    """A file made when it is asked for: it is saved, never shown as a page of ours."""

    path: str
    name: str
    make: Callable[[], bytes]


class Site(Protocol):
    """What a role shows; ``refresh`` runs in the event loop, all else in threads."""

    heading: str
    pages: tuple[ShownPage, ...]
    actions: tuple[FormAction, ...]
    downloads: tuple[FileDownload, ...]

    def refresh(self) -> None:
        """Begin to read again what takes long, where it changed."""

    def look(self) -> Stamp:
        """What differs where a page would."""

    def summary(self) -> str:
        """One sentence on what runs, read out to those who do not see the page."""


def log_page(directory: Path, unit: str) -> ShownPage:
    """The newest lines of a daemon's log, and where all of it is."""

    def view(_: Parameters) -> Mapping[str, Any]:
        return {"unit": unit, "lines": last_lines(directory / KEPT), "file": directory / KEPT}

    return ShownPage("/log", "Log", "log.html", view)


def last_lines(path: Path) -> list[str]:
    """The end of a log file, oldest first; none where there is no file."""
    with suppress(OSError), path.open("rb") as file:
        start = max(0, file.seek(0, SEEK_END) - LOG_BYTES)
        file.seek(start)
        lines = file.read(LOG_BYTES).decode("utf-8", "replace").split("\n")
        # The first line may be cut, and the last one is still empty.
        return lines[start > 0 : -1][-LOG_LINES:]
    return []


class Application:
    """The routes of a site."""

    def __init__(self, site: Site, sessions: Sessions) -> None:
        self._site = site
        self._sessions = sessions
        self._environment = environment()
        self._downloading = threading.Lock()  # one at a time: each reads a whole ledger
        pages = [
            Route(page.path, partial(self._page, page), methods=["GET"]) for page in site.pages
        ]
        actions = [
            Route(action.path, partial(self._act, action), methods=["POST"])
            for action in site.actions
        ]
        files = [
            Route(file.path, partial(self._download, file), methods=["GET"])
            for file in site.downloads
        ]
        others = [
            Route("/events", self._events, methods=["GET"]),
            Route("/static/{name}", self._static, methods=["GET"]),
        ]
        self.asgi = Starlette(routes=[*pages, *actions, *files, *others])

    async def _page(self, page: ShownPage, request: Request) -> Response:
        self._site.refresh()
        session = request.scope["console_session"]
        status, template, shown = HTTPStatus.OK, page.template, dict[str, Any](title=page.title)
        try:
            shown |= await run_in_threadpool(page.view, request.path_params)
            shown["summary"] = await run_in_threadpool(self._site.summary)
        except KeyError:
            raise HTTPException(HTTPStatus.NOT_FOUND) from None
        # Such as a folder that the daemon has not made yet: the page says so and waits.
        except StaddleError as error:
            status, template = HTTPStatus.SERVICE_UNAVAILABLE, "problem.html"
            shown |= {"problem": str(error), "summary": ""}
        base = request.scope["root_path"]
        shown |= {
            "base": base,
            "path": request.url.path,
            "page": page,
            "site": self._site,
            "form_token": self._sessions.form_token(session),
            "notice": self._sessions.notices.get(session, ""),
        }
        # Shown once, on a page that a person opened; a refresh fetches what it will not show.
        if "hx-request" not in request.headers:
            self._sessions.notices.pop(session, None)
        return HTMLResponse(self._environment.get_template(template).render(shown), status)

    async def _act(self, action: FormAction, request: Request) -> Response:
        session = request.scope["console_session"]
        form = await _form(request)
        token = self._sessions.form_token(session)
        if not hmac.compare_digest(form.get("token", "").encode(), token.encode()):
            return PlainTextResponse("this form is of an old page\n", HTTPStatus.FORBIDDEN)
        try:
            said = await run_in_threadpool(action.act, {**form, **request.path_params})
        except KeyError:
            raise HTTPException(HTTPStatus.NOT_FOUND) from None
        except StaddleError as error:
            said = str(error)
        self._sessions.notices[session] = said
        back = action.back.format(
            **{name: quote(value, safe="") for name, value in request.path_params.items()}
        )
        return RedirectResponse(f"{request.scope['root_path']}{back}", HTTPStatus.SEE_OTHER)

    async def _download(self, file: FileDownload, request: Request) -> Response:
        def made() -> bytes:
            with self._downloading:
                return file.make()

        try:
            data = await run_in_threadpool(made)
        except StaddleError as error:
            return PlainTextResponse(printable(str(error)), HTTPStatus.SERVICE_UNAVAILABLE)
        saved = {"content-disposition": f'attachment; filename="{file.name}"'}
        return Response(data, media_type="application/octet-stream", headers=saved)

    async def _events(self, request: Request) -> Response:
        stream = changes(self._site.refresh, self._site.look)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return Response(packaged("static", name), media_type=STATIC[name])


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form, the last of each name; empty for what is too long or not text."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            return {}
    found = parse_qs(data.decode("utf-8", "replace"), max_num_fields=8, errors="replace")
    return {name: values[-1] for name, values in found.items()}
