"""A method of our own installation that tries to get a secret past the gate, through the agent as
it ships.

Everything that the client is handed is kept (recording_gate.py). Code of a method runs in the
agent's process: what is tested here is that nothing it gives, raises or changes makes the gate let
out more than the signed job declares.
"""

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch
from support.recording_gate import (
    RECORDS,
    SILO,
    SILOS,
    FakeClient,
    World,
    kinds,
    make_federation,
    records,
)
from torch import Tensor

from staddle.algorithms import catalog
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.exchange.parts import WEIGHT, Contribution, Kind, Part, Sum, TensorSpec
from staddle.algorithms.job.job import Job
from staddle.algorithms.methods.fedper import FedPer
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.commands.federation import local_federation
from staddle.errors import LocalError, RefusedError
from staddle.proto import federation_pb2 as pb
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.frames import encode
from staddle.proto.stream import Digests
from staddle.silo import agent as agents
from staddle.silo import config as configs
from staddle.silo import plain_rounds
from staddle.silo.agent import Agent
from staddle.silo.egress.outcomes import DeniedError
from staddle.silo.egress.session import UnreachableError
from staddle.silo.session import Exit

pytestmark = pytest.mark.actor("installed method")

SECRET = b"PATIENT-4711-HIV" * 4  # 64 bytes that are finite numbers in every dtype
ACCEPTED, TRAINING = "ACCEPT UNSPECIFIED", "FAILED TRAINING"
BIAS, WEIGHTS = "extractor.conv1.bias", "extractor.conv1.weight"


def secret(dtype=torch.float32):
    return torch.frombuffer(bytearray(SECRET), dtype=dtype)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_federation(tmp_path_factory.mktemp("smuggled"))


@pytest.fixture
def world(made, tmp_path):
    found = World(made, tmp_path)
    yield found
    found.ledger.close()


def crossed(client):
    """Every byte of every message that the client was handed."""
    sent = (*client.messages, *client.all_frames)
    return b"".join(message.SerializeToString() for message in sent)


class Coordinator(FakeClient):
    """Offers the job, asks for its first round, then waits."""

    def __init__(self, path, made, job):
        super().__init__(path)
        digest = bytes.fromhex(job.digest)
        offer = pb.Offer(job=job.name, job_digest=digest, signed_job=made.signed(job.name))
        asked = pb.Round(job=job.name, job_digest=digest, round=0, cohort=job.silos)
        self.tasks = [pb.Task(offer=offer), pb.Task(round=asked)]
        self.told = asyncio.Event()
        nothing = tensor.Manifest(job=job.name, job_digest=digest)
        end = tensor.End(sha256=Digests(()).total)
        self.delivery = [tensor.Frame(manifest=nothing), tensor.Frame(end=end)]

    async def poll(self, request, hold):
        self.messages.append(request)
        if self.tasks:
            return self.tasks.pop(0)
        self.told.set()
        return await asyncio.get_running_loop().create_future()

    @property
    def codes(self):
        """The codes of the answers."""
        answers = [message for message in self.messages if isinstance(message, pb.AnswerRequest)]
        kind, code = pb.AnswerKind.Name, pb.ErrorCode.Name
        return [f"{kind(each.kind)[12:]} {code(each.code)[11:]}" for each in answers]


class Hostile(FedPer):
    """FedPer, whose contributions go through ``trick`` before they are handed over."""

    trick = staticmethod(lambda contributions: contributions)

    def contribute(self, state, facts):
        return self.trick(super().contribute(state, facts))


@pytest.fixture
def attack(world, tmp_path, monkeypatch):
    """Run the agent through an offer and a round with a method that does this.

    Its coordinator's client.
    """
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(plain_rounds, "PAUSE_SECONDS", 0.01)
    monkeypatch.setitem(catalog.METHODS, "fedper", Hostile)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 40)
    shard = Dataset(torch.from_numpy(x), torch.from_numpy(y))
    local_federation.write_silo(world.made.files, SILO, "127.0.0.1:1", shard, [world.job])
    config = configs.load(world.made.files.silo_config(SILO))
    config = config.model_copy(update={"directory": tmp_path / "state"})
    (tmp_path / "state").mkdir()

    def run(trick):
        monkeypatch.setattr(Hostile, "trick", staticmethod(trick))

        async def scenario():
            client = Coordinator(world.path, world.made, world.job)
            client.receipt = world.receipt
            world.client = world.gate.session.client = client
            agent = Agent(
                config, SILO, world.made.roster, world.policy, world.gate, world.keys, pytest.fail
            )
            running = asyncio.create_task(agent.run())
            told = asyncio.create_task(client.told.wait())
            async with asyncio.timeout(30):
                await asyncio.wait({running, told}, return_when="FIRST_COMPLETED")
            agent.stop()
            assert await running == Exit("")
            return client

        return asyncio.run(scenario())

    return run


def nothing_left(world, client):
    """No upload, no record of one, no trace of the secret.

    The ledger's count of control messages is what came.
    """
    world.nothing_left()
    assert SECRET[:16] not in crossed(client)
    explained(world, client)


def explained(world, client):
    """Every byte that the client was handed stands in the ledger."""
    (close,) = records(world.path, "control.close")
    size = sum(message.ByteSize() for message in client.messages)
    assert (close["messages"], close["bytes"]) == (len(client.messages), size)
    sizes = [sum(len(f.chunk) for f in frames) for frames in client.all_uploads]
    assert sizes == [r["message"]["bytes"] for r in records(world.path, "egress.intent")]
    world.ledger.close()
    assert world.audited().ok


# What a method gives.


def changed(name, value):
    """The contributions with one tensor of the extractor set: added, or in place of the
    right one.
    """

    def trick(contributions):
        tensors = {**contributions["extractor"].tensors, name: value}
        return {"extractor": Contribution(tensors, contributions["extractor"].weight)}

    return trick


def weighted(weight):
    return lambda given: {"extractor": Contribution(given["extractor"].tensors, weight)}


class Changing(Tensor):
    """Zeros when it is looked at, the secret when it is copied or moved."""

    @classmethod
    def __torch_function__(cls, function, kinds_, args=(), kwargs=None):
        if function in (Tensor.cpu, Tensor.contiguous, Tensor.numpy, Tensor.detach, Tensor.clone):
            return secret()[:16]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def lazy():
    return torch.zeros(16).as_subclass(Changing)


class Duck:
    """No tensor, but asked like one."""

    dtype, shape, layout = torch.float32, (16,), torch.strided
    is_meta, device = False, torch.device("cpu")

    def detach(self):
        return secret()[:16]

    contiguous = cpu = detach


class Name(str):
    """A name that is equal to whatever it is compared with."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return True


NANS = torch.frombuffer(bytearray(b"PA\xc0\x7f" * 16), dtype=torch.float32)
TRICKS = {
    "an extra part": lambda given: {**given, "secret": Contribution({"x": secret()})},
    "an extra tensor": changed("extractor.secret", secret()),
    "a longer tensor": changed(BIAS, torch.cat([torch.zeros(16), secret()])),
    "another dtype of the same size": changed(BIAS, secret(torch.int32)[:16]),
    "another shape of the same size": changed(BIAS, secret()[:16].reshape(4, 4)),
    "a letter that looks like another": changed("extractоr.conv1.bias", secret()[:16]),
    "a full-width letter": changed("extractor.conv1.biａs", secret()[:16]),
    "two dots": changed("extractor..conv1.bias", secret()[:16]),
    "a name with a line end": changed(f"{BIAS}\n", secret()[:16]),
    "a number as a name": changed(1, secret()[:16]),
    "a name that equals every name": changed(Name("other"), secret()),
    "no tensor at all": changed(BIAS, Duck()),
    "data in NaNs": changed(BIAS, NANS),
    "a weight that is not a whole number": weighted(24.000000000000004),
    "a weight of more records than there are": weighted(41.0),
    "a negative weight": weighted(-1.0),
    "a negative zero as a weight": weighted(-0.0),
    "a weight that is a tensor of more": weighted(secret(torch.float64)),
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_what_the_job_does_not_declare_stays(world, attack, trick):
    client = attack(trick)
    nothing_left(world, client)
    assert client.codes == [ACCEPTED, TRAINING]


@pytest.mark.control
def test_an_honest_method_gives_what_it_declares(world, attack):
    client = attack(lambda contributions: contributions)
    assert client.uploads == 1
    assert client.codes == [ACCEPTED]
    explained(world, client)


def test_of_a_view_its_own_elements_cross_and_nothing_behind_them(world, attack):
    behind = torch.cat([secret(), torch.arange(16.0), secret()])
    client = attack(changed(BIAS, behind[16:32]))
    assert client.uploads == 1
    assert torch.arange(16.0).numpy().tobytes() in crossed(client)
    assert SECRET[:16] not in crossed(client)
    explained(world, client)


@pytest.mark.control
def test_a_view_with_strides_crosses_as_the_numbers_that_it_shows(world, attack):
    client = attack(changed(BIAS, torch.arange(32.0)[::2]))
    assert torch.arange(0.0, 32.0, 2.0).numpy().tobytes() in crossed(client)
    explained(world, client)


@pytest.mark.control
def test_negative_zeros_and_denormals_are_numbers_and_cross_bit_by_bit(world, attack):
    numbers = torch.tensor([-0.0, 1e-45, -1e-45, 3e-39] * 4)
    client = attack(changed(BIAS, numbers))
    assert numbers.numpy().tobytes() in crossed(client)
    explained(world, client)


def test_metrics_are_the_runners_and_not_the_methods(world, attack):
    names = ("correct.delivered", "correct.trained", "tested")
    fake = Contribution({name: torch.tensor(2**40) for name in names})
    client = attack(lambda contributions: {**contributions, RIGHT.name: fake})
    assert client.uploads == 1
    payload = b"".join(frame.chunk for frame in client.frames)
    tested, right = np.frombuffer(payload[-8:], "<i8")[0], np.frombuffer(payload[-24:-8], "<i8")
    assert 0 < tested <= 20
    assert (right >= 0).all()
    assert (right <= tested).all()
    explained(world, client)


def test_a_tensor_that_changes_when_copied(world, attack):
    """It crosses as the numbers that were checked.

    They are declared numbers, and any are: docs/wire.md says so.
    """
    client = attack(changed(BIAS, lazy()))
    assert client.uploads == 1
    assert crossed(client).count(SECRET[:64]) == 1
    explained(world, client)


# What a method raises.


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError(SECRET.decode())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(SECRET.decode()), "TRAINING"),
        (LocalError(SECRET.decode()), "TRAINING"),
        (RefusedError("coordinator", SECRET.decode(), SECRET.decode()), "DELIVERY"),
        (DeniedError(SECRET.decode()), "POLICY"),
        (UnprintableError(), "TRAINING"),
        (KeyError("x" * 100_000), "TRAINING"),
        (MemoryError(), "TRAINING"),
    ],
)
def test_of_an_error_a_code_crosses(world, attack, caplog, error, code):
    def trick(_):
        raise error

    client = attack(trick)
    nothing_left(world, client)
    assert client.codes[1:] == [f"FAILED {code}"]
    failed = [r.fields for r in caplog.records if r.getMessage() == "round.failed"]
    assert [fields["code"] for fields in failed] == [code]
    assert all(len(fields["why"]) < 1000 for fields in failed)


def test_an_error_of_the_connection_is_no_way_to_say_anything(world, attack):
    def trick(_):
        raise UnreachableError("coordinator", SECRET.decode())

    client = attack(trick)
    world.nothing_left()
    assert SECRET[:16] not in crossed(client)
    assert client.codes == [ACCEPTED]


@pytest.mark.parametrize(("place", "begun"), [("exactly", []), ("Digester.update", ["unknown"])])
def test_memory_that_runs_out_in_the_gate_costs_the_round_and_not_the_agent(
    world, attack, caplog, monkeypatch, place, begun
):
    def full(*_):
        raise MemoryError("no room for 3 GiB")

    monkeypatch.setattr(f"staddle.silo.egress.gate.{place}", full)
    client = attack(lambda contributions: contributions)
    assert client.codes[1:] == [TRAINING]
    (failed,) = [r.fields for r in caplog.records if r.getMessage() == "round.failed"]
    assert failed["why"] == "out of memory: no room for 3 GiB"
    assert [each["status"] for each in records(world.path, "egress.outcome")] == begun
    assert len(records(world.path, "egress.intent")) == len(begun)
    world.ledger.close()
    assert world.audited().ok


# What a method changes.


def test_a_schema_that_grows_after_the_job_was_accepted_is_not_the_signed_one(
    world, attack, monkeypatch
):
    more = Part("secret", Kind.WHOLE_MODEL, Sum("total"), (TensorSpec("x", "float32", (16,)),))

    def trick(contributions):
        real = Job.up
        monkeypatch.setattr(Job, "up", lambda job, round_: (*real(job, round_), more))
        return {**contributions, "secret": Contribution({"x": secret()})}

    client = attack(trick)
    nothing_left(world, client)
    assert client.codes[1:] == [TRAINING]


def test_a_job_that_is_renamed_gives_under_the_signed_name_and_digest(world, attack, monkeypatch):
    """Those of this agent alone: other tests of this process have jobs of that name, too."""

    def jobs():
        return [found for found in gc.get_objects() if type(found) is Job]

    def trick(contributions):
        renamed = [job for job in jobs() if not any(job is each for each in earlier)]
        assert {job.name for job in renamed} == {world.job.name}
        for job in renamed:
            object.__setattr__(job, "name", SECRET.decode())
            job.__dict__["digest"] = SECRET.hex()[:64]
        return contributions

    earlier = jobs()
    name, digest = world.job.name, world.job.digest
    client = attack(trick)
    (upload,) = client.all_uploads
    assert (upload[0].manifest.job, upload[0].manifest.job_digest.hex()) == (name, digest)
    assert SECRET[:16] not in crossed(client)
    explained(world, client)


# The gate alone, as if everything before it had been fooled.


def refused(world, payload, words):
    with pytest.raises(LocalError, match=words):
        world.contribute(payload)
    world.nothing_left()
    assert SECRET[:16] not in crossed(world.client)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("extractоr.conv1.bias", secret()[:16], "not in the job's schema"),
        ("extractor..conv1.bias", secret()[:16], "not in the job's schema"),
        (f"{BIAS}\n", secret()[:16], "not in the job's schema"),
        (SECRET.decode() * 100, secret(), "not in the job's schema"),
        (7, secret(), "not in the job's schema"),
        (BIAS, lazy(), "no plain tensor but Changing"),
        (BIAS, Duck(), "no plain tensor but Duck"),
        (BIAS, torch.nn.Parameter(secret()[:16]), "no plain tensor but Parameter"),
        (BIAS, torch.eye(16)[0].to_sparse(), "sparse"),
        (BIAS, torch.empty(16, device="meta"), "meta"),
        (BIAS, secret(torch.int32)[:16], "int32"),
        (WEIGHT, torch.tensor(1.5, dtype=torch.float64), "not a whole number from 0 to 30"),
        (WEIGHT, torch.tensor(31.0, dtype=torch.float64), "not a whole number from 0 to 30"),
        (WEIGHT, torch.tensor(-0.0, dtype=torch.float64), "not a whole number from 0 to 30"),
        (WEIGHT, torch.tensor(5e-324, dtype=torch.float64), "not a whole number from 0 to 30"),
    ],
)
def test_1_and_3_the_gate_refuses_what_the_runner_let_pass(world, name, value, words):
    payload = world.payload()
    payload["extractor"][name] = value
    refused(world, payload, words)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"tested": 11, "correct.trained": 1}, "tested is 11, this silo has 10"),
        ({"tested": -1}, "metrics/tested holds a value below 0"),
        ({"tested": 5, "correct.trained": 6}, "correct.trained is 6, of 5"),
        ({"correct.delivered": -1}, "metrics/correct.delivered holds a value below 0"),
        ({"correct.delivered": int.from_bytes(SECRET[:7], "little")}, "correct.delivered is"),
        ({"tested": 2**62, "correct.trained": 2**62}, "tested is"),
    ],
)
def test_2_and_3_metrics_count_test_records(world, counts, words):
    payload = world.payload()
    payload["metrics"] |= {"correct.delivered": torch.tensor(0), "correct.trained": torch.tensor(0)}
    payload["metrics"] |= {name: torch.tensor(count) for name, count in counts.items()}
    refused(world, payload, words)


@pytest.mark.parametrize("samples", [RECORDS.train + 1, -1, 2**53 + 1])
def test_3_a_census_counts_training_records(world, samples):
    world.job = world.made.job("census", "fedsimsup", silos=(*SILOS, "silo-d"), participation=0.75)
    world.policy = world.gate._policy = world.made.policy(world.job)
    world.contribute(world.payload(samples=torch.tensor(RECORDS.train)))
    world.client.uploads, world.client.frames = 0, []
    before = len(records(world.path))
    with pytest.raises(LocalError, match="samples is not a whole number from 0 to 30"):
        world.contribute(world.payload(samples=torch.tensor(samples)))
    assert world.client.uploads == 0
    assert kinds(records(world.path)[before:]) in ([], ["egress.outcome"])  # of the one before


def test_an_instance_with_methods_of_its_own_is_read_as_the_tensor_that_it_is(world):
    payload = world.payload()
    value = payload["extractor"][BIAS]
    for method in ("detach", "cpu", "contiguous", "numpy", "clone", "copy_", "to"):
        setattr(value, method, lambda *_: secret()[:16])
    honest = bytes(torch.Tensor.numpy(value).tobytes())
    world.contribute(payload)
    assert honest in crossed(world.client)
    assert SECRET[:16] not in crossed(world.client)


class Twice(dict):
    """Honest when it is read first."""

    def items(self):
        first, self["read"] = "read" not in self, True
        pairs = [(key, value) for key, value in super().items() if key != "read"]
        if first:
            return pairs
        return [(key, secret()[: value.numel()].reshape(value.shape)) for key, value in pairs]


def test_a_mapping_is_read_once(world):
    payload = world.payload()
    wanted = world.wanted(payload)
    world.contribute({part: Twice(values) for part, values in payload.items()})
    assert b"".join(frame.chunk for frame in world.client.frames) == b"".join(wanted)


def test_what_changes_after_it_was_checked_crosses_as_it_was_checked(world):
    payload = world.payload()
    wanted = b"".join(world.wanted(payload))

    def spoil(_):
        for values in payload.values():
            for value in values.values():
                value.zero_().add_(1)
        payload["extractor"][BIAS].copy_(secret()[:16])

    world.client.on_frame = spoil  # the manifest is the first
    world.contribute(payload)
    assert b"".join(frame.chunk for frame in world.client.frames) == wanted
    assert world.audited().ok


def test_a_thread_that_goes_on_writing_gets_no_nan_across(world):
    payload = world.payload()
    target, done = payload["extractor"][WEIGHTS], threading.Event()
    size = sum(item.spec.nbytes for item in world.items() if item.spec.dtype == "float32")

    def scribble():
        while not done.is_set():
            target.fill_(1.0)
            target.view(-1)[::2] = float("nan")

    writing = threading.Thread(target=scribble)
    writing.start()
    try:
        for _ in range(30):
            try:
                world.contribute(payload)
            except LocalError as error:
                assert "NaN" in str(error)  # noqa: PT017 either may happen: the copy was made before or after
            else:
                sent = b"".join(frame.chunk for frame in world.client.frames)
                assert np.isfinite(np.frombuffer(sent[:size], "<f4")).all()
    finally:
        done.set()
        writing.join()
    assert world.audited().ok


@pytest.mark.parametrize("batched", [True, False])
def test_a_tensor_that_cannot_be_read_is_an_error_of_ours(world, batched):
    kept = []

    def keep(value):
        kept.append(value)
        return value

    torch.vmap(keep)(torch.zeros(2, 16))
    payload = world.payload()
    payload["extractor"][BIAS] = kept[0] if batched else torch._efficientzerotensor(16)
    if batched:
        refused(world, payload, "cannot be read")
    else:
        world.contribute(payload)
        assert world.client.uploads == 1


@pytest.mark.control
def test_a_negated_view_crosses_as_its_numbers(world):
    payload = world.payload()
    value = torch.complex(torch.zeros(16), torch.arange(16.0)).conj().imag
    assert value.is_neg()
    payload["extractor"][BIAS] = value
    world.contribute(payload)
    assert (-torch.arange(16.0)).numpy().tobytes() in crossed(world.client)


@pytest.mark.control
def test_frames_are_what_the_codec_writes(world):
    """What ``crossed`` looks at is what gRPC would be handed."""
    world.contribute()
    frames = world.client.frames
    assert [tensor.Frame.FromString(encode(frame)) for frame in frames] == frames
