"""An idle connection to the metrics costs no thread, and keeps no scraper waiting."""

import contextlib
import gzip
import select
import socket
import threading

import pytest
from faults.listener import GET, SECONDS, connected, received, scraped

from staddle import metrics_listener
from staddle.metrics import Gauge, MetricsConfig, log, served


@pytest.fixture
def address():
    """Where the metrics are served."""
    log.setup("json")
    heard = []
    with (
        log.followed(lambda _, fields: heard.append(fields.get("address"))),
        served(
            MetricsConfig(listen="127.0.0.1:0"),
            "silo",
            (),
            lambda: [Gauge("near", "x", ("silo",), {("0",): 1})],
        ),
    ):
        host, _, port = heard[-1].rpartition(":")
        yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"G", GET])
def test_a_connection_that_does_not_ask_is_closed_in_time(monkeypatch, address, sent):
    monkeypatch.setattr(metrics_listener, "SECONDS", 0.2)
    with connected(address) as idle:
        idle.sendall(sent)
        assert received(idle) == b""
    monkeypatch.undo()
    assert scraped(address).startswith(b"HTTP/1.1 200 OK")


def test_one_that_does_not_read_is_closed_in_time_and_others_are_answered(monkeypatch):
    monkeypatch.setattr(metrics_listener, "SECONDS", 3.0)
    body = bytes(2**24)  # more than the kernel takes

    def app(environment, start_response):
        start_response("200 OK", [])
        return [body]

    with metrics_listener.listening("127.0.0.1", 0, app) as port, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(GET + b"\r\n")
        assert scraped(("127.0.0.1", port)).endswith(body)  # meanwhile
        ended = select.poll()
        ended.register(deaf, select.POLLRDHUP)  # not what is there to read
        assert ended.poll(SECONDS * 1000)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"GET /\r\n\r\n", b"400 Bad Request"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (GET + b"a: b\r\n" * 101 + b"\r\n", b"400 Bad Request"),
        (GET + b"a: " + b"b" * 17_000 + b"\r\n\r\n", b"431 Request Header Fields Too Large"),
        (b"POST / HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"OPTIONS / HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /favicon.ico HTTP/1.1\r\n\r\n", b"200 OK"),
    ],
)
def test_other_requests_are_told_what_they_are(address, request_, status):
    with connected(address) as one:
        one.sendall(request_)
        assert received(one).startswith(b"HTTP/1.1 " + status + b"\r\n")


def test_scrapers_get_what_they_ask_for(address):
    assert b"# EOF" in scraped(address, b"Accept: application/openmetrics-text; version=1.0.0\r\n")
    head, _, body = scraped(address, b"Accept-Encoding: gzip\r\n").partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head
    assert b"staddle_silo_near" in gzip.decompress(body)
    with connected(address) as one:
        one.sendall(b"GET /metrics?name[]=staddle_silo_near HTTP/1.1\r\n\r\n")
        assert b"process_resident" not in received(one)


def test_the_listener_ends_while_connections_are_open():
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        with metrics_listener.listening("127.0.0.1", 0, lambda *_: []) as port:
            idle = [stack.enter_context(connected(("127.0.0.1", port))) for _ in range(3)]
        assert set(threading.enumerate()) <= before
        assert [received(connection) for connection in idle] == [b""] * 3
