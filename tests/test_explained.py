"""Whether the reader of recorded calls (explained.py) finds what no record of a secure sum explains."""

import copy
from hashlib import sha256
from types import SimpleNamespace

import pytest
from explained import SECURE, UPLOAD, Call, entries, unexplained
from ledgers import CTX, FEDERATION, HASH, KEY, MASKED_BYTES, PEER, intend_masked, open_ledger, protocol

from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.security.checkpoint import Checkpoint
from staddle.security.records import Payload

AGENT = (("user-agent", "grpc-python-asyncio/1.76.0 grpc-c/51.0.0 (linux; chttp2)"),)
SESSION = b"session-of-16-by"
WHOLE = bytes(range(MASKED_BYTES))
CUT = 96
OF = {"job": "j1", "job_digest": bytes.fromhex(HASH), "round": 3}


class Roster:
    """All that the reader asks a roster for, where nobody attests."""

    federation = FEDERATION

    def __getitem__(self, silo):
        return SimpleNamespace(log_key=KEY.public_key().public_bytes_raw().hex())


class Recording:
    """A silo that gives one secure sum, and all that crosses."""

    def __init__(self, folder):
        self.ledger = open_ledger(folder)
        self.calls, self.sizes, self.folder = [], [], folder
        self.control = 0

    def unary(self, name, request, reply, method=None):
        data = request.SerializeToString(deterministic=True)
        call = Call(f"/staddle.v1.Federation/{name}", AGENT, [data], [reply.SerializeToString(deterministic=True)])
        self.calls.append(call)
        if call.method != SECURE:
            self.sizes.append(len(data))

    def begin(self):
        self.ledger.start("staddle 0.1.0", HASH, HASH)
        self.ledger.job_accept("j1", HASH, "operator-1")
        self.control = self.ledger.control_open("s1", PEER, 100, 10_000)
        greeting = {"silo": "silo-a", "protocol_min": 1, "protocol_max": 1, "roster_digest": bytes.fromhex(HASH)}
        reply = pb.HelloReply(protocol=1, session=SESSION)
        self.unary("Hello", pb.HelloRequest(**greeting, challenge=bytes.fromhex(self.control.leaf)), reply)
        self.unary("Poll", pb.PollRequest(session=SESSION), pb.Task(round=pb.Round(**OF)))

    def give(self, kind, body, **changes):
        """One protocol message, with a record of its bytes."""
        attempt = secure.SecureAttempt(**OF, context=bytes.fromhex(CTX))
        given = secure.SecureGiven(**{"session": SESSION, "attempt": attempt, kind: body, **changes})
        data = given.SerializeToString(deterministic=True)
        protocol(self.ledger, kind, message=Payload(bytes=len(data), sha256=sha256(data).hexdigest()))
        self.unary("Secure", given, secure.SecureTaken())

    def ask(self, had):
        told = secure.SecureTold(attempt=secure.SecureAttempt(**OF), keys=secure.KeysTold())
        self.unary("SecureNext", secure.SecureAsked(session=SESSION, **OF, had=had), told)

    def upload(self, offset, sent):
        """Bytes from an offset on; all of them with their END."""
        ref = intend_masked(self.ledger, offset=offset, message_bytes=MASKED_BYTES - offset)
        frames = [
            tensor.Frame(
                manifest=tensor.Manifest(
                    **OF, session=SESSION, size=MASKED_BYTES, offset=offset, context=bytes.fromhex(CTX)
                )
            )
        ]
        frames += [tensor.Frame(chunk=WHOLE[at : at + 32]) for at in range(offset, offset + sent, 32)]
        if offset + sent == MASKED_BYTES:
            frames.append(tensor.Frame(end=self.end(ref)))
            self.ledger.outcome(ref, "sent", sent, "5c")
        received = [pb.Receipt(signature=b"\x5c").SerializeToString()] if offset else []
        sent_frames = [frame.SerializeToString(deterministic=True) for frame in frames]
        self.calls.append(Call(UPLOAD, AGENT, sent_frames, received, cut=not offset))

    def end(self, ref):
        digest = sha256(WHOLE).digest()
        total = sha256(digest)
        sealed = self.ledger.digest(ref, (), Payload(bytes=MASKED_BYTES, sha256=total.hexdigest()))
        place, size = sealed.place, Checkpoint.parse(sealed.checkpoint.text).size
        return tensor.End(
            sha256=total.digest(),
            tensor_sha256=[digest],
            ledger_seq=place.seq,
            ledger_leaf=bytes.fromhex(place.leaf),
            head=bytes(self.ledger.growth(0, sealed.checkpoint)),
            inclusion=self.ledger.inclusion(place.seq, size),
        )

    def close(self):
        self.ledger.control_close(self.control.seq, len(self.sizes), sum(self.sizes))
        self.ledger.close()
        return self.calls, entries(self.folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    made = Recording(tmp_path_factory.mktemp("ledger"))
    made.begin()
    made.give("keys", secure.KeyBundle(silo="silo-a", seal=b"s" * 32))
    made.ask(0)
    made.ask(1)
    made.give("shares", secure.Dealt())
    made.upload(0, CUT)
    made.upload(CUT, MASKED_BYTES - CUT)
    made.give("header", secure.Header(silo="silo-a", length=MASKED_BYTES, sha256=sha256(WHOLE).digest()))
    made.give("survival", secure.Survival(silo="silo-a"))
    return made.close()


def test_a_secure_sum_is_explained_by_its_records(recorded):
    calls, ledger = recorded
    assert unexplained(calls, ledger, Roster()) == []
    assert [call.method.rpartition("/")[2] for call in calls] == [
        "Hello", "Poll", "Secure", "SecureNext", "SecureNext", "Secure", "Upload", "Upload", "Secure", "Secure"
    ]  # fmt: skip


def of(calls, name, number=0):
    return [call for call in calls if call.method.endswith(f"/{name}")][number]


def rewrite(call, number, kind, change):
    message = kind.FromString(call.sent[number])
    change(message)
    call.sent[number] = message.SerializeToString(deterministic=True)


def manifest(calls, change):
    rewrite(of(calls, "Upload"), 0, tensor.Frame, lambda frame: change(frame.manifest))


def spoil(calls, number=0):
    of(calls, "Upload", number).sent[1] = tensor.Frame(chunk=bytes(32)).SerializeToString()


DOCTORED = {
    "a message that no record has": (
        lambda c: c.append(copy.deepcopy(of(c, "Secure"))),
        "no record is of this message",
    ),
    "another message": (
        lambda c: rewrite(of(c, "Secure"), 0, secure.SecureGiven, lambda m: setattr(m.keys, "mask", b"secret")),
        "no record is of this message of",
    ),
    "a second message in a call": (lambda c: of(c, "Secure").sent.append(b""), "2 messages in a call that has one"),
    "an unknown field": (
        lambda c: of(c, "Secure").sent.__setitem__(0, of(c, "Secure").sent[0] + b"\xfa\x01\x06secret"),
        "SecureGiven has unknown fields [31]",
    ),
    "more messages had than came": (
        lambda c: rewrite(of(c, "SecureNext", 1), 0, secure.SecureAsked, lambda m: setattr(m, "had", 7)),
        "field had is 7, which nothing explains",
    ),
    "an upload of another attempt": (
        lambda c: manifest(c, lambda m: setattr(m, "context", b"x" * 32)),
        "no intent declares",
    ),
    "an upload of no attempt": (lambda c: manifest(c, lambda m: m.ClearField("context")), "no intent declares"),
    "a name in a masked manifest": (
        lambda c: manifest(c, lambda m: m.tensors.add(part="secret")),
        "the manifest's tensors are not the intent's: [('secret'",
    ),
    "another size": (lambda c: manifest(c, lambda m: setattr(m, "size", 7)), "its intent another size"),
    "other words before the cut": (spoil, "END has other digests than record"),
    "other words": (lambda c: spoil(c, 1), "digest 7 is of another message"),
    "a chunk too many": (
        lambda c: of(c, "Upload").sent.append(tensor.Frame(chunk=WHOLE).SerializeToString()),
        "payload bytes crossed, intent",
    ),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_what_no_record_explains_is_found(recorded, name):
    calls, ledger = copy.deepcopy(recorded)
    change, said = DOCTORED[name]
    change(calls)
    found = unexplained(calls, ledger, Roster())
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_number": 4},
        {"ctx": "d8" * 32},
        {"kind": "shares"},
        {"job": "j2"},
        {"rpc": "/staddle.v1.Federation/Poll"},
    ],
    ids=str,
)
def test_a_record_that_says_another_thing_than_its_message_is_found(tmp_path, wrong):
    made = Recording(tmp_path)
    made.begin()
    given = secure.SecureGiven(session=SESSION, attempt=secure.SecureAttempt(**OF, context=bytes.fromhex(CTX)))
    given.keys.silo = "silo-a"
    data = given.SerializeToString(deterministic=True)
    message = Payload(bytes=len(data), sha256=sha256(data).hexdigest())
    protocol(made.ledger, **{"kind": "keys", "message": message, **wrong})
    made.unary("Secure", given, secure.SecureTaken())
    (problem,) = unexplained(*made.close(), Roster())
    assert problem.endswith("has another kind, job, round or attempt than its message")


def test_a_message_of_another_session_is_found(tmp_path):
    made = Recording(tmp_path)
    made.begin()
    made.give("keys", secure.KeyBundle(silo="silo-a"), session=b"another")
    (problem,) = unexplained(*made.close(), Roster())
    assert problem.endswith("the message names another session")
