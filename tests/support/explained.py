"""Is everything that left a silo explained by its ledger? A pure function of recorded calls and
ledger records.

It knows the messages from their descriptors and the rules from docs/security-rules.md, and none of
the code that sends.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from staddle.errors import ProofError
from staddle.files.documents import canonical_json
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import MOST_LANES
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import GROUP_CONTEXT, HEAD, framed
from staddle.security.identity.roster import Roster
from staddle.security.ledger.fast_decoder import Record, parse_any
from staddle.security.ledger.records import (
    ControlClose,
    ControlOpen,
    Digest,
    Ingress,
    Intent,
    JobAccept,
    JobDecline,
    OutcomeRecord,
    ProtocolMessage,
    Start,
)
from staddle.security.log import note as notes
from staddle.security.log import tree_head as checkpoints
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import log_key
from staddle.security.log.merkle import Tree
from staddle.security.log.segments import Reading
from staddle.security.log.tree_head import TreeHead
from staddle.silo.egress.session import MAX_CONTROL_BYTES

UPLOAD, FETCH, SECURE, CONTRIBUTE, PADDED = (
    f"/staddle.v1.Federation/{name}"
    for name in ("Upload", "Fetch", "Secure", "Contribute", "Padded")
)
MESSAGES = {  # method → what a silo sends, what it gets
    f"/staddle.v1.Federation/{method.name}": (method.input_type, method.output_type)
    for method in pb.DESCRIPTOR.services_by_name["Federation"].methods
}
AGENT = re.compile(r"grpc-python-asyncio/[0-9.]+ grpc-c/[0-9.]+ \((linux|osx|windows); chttp2\)")
ERROR = "staddle-error"
CODES = {name.removeprefix("ERROR_CODE_") for name in pb.ErrorCode.keys()}  # noqa: SIM118 an enum wrapper
UNNAMED = ("masked", "padded")  # forms whose words carry no names of tensors
DTYPES = {
    "float32": tensor.DTYPE_FLOAT32,
    "float64": tensor.DTYPE_FLOAT64,
    "int64": tensor.DTYPE_INT64,
}


@dataclass
class Call:
    """One call of a silo as it crossed: metadata and messages of both directions, as bytes."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()  # of the request
    sent: list[bytes] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    answered: tuple[tuple[str, str | bytes], ...] = ()  # metadata of the response, first and last
    cut: bool = False  # it did not come to its end


@dataclass(frozen=True)
class Entry:
    """One record of a ledger in its place."""

    seq: int
    leaf: str
    record: Record


def entries(path: Path) -> list[Entry]:
    """All records of a ledger."""
    return [Entry(line.seq, line.leaf, parse_any(line)) for line in Reading(path)]


def message_bytes(calls: Sequence[Call]) -> int:
    """Payload bytes that went up, whatever became of them."""
    sent = (data for call in calls if call.method == UPLOAD for data in call.sent)
    return sum(len(tensor.Frame.FromString(data).chunk) for data in sent)


def unexplained(calls: Sequence[Call], ledger: Sequence[Entry], roster: Roster) -> list[str]:
    """What crossed of one silo and no record explains, or what the ledger says of it that is not
    so; in plain words.
    """
    found = _Reader(calls, ledger, roster).problems()
    return [f"call {place} ({method}): {why}" for place, method, why in found]


@dataclass
class _Session:
    """Control messages that crossed between one greeting and the next."""

    challenge: bytes
    messages: int = 0
    bytes: int = 0
    # tasks that came down; a heartbeat runs beside each, and answers what other silos ask
    work: int = 0


class _Reader:
    """Walks the calls in the order in which they began."""

    def __init__(self, calls: Sequence[Call], ledger: Sequence[Entry], roster: Roster) -> None:
        self.calls = calls
        self.ledger = ledger
        self.roster = roster
        self.tree = Tree(bytes.fromhex(entry.leaf) for entry in ledger)
        of = lambda kind: [e for e in ledger if isinstance(e.record, kind)]
        self.challenges = {bytes.fromhex(e.leaf) for e in of(ControlOpen)}
        self.known = {0}  # sizes of this ledger whose heads the coordinator may hold
        self.ours = {0}  # sizes of the coordinator's ledger whose heads came down
        self.heads: set[tuple[str, bytes]] = set()  # (silo, head) as they came down
        self.asked: set[tuple[str, bytes]] = set()  # (silo, challenge)
        self.silo = of(Start | Intent)[0].record.silo
        self.intents = of(Intent)
        hidden = (e.record for e in self.intents if e.record.hidden)
        self.parts = {(record.job, record.round, record.part) for record in hidden}
        self.padded = [e for e in self.intents if e.record.form == "padded"]
        self.words = {(e.record.job, e.record.part): _whole(e.record) for e in self.padded}
        self.digests = {e.record.ref: e for e in of(Digest)}
        self.outcomes = {e.record.ref: e.record for e in of(OutcomeRecord)}
        self.dropped = set(_dropped(ledger))
        self.protocol = of(ProtocolMessage)
        decided = [e.record for e in of(JobAccept | JobDecline)]
        self.jobs = {(record.job, bytes.fromhex(record.job_digest)) for record in decided}
        self.rosters = {bytes.fromhex(e.record.roster) for e in of(Start)}
        self.token = b""  # of the session that is open
        self.rounds = {0}  # that the silo was asked for
        # (job, round) → messages of its secure sums that came down
        self.told: Counter[tuple[str, int]] = Counter()
        self.sessions: list[_Session] = []
        # (job digest, round, ctx) → payload that crossed so far
        self.held: dict[tuple[str, int, bytes], bytes] = {}
        self.receipts: set[str] = set()
        self.deliveries: list[tuple[str, int, int, str]] = []  # (job, round, bytes, sha256)

    def problems(self) -> Iterator[tuple[int, str, str]]:
        for place, call in enumerate(self.calls):
            for why in self._call(place, call):
                yield place, call.method, why
        for why in (*self._totals(), *self._outcomes(), *self._ingress()):
            yield len(self.calls), "the ledger", why

    def _call(self, place: int, call: Call) -> Iterator[str]:
        yield from _metadata(call)
        if call.method not in MESSAGES:
            yield f"a method that is not of this protocol, {sum(map(len, call.sent))} bytes"
            return
        sends, gets = MESSAGES[call.method]
        if call.method == UPLOAD:
            yield from self._upload(call)
        elif call.method in (SECURE, CONTRIBUTE, PADDED):
            yield from self._protocol(call, sends)
        else:
            yield from self._control(call, sends)
        for data in call.received:
            found = yield from _message(gets, data, "came down: ")
            if found is not None:
                self._learn(found)
        if call.method == FETCH:
            yield from self._delivery(call)

    # Control messages.

    def _control(self, call: Call, sends) -> Iterator[str]:
        if call.method.endswith("/Hello"):
            greeting = pb.HelloRequest.FromString(b"".join(call.sent[:1]))
            self.sessions.append(_Session(greeting.challenge))
        if not self.sessions:
            yield "before any greeting"
            return
        if len(call.sent) > 1:
            yield f"{len(call.sent)} messages in a call that has one"
        for data in call.sent:
            self.sessions[-1].messages += 1
            self.sessions[-1].bytes += len(data)
            message = yield from _message(sends, data)
            if message is not None:
                yield from self._fields(message)

    def _fields(self, message) -> Iterator[str]:
        """Every field says what the silo was told, who it is, or a word of a closed list."""
        for name, value in ((descriptor.name, value) for descriptor, value in message.ListFields()):
            known = {
                "silo": lambda v: v == self.silo or v in {silo for silo, _ in self.asked},
                "roster_digest": lambda v: v in self.rosters,
                "protocol_min": lambda v: v == 2,
                "protocol_max": lambda v: v == 2,
                "session": lambda v: v == self.token,
                "software": lambda v: v == f"staddle {version('staddle')}",
                # recorded within the last hour
                "clock": lambda v: 0 <= time.time() - v < 3600,
                "jobs": lambda v: 1 <= v <= MOST_LANES,
                "in_hand": self._in_hand,
                "challenge": lambda v: v in self.challenges or (message.silo, v) in self.asked,
                "by": lambda v: v == self.silo,
                "held": lambda v: (message.silo, v) in self.heads,
                "signature": lambda v: self._attested(message, v),
                "job": lambda v: v in {job for job, _ in self.jobs},
                "part": lambda v: (message.job, message.round, v) in self.parts,
                "job_digest": lambda v: (message.job, v) in self.jobs,
                "round": lambda v: v in self.rounds,
                "had": lambda v: v <= self.told[message.job, message.round],
                "kind": lambda v: v in pb.AnswerKind.values(),
                "code": lambda v: v in pb.ErrorCode.values(),
            }
            if name not in known or not known[name](value):
                yield f"field {name} is {value!r:.80}, which nothing explains"

    def _in_hand(self, tasks) -> bool:
        """Whether these are tasks that the silo was told."""
        known = {job for job, _ in self.jobs}
        return all(
            own.job in known and own.kind in pb.TaskKind.values() and own.round in {0, *self.rounds}
            for own in tasks
        )

    def _attested(self, said, signature: bytes) -> bool:
        """Whether the silo signed the other fields, and nothing else: Ed25519 leaves it no choice
        of the bytes.
        """
        fields = {"by": said.by, "silo": said.silo, "challenge": said.challenge.hex()}
        fields |= {"federation": self.roster.federation, "head": said.held.decode()}
        fields |= {"roster": rosters.digest(self.roster)}
        return self.roster[self.silo].has_signed(HEAD, canonical_json(fields), signature)

    def _learn(self, message) -> None:
        """What the coordinator told: session, rounds, receipts, heads, questions of other silos."""
        match message:
            case pb.HelloReply():
                self.token = message.session
                if message.held:
                    self.known.add(TreeHead.parse(notes.parse(message.held).text).size)
            case pb.Task() if message.WhichOneof("body") == "witness":
                self.asked |= {(asked.silo, asked.challenge) for asked in message.witness.asked}
            case pb.BeatReply():
                self.asked |= {(asked.silo, asked.challenge) for asked in message.asked}
            case pb.Task() if message.WhichOneof("body") == "offer":
                self.sessions[-1].work += 1
            case pb.Task() if message.WhichOneof("body") in ("round", "finish"):
                self.sessions[-1].work += 1
                self.rounds.add(getattr(message, message.WhichOneof("body")).round)
                for head in message.round.heads:
                    self.heads.add((checkpoints.owner(head.decode().split("\n")[0])[1], head))
            case pb.Receipt():
                self.receipts.add(message.signature.hex())
                if message.head:
                    proof = Consistency.parse(message.head)
                    self.ours.add(TreeHead.parse(proof.checkpoint.text).size)
            case secure.SecureDelivery() if message.WhichOneof("body") != "nothing":
                self.told[message.attempt.job, message.attempt.round] += 1
            case pb.StandingReply() if message.HasField("receipt"):
                self.receipts.add(message.receipt.signature.hex())

    def _totals(self) -> Iterator[str]:
        opened = [e for e in self.ledger if isinstance(e.record, ControlOpen)]
        closed = {e.record.ref: e.record for e in self.ledger if isinstance(e.record, ControlClose)}
        greeted = {session.challenge: session for session in self.sessions}
        strangers = greeted.keys() - {bytes.fromhex(entry.leaf) for entry in opened}
        if strangers or len(greeted) != len(self.sessions):
            crossed = f"{len(self.sessions)} greetings crossed"
            yield f"{len(opened)} control sessions are recorded, {crossed}"
        for entry in opened:
            # a greeting is counted before it leaves, also one whose handshake then failed
            session = greeted.get(bytes.fromhex(entry.leaf), _Session(b""))
            ahead = 2 * session.work if session.messages else 1
            seen, close = (session.messages, session.bytes), closed.get(entry.seq)
            if close is None:  # the process was killed: its cap stands
                later = [e.record for e in self.ledger if e.seq > entry.seq]
                after = [record for record in later if isinstance(record, Start | ControlOpen)]
                if after and not isinstance(after[0], Start):
                    yield f"session {entry.seq} was never closed, and another began"
                if seen[0] > entry.record.max_messages or seen[1] > entry.record.max_bytes:
                    yield f"session {entry.seq}: {seen} messages and bytes crossed, over its cap"
            # a message is counted before it leaves: work that ends may cancel a heartbeat, and an
            # answer
            elif not (
                0 <= close.messages - seen[0] <= ahead
                and 0 <= close.bytes - seen[1] <= (close.messages - seen[0]) * MAX_CONTROL_BYTES
            ):
                closed_with = f"the ledger closes it with {(close.messages, close.bytes)}"
                yield f"session {entry.seq}: {seen} messages and bytes crossed, {closed_with}"

    # The protocols of secure sums and mixes: a record for each message, of its very bytes.

    def _protocol(self, call: Call, sends) -> Iterator[str]:
        if len(call.sent) > 1:
            yield f"{len(call.sent)} messages in a call that has one"
        for data in call.sent:
            message = yield from _message(sends, data)
            if message is None:
                continue
            wanted, of = (len(data), sha256(data).hexdigest()), lambda e: e.record.message
            found = [e for e in self.protocol if (of(e).bytes, of(e).sha256) == wanted]
            if not found:
                secured = call.method == SECURE
                what = message.WhichOneof("body") if secured else message.DESCRIPTOR.name
                yield f"no record is of this message of {len(data)} bytes, {what!r}"
                continue
            self.protocol.remove(found[0])
            r = found[0].record
            said = (r.rpc, r.kind, r.job, r.job_digest, r.round, r.ctx)
            if said not in self._records_of(call.method, message):
                why = "has another kind, job, round or attempt than its message"
                yield f"record {found[0].seq} {why}"
            if message.session != self.token:
                yield "the message names another session"

    def _records_of(self, method: str, message) -> Iterator[tuple]:
        """What a record of this message says, its bytes left out."""
        match message:
            case secure.SecureUpload(attempt=attempt):
                of = (attempt.job, attempt.job_digest.hex(), attempt.round, attempt.context.hex())
                yield (method, message.WhichOneof("body"), *of)
            case secure.Contributed():
                # Of the one key of the job's silos, before its first round; sealed by us, to
                # others of the roster.
                federation, job = self.roster.federation.encode(), message.job_digest
                ours = message.contribution.sealing.sender == self.silo
                silos = [self.silo, *(piece.recipient for piece in message.pieces)]
                digest = bytes.fromhex(rosters.members_digest(self.roster, silos))
                context = framed(GROUP_CONTEXT, federation, digest, job, bytes(8))
                if ours and self._to_others(message.pieces):
                    of = (message.job, job.hex(), 0, sha256(context).hexdigest())
                    yield (method, "contribution", *of)
            case secure.PaddedWordUpload():
                # Of the upload that left: its version, its part, and the digest of its bytes.
                upload, job_digest = message.upload, message.job_digest.hex()
                told = (message.job, job_digest, upload.round, message.part, upload.number)
                total = sha256(upload.sha256).hexdigest()
                ours = {upload.silo, upload.sealing.sender} == {self.silo}
                for entry in self.padded if ours and self._to_others(message.pieces) else ():
                    i, digest = entry.record, self.digests.get(entry.seq)
                    own = (i.job, i.job_digest, i.round, i.part, i.hidden.number)
                    if own == told and digest and digest.record.message.sha256 == total:
                        yield (method, "padded", *own[:3], i.hidden.ctx)

    def _to_others(self, pieces) -> bool:
        """Whether each piece is for another silo of the roster, each once and in order."""
        named = [piece.recipient for piece in pieces]
        others = {entry.id for entry in self.roster.silos} - {self.silo}
        return named == sorted(set(named)) and set(named) <= others

    # Uploads.

    def _upload(self, call: Call) -> Iterator[str]:
        frames = []
        for data in call.sent:
            frame = yield from _message(tensor.Frame.DESCRIPTOR, data)
            if frame is None:
                return
            frames.append(frame)
        if not frames:
            return
        bodies = [frame.WhichOneof("body") for frame in frames]
        ends = min(bodies.count("end"), 1)
        if bodies != ["manifest", *["chunk"] * (len(bodies) - 1 - ends), *["end"] * ends]:
            yield f"frames {bodies} are no manifest, chunks and end"
            return
        manifest = frames[0].manifest
        entry = self._intent(manifest, frames[-1].end if ends else None)
        if entry is None:
            what = f"job {manifest.job!r} round {manifest.round} at {manifest.offset}"
            yield f"no intent declares the upload of {what}"
            return
        yield from self._manifest(manifest, entry.record)
        chunks = b"".join(frame.chunk for frame in frames if frame.WhichOneof("body") == "chunk")
        whole = entry.record.message.bytes
        if len(chunks) > whole or (ends and len(chunks) != whole):
            yield f"{len(chunks)} message bytes crossed, intent {entry.seq} declares {whole}"
        key = (entry.record.job_digest, entry.record.round, manifest.context)
        payload = self.held.get(key, b"")[: manifest.offset] + chunks
        self.held[key] = payload
        if ends:
            yield from self._end(frames[-1].end, entry, payload)

    def _intent(self, manifest, end) -> Entry | None:
        """The intent of an upload: the one whose digest END names, else the first that is left with
        this manifest.

        Those before it were never sent, so none of them may have a digest, but for what a kill
        dropped.
        """
        m, found, chosen = manifest, [], None
        wanted = (m.job, m.job_digest.hex(), m.round, m.offset, m.context.hex())
        for entry in self.intents:
            record, digest = entry.record, self.digests.get(entry.seq)
            bound = record.secagg or record.hidden
            ctx = bound.ctx if bound else ""
            if (record.job, record.job_digest, record.round, record.offset, ctx) == wanted:
                found.append(entry)
                if end and digest and digest.seq == end.ledger_seq:
                    chosen = chosen or entry
            if digest and entry.seq not in self.dropped:
                break
        chosen = chosen or (found[0] if found else None)
        if chosen:
            del self.intents[: self.intents.index(chosen) + 1]
        return chosen

    def _manifest(self, manifest, intent: Intent) -> Iterator[str]:
        if manifest.session != self.token:
            yield "the manifest names another session"
        if manifest.part != intent.part:
            yield f"the manifest is of part {manifest.part!r}, its intent of {intent.part!r}"
        if manifest.rows:
            yield "the manifest has rows, which are of deliveries"
        unnamed = intent.form in UNNAMED
        size = _whole(intent) if unnamed else sum(t.bytes for t in intent.tensors)
        if (manifest.size, manifest.size - manifest.offset) != (size, intent.message.bytes):
            spelt = f"{manifest.size} bytes from {manifest.offset}"
            yield f"the manifest has {spelt}, its intent another size"
        named = () if unnamed else intent.tensors
        declared = [(t.part, t.kind, t.name, t.dtype, t.shape, t.bytes) for t in named]
        names, found = {number: name for name, number in DTYPES.items()}, []
        for t in manifest.tensors:
            dtype = names.get(t.dtype, str(t.dtype))
            found.append((t.part, _kind(t.kind), t.name, dtype, tuple(t.shape), t.size))
        if found != declared:
            wrong = [one for one in found if one not in declared]
            wrong = wrong or [one for one in declared if one not in found] or found
            yield f"the manifest's tensors are not the intent's: {wrong[:1]}"

    def _end(self, end, entry: Entry, payload: bytes) -> Iterator[str]:
        recorded, place = self.digests.get(entry.seq), (end.ledger_seq, end.ledger_leaf.hex())
        if recorded is None or place != (recorded.seq, recorded.leaf):
            where = f"where no digest of intent {entry.seq} has that leaf"
            yield f"END says place {end.ledger_seq}, {where}"
            return
        yield from self._head(end)
        unnamed = entry.record.form in UNNAMED
        crossed, at = [], 0
        for size in [len(payload)] if unnamed else [t.bytes for t in entry.record.tensors]:
            crossed.append(sha256(payload[at : at + size]).hexdigest())
            at += size
        said = [t.sha256 for t in recorded.record.tensors]
        if unnamed or entry.record.form == "rotated":
            if said:
                yield f"digest {recorded.seq} has hashes of tensors that nobody may guess"
            said = crossed
        total = sha256(b"".join(map(bytes.fromhex, said))).hexdigest()
        if crossed != said:
            yield f"the bytes that crossed are not those of digest {recorded.seq}"
        if [digest.hex() for digest in end.tensor_sha256] != said or end.sha256.hex() != total:
            yield f"END has other digests than record {recorded.seq}"
        if recorded.record.message.sha256 != total or recorded.record.message.bytes != len(payload):
            yield f"digest {recorded.seq} is of another message"

    def _head(self, end) -> Iterator[str]:
        """The head that goes with END is that of the ledger up to its record, from one that the
        coordinator holds.
        """
        size = end.ledger_seq + 1
        try:
            proof = Consistency.parse(end.head)
            key = log_key(self.roster.federation, self.silo, self.roster[self.silo].log_key)
            head = checkpoints.verify(proof.checkpoint, key).checkpoint
        except ProofError as error:
            yield f"END has no head: {error}"
            return
        found, old = (head.size, head.root, len(proof.checkpoint.signatures)), proof.old_size
        if found != (size, self.tree.root(size), 1):
            yield f"END has a head of {head.size} records that is not the one of its record"
        if old not in self.known or proof.hashes != self.tree.consistency_proof(old, size):
            why = "which nobody asked for, or with other hashes"
            yield f"END proves growth from {old} records, {why}"
        if tuple(end.inclusion) != self.tree.inclusion_proof(end.ledger_seq, size):
            yield "END has hashes that prove another record, or none"
        if end.holds not in self.ours:
            yield f"END says that a head of {end.holds} records is held, which never came down"
        self.known.add(size)

    def _outcomes(self) -> Iterator[str]:
        for ref, outcome in self.outcomes.items():
            if outcome.status == "sent" and outcome.receipt not in self.receipts:
                yield f"outcome of intent {ref} has a receipt that never came down"
        for entry in self.intents:
            if entry.seq in self.digests and entry.seq not in self.dropped:
                yield f"intent {entry.seq} has a digest, and no upload of it crossed"

    # Deliveries.

    def _delivery(self, call: Call) -> Iterator[str]:
        frames = [tensor.Frame.FromString(data) for data in call.received]
        if not frames or frames[-1].WhichOneof("body") != "end":
            return
        manifest, payload = frames[0].manifest, b"".join(frame.chunk for frame in frames)
        if len(payload) != manifest.size:
            yield f"{len(payload)} bytes came down under a manifest of {manifest.size}"
        digests, at = [], 0
        for size in (*(header.size for header in manifest.tensors), *self._row_sizes(manifest)):
            digests.append(sha256(payload[at : at + size]).digest())
            at += size
        if at != len(payload):
            yield f"{len(payload)} bytes came down, of which tensors and rows are {at}"
        if digests:
            total = sha256(b"".join(digests)).hexdigest()
            end = frames[-1].end
            if (list(end.tensor_sha256), end.sha256.hex()) != (digests, total):
                yield "came down: END has other digests than its bytes"
            self.deliveries.append((manifest.job, manifest.round, len(payload), total))

    def _row_sizes(self, manifest) -> list[int]:
        """Bytes of each row: as many words as our own uploads of its part have, or what the others
        leave of them.
        """
        known = [self.words.get((manifest.job, row.part)) for row in manifest.rows]
        taken = sum(header.size for header in manifest.tensors) + sum(size or 0 for size in known)
        left = manifest.size - taken
        return [left // known.count(None) if size is None else size for size in known]

    def _ingress(self) -> Iterator[str]:
        left = list(self.deliveries)
        for entry in self.ledger:
            if isinstance(record := entry.record, Ingress):
                found = (record.job, record.round, record.message.bytes, record.message.sha256)
                if found in left:
                    left.remove(found)
                else:
                    yield f"ingress {entry.seq} is of a delivery that never came down"
        killed = sum(isinstance(e.record, Start) for e in self.ledger) - 1
        if len(left) > max(0, killed):  # a kill between the last byte and the record, once a life
            yield f"{len(left)} deliveries came down without a record: {left[0][:3]}"


def _dropped(ledger: Sequence[Entry]) -> Iterator[int]:
    """Intents whose digest was the last that a life knew of them: it was killed, and may have sent
    nothing of them.
    """
    open_ = set()
    for entry in ledger:
        if isinstance(entry.record, Digest):
            open_.add(entry.record.ref)
        elif isinstance(entry.record, OutcomeRecord):
            open_.discard(entry.record.ref)
        elif isinstance(entry.record, Start):
            yield from open_
            open_.clear()


def _whole(intent: Intent) -> int:
    return intent.offset + intent.message.bytes


def _kind(number: int) -> str:
    known = number in tensor.PartKind.values()
    return tensor.PartKind.Name(number).removeprefix("PART_KIND_").lower() if known else str(number)


def _metadata(call: Call) -> Iterator[str]:
    """gRPC's own headers and the code of a refusal.

    Its others (content-type, te, grpc-…) the library does not show.
    """
    for key, value in call.metadata:
        if key != "user-agent" or not isinstance(value, str) or not AGENT.fullmatch(value):
            yield f"metadata {key}={value!r:.80}"
    for key, value in call.answered:
        if key != ERROR or value not in CODES:
            yield f"came down: metadata {key}={value!r:.80}"


def _message(descriptor, data: bytes, way: str = ""):
    """The message, if it is one, in its one spelling and without unknown fields."""
    kind = {
        found.DESCRIPTOR.full_name: found
        for module in (pb, secure, tensor)
        for found in vars(module).values()
        if hasattr(found, "DESCRIPTOR") and hasattr(found, "FromString")
    }[descriptor.full_name]
    try:
        message = kind.FromString(data)
    except DecodeError:
        yield f"{way}{len(data)} bytes that are no {descriptor.name}"
        return None
    if unknown := list(_unknown(message)):
        yield f"{way}{descriptor.name} has unknown fields {unknown}"
    elif message.SerializeToString(deterministic=True) != data:
        yield f"{way}{descriptor.name} of {len(data)} bytes is written with more than its fields"
    return message


def _unknown(message) -> Iterator[int]:
    yield from (found.field_number for found in UnknownFieldSet(message))
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _unknown(inner)
