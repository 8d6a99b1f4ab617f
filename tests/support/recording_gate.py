"""A gate with a real ledger, policy and roster over a client that keeps what the gate lets out."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from support.explained import UPLOAD, Call
from support.ledgers import stored, write_start

from staddle.algorithms.exchange.parts import DTYPES, WEIGHT, upload_items
from staddle.algorithms.job.job import Job
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.commands.federation import local_federation
from staddle.commands.federation.local_federation import LocalFederation
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import stream
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.frames import decode, encode
from staddle.proto.wire import tensor_bytes
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Keys, load_keys
from staddle.security.identity.roster import Roster
from staddle.security.ledger import audit
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.receipt import Receipt
from staddle.security.log.consistency import Consistency
from staddle.security.log.tree_head import TreeHead
from staddle.security.policy import policy as policies
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.session import UnreachableError
from staddle.silo.egress.witness import HEADS, Witness
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.declared import Declared, RecordCount

SESSION = b"0123456789abcdef"
SILOS = ("silo-a", "silo-b", "silo-c")
SILO = SILOS[0]
AGENT = (("user-agent", "grpc-python-asyncio/1.80.0 grpc-c/53.0.0 (linux; chttp2)"),)
RECORDS = RecordCount(train=30, test=10)


@dataclass
class Made:
    """A federation's files, and what a test reads of them."""

    files: LocalFederation
    roster: Roster
    coordinator: Keys
    jobs: dict[str, Job] = field(default_factory=dict)

    def job(self, name, method="fedper", silos=SILOS, options=None, **changes) -> Job:
        """A job that the operator has signed."""
        options = options or ({"rho": 0.5} if method == "pfedsim" else {})
        document = {
            "version": 1,
            "name": name,
            "seed": 3,
            "purpose": "For a test",
            "rounds": 4,
            "silos": list(silos),
        }
        document |= {"model": {"name": "cnn-digits", "classes": 3}, **changes}
        document |= {"method": {"name": method, "options": options}}
        # A private job draws by its sample rate, and refuses a size of batches.
        batches = {} if "privacy" in changes else {"batch_size": 8}
        document |= {"training": {"epochs": 1, "lr": 0.1, **batches}}
        self.jobs[name] = local_federation.sign_job(self.files, document)
        return self.jobs[name]

    def signed(self, name) -> bytes:
        """The job file that the operator signed."""
        return (self.files.folder / "jobs" / f"{name}.json").read_bytes()

    def policy(self, *jobs, **replaced):
        """A policy that allows what these jobs give.

        ``replaced`` changes pieces of its text, ``added`` comes last.
        """
        text = local_federation.policy_text(jobs)
        added = replaced.pop("added", "")
        for old, new in replaced.pop("replace", {}).items():
            assert old in text, old
            text = text.replace(old, new)
        if added and "[secure_aggregation]" in text:  # in place of the one that was drafted
            text = text[: text.index("[secure_aggregation]")] + text[text.index("\n\n# '") :]
        return self.parsed(text + added)

    @staticmethod
    def parsed(text):
        """The policy of this text."""
        return policies.parse(text.encode(), "policy.toml")


def make_federation(folder) -> Made:
    """Keys, a roster and two jobs: one whose rounds are alike, one of two phases."""
    files = local_federation.make(folder / "local", SILOS)
    roster = rosters.load(files.folder / "roster.json")
    federation = Made(files, roster, load_keys(files.folder / "coordinator" / "keys"))
    federation.job("simple")
    federation.job("phases", "pfedsim")
    return federation


class FakeClient:
    """What the gate lets out, and what the ledger's file held at each moment."""

    def __init__(self, path):
        self.path = path
        self.calls = []  # all that crossed, as a tap would have it
        self.messages = []  # control messages
        self.frames = []  # of the last upload
        self.all_uploads = []  # frames by upload
        self.uploads = 0
        self.before = None  # the ledger when the upload began, before the first frame was pulled
        self.at = []  # the ledger when each frame came
        self.closed = False
        self.stop_after = None  # frames until the connection breaks
        self.error = UnreachableError("coordinator", "gone")
        self.receipt = lambda _: pb.Receipt()
        self.delivery = []
        self.standing_reply = lambda _: pb.StandingReply()
        self.task = pb.Task(nothing=pb.Nothing())
        self.greeting = pb.HelloReply(protocol=2, session=SESSION, beat_seconds=5, hold_seconds=20)
        self.on_frame = lambda _: None

    def _control(self, method, request, *replies):
        self.messages.append(request)
        sent = [request.SerializeToString()]
        received = [reply.SerializeToString() for reply in replies]
        self.calls.append(Call(f"/staddle.v1.Federation/{method}", AGENT, sent, received))

    async def hello(self, request):
        self._control("Hello", request, self.greeting)
        return self.greeting

    async def poll(self, request, hold):
        self._control("Poll", request, self.task)
        self.hold = hold
        return self.task

    async def beat(self, request):
        reply = pb.BeatReply(wanted=request.round == 1)
        self._control("Beat", request, reply)
        return reply

    async def answer(self, request):
        self._control("Answer", request, pb.AnswerReply())
        return pb.AnswerReply()

    async def standing(self, request):
        reply = self.standing_reply(self)
        self._control("Standing", request, reply)
        return reply

    async def attest(self, request):
        self._control("Attest", request, pb.AttestReply())

    async def padded(self, request):
        self._control("Padded", request, secure.SecureTaken())

    async def fetch(self, request, largest):
        self._control("Fetch", request, *self.delivery)
        self.largest = largest
        for frame in self.delivery:
            yield decode(frame.SerializeToString())

    async def upload(self, frames, size):
        self.uploads += 1
        self.frames, self.at = [], []
        self.all_uploads.append(self.frames)
        call = Call(UPLOAD, AGENT, cut=True)
        self.calls.append(call)
        self.before = records(self.path)
        async with contextlib.aclosing(frames):
            if self.stop_after == 0:
                raise self.error
            async for frame in frames:
                self.at.append(records(self.path))
                call.sent.append(encode(frame))
                self.frames.append(tensor.Frame.FromString(call.sent[-1]))
                self.on_frame(self)
                if self.stop_after == len(self.frames):
                    raise self.error
        receipt = self.receipt(self)
        call.received.append(receipt.SerializeToString())
        call.cut = False
        return receipt

    async def close(self):
        self.closed = True

    @property
    def all_frames(self):
        return [frame for frames in self.all_uploads for frame in frames]

    @property
    def end(self):
        return self.frames[-1].end


def records(path, *types):
    """All records of a ledger's folder."""
    return stored(path, *types)


def kinds(found):
    return [record["type"] for record in found]


class World:
    """A gate with a real ledger, policy and roster over the fake client."""

    def __init__(self, made, folder, policy=None):
        self.made = made
        self.job = made.jobs.get("simple")
        self.declares = None  # in place of the job
        self.path = folder / "ledger"
        self.policy = policy or made.policy(*made.jobs.values())
        self.keys = load_keys(made.files.folder / SILO / "keys")
        self.ledger = self.open_ledger()
        self.client = FakeClient(self.path)
        self.client.receipt = self.receipt
        self.gate = self.make_gate()
        self.receipt_changes = {}

    def open_ledger(self):
        return Ledger.open(self.path, SILO, self.made.roster.federation, self.keys.log)

    def make_gate(self):
        self.witness = Witness(self.ledger, self.made.roster, self.keys, self.path.parent / HEADS)
        return Gate(self.client, self.ledger, self.policy, self.made.roster, self.witness)

    @property
    def declared(self):
        return self.declares or Declared.of(self.job.document(), RECORDS)

    def items(self, round_=0):
        return self.declares.items(round_) if self.declares else upload_items(self.job.up(round_))

    def payload(self, round_=0, **changes):
        """What the job's round gives: random numbers, plausible counts.

        ``changes`` replaces tensors by name.
        """
        rng = torch.Generator().manual_seed(round_)
        given = {}
        for item in self.items(round_):
            value = torch.randn(item.spec.shape, generator=rng).mul(10).to(DTYPES[item.spec.dtype])
            if item.spec.name == WEIGHT:
                value = torch.full_like(value, RECORDS.train)
            elif item.part == RIGHT.name:
                value = torch.tensor(RECORDS.test - (item.spec.name != "tested"))
            given.setdefault(item.part, {})[item.spec.name] = changes.get(item.spec.name, value)
        return given

    def wanted(self, payload, round_=0):
        """The bytes on the wire, the obvious way."""
        tensors = (payload[item.part][item.spec.name] for item in self.items(round_))
        return [bytes(tensor_bytes(each)) for each in tensors]

    def receipt(self, client):
        digests = stream.Digests(tuple(client.end.tensor_sha256))
        manifest, end = client.frames[0].manifest, client.end
        head = TreeHead.parse(Consistency.parse(end.head).checkpoint.text)
        members = rosters.members_digest(self.made.roster, (SILO,))
        fields = {"federation": "local", "members": members, "silo": SILO}
        fields |= {"job": self.declared.digest, "round": manifest.round, "size": manifest.size}
        fields |= {"sha256": digests.total.hex(), "ledger_seq": end.ledger_seq}
        fields |= {"ledger_leaf": end.ledger_leaf.hex(), "ledger_root": head.root.hex()}
        fields |= self.receipt_changes
        return pb.Receipt(signature=Receipt(**fields).sign(self.made.coordinator))

    def contribute(self, payload=None, round_=0):
        async def scenario():
            if not self.gate.session.token:
                await self.gate.session.hello()
            given = self.payload(round_) if payload is None else payload
            given = given if isinstance(given, Contributions) else Contributions(given)
            await self.gate.upload_plain(self.declared, round_, given, SILOS)

        asyncio.run(scenario())

    def broken(self, frames, payload=None):
        """Give once; the connection breaks after this many frames, or behind the last."""

        def gone(_):
            raise self.client.error

        self.client.stop_after, self.client.receipt = frames, gone
        with pytest.raises(UnreachableError):
            self.contribute(payload)
        self.client.receipt = self.receipt

    def settle(self):
        return asyncio.run(self.gate.settle())

    def restart(self):
        """The process died and began anew: another gate over the ledger's file."""
        self.ledger.close()
        self.ledger = self.open_ledger()
        write_start(self.ledger, "test", rosters.digest(self.made.roster), self.policy.digest)
        self.gate = self.make_gate()
        asyncio.run(self.gate.session.hello())

    def outcome(self):
        """The outcome record; durable at the latest when the ledger is closed."""
        return records(self.path, "egress.outcome")[-1]

    def nothing_left(self):
        assert self.client.uploads == 0
        assert self.client.frames == []
        assert not [k for k in kinds(records(self.path)) if k.startswith("egress.")]

    def audited(self):
        """Close the ledger and check that it holds."""
        asyncio.run(self.gate.session.close())
        self.ledger.close()
        found = audit.verify(self.path)
        assert found.ok, found.problems
        return found
