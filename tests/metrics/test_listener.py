"""An idle connection to the metrics costs no thread, and keeps no scraper waiting."""

import contextlib
import gzip
import re
import select
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from faults.listener import GET, SECONDS, app, connected, received, scraped

from staddle.errors import LocalError
from staddle.metrics import listener
from staddle.metrics.exporter import (
    Gauge,
    MetricsConfig,
    ProcessMetrics,
    TlsFiles,
    client_tls,
    log,
    served,
)
from staddle.security.identity.certificate import BACKDATED, LIFETIME, utc_now
from staddle.security.identity.keys import Role, create_keys


@pytest.fixture
def address():
    """Where the metrics are served."""
    log.setup("json")
    heard, counts, none = [], ProcessMetrics("silo", ()), TlsFiles(Path("none"), Path("none"))
    with (
        log.followed(lambda _, fields: heard.append(fields.get("address"))),
        served(MetricsConfig(listen="127.0.0.1:0"), counts, none),
    ):
        counts.show(lambda: [Gauge("near", "x", ("silo",), {("0",): 1})], none)
        host, _, port = heard[-1].rpartition(":")
        yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"G", GET])
def test_a_connection_that_does_not_ask_is_closed_in_time(monkeypatch, address, sent):
    monkeypatch.setattr(listener, "SECONDS", 0.2)
    with connected(address) as idle:
        idle.sendall(sent)
        assert received(idle) == b""
    monkeypatch.undo()
    assert scraped(address).startswith(b"HTTP/1.1 200 OK")


def test_one_that_does_not_read_is_closed_in_time_and_others_are_answered(monkeypatch):
    monkeypatch.setattr(listener, "SECONDS", 3.0)
    body = bytes(2**24)  # more than the kernel takes

    def app(environment, start_response):
        start_response("200 OK", [])
        return [body]

    with listener.listening("127.0.0.1", 0, app) as port, socket.socket() as deaf:
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
        with listener.listening("127.0.0.1", 0, lambda *_: []) as port:
            idle = [stack.enter_context(connected(("127.0.0.1", port))) for _ in range(3)]
        assert set(threading.enumerate()) <= before
        assert [received(connection) for connection in idle] == [b""] * 3


# Over TLS.


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Folders of keys: the daemon's, a scraper's, a stranger's."""
    folder = tmp_path_factory.mktemp("keys")
    for name, role in (("daemon", Role.SILO), ("scraper", Role.OPERATOR), ("other", Role.OPERATOR)):
        create_keys(folder / name, name, role, "Hospital")
    return folder


def crossed(keys, pinned, **more):
    """Where the metrics are served to whoever has the key of a certificate."""
    own = TlsFiles(keys / "daemon" / "tls.crt", keys / "daemon" / "tls.key")
    return listener.listening("127.0.0.1", 0, app, client_tls((pinned,), own), **more)


def asking(keys, name=None, most=None):
    """A client's side; it has no certificate without a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "daemon" / "tls.crt")
    context.maximum_version = most or ssl.TLSVersion.MAXIMUM_SUPPORTED
    if name:
        context.load_cert_chain(keys / name / "tls.crt", keys / name / "tls.key")
    return context


def answered(port, context):
    """What a client with this side of TLS gets."""
    with (
        connected(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="daemon.staddle") as secured,
    ):
        secured.sendall(GET + b"\r\n")
        return secured.version(), received(secured)


def test_whoever_has_the_key_of_a_named_certificate_is_answered(keys):
    with crossed(keys, keys / "scraper" / "tls.crt") as port:
        version, answer = answered(port, asking(keys, "scraper"))
    assert version == "TLSv1.3"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"all is well")


def test_others_are_not(keys):
    with crossed(keys, keys / "scraper" / "tls.crt") as port:
        for name, why in ((None, "certificate required"), ("other", "unknown ca")):
            with pytest.raises(ssl.SSLError, match=why):
                answered(port, asking(keys, name))
        with pytest.raises(ssl.SSLError, match="protocol version"):
            answered(port, asking(keys, "scraper", ssl.TLSVersion.TLSv1_2))
        assert b"all is well" not in scraped(("127.0.0.1", port))
        assert answered(port, asking(keys, "scraper"))[1].endswith(b"all is well")


def test_one_for_whom_a_named_certificate_vouches_is_not(keys, tmp_path):
    """A hospital's own authority may have issued thousands."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])

    def issued(basic, subject, public):
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(name)
        made = made.public_key(public).serial_number(x509.random_serial_number())
        made = made.not_valid_before(utc_now() - BACKDATED).not_valid_after(utc_now() + LIFETIME)
        made = made.add_extension(x509.BasicConstraints(basic, None), critical=True)
        return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)

    (tmp_path / "authority.crt").write_bytes(issued(True, name, key.public_key()))
    member = tmp_path / "member"
    create_keys(member, "member", Role.OPERATOR, "Hospital")
    public = load_pem_private_key((member / "tls.key").read_bytes(), None).public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "member")])
    (member / "tls.crt").write_bytes(issued(False, subject, public))
    context = asking(keys)
    context.load_cert_chain(member / "tls.crt", member / "tls.key")
    with crossed(keys, tmp_path / "authority.crt") as port:
        assert answered(port, context)[1].startswith(b"HTTP/1.1 403 Forbidden\r\n")
    # Named by itself it is.
    with crossed(keys, member / "tls.crt") as port:
        assert answered(port, context)[1].endswith(b"all is well")


def test_a_certificate_is_replaced_without_another_listener(keys, tmp_path):
    """Files are read where it is another one alone."""
    log.setup("json")
    first, scraper, heard = tmp_path / "first", tmp_path / "scraper.crt", []
    shutil.copytree(keys / "daemon", first)
    shutil.copy(keys / "scraper" / "tls.crt", scraper)
    create_keys(tmp_path / "second", "daemon", Role.SILO, "Hospital")
    counts, own = ProcessMetrics("silo", ()), TlsFiles(first / "tls.crt", first / "tls.key")
    config = MetricsConfig(listen="127.0.0.1:0", clients=(scraper,))
    with (
        log.followed(lambda _, fields: heard.append(fields.get("address"))),
        served(config, counts, own),
    ):
        port = int(heard[-1].rpartition(":")[2])
        shutil.rmtree(first)
        scraper.unlink()
        counts.show(tuple, own)
        assert b" 200 OK" in answered(port, asking(keys, "scraper"))[1]
        counts.show(tuple, TlsFiles(tmp_path / "second" / "tls.crt", tmp_path / "second/tls.key"))
        with pytest.raises(ssl.SSLCertVerificationError):
            answered(port, asking(keys, "scraper"))
        for name in ("scraper", "other"):
            shutil.copytree(keys / name, tmp_path / "anew" / name)
        shutil.copytree(tmp_path / "second", tmp_path / "anew" / "daemon")
        assert b" 200 OK" in answered(port, asking(tmp_path / "anew", "scraper"))[1]
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            answered(port, asking(tmp_path / "anew", "other"))


def test_idle_handshakes_cost_no_thread_and_keep_nobody_out(keys):
    with (
        crossed(keys, keys / "scraper" / "tls.crt") as port,
        contextlib.ExitStack() as stack,
    ):
        serving = set(threading.enumerate())
        address = ("127.0.0.1", port)
        count = listener.MOST_CONNECTIONS + 20
        idle = [stack.enter_context(connected(address)) for _ in range(count)]
        for connection in idle:
            with contextlib.suppress(ConnectionError):  # those closed as the oldest
                connection.sendall(b"\x16\x03\x01")
        assert answered(port, asking(keys, "scraper"))[1].endswith(b"all is well")
        assert [received(connection) for connection in idle[:20]] == [b""] * 20
        assert set(threading.enumerate()) <= serving


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00"])
def test_a_handshake_that_does_not_end_is_closed_in_time(monkeypatch, keys, begun):
    monkeypatch.setattr(listener, "SECONDS", 0.2)
    with (
        crossed(keys, keys / "scraper" / "tls.crt") as port,
        connected(("127.0.0.1", port)) as idle,
    ):
        idle.sendall(begun)
        assert received(idle) == b""


@pytest.mark.parametrize("text", ["", "no certificate", "two", "key"])
def test_a_file_that_is_not_one_certificate_is_named(keys, tmp_path, text):
    path, own = tmp_path / "prometheus.crt", (keys / "scraper" / "tls.crt").read_text()
    others = {"two": own * 2, "key": (keys / "scraper" / "tls.key").read_text()}
    path.write_text(others.get(text, text))
    with (
        pytest.raises(LocalError, match=re.escape(f"{path}: not one certificate")),
        crossed(keys, path),
    ):
        pass
