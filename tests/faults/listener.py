"""Connections to the metrics that ask for nothing."""

import contextlib
import socket
import threading

from faults.table import row

from staddle.metrics import listener

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
SECONDS = 20  # that an answer may take


def connected(address):
    return socket.create_connection(address, timeout=SECONDS)


def received(connection):
    """All until the other side closes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(2**16):
            pieces.append(piece)
    return b"".join(pieces)


def scraped(address, more=b""):
    with connected(address) as scraper:
        scraper.sendall(GET + more + b"\r\n")
        return received(scraper)


def app(environment, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"all is well"]


@row(
    "hundreds connect and send nothing, or a part",
    "scrapes are answered, no thread is made, the oldest are closed",
)
def idle_connections(folder, draw):
    # Threads that earlier tests of this process left may end meanwhile.
    before = set(threading.enumerate())
    count = draw.randrange(listener.MOST_CONNECTIONS + 1, 400)
    with listener.listening("127.0.0.1", 0, app) as port, contextlib.ExitStack() as stack:
        serving = set(threading.enumerate())
        idle = [stack.enter_context(connected(("127.0.0.1", port))) for _ in range(count)]
        for connection in idle:
            with contextlib.suppress(ConnectionError):  # those closed as the oldest
                connection.sendall(GET[: draw.randrange(len(GET))])
        answer = scraped(("127.0.0.1", port))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"all is well")
        assert set(threading.enumerate()) <= serving
        for connection in idle[: count - listener.MOST_CONNECTIONS]:
            assert received(connection) == b""
    assert set(threading.enumerate()) <= before
