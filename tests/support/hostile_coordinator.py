"""A coordinator with the right keys that does as it is told, over real TLS, against the agent as it
ships.

A world has ``jobs`` and ``signed`` by name, ``silos``, ``roster``, ``keys`` of the coordinator, and
``silo_keys``, ``config`` and ``policy`` of the one real silo. ``secure`` and ``secure_next`` are
for coordinators of blind rounds, ``contribute`` and ``group_key`` for those of keyed jobs.
"""

import asyncio
import contextlib
import re
from types import SimpleNamespace

import grpc
import numpy as np
import torch
from support.ledgers import first, stored, write_start, write_stop
from support.split_keys import fix_split

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.exchange.parts import delivered_items
from staddle.commands.federation import local_federation
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import SERVER_OPTIONS
from staddle.proto.stream import Digester, chunks
from staddle.proto.wire import to_wire
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger import audit, messages
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.receipt import Receipt
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import Signer
from staddle.security.log.tree_head import TreeHead
from staddle.security.policy import policy as policies
from staddle.silo import config as configs
from staddle.silo import daemon
from staddle.silo.admission import budget as budgets
from staddle.silo.admission.signed_sets import check_remembered
from staddle.silo.agent import Agent
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.session import open_client
from staddle.silo.egress.witness import HEADS, Witness
from staddle.silo.session import Exit

SILO = "north"
SECONDS = 20
MAX_STEP = re.compile(r"^max_step = .*\n", re.MULTILINE)

# What it and the silo have.


def make_world(folder, silos, *documents, records=80):
    """Keys of all silos, a roster, these signed jobs, and what the real silo has."""
    federation = local_federation.make(folder / "federation", silos)
    jobs = [local_federation.sign_job(federation, document) for document in documents]
    shard = digits().take(np.arange(records))
    local_federation.write_silo(federation, SILO, "127.0.0.1:1", shard, jobs)
    folder = federation.folder
    others = [silo for silo in silos if silo != SILO]
    return SimpleNamespace(
        federation=federation,
        jobs={job.name: job for job in jobs},
        silos=silos,
        signed={job.name: (folder / "jobs" / f"{job.name}.json").read_bytes() for job in jobs},
        roster=rosters.load(folder / "roster.json"),
        keys=load_keys(folder / "coordinator" / "keys"),
        silo_keys=load_keys(folder / SILO / "keys"),
        others={silo: load_keys(folder / silo / "keys") for silo in others},
        config=configs.load(federation.silo_config(SILO)),
        policy=policy_for(jobs),
    )


# The coordinator.


class Raw(bytes):
    """A reply as bytes that are no message."""

    def SerializeToString(self):  # noqa: N802 protobuf's name
        return bytes(self)


GARBAGE = Raw(b"\xff\xff\xff")


class Hostile:
    """Tells its tasks one after the other.

    ``hello``, ``fetch`` and ``upload`` hold what to do the next times.
    """

    def __init__(self, world, tasks=(), *, hello=(), fetch=(), upload=(), endless=None):
        self.world = world
        self.tasks = list(tasks)
        self.script = {"hello": list(hello), "fetch": list(fetch), "upload": list(upload)}
        self.endless = endless
        self.told = asyncio.Event()  # every task was told, and the silo asks for more
        self.calls = {"hello": 0, "poll": 0, "beat": 0, "answer": 0, "standing": 0, "fetch": 0}
        self.answers = []
        self.arrived = 0  # message bytes, of uploads that were cut off too
        self.uploads = []  # (job, round, payload) of whole ones

    def _next(self, name):
        return self.script[name].pop(0) if self.script[name] else None

    async def hello(self, request, context):
        self.calls["hello"] += 1
        reply = self._next("hello")
        return reply or pb.HelloReply(protocol=2, session=b"s" * 16, beat_seconds=1, hold_seconds=1)

    async def poll(self, request, context):
        self.calls["poll"] += 1
        if self.tasks:
            return self.tasks.pop(0)
        if self.endless is not None:
            return self.endless
        self.told.set()
        await asyncio.sleep(1)
        return pb.Task(nothing=pb.Nothing())

    async def beat(self, request, context):
        self.calls["beat"] += 1
        return pb.BeatReply(wanted=True)

    async def answer(self, request, context):
        self.calls["answer"] += 1
        kind, code = pb.AnswerKind.Name(request.kind)[12:], pb.ErrorCode.Name(request.code)[11:]
        self.answers.append((kind, request.round, code))
        return pb.AnswerReply()

    async def standing(self, request, context):
        self.calls["standing"] += 1
        return pb.StandingReply()

    async def fetch(self, request, context):
        self.calls["fetch"] += 1
        deliver = self._next("fetch") or (
            lambda: delivery(self.world, request.job, request.round, self.calls["fetch"])
        )
        for frame in deliver():
            yield frame
            await asyncio.sleep(0)

    async def upload(self, frames, context):
        cut = self._next("upload")
        if cut is not None and (reply := await cut(self, frames, context)) is not None:
            return reply
        manifest, payload, end = await self.taken(frames)
        self.uploads.append((manifest.job, manifest.round, payload))
        return self.receipt(manifest, end)

    async def taken(self, frames):
        payload = bytearray()
        async for frame in frames:
            if frame.WhichOneof("body") == "manifest":
                manifest = frame.manifest
            elif frame.WhichOneof("body") == "chunk":
                payload += frame.chunk
                self.arrived += len(frame.chunk)
            else:
                end = frame.end
        return manifest, bytes(payload), end

    def receipt(self, manifest, end, keys=None, **changes):
        roster, head = self.world.roster, Consistency.parse(end.head).checkpoint.text
        members = rosters.members_digest(roster, (SILO,))
        fields = {"federation": roster.federation, "members": members, "silo": SILO}
        fields |= {"job": manifest.job_digest.hex(), "round": manifest.round}
        fields |= {"size": manifest.size, "sha256": end.sha256.hex(), "ledger_seq": end.ledger_seq}
        fields |= {"ledger_leaf": end.ledger_leaf.hex()}
        fields |= {"ledger_root": TreeHead.parse(head).root.hex(), **changes}
        return pb.Receipt(signature=Receipt(**fields).sign(keys or self.world.keys))


def policy_for(jobs):
    """What a local federation's silo has for these jobs, but that what is drawn by ``delivery`` may
    come down.
    """
    return MAX_STEP.sub("", local_federation.policy_text(jobs))


def delivery(world, job, round_, seed=0, change=None):
    """Frames of a delivery: other numbers for each seed, nothing in round 0."""
    job = world.jobs[job]
    items = delivered_items(job.down(round_)) if round_ else ()
    rng = torch.Generator().manual_seed(seed)
    values = [torch.randn(item.spec.shape, generator=rng) * 0.05 for item in items]
    if change is not None:
        change(values)
    digester = Digester([item.spec.nbytes for item in items])
    pieces = [bytes(piece.content) for piece in chunks(values)]
    for piece in pieces:
        digester.update(piece)
    fields = {"job": job.name, "job_digest": bytes.fromhex(job.digest), "round": round_}
    fields |= {"size": sum(item.spec.nbytes for item in items), "tensors": to_wire(items)}
    manifest = tensor.Manifest(**fields)
    end = tensor.End(sha256=digester.digests().total, tensor_sha256=digester.digests().tensors)
    sent = [tensor.Frame(chunk=piece) for piece in pieces]
    return [tensor.Frame(manifest=manifest), *sent, tensor.Frame(end=end)]


@contextlib.asynccontextmanager
async def listening(hostile):
    # ours would not send what is too long
    options = {**dict(SERVER_OPTIONS), "grpc.max_send_message_length": -1}
    server = grpc.aio.server(options=list(options.items()))
    encode = lambda message: message.SerializeToString()
    unary = grpc.unary_unary_rpc_method_handler
    fetch, upload = grpc.unary_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    handlers = {
        "Hello": unary(hostile.hello, pb.HelloRequest.FromString, encode),
        "Poll": unary(hostile.poll, pb.PollRequest.FromString, encode),
        "Beat": unary(hostile.beat, pb.BeatRequest.FromString, encode),
        "Answer": unary(hostile.answer, pb.AnswerRequest.FromString, encode),
        "Standing": unary(hostile.standing, pb.StandingRequest.FromString, encode),
        "Fetch": fetch(hostile.fetch, pb.FetchRequest.FromString, encode),
        "Upload": upload(hostile.upload, tensor.Frame.FromString, encode),
    }
    if hasattr(hostile, "secure"):
        handlers["Secure"] = unary(hostile.secure, secure.SecureUpload.FromString, encode)
        handlers["SecureNext"] = unary(hostile.secure_next, secure.SecurePoll.FromString, encode)
    if hasattr(hostile, "contribute"):
        handlers["Contribute"] = unary(hostile.contribute, secure.Contributed.FromString, encode)
        handlers["GroupKey"] = unary(hostile.group_key, secure.KeyPoll.FromString, encode)
    service = grpc.method_handlers_generic_handler("staddle.v1.Federation", handlers)
    server.add_generic_rpc_handlers((service,))
    keys = hostile.world.keys
    pair = (keys.tls_key, keys.entry.certificate.encode())
    credentials = grpc.ssl_server_credentials([pair], hostile.world.roster.bundle().encode(), True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


# The silo.


async def attacked(hostile, folder, *, seconds=None, policy=None):
    """Run the agent until it has been told every task.

    It must be there to the end, and nothing may go unrecorded.
    """
    world, complaints = hostile.world, []

    def complained(_, context):
        # gRPC has one poller per process: where the loop of another thread took its event first,
        # this one finds nothing to read, and the poller may have an event for a loop that is closed
        # by now. Agents have one loop.
        if "PollerCompletionQueue" not in context["message"]:
            complaints.append(context)

    asyncio.get_running_loop().set_exception_handler(complained)
    rules = policies.parse((policy or world.policy).encode(), "policy.toml")
    fix_split(folder, SILO)
    config, keys = world.config.model_copy(update={"directory": folder}), world.silo_keys
    with Ledger.open(folder / "ledger", SILO, world.roster.federation, keys.log) as ledger:
        check_remembered(folder / "jobs", ledger)
        write_start(ledger, "test", rosters.digest(world.roster), rules.digest)
        with daemon._budgets(config, rules, ledger, world.roster, keys) as opened:
            async with listening(hostile) as address:
                witness = Witness(ledger, world.roster, keys, folder / HEADS)
                client = open_client(address, keys, world.roster)
                paid = budgets.paid_by(opened)
                gate = Gate(client, ledger, rules, world.roster, witness, paid)
                config = config.model_copy(update={"coordinator": address})
                follow = config.roster_in_use().offered
                agent = Agent(config, SILO, world.roster, rules, gate, keys, follow, opened)
                await told_all(hostile, agent, seconds)
        write_stop(ledger, "asked to stop")
    assert complaints == [], complaints
    recorded(hostile, folder)


async def told_all(hostile, agent, seconds):
    running = asyncio.create_task(agent.run())
    told = asyncio.create_task(hostile.told.wait())
    first_done = {"timeout": seconds or SECONDS, "return_when": asyncio.FIRST_COMPLETED}
    await asyncio.wait({running, told}, **first_done)
    if running.done():
        running.result()
    assert not running.done(), "the agent left"
    assert told.done() or seconds is not None, f"tasks were left: {hostile.tasks}"
    told.cancel()
    agent.stop()
    assert await asyncio.wait_for(running, SECONDS) == Exit("")


def records(folder, *types, log="ledger"):
    """All records of a silo's ledger, or those of these types."""
    return stored(folder / log, *types)


def ends(folder, *fields):
    """How its secure sums ended: code and blame, behind these fields of the records."""
    found = records(folder, "secagg.end")
    return [tuple(record[name] for name in (*fields, "code", "blame")) for record in found]


def recorded(hostile, folder):
    """Every byte and every control message that arrived is in the ledger."""
    key = Signer.of(hostile.world.roster.federation, SILO, hostile.world.silo_keys.log).public
    found = audit.verify(folder / "ledger", key=key)
    assert found.ok, found.problems
    assert found.open_intents == ()
    totals = messages.summary(folder / "ledger")
    control = totals.pop(("(control)", "(control)"))
    assert sum(total.bytes for total in totals.values()) >= hostile.arrived
    assert control.messages >= sum(hostile.calls.values())
    assert first(folder / "ledger").stat().st_size < 1_000_000


def play(hostile, folder, **options):
    asyncio.run(attacked(hostile, folder, **options))
    return hostile


# Tasks.


def fields_of(world, name, **fields):
    return {"job": name, "job_digest": bytes.fromhex(world.jobs[name].digest), **fields}


def offer(world, name="first", **changes):
    fields = fields_of(world, name, signed_job=world.signed[name])
    return pb.Task(offer=pb.Offer(**{**fields, **changes}))


def round_of(world, number, name="first", **changes):
    fields = fields_of(world, name, round=number, cohort=world.silos)
    return pb.Task(round=pb.Round(**{**fields, **changes}))


def finish(world, number, name="first", **changes):
    fields = fields_of(world, name, round=number, completed=True)
    return pb.Task(finish=pb.Finish(**{**fields, **changes}))
