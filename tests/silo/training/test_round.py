from dataclasses import replace
from functools import partial

import pytest
import torch
from support.private_jobs import opened, policy_for, private_job, steps_of
from support.recording_gate import World

from staddle import log
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import PrivateSilo
from staddle.algorithms.training.silo_round import state_from_bytes, state_to_bytes
from staddle.bundle import making
from staddle.bundle.description import Origin
from staddle.bundle.folder import FILES, SIGNATURE
from staddle.bundle.making import ModelMaker
from staddle.errors import CancelledError, LocalError, ProofError, UnwritableError
from staddle.security.blind.plan import JobPlan
from staddle.security.dp.noise import Randomness
from staddle.silo.admission.accountant import JobAccount
from staddle.silo.admission.checks import Admitted
from staddle.silo.job_folder import JobFolder
from staddle.silo.parts.declared import Declared, RecordCount
from staddle.silo.training.round import JobTraining

from ..conftest import records

NPZ = {"kind": "npz"}


@pytest.fixture
def work(made, tmp_path):
    """The work of a fedper job at silo-a, in a folder of the given name."""
    job, shard = made.jobs["simple"], records()
    train, test = shard.take(torch.arange(30).numpy()), shard.take(torch.arange(30, 40).numpy())

    def make(name, weights=None):
        folder = JobFolder(tmp_path / name)
        folder.accept(b"{}", "data")
        declared = Declared.of(job.document(), RecordCount(len(train), len(test)))
        admitted = Admitted(JobPlan(job), declared, "operator", train, test, weights or {}, {})
        return JobTraining(admitted, folder, "silo-a", 1, lambda: False)

    return make


def maker(work):
    origin = Origin(kind="silo", name="silo-a")
    return partial(ModelMaker, work.admitted.job, origin, NPZ, b"key")


def delivery(work, seed):
    rng = torch.Generator().manual_seed(seed)
    (part,) = work.admitted.job.method().down(1)
    return {part.name: {s.name: torch.randn(s.shape, generator=rng) * 0.05 for s in part.tensors}}


def equal(first, second):
    first, second = (getattr(each, "tensors", each) for each in (first, second))
    pairs = [(first[part][name], second[part][name]) for part in first for name in first[part]]
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_round_that_did_not_count_is_as_if_the_silo_had_been_away(work):
    one, other = work("one"), work("other")
    for each in (one, other):
        each.train(0, 0, {})
    one.train(1, 1, delivery(one, 1))  # does not count
    lost, away = one.train(2, 1, delivery(one, 2)), other.train(2, 1, delivery(other, 2))
    assert equal(lost, away)
    assert one.folder.rounds_done == other.folder.rounds_done == 3
    assert equal(one.folder.state(3).parts, other.folder.state(3).parts)
    # nor did round 2
    assert equal(one.train(3, 1, delivery(one, 3)), other.train(3, 1, delivery(other, 3)))


def test_a_round_that_counted_is_built_upon(work):
    one, other = work("one"), work("other")
    for each, counted in ((one, 1), (other, 0)):
        each.train(0, 0, {})
        each.train(1, counted, delivery(each, 1))
    # fedper's classifier went on, or did not
    assert not equal(one.folder.state(2).parts, other.folder.state(2).parts)


def test_a_first_round_that_did_not_count_begins_anew_with_the_silos_own_weights(work, made):
    initial = initial_state(made.jobs["simple"].method(), "silo-a")
    own = {"classifier": {name: v + 1 for name, v in initial.parts["classifier"].items()}}
    one, other, plain = work("one", own), work("other", own), work("plain")
    one.train(0, 0, {})
    first, second = one.train(1, 0, delivery(one, 1)), other.train(1, 0, delivery(other, 1))
    assert equal(first, second)
    assert not equal(first, plain.train(1, 0, delivery(plain, 1)))


@pytest.mark.parametrize("counted", [0, 1, 2])
def test_the_end_evaluates_what_counted(work, counted):
    one = work("one")
    one.train(0, 0, {})
    states = {0: None, 1: one.folder.state(1)}
    one.train(1, min(counted, 1), delivery(one, 1))
    states[2] = one.folder.state(2)
    if counted:
        with pytest.raises(LocalError, match="which it cannot take back"):
            one.finish(0, delivery(one, 2), maker(one))
    one.finish(counted, delivery(one, 2), maker(one))
    kept = one.folder.values.read_bytes()
    if counted:  # fedper keeps the model that was trained last
        assert state_to_bytes(state_from_bytes(kept)) == state_to_bytes(states[counted])
    else:  # and a silo of which no round counted the one that was delivered
        (part,) = delivery(one, 2)
        shared = {f"extractor.{n}": v for n, v in state_from_bytes(kept).parts["extractor"].items()}
        assert equal({part: shared}, delivery(one, 2))
    assert one.folder.report()["final"]["round"] == 4


def test_a_report_that_cannot_be_kept_leaves_the_round_to_be_trained_again(work):
    one, other = work("one"), work("other")
    (one.folder.path / "report.json").mkdir(parents=True)
    with pytest.raises(LocalError, match=r"report\.json"):
        one.train(0, 0, {})
    assert (one.folder.rounds_done, one.folder.outbox(0)) == (0, None)
    (one.folder.path / "report.json").rmdir()
    assert equal(one.train(0, 0, {}), other.train(0, 0, {}))
    assert [entry["round"] for entry in one.folder.report()["rounds"]] == [0]


def test_a_count_that_the_silo_knows_nothing_of_trains_nothing(work):
    one = work("one")
    one.train(0, 0, {})
    with pytest.raises(LocalError, match="an old state was restored"):
        one.train(1, 2, {})
    assert one.folder.rounds_done == 1


def test_what_a_silo_mixes_in_itself_is_its_state_of_the_round_that_counted(work, made):
    one = work("one")
    # its tensors are named by the state's own, as those of a Mix
    part = made.jobs["simple"].up(0)[0]
    one.train(0, 0, {})
    counted = one.folder.state(1)
    one.train(1, 1, delivery(one, 1))
    own = one.own(1, part)
    assert [piece.shape for piece in own] == [(spec.elements,) for spec in part.tensors]
    for spec, piece in zip(part.tensors, own, strict=True):
        module, _, leaf = spec.name.partition(".")
        assert torch.equal(torch.from_numpy(piece), counted.parts[module][leaf].reshape(-1))
    assert any((a != b).any() for a, b in zip(own, one.own(2, part), strict=True))


def test_a_part_that_is_not_named_by_the_state_cannot_be_mixed_in(work, made):
    part = made.jobs["simple"].up(0)[0]
    odd = replace(part, tensors=(replace(part.tensors[0], name="theta.w"),))
    with pytest.raises(LocalError, match=r"tensor 'theta\.w' is not part of this silo's state"):
        work("one").own(0, odd)
    with pytest.raises(LocalError, match="is not part of this silo's state"):
        work("two").own(0, replace(part, tensors=(replace(part.tensors[0], shape=(1, 2)),)))


# A private job: what a round takes is paid for before, and what it gives is kept before that is
# committed.
@pytest.fixture
def paid(made, tmp_path):
    """The work of a private fedper job at silo-a, its budget, and what was spent of it so far."""
    job = private_job(made, "paid", method="fedper", privacy={"histogram_sigma": 1.0})
    world = World(made, tmp_path, policy_for(made, job))
    shard = records()
    train, test = shard.take(torch.arange(30).numpy()), shard.take(torch.arange(30, 40).numpy())
    folder = JobFolder(tmp_path / "jobs" / "paid")
    folder.accept(b"{}", "data")
    with opened(world) as budget:

        def make(weights=None, public=frozenset()):
            declared = Declared.of(job.document(), RecordCount(len(train), len(test)))
            admitted = Admitted(
                JobPlan(job), declared, "operator", train, test, weights or {}, {}, public
            )
            private = PrivateSilo(JobAccount(budget, job, folder), Randomness)
            return JobTraining(admitted, folder, "silo-a", 1, lambda: False, private)

        make.spent = lambda: steps_of(budget, job).get(("2", "0.25"), 0)
        make.open = lambda: len(budget._budget._open)
        make.paid = lambda ids: all(budget.paid(number, job.digest) for number in ids)
        yield make


def test_a_private_round_is_paid_once(paid):
    """Its upload says what paid for it, and is sent again free of charge."""
    bundle = paid().train(0, 0, {})
    assert (paid.spent(), paid.open()) == (4, 0)
    for part, tensors in bundle.tensors.items():
        for name in tensors:
            taint = bundle.taint(part, name)
            assert not taint.exact, (part, name)
            assert taint.ids or part == "metrics"
            assert paid.paid(taint.ids)
    kept = paid().folder.outbox(0)
    assert equal(kept, bundle)
    assert kept.taints == bundle.taints
    assert paid.spent() == 4
    again = paid().train(1, 1, {})
    assert paid.spent() == 8
    assert (
        again.taint("extractor", "extractor.conv1.weight").ids
        > bundle.taint("extractor", "@weight").ids
    )


def test_a_private_round_and_its_disk(paid, monkeypatch):
    """A private round that cannot be stored is spent; a stored one is not trained again."""

    def full(*_):
        raise UnwritableError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "save_round", full)
        with pytest.raises(UnwritableError):
            paid().train(0, 0, {})
    assert (paid.spent(), paid.open()) == (4, 1)
    work = paid()
    (work.folder.path / "report.json").mkdir()
    with pytest.raises(LocalError, match=r"report\.json"):
        work.train(0, 0, {})
    assert (paid.spent(), paid.open()) == (8, 0)
    assert work.folder.outbox(0) is not None


def test_weights_from_a_file_are_private_unless_the_owner_says_that_they_are_public(paid, made):
    own = {"classifier": initial_state(made.jobs["simple"].method(), "silo-a").parts["classifier"]}
    for public in (frozenset(), frozenset({"classifier"})):
        state = paid(own, public)._state(0)
        assert {state.taint(f"part/classifier/{name}").exact for name in own["classifier"]} == {
            not public
        }
        assert not any(state.taint(f"part/extractor/{n}").exact for n in state.parts["extractor"])


def test_the_end_of_a_private_job_spends_nothing(paid):
    work = paid()
    work.train(0, 0, {})
    work.finish(1, {}, maker(work))
    assert paid.spent() == 4
    assert work.folder.finished


def test_the_model_of_a_job_is_described(work):
    one = work("one")
    one.train(0, 0, {})
    one.finish(1, delivery(one, 1), maker(one))
    assert one.folder.finished
    assert {path.name for path in one.folder.model.iterdir()} == {*FILES, SIGNATURE}
    assert not (one.folder.path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LocalError("the task 'x' fails"), "the task 'x' fails"),
        (RuntimeError("no memory"), "cannot be described: no memory; report it"),
        (MemoryError(), "cannot be described: MemoryError; report it"),
    ],
)
def test_a_model_that_cannot_be_described_is_kept_all_the_same(work, monkeypatch, error, why):
    """Whatever is said about a model may fail, and costs no model."""

    def fails(*_):
        raise error

    told = []
    monkeypatch.setattr(making, "thresholds", fails)
    monkeypatch.setattr(log, "problem", lambda event, **fields: told.append((event, fields)))
    one = work("one")
    one.train(0, 0, {})
    one.finish(1, delivery(one, 1), maker(one))
    assert one.folder.finished
    assert not one.folder.model.exists()
    kept = state_from_bytes(one.folder.values.read_bytes())
    assert state_to_bytes(kept) == state_to_bytes(one.folder.state(1))
    ((event, fields),) = told
    assert (event, fields["job"]) == ("model.undescribed", "simple")
    assert fields["why"].endswith(why)


def test_a_damaged_ledger_costs_no_model(work, monkeypatch):
    """The silo's agent cannot say the ledger's head, by which a model begins to be made."""

    def fails():
        raise ProofError("the ledger's record 3 is damaged")

    told = []
    monkeypatch.setattr(log, "problem", lambda event, **fields: told.append((event, fields["why"])))
    one = work("one")
    one.train(0, 0, {})
    one.finish(1, delivery(one, 1), fails)
    assert one.folder.finished
    assert not one.folder.model.exists()
    assert told == [("model.undescribed", "the ledger's record 3 is damaged")]


def test_a_stop_while_a_model_is_measured_leaves_the_job_to_end_again(work, monkeypatch):
    one = work("one")
    one.train(0, 0, {})

    def stopped(*_):
        raise CancelledError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(making, "measured", stopped)
        with pytest.raises(CancelledError):
            one.finish(1, delivery(one, 1), maker(one))
    assert not one.folder.finished
    one.finish(1, delivery(one, 1), maker(one))
    assert one.folder.model.exists()


def test_what_only_counts_keeps_values_alone(work, monkeypatch):
    one = work("one")
    one.train(0, 0, {})
    monkeypatch.setattr(type(one.admitted.job.method()), "trains", False)
    one.finish(1, delivery(one, 1), maker(one))
    assert one.folder.finished
    assert not one.folder.model.exists()
