"""Beyond loopback: whose certificates complete a handshake, and what a changed roster does."""

import asyncio
import contextlib
import datetime as dt
import shutil
import ssl

import pytest

pytest.importorskip("starlette")
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from staddle.algorithms.data.dataset import digits
from staddle.commands.federation import local_federation
from staddle.console.listener import Address
from staddle.console.server import readers, serve, site_of
from staddle.coordinator import config as configs
from staddle.errors import LocalError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.silo import config as silo_configs

SILOS = ("a", "b")
# By the handshake: the connection ends, and not a byte of an answer comes.
REFUSED = {"SSLError", "ConnectionResetError", ""}


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("made") / "f", SILOS)


@pytest.fixture
def made(founded, tmp_path):
    copied = type(founded)(**{**vars(founded), "folder": tmp_path / "f"})
    shutil.copytree(founded.folder, copied.folder)
    local_federation.write_coordinator(copied, [], {})
    return copied


@contextlib.asynccontextmanager
async def serving(path, config, listen="0.0.0.0:0"):
    """The lines that are shown, as they come."""
    said = asyncio.Queue()
    task = asyncio.create_task(serve(path, config, listen, None, said.put_nowait))
    try:
        yield said
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def port_of(said):
    line = await asyncio.wait_for(said.get(), 60)
    return int(line.split(":")[2].split("/")[0])


def context_of(federation, keys=None):
    """A browser's: it trusts the coordinator's certificate alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    coordinator = federation.keys("coordinator") / "tls.crt"
    context.load_verify_locations(coordinator)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if keys is not None:
        context.load_cert_chain(keys / "tls.crt", keys / "tls.key")
    return context


async def asked(context, port, host="coordinator.staddle"):
    """The first line of the answer, or the error."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="coordinator.staddle"
        )
        request = f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        # In TLS 1.3 a refused certificate shows with the first bytes that are read.
        line = (await reader.readline()).decode()
        writer.close()
    except (ssl.SSLError, ConnectionError) as error:
        return type(error).__name__
    return line.strip()


def issued(folder, issuer):
    """A certificate in somebody's name, signed with a member's TLS key."""
    key, now = generate_private_key(SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stranger")])
    own = x509.load_pem_x509_certificate((issuer / "tls.crt").read_bytes())
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(own.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(load_pem_private_key((issuer / "tls.key").read_bytes(), None), hashes.SHA256())
    )
    folder.mkdir()
    chain = made.public_bytes(Encoding.PEM) + (issuer / "tls.crt").read_bytes()
    (folder / "tls.crt").write_bytes(chain)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "tls.key").write_bytes(pem)
    return folder


def test_only_an_operators_certificate_opens_a_coordinators_page(made, tmp_path):
    config = configs.load(made.coordinator_config)
    operator = made.folder / "operator"
    forged = issued(tmp_path / "forged", operator)

    async def run():
        async with serving(made.coordinator_config, config) as said:
            port = await port_of(said)
            assert await asked(context_of(made, operator), port) == "HTTP/1.1 303 See Other"
            wrong = await asked(context_of(made, operator), port, host="evil.example")
            assert wrong == "HTTP/1.1 421 Misdirected Request"
            for keys in (None, made.keys("a"), made.keys("coordinator"), forged):
                found = await asked(context_of(made, keys), port)
                assert found in REFUSED, (keys, found)
            assert await asked(context_of(made, operator), port) == "HTTP/1.1 303 See Other"

    asyncio.run(run())


def test_a_new_roster_says_who_is_let_in_from_then_on(made):
    config = configs.load(made.coordinator_config)
    first, second = made.folder / "operator", made.folder / "second"
    entry = create_keys(second, "second", Role.OPERATOR, "somebody's")
    roster = rosters.add(rosters.remove(rosters.load(config.roster), "operator"), entry)
    new = rosters.sign(roster, load_keys(made.folder / "founder"))

    async def run():
        async with serving(made.coordinator_config, config) as said:
            port = await port_of(said)
            assert await asked(context_of(made, first), port) == "HTTP/1.1 303 See Other"
            assert await asked(context_of(made, second), port) in REFUSED
            rosters.save(new, config.roster)
            assert "the roster changed" in await asyncio.wait_for(said.get(), 60)
            assert await port_of(said) == port
            assert await asked(context_of(made, second), port) == "HTTP/1.1 303 See Other"
            assert await asked(context_of(made, first), port) in REFUSED

    asyncio.run(run())


def test_an_older_roster_or_none_ends_it(made):
    config = configs.load(made.coordinator_config)
    newest = rosters.load(config.roster)
    entry = create_keys(made.folder / "second", "second", Role.OPERATOR, "somebody's")
    older = rosters.sign(newest, load_keys(made.folder / "founder"))
    newer = rosters.sign(rosters.add(newest, entry), load_keys(made.folder / "founder"))
    for change, why in (
        (lambda: rosters.save(older, config.roster), "is not newer than"),
        (config.roster.unlink, "cannot read it"),
    ):
        rosters.save(newer, config.roster)

        async def run(change=change):
            said = asyncio.Queue()
            path = made.coordinator_config
            task = asyncio.create_task(serve(path, config, "0.0.0.0:0", None, said.put_nowait))
            await port_of(said)
            change()
            await asyncio.wait_for(task, 60)

        with pytest.raises(LocalError, match=why):
            asyncio.run(run())


def test_a_roster_without_readers_is_an_error(made):
    config = configs.load(made.coordinator_config)
    roster = rosters.remove(rosters.load(config.roster), "operator")
    rosters.save(rosters.sign(roster, load_keys(made.folder / "founder")), config.roster)
    with pytest.raises(LocalError, match="no operator who may see this page"):
        asyncio.run(serve(made.coordinator_config, config, "0.0.0.0:0", None, print))


def test_a_silos_page_is_for_operators_of_its_own_organisation(made):
    data = digits().take(list(range(40)))
    local_federation.write_silo(made, "a", "127.0.0.1:1", data, [])
    config = silo_configs.load(made.silo_config("a"))
    roster = rosters.load(config.roster)
    assert readers(config, roster) == ()
    own = next(entry for entry in roster.entries if entry.id == "a")
    entries = tuple(
        entry.model_copy(update={"organisation": own.organisation})
        if entry.role is Role.OPERATOR
        else entry
        for entry in roster.entries
    )
    changed = roster.model_copy(update={"entries": entries})
    assert [entry.role for entry in readers(config, changed)] == [Role.OPERATOR]


def test_an_operators_file_is_for_the_coordinators_page_on_loopback(made, tmp_path):
    config = configs.load(made.coordinator_config)
    for listen in ("0.0.0.0:0", "192.0.2.1:80", "[::]:80", "example.org:80"):
        with pytest.raises(LocalError, match="only on loopback"):
            site_of(made.coordinator_config, config, tmp_path, Address.of(listen))
    assert site_of(made.coordinator_config, config, tmp_path, Address.of("[::1]:0")).actions


@pytest.mark.parametrize(
    "listen", ["", "8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", ":1"]
)
def test_a_wrong_address_is_an_error(listen):
    with pytest.raises(LocalError, match="not host:port"):
        Address.of(listen)
