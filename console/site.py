"""Pages and actions of either role as one application; templates escape whatever they show."""

import hmac
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib import resources
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qs, quote

import jinja2
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

from ..commands.terminal.output import size
from ..commands.terminal.printer import printable
from ..errors import StaddleError
from .access import Sessions
from .changes import Stamp, changes

MOST_BYTES = 16 * 1024  # of a form: its token, digests, and a reason
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


class Application:
    """The routes of a site."""

    def __init__(self, site: Site, sessions: Sessions) -> None:
        self._site = site
        self._sessions = sessions
        self._environment = _environment()
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
        return Response(_packaged("static", name), media_type=STATIC[name])


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form, the last of each name; empty for what is too long or not text."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            return {}
    found = parse_qs(data.decode("utf-8", "replace"), max_num_fields=8, errors="replace")
    return {name: values[-1] for name, values in found.items()}


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _packaged("templates", name).decode()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        n="{:,}".format, size=size, span=span, at=lambda stamp: stamp[:19].replace("T", " ")
    )
    return environment


def span(seconds: float) -> str:
    """A length of time as people say it."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    for length, unit in units:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _packaged(folder: str, name: str) -> bytes:
    return (resources.files(__package__) / folder / name).read_bytes()
