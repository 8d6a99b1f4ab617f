import ast
import asyncio
import ssl
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

import staddle.coordinator
import staddle.proto
from staddle.coordinator.rpc import guard
from staddle.coordinator.rpc.guard import STATUS, Guard, identify
from staddle.errors import RefusedError
from staddle.proto import federation_pb2 as pb
from staddle.proto import membership_pb2, operations_pb2
from staddle.proto.channel import ERROR_METADATA, MAX_METADATA_BYTES
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys

ROLES = {
    "ministry": Role.FOUNDER,
    "op": Role.OPERATOR,
    "coordinator": Role.COORDINATOR,
    "silo-a": Role.SILO,
}
TLS13 = [b"TLSv1.3"]
SERVICE = "/staddle.v1.Federation/"
HEALTH = "/grpc.health.v1.Health/"
OPERATIONS = "/staddle.v1.Operations/"


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    made = {m: create_keys(folder / m, m, role, "o") for m, role in ROLES.items()}
    return {**made, "twin": create_keys(folder / "twin", "silo-a", Role.SILO, "o")}


@pytest.fixture(scope="module")
def roster(entries):
    made = rosters.new("lung", [entries["ministry"]], 1)
    for member in ("op", "coordinator", "silo-a"):
        made = rosters.add(made, entries[member])
    return made


def auth(entry, version=TLS13):
    return {"ssl_tls_version": version, "x509_pem_cert": [entry.certificate.encode()]}


def refusal(values, roster):
    with pytest.raises(RefusedError) as caught:
        identify(values, roster, "ipv4:10.0.0.1:1234")
    assert (caught.value.code, caught.value.peer) == ("IDENTITY", "ipv4:10.0.0.1:1234")
    return caught.value.why


# identify.
@pytest.mark.parametrize("member", list(ROLES))
def test_a_member_is_known_by_its_key(entries, roster, member):
    assert identify(auth(entries[member]), roster, "peer") == entries[member]


@pytest.mark.parametrize(
    "version", [[b"TLSv1.2"], [b"TLSv1.1"], [b""], [], [b"tlsv1.3"], [b"TLSv1.3", b"TLSv1.3"]]
)
def test_1_an_older_tls_is_refused_even_from_a_member(entries, roster, version):
    assert "not TLSv1.3" in refusal(auth(entries["silo-a"], version), roster)


def test_1_a_connection_without_tls_is_refused(entries, roster):
    refusal({}, roster)
    refusal({"x509_pem_cert": [entries["silo-a"].certificate.encode()]}, roster)


@pytest.mark.parametrize("certificates", [None, []])
def test_2_no_certificate_is_refused(roster, certificates):
    values = {
        "ssl_tls_version": TLS13,
        **({} if certificates is None else {"x509_pem_cert": certificates}),
    }
    assert "no client certificate" in refusal(values, roster)


def test_2_two_certificates_another_key_and_a_removed_member_are_refused(entries, roster):
    two = [entries["silo-a"].certificate.encode(), entries["op"].certificate.encode()]
    refusal({"ssl_tls_version": TLS13, "x509_pem_cert": two}, roster)
    assert entries["twin"].id == "silo-a"
    assert "belongs to no member" in refusal(auth(entries["twin"]), roster)
    assert "belongs to no member" in refusal(
        auth(entries["silo-a"]), rosters.remove(roster, "silo-a")
    )


@pytest.mark.parametrize(
    "pem", [b"", b"no certificate", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nAAAA\n"]
)
def test_2_what_is_no_certificate_is_refused(roster, pem):
    refusal({"ssl_tls_version": TLS13, "x509_pem_cert": [pem]}, roster)


def flipped(entry, places):
    der = bytearray(ssl.PEM_cert_to_DER_cert(entry.certificate))
    for place in places:
        der[place // 8] ^= 1 << place % 8
    return ssl.DER_cert_to_PEM_cert(bytes(der)).encode()


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_2_no_changed_certificate_raises_anything_but_a_refusal(entries, roster):
    entry, leaked = entries["silo-a"], set()
    for place in range(0, 8 * len(ssl.PEM_cert_to_DER_cert(entry.certificate)), 3):
        try:
            identify(
                {"ssl_tls_version": TLS13, "x509_pem_cert": [flipped(entry, [place])]},
                roster,
                "peer",
            )
        except RefusedError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not come out
            leaked.add(type(error).__name__)
    assert not leaked


# The guard around a call.
class Context:
    """What gRPC tells a handler, and what the handler told gRPC."""

    def __init__(self, entry, version=TLS13, requests=("request",)):
        self._auth = auth(entry, version)
        self._requests = iter(requests)
        self.aborted = None

    async def read(self):
        return next(self._requests, grpc.aio.EOF)

    def auth_context(self):
        return self._auth

    def peer(self):
        return "ipv4:10.0.0.1:1234"

    async def abort(self, code, details, trailing_metadata=()):
        self.aborted = (code, dict(trailing_metadata)[ERROR_METADATA])
        raise grpc.aio.AbortError(details)


async def wrapped(warden, method, behaviour, kind="unary_unary"):
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)

    async def continuation(details):
        return handler

    made = await warden.intercept_service(continuation, SimpleNamespace(method=method))
    guarded = made.stream_stream if made.response_streaming else made.stream_unary
    return lambda context: guarded(None, context)


def called(warden, context, method=f"{SERVICE}Poll", error=None):
    """The reply of one unary call; AbortError when it was refused."""

    async def behaviour(request, context):
        if error is not None:
            raise error
        return "reply"

    async def one():
        return await (await wrapped(warden, method, behaviour))(context)

    return asyncio.run(one())


MAY = {"silo-a": (SERVICE, HEALTH), "op": (OPERATIONS, HEALTH), "ministry": (), "coordinator": ()}


@pytest.mark.parametrize(
    "method", [f"{SERVICE}Poll", f"{HEALTH}Check", f"{OPERATIONS}Stop", "/other.Service/Poll"]
)
@pytest.mark.parametrize("member", MAY)
def test_3_each_role_may_call_its_own_services(entries, roster, member, method):
    context = Context(entries[member])
    if method.rpartition("/")[0] + "/" in MAY[member]:
        assert called(Guard(roster), context, method) == "reply"
        return
    with pytest.raises(grpc.aio.AbortError):
        called(Guard(roster), context, method)
    assert context.aborted == (grpc.StatusCode.PERMISSION_DENIED, "IDENTITY")


def test_1_the_guard_refuses_an_older_tls_before_the_handler_runs(entries, roster):
    context = Context(entries["silo-a"], [b"TLSv1.2"])
    with pytest.raises(grpc.aio.AbortError):
        called(Guard(roster), context, error=AssertionError("the handler ran"))
    assert context.aborted == (grpc.StatusCode.PERMISSION_DENIED, "IDENTITY")


def test_4_a_member_over_its_limits_is_refused_and_let_in_again(entries, roster):
    async def scenario():
        warden, gate = Guard(roster), asyncio.Event()

        async def behaviour(request, context):
            await gate.wait()
            return "reply"

        handler = await wrapped(warden, f"{SERVICE}Upload", behaviour)
        first = asyncio.create_task(handler(Context(entries["silo-a"])))
        await asyncio.sleep(0)
        context = Context(entries["silo-a"])
        with pytest.raises(grpc.aio.AbortError):
            await handler(context)
        assert context.aborted == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT")
        gate.set()
        assert await first == "reply"
        assert await handler(Context(entries["silo-a"])) == "reply"

    asyncio.run(scenario())


def test_4_a_call_that_fails_or_is_cancelled_is_counted_out(entries, roster):
    warden = Guard(roster)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            called(warden, Context(entries["silo-a"]), f"{SERVICE}Upload", ZeroDivisionError())

    async def cancelled():
        async def behaviour(request, context):
            await asyncio.sleep(60)

        handler = await wrapped(warden, f"{SERVICE}Upload", behaviour)
        for _ in range(3):
            task = asyncio.create_task(handler(Context(entries["silo-a"])))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    assert called(warden, Context(entries["silo-a"]), f"{SERVICE}Upload") == "reply"


def test_4_a_stream_counts_until_it_is_closed(entries, roster):
    async def scenario():
        warden = Guard(roster)

        begun, go_on = asyncio.Event(), asyncio.Event()

        async def behaviour(request, context):
            begun.set()
            await go_on.wait()
            return request

        handler = await wrapped(warden, f"{SERVICE}Fetch", behaviour, "unary_stream")
        half = asyncio.create_task(handler(Context(entries["silo-a"])))
        await begun.wait()
        context = Context(entries["silo-a"])
        with pytest.raises(grpc.aio.AbortError):
            await handler(context)
        assert context.aborted[1] == "LIMIT"
        go_on.set()
        await half
        await handler(Context(entries["silo-a"]))  # its place is free again

    asyncio.run(scenario())


def test_an_unknown_method_stays_unknown(roster):
    async def nothing(details):
        return None

    assert (
        asyncio.run(Guard(roster).intercept_service(nothing, SimpleNamespace(method="/x/Y")))
        is None
    )


# Codes.
@pytest.mark.parametrize("code", STATUS)
def test_every_code_of_the_table_leaves_with_its_status(entries, roster, code):
    context = Context(entries["silo-a"])
    with pytest.raises(grpc.aio.AbortError):
        called(Guard(roster), context, error=RefusedError("silo-a", code, "why"))
    assert context.aborted == (STATUS[code], code)


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
def test_a_reason_that_quotes_much_is_cut_so_that_its_code_arrives(entries, roster, character):
    error = RefusedError("silo-a", "JOB_INVALID", "unknown key " + character * 4_000_000)
    with pytest.raises(grpc.aio.AbortError, match=r"^unknown key ") as caught:
        called(Guard(roster), Context(entries["silo-a"]), error=error)
    on_the_line = urllib.parse.quote(str(caught.value))  # as gRPC writes what is not ASCII
    assert 1_000 < len(on_the_line) < MAX_METADATA_BYTES


def raised_codes(folder):
    """(code, where) of every RefusedError that the modules of a folder make.

    The code must stand there literally.

    Without the messages of secure sums and mixes, whose codes are those of security/faults.py: they
    cross as SECURE.
    """
    for path in sorted(set(folder.rglob("*.py")) - set((folder / "convert").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RefusedError":
                yield ast.literal_eval(node.args[1]), f"{path.name}:{node.lineno}"


def test_every_code_raised_has_a_status_of_the_closed_list_and_unavailable_is_stopping():
    folders = [Path(module.__file__).parent for module in (staddle.coordinator, staddle.proto)]
    raised = {code: where for folder in folders for code, where in raised_codes(folder)}
    assert len(raised) > 10
    assert {code: where for code, where in raised.items() if code not in STATUS} == {}
    assert set(STATUS) == set(raised), "a status that nothing raises"
    names = {name.removeprefix("ERROR_CODE_") for name in pb.ErrorCode.keys()}  # noqa: SIM118 - an enum wrapper
    assert set(STATUS) < names
    assert grpc.StatusCode.OK not in STATUS.values()
    unavailable = [code for code, status in STATUS.items() if status is grpc.StatusCode.UNAVAILABLE]
    assert unavailable == ["STOPPING"]


def test_the_services_of_the_table_are_those_of_the_proto_files():
    ours = [
        *pb.DESCRIPTOR.services_by_name.values(),
        *operations_pb2.DESCRIPTOR.services_by_name.values(),
        *membership_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    names = {f"/{service.full_name}" for service in ours}
    assert {*guard.MAY_CALL, guard.ENROLMENT} == {*names, "/grpc.health.v1.Health"}
