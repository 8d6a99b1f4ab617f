"""What strangers can do at a coordinator whose one open call is Enrol: over real TLS."""

import asyncio
import contextlib
import os
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.coordinator_thread import coordinator
from support.raw_silo import SECONDS, refused
from support.signed_federation import job_document, signed_federation

from staddle.commands.members import founding
from staddle.coordinator.enrolment import WaitingMember
from staddle.coordinator.rpc import guard
from staddle.coordinator.rpc.limits import STRANGERS_LOGGED
from staddle.errors import PeerError, UnwritableError
from staddle.files.documents import canonical_json
from staddle.proto import federation_pb2, membership_pb2, operations_pb2
from staddle.proto.channel import ENROL, OPTIONS
from staddle.security.identity import invitation as invitations
from staddle.security.identity import roster as rosters
from staddle.security.identity.guest import GUEST_CERTIFICATE, guest_key
from staddle.security.identity.keys import Role, create_keys, load_keys

pytestmark = pytest.mark.actor("stranger")
SILOS = ("north", "east")
SERVICES = [
    service
    for module in (federation_pb2, operations_pb2, membership_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
CLOSED = [
    f"/{service.full_name}/{method.name}"
    for service in SERVICES
    for method in service.methods
    if f"/{service.full_name}/{method.name}" != ENROL
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return signed_federation(tmp_path_factory.mktemp("world"), SILOS, job_document(SILOS))


@pytest.fixture(scope="module")
def here(world):
    with coordinator(world.config) as here:
        yield here
    assert here.broken == []


@contextlib.asynccontextmanager
async def stranger(here, world, limit=64 << 20):
    root = world.roster.coordinator.certificate.encode()
    credentials = grpc.ssl_channel_credentials(root, guest_key(), GUEST_CERTIFICATE.encode())
    options = {**dict(OPTIONS), "grpc.max_send_message_length": limit}
    options["grpc.ssl_target_name_override"] = "coordinator.staddle"
    async with grpc.aio.secure_channel(
        here.address, credentials, options=list(options.items())
    ) as channel:
        yield channel


def enrolling(channel):
    return channel.unary_unary(ENROL, lambda data: data, membership_pb2.EnrolReply.FromString)


def kept(world):
    folder = world.config.directory / "enrolments"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_stranger_reaches_no_other_call(here, world):
    async def scenario():
        async with stranger(here, world) as channel:
            for method in (*CLOSED, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
                call = channel.unary_unary(method, lambda data: data, lambda data: data)
                await refused(call(b"", timeout=SECONDS), "IDENTITY", "belongs to no member")

    assert len(CLOSED) > 20
    here.run(scenario())
    assert here.daemon.sessions == {}


def test_where_enrolment_is_closed_no_stranger_completes_a_handshake(world, tmp_path):
    changes = {"enrolment": False, "directory": tmp_path}

    async def scenario(here):
        async with stranger(here, world) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await enrolling(channel)(b"", timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    with coordinator(world.config.model_copy(update=changes)) as closed:
        closed.run(scenario(closed))


def request(ticket=b"", entry=b""):
    return membership_pb2.EnrolRequest(ticket=ticket, entry=entry).SerializeToString()


def test_what_is_too_large_or_never_comes_is_refused(here, world, monkeypatch):
    async def scenario():
        async with stranger(here, world) as channel:
            call = enrolling(channel)
            large = request(b"x" * invitations.MOST_BYTES, b"x" * guard.MOST_GUEST_BYTES)
            await refused(call(large, timeout=SECONDS), "MANIFEST", "more than 40000")
            # only now: on a busy machine the message above may take longer
            monkeypatch.setattr(guard, "GUEST_SECONDS", 0.2)
            silent = channel.stream_unary(ENROL, lambda data: data, lambda data: data)(
                timeout=SECONDS
            )
            await refused(silent, "LIMIT", "sent nothing for 0.2 seconds")

    here.run(scenario())
    assert kept(world) == []


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(request, st.binary(max_size=100), st.binary(max_size=100)),
    )
)
def test_any_bytes_are_refused_and_leave_nothing(here, world, data):
    async def scenario():
        async with stranger(here, world) as channel:
            await refused(enrolling(channel)(data, timeout=SECONDS), "MANIFEST")

    here.run(scenario())
    assert kept(world) == []


def test_a_ticket_lets_one_entry_wait_and_makes_nobody_a_member(here, world, tmp_path):
    founder = load_keys(world.folder / "founder")
    ticket = invitations.ticket(
        founder, "local", "west", "silo", os.urandom(32), int(time.time()) + 3600
    )
    entries = [create_keys(tmp_path / n, "west", Role.SILO, "org") for n in ("west", "thief")]
    first, second = (canonical_json(each.model_dump(mode="json")) for each in entries)
    whole = canonical_json(ticket.model_dump())
    member = load_keys(tmp_path / "west")

    async def scenario():
        async with stranger(here, world) as channel:
            call = enrolling(channel)
            for _ in range(3):
                reply = await call(request(whole, first), timeout=SECONDS)
                assert reply == membership_pb2.EnrolReply()
            await refused(call(request(whole, second), timeout=SECONDS), "IDENTITY", "was used")
            spoilt = whole.replace(b'"west"', b'"wast"')
            await refused(call(request(spoilt, first), timeout=SECONDS), "IDENTITY")
        # its own certificate opens nothing either
        root = world.roster.coordinator.certificate.encode()
        pair = member.tls_key, member.entry.certificate.encode()
        options = [*OPTIONS, ("grpc.ssl_target_name_override", "coordinator.staddle")]
        credentials = grpc.ssl_channel_credentials(root, *pair)
        async with grpc.aio.secure_channel(here.address, credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await enrolling(channel)(request(whole, first), timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    here.run(scenario())
    assert len(kept(world)) == 1
    assert here.daemon.roster == world.roster


def unwritable(*_):
    raise UnwritableError("/srv/secret/roster.json: cannot write it")


def test_founders_alone_publish_and_only_what_follows_the_present_roster(
    here, world, tmp_path, monkeypatch
):
    founder = load_keys(world.folder / "founder")
    entry = create_keys(tmp_path / "west", "west", Role.SILO, "org")
    path = "/staddle.v1.Membership/Publish"
    add = lambda base, keys=founder: rosters.sign(rosters.add(base, entry), keys)
    other = create_keys(tmp_path / "f", "founder", Role.FOUNDER, "org")
    forged = rosters.sign(
        rosters.add(rosters.add(world.roster, other, replace=True), entry),
        load_keys(tmp_path / "f"),
    )
    unsigned = rosters.add(world.roster, entry)
    coordinators = create_keys(tmp_path / "c", "coordinator", Role.COORDINATOR, "org")
    swapped = rosters.sign(rosters.add(world.roster, coordinators, replace=True), founder)
    older = rosters.sign(
        add(world.roster).model_copy(update={"version": 1, "signatures": {}}), founder
    )

    def message(roster):
        return membership_pb2.PublishRequest(roster=rosters.encoded(roster)).SerializeToString()

    async def scenario():
        for keys in (world.keys["north"], load_keys(world.folder / "operator")):
            async with publishing(here, world, keys) as channel:
                call = channel.unary_unary(path, lambda data: data, lambda data: data)
                data = message(add(world.roster))
                await refused(call(data, timeout=SECONDS), "IDENTITY", "may not call")
        async with publishing(here, world, founder) as channel:
            call = channel.unary_unary(path, lambda data: data, lambda data: data)
            for roster, why in (
                (forged, "a pin does not fit"), (unsigned, "needs signatures"),
                (swapped, "has no 'coordinator' with the keys in use"), (older, "is not newer"),
            ):  # fmt: skip
                await refused(call(message(roster), timeout=SECONDS), "ROSTER", why)
            with monkeypatch.context() as patch:
                patch.setattr(rosters, "save", unwritable)
                call_ended = call(message(add(world.roster)), timeout=SECONDS)
                await refused(call_ended, "ROSTER", "its log says why")
            assert "/srv/secret" not in await call_ended.details()
            # what is in use already changes nothing
            await call(message(world.roster), timeout=SECONDS)

    here.run(scenario())
    assert world.config.roster_in_use().present == world.roster


def test_a_stranger_cannot_fill_the_disk_with_lines_of_the_log(here, world, monkeypatch):
    logged, problem, counted = [], guard.log.problem, []
    monkeypatch.setattr(guard.log, "unwritten", lambda name, **_: counted.append(name))
    monkeypatch.setattr(
        guard.log, "problem", lambda *a, **f: (logged.append(a[0]), problem(*a, **f))
    )
    # one minute for the whole test, which is not that of the tests before
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: 1e12))
    times = 2 * STRANGERS_LOGGED

    async def scenario():
        async with stranger(here, world) as channel:
            closed = channel.unary_unary(CLOSED[0], lambda data: data, lambda data: data)
            for _ in range(times):
                await refused(closed(b"", timeout=SECONDS), "IDENTITY")
                await refused(enrolling(channel)(b"x", timeout=SECONDS), "MANIFEST")
        # a member's refusals are all logged
        async with publishing(here, world, world.keys["north"]) as channel:
            publish = "/staddle.v1.Membership/Publish"
            call = channel.unary_unary(publish, lambda data: data, lambda data: data)
            for _ in range(times):
                await refused(call(b"", timeout=SECONDS), "IDENTITY", "may not call")

    here.run(scenario())
    assert logged.count("refused") == STRANGERS_LOGGED - 1 + times
    assert logged.count("refused.many") == 1
    # All are counted, whether a line is written or not.
    assert len(counted) + logged.count("refused") == 3 * times


def publishing(here, world, keys):
    root = world.roster.coordinator.certificate.encode()
    pair = keys.tls_key, keys.entry.certificate.encode()
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "coordinator.staddle")]
    credentials = grpc.ssl_channel_credentials(root, *pair)
    return grpc.aio.secure_channel(here.address, credentials, options=options)


def test_of_two_founders_at_once_one_is_told_that_the_other_was_first(world, tmp_path, monkeypatch):
    """The coordinator still serves under the roster before: it ends folds before it starts anew."""
    founder = load_keys(world.folder / "founder")
    added = [
        rosters.sign(
            rosters.add(world.roster, create_keys(tmp_path / name, name, Role.SILO, "org")), founder
        )
        for name in ("west", "south")
    ]
    rosters.save(world.roster, tmp_path / "roster.json")
    changes = {"directory": tmp_path / "state", "roster": tmp_path / "roster.json"}

    async def scenario(here):
        parse, read_in = rosters.parse, []
        monkeypatch.setattr(
            rosters,
            "parse",
            lambda *given: (read_in.append(threading.get_ident()), parse(*given))[1],
        )
        async with publishing(here, world, founder) as channel:
            call = channel.unary_unary(
                "/staddle.v1.Membership/Publish", lambda data: data, lambda data: data
            )
            messages = [
                membership_pb2.PublishRequest(roster=rosters.encoded(each)).SerializeToString()
                for each in added
            ]
            calls = [call(each, timeout=SECONDS) for each in messages]
            found = await asyncio.gather(*calls, return_exceptions=True)
            (first,) = [n for n, each in enumerate(found) if not isinstance(each, Exception)]
            await refused(call(messages[1 - first], timeout=SECONDS), "ROSTER", "is not newer")
            await call(messages[first], timeout=SECONDS)
        # A roster of thousands takes seconds to read: other calls go on meanwhile.
        assert len(read_in) == 4
        assert threading.get_ident() not in read_in
        return added[first]

    with coordinator(world.config.model_copy(update=changes)) as other:
        published = other.run(scenario(other))
    assert rosters.load(tmp_path / "state" / "roster.json") == published
    # What was given by hand stays as it is.
    assert rosters.load(tmp_path / "roster.json") == world.roster


def test_a_coordinator_cannot_pass_off_an_invited_silo_as_an_operator(world, tmp_path):
    """It shows the founder an entry that the member has signed for it alone."""
    founder = load_keys(world.folder / "founder")
    ticket = invitations.ticket(founder, "local", "west", "silo", b"t" * 32, int(time.time()) + 900)
    entry = create_keys(tmp_path / "west", "west", Role.OPERATOR, "org")
    shown = WaitingMember(ticket=ticket, entry=entry)
    rosters.save(world.roster, tmp_path / "roster.json")
    changes = {"directory": tmp_path / "state", "roster": tmp_path / "roster.json"}
    with coordinator(world.config.model_copy(update=changes)) as other:
        (tmp_path / "state" / "enrolments").mkdir()
        (tmp_path / "state" / "enrolments" / "west.json").write_bytes(
            canonical_json(shown.model_dump(mode="json"))
        )
        trust = world.config.trust
        lines = (
            "version = 1", f'coordinator = "{other.address}"', f'keys = "{world.folder}/founder"',
            'roster = "roster.json"', "[trust]", f'federation = "{trust.federation}"',
            f"threshold = {trust.threshold}", f"founders = {list(trust.founders)}",
        )  # fmt: skip
        (tmp_path / "founder.toml").write_text("\n".join(lines))
        with pytest.raises(PeerError, match="was invited as silo 'west', and the entry is of oper"):
            founding.admit(tmp_path / "founder.toml", "west", entry.protocol_fingerprint)
    assert rosters.load(tmp_path / "roster.json") == world.roster
