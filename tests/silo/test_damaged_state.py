"""Each file of a silo: one flipped bit, a cut or an empty file is found before it is used."""

import asyncio
import shutil
from types import SimpleNamespace

import pytest
import torch
from support.counted import counts
from support.private_jobs import opened, policy_for, private_job
from support.recording_gate import World

from staddle.algorithms.course import SiloState
from staddle.algorithms.job.privacy import Spend
from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.training.accountant import Counts
from staddle.algorithms.training.silo_round import RoundReport
from staddle.commands.simulate import membership
from staddle.errors import LocalError, RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.security.blind.mix_row import RowMemory, VersionMemory
from staddle.security.blind.prekeys import Known
from staddle.security.blind.rotation import RotationMemory
from staddle.security.dp.budget import Budget, Ceiling
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.secagg.memory import Memory
from staddle.silo.admission.accountant import JobAccount
from staddle.silo.agent import Agent
from staddle.silo.blind.rounds import MemoryFiles
from staddle.silo.config import SiloConfig
from staddle.silo.egress.witness import HEADS
from staddle.silo.ingress.keyed_job import PrekeyFiles
from staddle.silo.ingress.mix_memory import MixMemory, OpenedDirected, OpenedRows, Rotations
from staddle.silo.job_folder import JobFolder, split_key
from staddle.silo.parts.contributions import UNSAID, Contributions

STATE = SiloState({"membership": {"c": torch.tensor([0.25, 0.75])}}, {"momentum": torch.ones(2)})
GIVEN = Contributions({"model": {"w": torch.arange(6.0)}})
DIGEST = "9f" * 32


def report():
    return RoundReport(
        round=0, samples=90, delivered=counts(10, 8), trained=counts(10, 9), loss=0.25
    )


def account(path):
    budget = SimpleNamespace(paid=lambda *_: True)
    private = SimpleNamespace(epsilon=8.0, delta=1e-5)
    model, task = SimpleNamespace(width=3), Classification()
    job = SimpleNamespace(model=model, task=task, private=private, digest=DIGEST)
    return JobAccount(budget, job, JobFolder(path))


def memories(path):
    return MemoryFiles(path, lambda: True)


def prekeys(path):
    return PrekeyFiles(path, b"\5" * 32)


def begun(path):
    prekeys(path).begin(b"\7" * 32, Known.first({"silo-b": public_key(b"\3" * 32)}))


KEPT = {  # file: how it is written into a folder, and how it is read again
    "state-1.safetensors": (lambda p: JobFolder(p).save_round(0, 0, STATE, GIVEN),
        lambda p: JobFolder(p).state(1)),
    "outbox-1.safetensors": (lambda p: JobFolder(p).save_round(0, 0, STATE, GIVEN),
        lambda p: JobFolder(p).outbox(0)),
    "counted": (lambda p: JobFolder(p).save_round(1, 1, STATE, GIVEN),
        lambda p: JobFolder(p).state(2)),
    "report.json": (lambda p: JobFolder(p).finish(report(), {"silo": "a"}),
        lambda p: JobFolder(p).report()["final"]),
    "dataset": (lambda p: JobFolder(p).accept(b"{}", "data"),
        lambda p: JobFolder(p).check_on("data")),
    "model.safetensors": (lambda p: JobFolder(p).save_values(STATE),
        lambda p: membership.read_all([p / "model.safetensors"]).memberships.tolist()),
    "counts.json": (lambda p: account(p).keep_counts(Counts(torch.tensor([4, 0, 9]), 3)),
        lambda p: account(p).counts()),
    "secagg-sum-model-c.json": (
        lambda p: memories(p).save(
            "job/sum/model/c", Memory(round=17, ctx=DIGEST, signed_survivors=("a", "b"))
        ),
        lambda p: memories(p).load("job/sum/model/c"),
    ),
    "mix-x.rows.json": (
        lambda p: MixMemory(p).save_rows(
            "x", OpenedRows(memory=RowMemory(last=DIGEST, newest={"b": 4}))
        ),
        lambda p: MixMemory(p).rows("x"),
    ),
    "mix-x.directed.json": (lambda p: MixMemory(p).save_directed("x", OpenedDirected(newest=7)),
        lambda p: MixMemory(p).directed("x")),
    "mix-x.versions.json": (lambda p: MixMemory(p).save_versions("x", VersionMemory()),
        lambda p: MixMemory(p).versions("x")),
    "mix-x.signed": (
        lambda p: MixMemory(p).save_signed("x", pb.PaddedWordUpload(job="job", part="x")),
        lambda p: MixMemory(p).signed("x"),
    ),
    "gram-x.json": (
        lambda p: MixMemory(p).save_rotations(
            "x", Rotations(memory=RotationMemory(), given=DIGEST)
        ),
        lambda p: MixMemory(p).rotations("x"),
    ),
    "prekeys.json": (begun, lambda p: prekeys(p).known()),
    "group.prekeys": (begun, lambda p: prekeys(p).own()),
    "split.key": (split_key, split_key),
}  # fmt: skip


# earlier releases and other programs write none
MAY_LACK_DIGEST = ("model.safetensors", "split.key", "report.json")


def unless_refused(read, path):
    try:
        return read(path)
    except LocalError:
        return None


def damages(data):
    """A bit of each of many bytes, both ends among them; a cut; nothing at all."""
    for at in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    yield from (data[:-1], data[: len(data) // 2], b"")


@pytest.mark.parametrize("name", KEPT)
def test_what_a_disk_changed_is_found_before_it_is_used(tmp_path, name):
    write, read = KEPT[name]
    write(tmp_path)
    whole = read(tmp_path)
    data = (tmp_path / name).read_bytes()
    for damaged in damages(data):
        (tmp_path / name).write_bytes(damaged)
        if name in MAY_LACK_DIGEST and (found := unless_refused(read, tmp_path)) is not None:
            assert found == whole  # the digest alone is damaged, or a space
            continue
        with pytest.raises(LocalError, match=name.replace(".", r"\.")):
            read(tmp_path)


def damaged_outbox(made, world, job):
    """An agent, and a folder in which the outbox of round 0 of a job is damaged."""
    folder = JobFolder(world.path.parent / "jobs" / job.name)
    folder.accept(b"{}", "data")
    folder.save_round(0, 0, STATE, GIVEN)
    path = folder.path / "outbox-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    config = SiloConfig.model_construct(directory=world.path.parent)
    return Agent(
        config, "silo-a", made.roster, world.policy, world.gate, world.keys, pytest.fail
    ), folder


def test_a_job_that_is_offered_again_stays_on_its_records(made, tmp_path):
    """What it has paid and drawn is of these."""
    world = World(made, tmp_path)
    config = SiloConfig.model_construct(directory=tmp_path)
    agent = Agent(config, "silo-a", made.roster, world.policy, world.gate, world.keys, pytest.fail)
    signed, folder = made.signed("simple"), JobFolder(tmp_path / "jobs" / "simple")
    for before, why in (("data", ""), ("scans", "this job began on data set 'scans'")):
        folder.accept(signed, before)
        if not why:
            agent._check_earlier(world.job, signed)
            continue
        with pytest.raises(RefusedError, match=why) as caught:
            agent._check_earlier(world.job, signed)
        assert caught.value.code == "JOB_INVALID"


def test_what_was_trained_from_one_state_is_not_given_as_if_from_another(tmp_path):
    """A coordinator that counts rounds anew would have one state's values in a second sum."""
    folder = JobFolder(tmp_path)
    folder.accept(b"{}", "data")
    folder.save_round(2, 1, STATE, GIVEN)
    assert folder.outbox(2).start == 1
    assert Contributions({}).start == UNSAID


def test_a_damaged_outbox_of_which_nothing_left_is_trained_again(made, tmp_path, caplog):
    world = World(made, tmp_path)
    agent, folder = damaged_outbox(made, world, world.job)
    assert asyncio.run(agent._outbox(world.job, folder, 0)) is None
    assert folder.rounds_done == 0  # as before it was trained
    (told,) = [record.fields for record in caplog.records if record.message == "outbox.damaged"]
    assert "outbox-1.safetensors: is not as it was written: the disk changed it" in told["why"]


def test_a_damaged_outbox_of_which_something_left_is_named_and_kept(made, tmp_path):
    world = World(made, tmp_path)
    world.contribute()
    agent, folder = damaged_outbox(made, world, world.job)
    with pytest.raises(LocalError, match=r"outbox-1\.safetensors: .* restore it from a backup"):
        asyncio.run(agent._outbox(world.job, folder, 0))
    assert folder.rounds_done == 1


def test_a_damaged_outbox_of_a_private_job_is_not_paid_for_again(made, tmp_path):
    job = private_job(made)
    agent, folder = damaged_outbox(made, World(made, tmp_path, policy_for(made, job)), job)
    with pytest.raises(LocalError, match=r"outbox-1\.safetensors: .* restore it from a backup"):
        asyncio.run(agent._outbox(job, folder, 0))
    assert folder.rounds_done == 1


def test_heads_of_others_that_a_disk_changed_stop_the_silo_at_its_start(made, tmp_path):
    world = World(made, tmp_path)
    world.make_gate()
    path = world.path.parent / HEADS
    asyncio.run(
        world.witness._keep(heads={"coordinator": bytes(world.ledger.checkpoint()).decode()})
    )
    data = path.read_bytes()
    for damaged in damages(data):
        path.write_bytes(damaged)
        with pytest.raises(LocalError, match=r"heads\.json"):
            world.make_gate()


def test_a_ledger_of_a_silo_that_was_killed_is_found_changed_to_its_last_record(made, tmp_path):
    world = World(made, tmp_path)
    world.contribute()
    check_log(
        world.path,
        tmp_path,
        lambda p: Ledger.open(p, "silo-a", made.roster.federation, world.keys.log).close(),
    )


def test_a_budget_of_a_silo_that_was_killed_is_found_changed_to_its_last_record(made, tmp_path):
    job = private_job(made)
    world = World(made, tmp_path, policy_for(made, job))
    with opened(world) as budget:
        budget.reserve(job, 0, [Spend("training", "2", "0.25", 4)], Ceiling("8", "0.00001"))
        folder = next((tmp_path / "privacy").iterdir())

        def reopen(path):
            other = SimpleNamespace(privacy_heads=world.ledger.privacy_heads)
            Budget.open(
                path, "data", made.roster.federation, "silo-a", world.keys.log, known=bool(other)
            ).close()

        check_log(folder, tmp_path, reopen)


def check_log(folder, tmp_path, reopen):
    """Each damage of a segment, as kill -9 leaves it, is refused when the log is opened."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    reopen(copy)
    shutil.rmtree(copy)
    (segment,) = folder.glob("seg-*.jsonl")
    data = segment.read_bytes()
    for at in [*range(0, len(data), 41), *range(len(data) - 40, len(data))]:
        shutil.copytree(folder, copy)
        (copy / segment.name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LocalError):
            reopen(copy)
        shutil.rmtree(copy)
