"""The reader of recorded calls finds what no record of a secure sum or a mix explains."""

import copy
import functools
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
from support.explained import CONTRIBUTE, FETCH, PADDED, SECURE, UPLOAD, Call, entries, unexplained
from support.ledgers import (
    CTX,
    FEDERATION,
    HASH,
    KEY,
    MASKED_BYTES,
    PADDED_BYTES,
    PEER,
    ROTATED_BYTES,
    USE,
    VERSION,
    intend_masked,
    intend_padded,
    intend_rotated,
    open_ledger,
    protocol,
    write_control_close,
    write_control_open,
    write_digest,
    write_ingress,
    write_job_accept,
    write_outcome,
    write_start,
)

from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import GROUP_CONTEXT, framed
from staddle.security.ledger.records import Digest, MessageDigest, TensorDigest
from staddle.security.log.tree_head import TreeHead

AGENT = (("user-agent", "grpc-python-asyncio/1.76.0 grpc-c/51.0.0 (linux; chttp2)"),)
SESSION = b"session-of-16-by"
WHOLE = bytes(range(MASKED_BYTES))
WORDS = bytes(number % 256 for number in range(PADDED_BYTES))
VECTORS = bytes(range(ROTATED_BYTES))
CUT = 96
JOB = {"job": "j1", "job_digest": bytes.fromhex(HASH)}
OF = {**JOB, "round": 3}


def payload_of(message):
    data = message.SerializeToString(deterministic=True)
    return MessageDigest(bytes=len(data), sha256=sha256(data).hexdigest())


class Roster:
    """All that the reader asks a roster for, where nobody attests."""

    federation = FEDERATION
    entries = ()
    silos = tuple(SimpleNamespace(id=silo) for silo in ("silo-a", "silo-b", "silo-c"))

    def __getitem__(self, silo):
        return SimpleNamespace(log_key=KEY.public_key().public_bytes_raw().hex())


MEMBERS = bytes.fromhex(rosters.members_digest(Roster(), ()))
EPOCH = sha256(
    framed(GROUP_CONTEXT, FEDERATION.encode(), MEMBERS, bytes.fromhex(HASH), bytes(8))
).hexdigest()


class Recording:
    """A silo that gives one secure sum, and all that crosses."""

    def __init__(self, folder):
        self.ledger = open_ledger(folder)
        self.calls, self.sizes, self.folder = [], [], folder
        self.control = 0

    def unary(self, name, request, reply, method=None):
        data = request.SerializeToString(deterministic=True)
        received = [reply.SerializeToString(deterministic=True)]
        call = Call(f"/staddle.v1.Federation/{name}", AGENT, [data], received)
        self.calls.append(call)
        if call.method not in (SECURE, CONTRIBUTE, PADDED):
            self.sizes.append(len(data))

    def begin(self):
        write_start(self.ledger, "staddle 0.1.0", HASH, HASH)
        write_job_accept(self.ledger, "j1", HASH, "operator-1")
        self.control = write_control_open(self.ledger, "s1", PEER, 100, 10_000)
        greeting = {"silo": "silo-a", "protocol_min": 2, "protocol_max": 2}
        greeting |= {"roster_digest": bytes.fromhex(HASH)}
        greeting |= {"challenge": bytes.fromhex(self.control.leaf)}
        reply = pb.HelloReply(protocol=2, session=SESSION)
        self.unary("Hello", pb.HelloRequest(**greeting), reply)
        self.unary("Poll", pb.PollRequest(session=SESSION), pb.Task(round=pb.Round(**OF)))

    def give(self, kind, body, **changes):
        """One protocol message, with a record of its bytes."""
        attempt = secure.SecureAttempt(**OF, context=bytes.fromhex(CTX))
        fields = {"session": SESSION, "attempt": attempt, kind: body, **changes}
        given = secure.SecureUpload(**fields)
        protocol(self.ledger, kind, message=payload_of(given))
        self.unary("Secure", given, secure.SecureTaken())

    def ask(self, had):
        told = secure.SecureDelivery(
            attempt=secure.SecureAttempt(**OF), keys=secure.DeliveredKeys()
        )
        self.unary("SecureNext", secure.SecurePoll(session=SESSION, **OF, had=had), told)

    def upload(self, offset, sent):
        """Bytes from an offset on; all of them with their END."""
        ref = intend_masked(self.ledger, offset=offset, message_bytes=MASKED_BYTES - offset)
        manifest = tensor.Manifest(**OF, session=SESSION, size=MASKED_BYTES, offset=offset)
        manifest.context = bytes.fromhex(CTX)
        chunks = [WHOLE[at : at + 32] for at in range(offset, offset + sent, 32)]
        frames = [tensor.Frame(manifest=manifest), *(tensor.Frame(chunk=each) for each in chunks)]
        whole = offset + sent == MASKED_BYTES
        if whole:
            frames.append(tensor.Frame(end=self.end(ref)))
            write_outcome(self.ledger, ref, "sent", sent, "5c")
        received = [pb.Receipt(signature=b"\x5c").SerializeToString()] if whole else []
        sent_frames = [frame.SerializeToString(deterministic=True) for frame in frames]
        self.calls.append(Call(UPLOAD, AGENT, sent_frames, received, cut=not whole))

    def recorded(self, name, kind, message, ctx, round_number=3):
        """A message of the protocol of a mix, with one record of its bytes."""
        fields = {"ctx": ctx, "round_number": round_number, "rpc": f"/staddle.v1.Federation/{name}"}
        protocol(self.ledger, kind, message=payload_of(message), **fields)
        self.unary(name, message, secure.SecureTaken())

    def contribute(self, recipients=("silo-b", "silo-c"), sender="silo-a", **changes):
        contribution = secure.Contribution(sealing=secure.Sealing(sender=sender, root=b"r" * 32))
        pieces = [secure.Sealed(recipient=recipient) for recipient in recipients]
        given = secure.Contributed(session=SESSION, **JOB, contribution=contribution, pieces=pieces)
        fields = {"ctx": EPOCH, "round_number": 0, **changes}
        self.recorded("Contribute", "contribution", given, **fields)
        self.unary("GroupKey", secure.KeyPoll(session=SESSION, **JOB), secure.KeyReply())

    def own(self, intend, ctx, part, words, cut=0, headers=()):
        """The upload of one part; what is left of it behind a cut, too."""
        at = 0
        for end in [*([cut] if cut else []), len(words)]:
            ref = intend(self.ledger, ctx, offset=at, message_bytes=len(words) - at, cohort=())
            manifest = tensor.Manifest(
                **OF, session=SESSION, size=len(words), offset=at, part=part, tensors=headers
            )
            manifest.context = bytes.fromhex(ctx)
            frames = [tensor.Frame(manifest=manifest), tensor.Frame(chunk=words[at:end])]
            if end == len(words):
                frames.append(tensor.Frame(end=self.end(ref, words)))
                write_outcome(self.ledger, ref, "sent", end - at, "5c")
            sent = [frame.SerializeToString(deterministic=True) for frame in frames]
            received = [pb.Receipt(signature=b"\x5c").SerializeToString()]
            broken = end < len(words)
            self.calls.append(Call(UPLOAD, AGENT, sent, [] if broken else received, cut=broken))
            if broken:
                asked = pb.StandingRequest(session=SESSION, **OF, part=part)
                self.unary("Standing", asked, pb.StandingReply())
            at = end

    def sign(self, ctx=VERSION, number=0, part="extractor", digest=None, silo="silo-a", round_=3):
        """The word on the padded upload."""
        upload = secure.PaddedUpload(
            silo=silo, round=round_, number=number, sealing=secure.Sealing(sender=silo)
        )
        upload.sha256 = digest or sha256(WORDS).digest()
        given = secure.PaddedWordUpload(session=SESSION, **JOB, part=part, upload=upload)
        given.pieces.add(recipient="silo-b")
        self.recorded("Padded", "padded", given, ctx)

    def fetch(self, parts=("extractor", "extractor", "other"), plain=b"p" * 16, recorded=True):
        """A delivery of one plain tensor and a row of each part, that of the last of any length."""
        rows = [
            bytes([number]) * (PADDED_BYTES if part == "extractor" else 24)
            for number, part in enumerate(parts)
        ]
        headers = [tensor.TensorHeader(part="mean", name="w", size=len(plain), shape=[2], dtype=2)]
        digests = [sha256(piece).digest() for piece in (plain, *rows)]
        whole, total = b"".join([plain, *rows]), sha256(b"".join(digests))
        manifest = tensor.Manifest(**OF, size=len(whole), tensors=headers)
        for part in parts:
            manifest.rows.add(part=part)
        frames = [tensor.Frame(manifest=manifest), tensor.Frame(chunk=whole)]
        frames.append(tensor.Frame(end=tensor.End(sha256=total.digest(), tensor_sha256=digests)))
        asked = pb.FetchRequest(session=SESSION, **OF).SerializeToString(deterministic=True)
        self.sizes.append(len(asked))
        received = [frame.SerializeToString(deterministic=True) for frame in frames]
        self.calls.append(Call(FETCH, AGENT, [asked], received))
        if recorded:
            message = MessageDigest(bytes=len(whole), sha256=total.hexdigest())
            fields = {"job": "j1", "round_number": 3, "purpose": "delivery", "rpc": FETCH}
            write_ingress(self.ledger, **fields, sender=PEER, message=message)

    def end(self, ref, words=WHOLE):
        digest = sha256(words).digest()
        total = sha256(digest)
        payload = MessageDigest(bytes=len(words), sha256=total.hexdigest())
        sealed = write_digest(self.ledger, ref, (), payload)
        place, size = sealed.place, TreeHead.parse(sealed.checkpoint.text).size
        return tensor.End(
            sha256=total.digest(),
            tensor_sha256=[digest],
            ledger_seq=place.seq,
            ledger_leaf=bytes.fromhex(place.leaf),
            head=bytes(self.ledger.growth(0, sealed.checkpoint)),
            inclusion=self.ledger.inclusion(place.seq, size),
        )

    def close(self):
        write_control_close(self.ledger, self.control.seq, len(self.sizes), sum(self.sizes))
        self.ledger.close()
        return self.calls, entries(self.folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    made = Recording(tmp_path_factory.mktemp("ledger"))
    made.begin()
    made.give("keys", secure.UploadedKeys(bundle=secure.KeyBundle(silo="silo-a", seal=b"s" * 32)))
    made.ask(0)
    made.ask(1)
    made.give("shares", secure.Dealt())
    made.upload(0, CUT)
    made.upload(CUT, MASKED_BYTES - CUT)
    made.give(
        "header", secure.Header(silo="silo-a", length=MASKED_BYTES, sha256=sha256(WHOLE).digest())
    )
    made.give("survival", secure.Survival(silo="silo-a"))
    return made.close()


def test_a_secure_sum_is_explained_by_its_records(recorded):
    calls, ledger = recorded
    assert unexplained(calls, ledger, Roster()) == []
    assert [call.method.rpartition("/")[2] for call in calls] == [
        "Hello", "Poll", "Secure", "SecureNext", "SecureNext", "Secure", "Upload", "Upload",
        "Secure", "Secure"
    ]  # fmt: skip


def of(calls, name, number=0):
    return [call for call in calls if call.method.endswith(f"/{name}")][number]


def rewrite(call, number, kind, change):
    message = kind.FromString(call.sent[number])
    change(message)
    call.sent[number] = message.SerializeToString(deterministic=True)


def spoil(calls, number=0):
    of(calls, "Upload", number).sent[1] = tensor.Frame(chunk=bytes(32)).SerializeToString()


def again(name):
    return lambda calls: calls.append(copy.deepcopy(of(calls, name)))


def message(name, number, kind, path, value):
    """A call's message with another value in a field of it."""
    *way, last = path.split(".")

    def change(found):
        setattr(functools.reduce(getattr, way, found), last, value)

    return lambda calls: rewrite(of(calls, name, number), 0, kind, change)


def frame_of(name, number, at, change):
    return lambda calls: rewrite(of(calls, name, number), at, tensor.Frame, change)


def manifest(number, **fields):
    """The manifest of an upload with other fields; without those that are None."""

    def change(frame):
        for name, value in fields.items():
            if value is None:
                frame.manifest.ClearField(name)
            else:
                setattr(frame.manifest, name, value)

    return frame_of("Upload", number, 0, change)


def tensor_added(number, **fields):
    return frame_of("Upload", number, 0, lambda frame: frame.manifest.tensors.add(**fields))


def more_bytes(name, data):
    def change(calls):
        of(calls, name).sent[0] += data

    return change


MORE = tensor.Frame(chunk=WHOLE).SerializeToString()
UNKNOWN = b"\xfa\x01\x06secret"
TWO_IN_ONE = "2 messages in a call that has one"
SECRET = "the manifest's tensors are not the intent's: [('secret'"
DOCTORED = {
    "a message that no record has": (again("Secure"), "no record is of this message"),
    "another message": (message("Secure", 0, secure.SecureUpload, "keys.bundle.mask", b"secret"),
        "no record is of this message of"),
    "a second message": (lambda calls: of(calls, "Secure").sent.append(b""), TWO_IN_ONE),
    "an unknown field": (more_bytes("Secure", UNKNOWN), "SecureUpload has unknown fields [31]"),
    "more messages had than came": (message("SecureNext", 1, secure.SecurePoll, "had", 7),
        "field had is 7, which nothing explains"),
    "an upload of another attempt": (manifest(0, context=b"x" * 32), "no intent declares"),
    "an upload of no attempt": (manifest(0, context=None), "no intent declares"),
    "a name in a masked manifest": (tensor_added(0, part="secret"), SECRET),
    "another size": (manifest(0, size=7), "its intent another size"),
    "other words before the cut": (spoil, "END has other digests than record"),
    "other words": (lambda calls: spoil(calls, 1), "digest 7 is of another message"),
    "a chunk too many": (lambda calls: of(calls, "Upload").sent.append(MORE),
        "message bytes crossed, intent"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCTORED)
def test_what_no_record_explains_is_found(recorded, name):
    check_found(recorded, *DOCTORED[name])


def check_found(recorded, change, said):
    calls, ledger = copy.deepcopy(recorded)
    change(calls)
    found = unexplained(calls, ledger, Roster())
    assert any(said in problem for problem in found), found


def begun(folder):
    made = Recording(folder)
    made.begin()
    return made


def check_one_problem(made, end):
    (problem,) = unexplained(*made.close(), Roster())
    assert problem.endswith(end)


ANOTHER = "has another kind, job, round or attempt than its message"
POLL = "/staddle.v1.Federation/Poll"


@pytest.mark.parametrize(
    "wrong",
    [{"round_number": 4}, {"ctx": "d8" * 32}, {"kind": "shares"}, {"job": "j2"}, {"rpc": POLL}],
    ids=str,
)
def test_a_record_that_says_another_thing_than_its_message_is_found(tmp_path, wrong):
    made = begun(tmp_path)
    attempt = secure.SecureAttempt(**OF, context=bytes.fromhex(CTX))
    given = secure.SecureUpload(session=SESSION, attempt=attempt)
    given.keys.bundle.silo = "silo-a"
    protocol(made.ledger, **{"kind": "keys", "message": payload_of(given), **wrong})
    made.unary("Secure", given, secure.SecureTaken())
    check_one_problem(made, ANOTHER)


def test_a_message_of_another_session_is_found(tmp_path):
    made, bundle = begun(tmp_path), secure.KeyBundle(silo="silo-a")
    made.give("keys", secure.UploadedKeys(bundle=bundle), session=b"another")
    check_one_problem(made, "the message names another session")


@pytest.mark.parametrize(("messages", "explained"), [(1, True), (2, False)])
def test_nothing_may_follow_a_greeting_lost_in_a_handshake(tmp_path, messages, explained):
    recording = Recording(tmp_path)
    lost = write_control_open(recording.ledger, "s0", PEER, 100, 10_000)
    write_control_close(recording.ledger, lost.seq, messages, 79)
    recording.begin()
    assert (unexplained(*recording.close(), Roster()) == []) == explained


@pytest.mark.parametrize("killed", [True, False])
def test_an_upload_with_a_digest_may_be_missing_where_a_kill_dropped_it(tmp_path, killed):
    """A silo writes DIGEST before END leaves: killed in between, it said of more than crossed."""
    made = begun(tmp_path)
    made.end(intend_masked(made.ledger, offset=0, message_bytes=MASKED_BYTES))
    if killed:
        made.sizes.clear()
        made.begin()
    made.upload(0, MASKED_BYTES)
    problems = unexplained(*made.close(), Roster())
    assert bool(problems) != killed
    assert killed or any(
        "where no digest of intent 3 has that leaf" in problem for problem in problems
    ), problems


# A job whose silos share a key: padded and rotated parts, and rows that come down.
HEADER = tensor.TensorHeader(
    part="heads", kind=7, name="rows", dtype=1, shape=[3, 5], size=ROTATED_BYTES
)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    made = Recording(tmp_path_factory.mktemp("ledger"))
    made.begin()
    made.contribute()
    made.fetch()
    made.own(intend_padded, VERSION, "extractor", WORDS, cut=CUT)
    made.sign()
    made.own(intend_rotated, USE, "heads", VECTORS, headers=[HEADER])
    made.upload(0, MASKED_BYTES)
    return made.close()


def test_every_byte_of_a_keyed_round_is_explained(keyed):
    calls, ledger = keyed
    assert unexplained(calls, ledger, Roster()) == []
    assert [call.method.rpartition("/")[2] for call in calls] == [
        "Hello", "Poll", "Contribute", "GroupKey", "Fetch", "Upload", "Standing", "Upload",
        "Padded", "Upload", "Upload"
    ]  # fmt: skip


def came_down(at, change):
    def rewritten(calls):
        call = of(calls, "Fetch")
        frame = tensor.Frame.FromString(call.received[at])
        change(frame)
        call.received[at] = frame.SerializeToString(deterministic=True)

    return rewritten


def chunk(number, size=None):
    """Other bytes in an upload."""

    def change(frame):
        frame.chunk = b"x" * (size or len(frame.chunk))

    return frame_of("Upload", number, 1, change)


def another_row(frame):
    frame.chunk = frame.chunk[:-1] + b"x"


def another_name(frame):
    frame.manifest.tensors[0].name = "secret"


SPOILT = {
    "a contribution that no record has": (again("Contribute"), "no record is of"),
    "another contribution": (message("Contribute", 0, secure.Contributed, "job", "secret"),
        "'Contributed'"),
    "another word on an upload": (
        message("Padded", 0, secure.PaddedWordUpload, "upload.tag", b"secret"),
        "'PaddedWordUpload'",
    ),
    "an unknown field in a sealed piece": (more_bytes("Padded", b"\x32\x09" + UNKNOWN),
        "PaddedWordUpload has unknown fields [31]"),
    "a word too many for the key": (message("GroupKey", 0, secure.KeyPoll, "job", "secret"),
        "field job is 'secret'"),
    "another part asked after": (message("Standing", 0, pb.StandingRequest, "part", "secret"),
        "field part is 'secret'"),
    "another part": (manifest(0, part="secret"), "is of part 'secret', its intent of 'extractor'"),
    "no part": (manifest(2, part=None), "is of part '', its intent of"),
    "a part of a masked one": (manifest(3, part="x"), "is of part 'x'"),
    "another version": (manifest(0, context=b"x" * 32), "no intent declares"),
    "no version": (manifest(1, context=None), "no intent declares"),
    "rows that go up": (
        frame_of("Upload", 2, 0, lambda frame: frame.manifest.rows.add(part="secret")),
        "has rows, which are of deliveries",
    ),
    "a name in a padded manifest": (tensor_added(0, part="secret"), SECRET),
    "another name in a rotated manifest": (frame_of("Upload", 2, 0, another_name), "'secret'"),
    "padded words before the cut": (chunk(0, CUT), "END has other"),
    "padded words behind it": (chunk(1), "is of another message"),
    "other vectors": (chunk(2), "END has other digests than record"),
    "another row": (came_down(1, another_row), "came down: END has other digests than its bytes"),
    "a row less in the manifest": (came_down(0, lambda frame: frame.manifest.rows.pop()),
        f"bytes came down, of which tensors and rows are {16 + 2 * PADDED_BYTES}"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_what_no_record_of_a_keyed_job_explains_is_found(keyed, name):
    check_found(keyed, *SPOILT[name])


@pytest.mark.parametrize(
    "wrong",
    [
        {"ctx": "d8" * 32}, {"round_number": 1}, {"sender": "silo-b"},
        {"recipients": ("silo-b", "secret")}, {"recipients": ("silo-a", "silo-b")},
        {"recipients": ("silo-c", "silo-b")}, {"recipients": ("silo-b", "silo-b")},
    ],
    ids=str,
)  # fmt: skip
def test_a_contribution_of_another_epoch_or_to_others_is_found(tmp_path, wrong):
    made = begun(tmp_path)
    made.contribute(**wrong)
    check_one_problem(made, ANOTHER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ctx": USE}, {"number": 1}, {"part": "heads"}, {"digest": b"d" * 32}, {"silo": "silo-b"},
        {"round_": 2},
        None,  # the upload never ended
    ],
    ids=str,
)  # fmt: skip
def test_a_word_on_another_upload_than_left_or_on_one_that_never_ended_is_found(tmp_path, wrong):
    made = begun(tmp_path)
    if wrong is None:
        intend_padded(made.ledger, cohort=())
    else:
        made.own(intend_padded, VERSION, "extractor", WORDS)
    made.sign(**wrong or {})
    check_one_problem(made, ANOTHER)


@pytest.mark.parametrize("number", range(3))
def test_a_hash_of_a_hidden_tensor_is_found(keyed, number):
    calls, ledger = keyed
    at = [place for place, entry in enumerate(ledger) if isinstance(entry.record, Digest)][number]
    hashes = (TensorDigest(part="p", name="t", sha256=HASH),)
    guessed = ledger[at].record.model_copy(update={"tensors": hashes})
    changed = [*ledger[:at], replace(ledger[at], record=guessed), *ledger[at + 1 :]]
    (problem,) = unexplained(calls, changed, Roster())
    assert f"digest {ledger[at].seq} has hashes of tensors that nobody may guess" in problem


def test_rows_without_a_record_are_found(tmp_path):
    made = begun(tmp_path)
    made.fetch(["extractor"], recorded=False)
    (problem,) = unexplained(*made.close(), Roster())
    assert "1 deliveries came down without a record" in problem
