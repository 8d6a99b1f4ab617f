"""What silos write, other users and other web pages can do to those who look at a console."""

import asyncio
import itertools
import re
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

import pytest

pytest.importorskip("starlette")
import httpx2
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from staddle import log
from staddle.commands.federation import local_federation
from staddle.console import access, listener
from staddle.console.access import RequestGuard, Sessions
from staddle.console.coordinator_site import CoordinatorSite
from staddle.console.listener import Address, bound, loopback
from staddle.console.site import Application
from staddle.coordinator import config as configs
from staddle.coordinator import live_status
from staddle.coordinator.live_status import Greeting, SiloSeen
from staddle.coordinator.storage.database import Database
from staddle.security.log.lock import locked

pytestmark = pytest.mark.actor("silo")
ORIGIN = "http://127.0.0.1:8765"
NASTY = [
    "<script src=//evil.example></script>",
    "'\"><img src=x onerror=alert(1)>",
    "{{ config }}{% for x in y %}",
    "</td></table><form action=//evil.example><input name=token>",
    "a\x1b]52;c;eA==\x07\u202e\x00b\n2026-11-20T21:30:05Z info    ledger.holds",
]


@pytest.fixture
def world(tmp_path):
    """The folder of a coordinator that runs, and a browser that the console has let in."""
    made = local_federation.make(tmp_path / "f", ("north", "south"))
    local_federation.write_coordinator(made, [], {})
    config = configs.load(made.coordinator_config)
    config.directory.mkdir()
    Database(config.directory / "coordinator.sqlite").close()
    sessions = Sessions(by_token=True)
    site = CoordinatorSite(config, None)
    guard = RequestGuard(Application(site, sessions).asgi, sessions, (ORIGIN,), "/below", "c")
    client = TestClient(guard, base_url=ORIGIN)
    client.get("/below/enter", params={"token": sessions.token})
    with locked(config.directory):
        yield config.directory, client


@contextmanager
def listening():
    """A console on loopback, in a thread: its address, host with port, and its sessions."""
    site, sessions = (
        Starlette(routes=[Route("/", page), Route("/events", events)]),
        Sessions(by_token=True),
    )
    with bound(Address("127.0.0.1", 0)) as (socket_, address):
        served = loopback(site, sessions, address)
        thread = threading.Thread(target=asyncio.run, args=(served.answer(socket_),))
        thread.start()
        try:
            yield served, (address.host, address.port)
        finally:
            served.server.should_exit = True
            thread.join()


def check(page):
    """Nothing in it but our own elements, each with attributes of our own."""
    assert page.status_code == 200
    assert not re.search(r"<(?:img|iframe|object|embed|link[^>]*//)|[\x1b\u202e\x00]", page.text)
    assert {*re.findall(r"<script[^>]*>", page.text)} == {
        f'<script src="/below/static/{name}" defer>' for name in ("htmx.min.js", "console.js")
    }
    assert {*re.findall(r'<form[^>]*action="([^"]*)"', page.text)} <= {"/below/verify"}
    assert not re.search(r"<[a-z][^>]*\son[a-z]+=", page.text)


@pytest.mark.parametrize("text", NASTY)
def test_the_version_that_a_silo_names_is_no_part_of_the_page(world, text):
    directory, client = world
    told = Greeting.of(text, 2**64 - 1, datetime.now(UTC).timestamp())
    live_status.write(directory, {"north": SiloSeen(connected=True, **vars(told))})
    page = client.get("/below/")
    check(page)
    assert "evil.example" not in page.text
    assert "115740 days" in page.text
    # Should it ever come into the file as it is, the template still makes text of it.
    live_status.write(directory, {"north": SiloSeen(connected=True, seen=text, software=text)})
    check(client.get("/below/"))


@pytest.mark.parametrize("text", NASTY)
def test_what_a_peer_has_written_into_the_log_is_one_line_of_text(world, text):
    directory, client = world
    with log.kept(directory / log.KEPT):
        log.problem("refused", why=f"says it is {text!r}", silo=text)
    page = client.get("/below/log")
    check(page)
    assert re.findall("<li[ >](?!<a)", page.text) == ["<li "]
    # A line that another writer left there is text, too.
    (directory / log.KEPT).write_bytes(text.encode() + b"\xff\n")
    check(client.get("/below/log"))


@pytest.mark.actor("stranger")
@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"host": "rebound.evil.example:8765"}),
        (
            "POST",
            {"host": "rebound.evil.example:8765", "origin": "http://rebound.evil.example:8765"},
        ),
        ("POST", {"origin": "http://evil.example"}),
        ("POST", {"origin": "null"}),
        ("GET", {"sec-fetch-site": "cross-site"}),
        ("GET", {"sec-fetch-site": "same-site"}),  # another port of this host
    ],
)
def test_another_page_reads_and_does_nothing_even_with_the_session(world, method, headers):
    _, client = world
    for path in ("/below/", "/below/verify", "/below/events", "/below/log"):
        answer = client.request(method, path, headers=headers, data=None)
        assert answer.status_code in (403, 421)
        assert "federation" not in answer.text


@pytest.mark.actor("stranger")
def test_paths_lead_to_no_file_and_streams_need_a_session(world):
    _, client = world
    for path in ("..%2f..%2fcoordinator.sqlite", "%2e%2e", "..%5c..%5cx", "x%00", "<b>"):
        for page in ("jobs", "static"):
            assert client.get(f"/below/{page}/{path}").status_code == 404
    client.cookies.clear()
    for path in ("", "events", "log", "jobs/x", "static/console.js"):
        assert client.get(f"/below/{path}").status_code == 401


async def page(_):
    return PlainTextResponse("the page")


async def events(_):
    async def stream():
        for number in itertools.count():
            yield f"{number}\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(stream())


# What a stranger may hold open: a connection that sends nothing, a request that never ends, a body
# that never comes, and requests whose answers are never read.
HELD = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 300,
)


@pytest.mark.actor("stranger")
@pytest.mark.parametrize("held", HELD)
def test_connections_that_are_held_open_lock_out_nobody_who_has_the_token(held, monkeypatch):
    strangers, closing = 32, 8 * access.LISTENED
    monkeypatch.setattr(access, "MOST_STRANGERS", strangers)
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", strangers + closing + 8)

    def flood(count):
        for _ in range(count):
            each = connections.enter_context(socket.create_connection(at))
            each.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                each.send(held)

    with listening() as (served, at), ExitStack() as connections:
        flood(strangers + closing + 16)
        with httpx2.Client(follow_redirects=True, timeout=60) as person:
            assert person.get(served.url).text == "the page"
            base = served.url.partition("/enter")[0]
            with person.stream("GET", f"{base}/events") as answer:
                told = answer.iter_lines()
                assert next(told) == "0"
                # A second flood ends neither what is open nor what is asked.
                flood(2 * strangers)
                seen = int(next(told))
                assert person.get(f"{base}/").text == "the page"
                assert next(line for line in told if int(line) > seen + 10)
