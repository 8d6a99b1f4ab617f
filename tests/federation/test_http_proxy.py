"""A silo that dials out by an HTTP proxy, over which alone its coordinator is found."""

import base64
import contextlib
import select
import socket
import socketserver
import threading

import pytest
from support.coordinator_thread import coordinator
from support.signed_federation import job_document, signed_federation

from staddle.errors import PeerError
from staddle.files.documents import validate
from staddle.proto import federation_pb2 as pb
from staddle.security.identity import roster as rosters
from staddle.silo import connectivity
from staddle.silo.config import SiloConfig
from staddle.silo.egress.session import UnreachableError, open_client

SILOS = ("north", "east")
NOWHERE = "coordinator.invalid:7443"  # RFC 6761: no resolver knows it
SECRET = base64.b64encode(b"hospital:word").decode()


class ConnectProxy(socketserver.BaseRequestHandler):
    """CONNECT to one name leads to ``target``; all else is forbidden."""

    def handle(self):
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.request.recv(4096)
        self.server.heads.append(head.decode())
        allowed = head.startswith(f"CONNECT {NOWHERE} ".encode())
        if not allowed or f"Basic {SECRET}" not in head.decode():
            self.request.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        host, _, port = self.server.target.rpartition(":")
        with socket.create_connection((host, int(port))) as other:
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ends = {self.request: other, other: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = b""
                    with contextlib.suppress(ConnectionError):
                        data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)


@pytest.fixture
def proxy():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), ConnectProxy) as server:
        server.daemon_threads, server.block_on_close, server.heads = True, False, []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.address = f"127.0.0.1:{server.server_address[1]}"
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def world(tmp_path):
    return signed_federation(tmp_path, SILOS, job_document(SILOS))


def test_a_silo_greets_and_checks_by_the_proxy_alone(world, proxy, monkeypatch):
    # what the environment says is not asked
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    keys, entry, by = world.keys["north"], world.roster.coordinator, "http://hospital:word@"
    by += proxy.address
    with coordinator(world.config) as here:
        proxy.target = here.address

        async def greet(by):
            client = open_client(NOWHERE, keys, world.roster, by)
            request = pb.HelloRequest(
                silo="north", protocol_min=2, protocol_max=2, challenge=bytes(32),
                roster_digest=bytes.fromhex(rosters.digest(world.roster)),
            )  # fmt: skip
            try:
                return await client.hello(request)
            finally:
                await client.close()

        assert here.run(greet(by)).session
        assert proxy.heads[0].startswith(f"CONNECT {NOWHERE} ")
        folder = world.folder / "north" / "keys"
        _, said = connectivity.connect(NOWHERE, entry, by)
        assert said == f"something listens on {NOWHERE}, by the proxy {proxy.address}"
        assert "TLS 1.3 with coordinator" in connectivity.handshake(NOWHERE, folder, entry, by)[1]
        assert connectivity.health(NOWHERE, keys, entry, by) == (True, "coordinator serves")

        # without the proxy, and with a wrong word to it, nobody is reached
        with pytest.raises(UnreachableError):
            here.run(greet(""))
        with pytest.raises(PeerError, match="no host has the name"):
            connectivity.connect(NOWHERE, entry)
        with pytest.raises(PeerError, match=f"403 Forbidden.*{proxy.address} said so") as caught:
            connectivity.connect(NOWHERE, entry, by.replace("word", "guess"))
        assert "guess" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:3128/x", "http://:1"]
)
def test_what_is_no_proxy_is_said(text):
    document = {"version": 1, "coordinator": "a:1", "proxy": text}
    with pytest.raises(Exception, match=r"proxy.*http://host:port"):
        validate(document, SiloConfig, "silo.toml")
