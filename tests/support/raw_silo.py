"""A silo made of raw calls, for saying what ours never says."""

import asyncio
import contextlib
from hashlib import sha256

import grpc
import pytest
import torch

from staddle import log
from staddle.algorithms.exchange.parts import DTYPES, WEIGHT, upload_items
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.proto import federation_pb2 as pb
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import ERROR_METADATA, MAX_MESSAGE_BYTES, OPTIONS
from staddle.proto.federation_pb2_grpc import FederationStub
from staddle.proto.stream import Digester, chunks
from staddle.proto.wire import to_wire
from staddle.security.identity import roster as rosters
from staddle.security.log import note as notes
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import Signer
from staddle.security.log.merkle import Tree
from staddle.security.log.tree_head import TreeHead

SECONDS = 20
MIB = 1 << 20


class Caller:
    """One silo of a job."""

    def __init__(self, address, keys, roster, job, limit=MAX_MESSAGE_BYTES):
        pair = (keys.tls_key, keys.entry.certificate.encode())
        credentials = grpc.ssl_channel_credentials(roster.coordinator.certificate.encode(), *pair)
        options = {**dict(OPTIONS), "grpc.max_send_message_length": limit}
        options["grpc.ssl_target_name_override"] = "coordinator.staddle"
        self.channel = grpc.aio.secure_channel(address, credentials, options=list(options.items()))
        self.stub = FederationStub(self.channel)
        self.silo, self.job, self.session = keys.entry.id, job, b""
        self.ledger = NoLedger(Signer.of(roster.federation, self.silo, keys.log))
        self.roster = bytes.fromhex(rosters.digest(roster))

    async def hello(self, **changes):
        request = {"silo": self.silo, "protocol_min": 2, "protocol_max": 2}
        request |= {"roster_digest": self.roster, "challenge": bytes(32), **changes}
        reply = await self.stub.Hello(pb.HelloRequest(**request), timeout=SECONDS)
        self.session = reply.session
        self.ledger.held = TreeHead.parse(notes.parse(reply.held).text).size if reply.held else 0
        return reply

    async def poll(self):
        """The next task, or nothing; what silos ask about each other's ledgers is not answered."""
        while True:
            task = await self.stub.Poll(pb.PollRequest(session=self.session), timeout=SECONDS)
            if task.WhichOneof("body") != "witness":
                return task

    async def told(self, body):
        """The next task; it is of this kind."""
        async with asyncio.timeout(SECONDS):
            while (task := await self.poll()).WhichOneof("body") == "nothing":
                pass
        assert task.WhichOneof("body") == body, task
        return getattr(task, body)

    @property
    def digest(self):
        return bytes.fromhex(self.job.digest)

    def of_round(self, round_, **fields):
        """Fields of a message of a round."""
        named = {"job": self.job.name, "job_digest": self.digest, "round": round_}
        return {"session": self.session, **named, **fields}

    def frames_of_bytes(self, payload, manifest):
        """An upload of one piece of bytes, from the offset of its manifest on."""
        digest = sha256(payload).digest()
        total, place = sha256(digest).digest(), self.ledger.end()
        end = tensor.End(sha256=total, tensor_sha256=[digest], **place)
        places = range(manifest.get("offset", 0), len(payload), MIB)
        sent = [tensor.Frame(chunk=payload[at : at + MIB]) for at in places]
        return [tensor.Frame(manifest=tensor.Manifest(**manifest)), *sent, tensor.Frame(end=end)]

    async def answer(self, kind, round_=0, code=0):
        request = pb.AnswerRequest(**self.of_round(round_, code=code))
        request.kind = pb.AnswerKind.Value(f"ANSWER_KIND_{kind}")
        await self.stub.Answer(request, timeout=SECONDS)

    async def accept(self):
        """From the greeting to the accepted job."""
        await self.hello()
        await self.told("offer")
        await self.answer("ACCEPT")

    async def upload(self, frames, wary=False):
        """Write all frames; its reply.

        ``wary``: look after each whether the coordinator, of this process, has ended the call.

        gRPC reports INTERNAL instead of the coordinator's own status to whoever writes into a call
        that is just ending. What the coordinator logged before it ended the call is raised then.
        """
        logged = []
        with log.followed(lambda event, fields: logged.append((event, fields))):
            try:
                return await self._upload(frames, wary)
            except grpc.aio.AioRpcError as error:
                own = [f for e, f in logged if e == "refused" and f["peer"] == self.silo]
                if code_of(error) is not None or not wary or not own:
                    raise
                code = own[-1]["code"]
                metadata = grpc.aio.Metadata((ERROR_METADATA, code))
                raise grpc.aio.AioRpcError(
                    STATUS[code], error.initial_metadata(), metadata, own[-1]["why"]
                ) from error

    async def _upload(self, frames, wary):
        call = self.stub.Upload(timeout=SECONDS)
        ended = asyncio.ensure_future(call.code())
        # it has ended the call
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            for frame in frames:
                await call.write(frame)
                if wary and (await asyncio.wait({ended}, timeout=0.2))[0]:
                    break
            else:
                await call.done_writing()
        receipt = await call
        self.ledger.held = frames[-1].end.ledger_seq + 1
        return receipt

    async def contribute(self, round_=0, wary=False, **changes):
        return await self.upload(frames_of(self, round_, **changes), wary)

    async def standing(self, round_=0):
        request = pb.StandingRequest(**self.of_round(round_))
        return await self.stub.Standing(request, timeout=SECONDS)

    def fetch(self, round_):
        return self.stub.Fetch(pb.FetchRequest(**self.of_round(round_)), timeout=SECONDS)

    async def delivered(self, round_):
        return b"".join([frame.chunk async for frame in self.fetch(round_)])


class NoLedger:
    """In place of a ledger: as many leaves as are wanted, all alike, and heads of them."""

    def __init__(self, signer, leaf=bytes(32)):
        self.signer = signer
        self.leaf = leaf
        self.held = 0  # records of which the coordinator holds the head
        self.tree = Tree()

    def end(self, seq=None, held=None):
        """What END says of the record ``seq``, by default some after those that the coordinator
        holds a head of.
        """
        if seq is not None and seq > 1000:  # no ledger has it; the head is of another place
            return {**self.end(), "ledger_seq": seq}
        seq = self.held + 3 if seq is None else seq
        while len(self.tree) <= seq:
            self.tree.append(self.leaf)
        held = self.held if held is None else held
        note = self.signer.sign(seq + 1, self.tree.root(seq + 1))
        proof = Consistency(held, self.tree.consistency_proof(min(held, seq + 1), seq + 1), note)
        inclusion = self.tree.inclusion_proof(seq, seq + 1)
        place = {"ledger_seq": seq, "ledger_leaf": self.leaf}
        return {**place, "head": bytes(proof), "inclusion": inclusion}


def frames_of(caller, round_=0, *, weight=100.0, fill=0.5, size=1024 * 1024, seq=None, named=None):
    """An upload with correct digests; ``named`` tensors hold a value of their own."""
    items = upload_items(caller.job.up(round_))
    counts = min(max(fill, 0), 2**40)  # of right answers: what any silo may say
    values = []
    for item in items:
        spec, value = item.spec, counts if item.part == RIGHT.name else fill
        value = weight if spec.name == WEIGHT else value
        made = torch.full(spec.shape, value, dtype=torch.float64).to(DTYPES[spec.dtype])
        made.reshape(-1)[-1:] = (named or {}).get(spec.name, made.reshape(-1)[-1:])
        values.append(made)
    digester = Digester([item.spec.nbytes for item in items])
    pieces = [bytes(piece.content) for piece in chunks(values, size)]
    for piece in pieces:
        digester.update(piece)
    digests = digester.digests()
    size = sum(item.spec.nbytes for item in items)
    manifest = tensor.Manifest(**caller.of_round(round_, size=size, tensors=to_wire(items)))
    place = caller.ledger.end(seq)
    end = tensor.End(sha256=digests.total, tensor_sha256=digests.tensors, **place)
    sent = [tensor.Frame(chunk=piece) for piece in pieces]
    return [tensor.Frame(manifest=manifest), *sent, tensor.Frame(end=end)]


def code_of(error):
    return dict(error.trailing_metadata() or ()).get(ERROR_METADATA)


async def maybe_late(call):
    """A call whose word may come too late: enough others have opened the sum without it."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if code_of(error) != "ROUND_CLOSED":
            raise


STATUS = {
    "BOUNDS": grpc.StatusCode.INVALID_ARGUMENT,
    "DIGEST": grpc.StatusCode.DATA_LOSS,
    "IDENTITY": grpc.StatusCode.PERMISSION_DENIED,
    "INTERRUPTED": grpc.StatusCode.ABORTED,
    "LEDGER": grpc.StatusCode.FAILED_PRECONDITION,
    "LENGTH": grpc.StatusCode.INVALID_ARGUMENT,
    "LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "MANIFEST": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FINITE": grpc.StatusCode.INVALID_ARGUMENT,
    "PROTOCOL_VERSION": grpc.StatusCode.FAILED_PRECONDITION,
    "ROSTER": grpc.StatusCode.FAILED_PRECONDITION,
    "ROUND_CLOSED": grpc.StatusCode.FAILED_PRECONDITION,
    "SECURE": grpc.StatusCode.FAILED_PRECONDITION,
    "SESSION": grpc.StatusCode.UNAUTHENTICATED,
    "UNKNOWN_JOB": grpc.StatusCode.NOT_FOUND,
    "WEIGHT": grpc.StatusCode.INVALID_ARGUMENT,
}


async def refused(call, code, *words):
    """The call ends with this code of ours, its status of gRPC, and these words."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = caught.value.details()
    assert code_of(caught.value) == code, details
    assert caught.value.code() is STATUS[code]
    for word in words:
        assert word in details


async def arrived(spool, silo, size):
    """Until a coordinator with this folder of uploads in flight has so many bytes of a silo's."""
    async with asyncio.timeout(SECONDS):
        while not any(path.stat().st_size >= size for path in spool.glob(f"{silo}.*")):  # noqa: ASYNC110 a file is waited for
            await asyncio.sleep(0.01)
