from math import ceil

import pytest
import torch
from support.numbered import lazily
from support.refusals import refused
from torch.testing import assert_close

from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation, simulate, versions_bytes
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.exchange.plain import PlainExchange
from staddle.algorithms.job.job import Job
from staddle.algorithms.numerics.devices import CPU
from staddle.algorithms.training.silo_round import state_to_bytes

RERUNS = {
    "local": {},
    "fedavg": {},
    "fedper": {},
    "pfedsim": {},
    "fedssa": {},
    "fedssa stale": {"stale_inclusive": True, "clip": 1.0},
    "fedssa extractors": {"extractors": ["digits-cnn-a", "digits-cnn-b", "digits-cnn-c"]},
    "fedsimsup": {"supervisor": ["lenet", "cnn", "transformer"], "tau_s": 1, "tau_theta": 1},
    "fedaims": {},
    "fedaims clusters": {"sampling": "algorithm2"},
    "fedaims full": {"sampling": "full", "aux_ce": "prototype", "reduction": "sum", "mu": 1e-4},
    "ppfl released": {"release_membership": "always", "lam": 0.0},
    "ppfl rbcd": {"schedule": "rbcd", "lam": 0.0},
    "ppfl mlp": {"variant": "ppfl2", "canonical": "mlp", "hidden": 8, "schedule": "rbcd"},
    "ppfl code": {"schedule": "theta_then_c", "membership_batches": True, "no_affinity": True,
        "double_exponential": True},
}  # fmt: skip
FOUR = ["a", "b", "c", "d"]


@pytest.mark.parametrize("case", RERUNS)
def test_a_job_and_that_of_its_document_have_the_same_bits(make_job, make_shards, case):
    """Whatever else has drawn from torch's own random numbers."""
    (name, *_), options = case.split(), RERUNS[case]
    model = {"fedaims": {"name": "convnet-digits"}, "fedssa": {"name": "digits-cnn-a"}}.get(name)
    norm = {} if name == "fedssa" else {"norm": "batch"}
    share = 1.0 if name == "ppfl" and "lam" not in options else 0.7
    model = {**(model or {}), **norm}
    job = make_job(name, options, model, silos=FOUR, rounds=3, participation=share)
    again = Job.from_document(job.document(), "document", (), federated=False)
    assert again.digest == job.digest
    ends = []
    for seed, each in enumerate((job, again)):
        torch.manual_seed(seed)
        ends.append(simulate(each, make_shards(each, 9)))
    one, other = ends
    assert one.history == other.history
    assert all(state_to_bytes(one.states[s]) == state_to_bytes(other.states[s]) for s in job.silos)
    assert_close(one.coordinator, other.coordinator, atol=0, rtol=0)


@pytest.mark.parametrize("case", [case for case in RERUNS if len(case.split()) == 1])
def test_lazy_records_train_the_same_models(make_job, make_shards, case):
    options = RERUNS[case]
    model = {"fedaims": {"name": "convnet-digits"}, "fedssa": {"name": "digits-cnn-a"}}.get(case)
    silos = [*FOUR, "e", "f"]
    job = make_job(case, options, model, silos=silos, rounds=2, participation=0.7)
    shards = make_shards(job, 9)
    # One of the silos has a process that reads; which one makes no difference.
    lazy = {
        silo: tuple(lazily(side, workers=int(silo == "a")) for side in sides)
        for silo, sides in shards.items()
    }
    one, other = simulate(job, shards), simulate(job, lazy)
    assert one.history == other.history
    assert all(state_to_bytes(one.states[s]) == state_to_bytes(other.states[s]) for s in job.silos)
    assert_close(one.coordinator, other.coordinator, atol=0, rtol=0)
    with refused(r"read when they are used \(data.lazy\) cannot be taken whole here"):
        Stacked(job, {silo: Records(*sides) for silo, sides in lazy.items()})


def test_history_and_metrics_follow_the_cohorts(make_job, make_shards):
    job = make_job("pfedsim", participation=0.5, silos=["a", "b", "c", "d"], rounds=6)
    ticks = []
    result = simulate(job, make_shards(job), progress=lambda *t: ticks.append(t))
    assert ticks == [(i + 1, 6) for i in range(6)]
    for silo, reports in result.history.items():
        assert [r.round for r in reports] == [*(r for r in range(6) if silo in job.cohort(r)), 6]
    for round_, sums in enumerate(result.metrics):
        reports = [
            next(r for r in result.history[s] if r.round == round_) for s in job.cohort(round_)
        ]
        assert sums["correct.trained"].item() == sum(r.trained.correct for r in reports)
        assert sums["tested"].item() == sum(r.tested for r in reports) == 24
    assert set(result.scores("trained")) == set(job.silos)


def test_bytes_are_those_of_the_tensors_that_cross(make_job, make_shards):
    """Nothing comes down in the first round; the last look delivers to all silos."""
    job = make_job("fedavg", participation=0.5, silos=["a", "b", "c", "d"], rounds=2)
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    simulation = Simulation(job, Serial(job, records))
    first, second = simulation.step(), simulation.step()
    model = sum(spec.nbytes for part in job.down(1) for spec in part.tensors)
    counts = sum(spec.nbytes for part in job.up(1) for spec in part.tensors) - model
    assert model > counts > 0
    assert (first.bytes_up, first.bytes_down) == (2 * (model + counts), 0)
    assert (second.bytes_up, second.bytes_down) == (2 * (model + counts), 2 * model)
    assert simulation.last_delivery == 0
    simulation.look()
    assert simulation.last_delivery == 4 * model


def test_full_participation_in_fedavg_ends_in_one_model(make_job, make_shards):
    job = make_job("fedavg", rounds=2)
    states = [state_to_bytes(s) for s in simulate(job, make_shards(job)).states.values()]
    assert len(set(states)) == 1
    job = make_job("local", rounds=2)
    assert len({state_to_bytes(s) for s in simulate(job, make_shards(job)).states.values()}) == 3


def test_personal_models_stay_as_trained_after_the_final_delivery(make_job, make_shards):
    job = make_job("fedper", rounds=2)
    result = simulate(job, make_shards(job))
    assert (
        len({s.parts["extractor"]["fc1.weight"].sum().item() for s in result.states.values()}) == 3
    )
    for silo, reports in result.history.items():
        assert reports[-1].trained.correct == reports[-2].trained.correct, silo


def test_pfedsim_without_personalisation_is_fedavg(make_job, make_shards):
    one, other = make_job("pfedsim", {"rho": 1}), make_job("fedavg")
    assert simulate(one, make_shards(one)).history == simulate(other, make_shards(other)).history


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedsimsup", "fedssa", "pfedsim", "ppfl"])
def test_running_statistics_count_a_silos_own_batches_only(make_job, make_shards, method):
    """What is frozen does not count either: in FedSimSup θ under its supervisor, in PPFL θ while c
    moves.
    """
    epochs = {"fedsimsup": 1}.get(method, 2)  # its supervisor takes the other
    fields = {"silos": FOUR, "participation": 0.75, "model": {"norm": "batch"}}
    job = make_job(method, {"lam": 0} if method == "ppfl" else {}, training={"epochs": 2}, **fields)
    shards = make_shards(job, 9)
    result = simulate(job, shards)
    for silo, state in result.states.items():
        trained = sum(report.loss is not None for report in result.history[silo])
        batches = trained * epochs * ceil(len(shards[silo][0]) / job.training.batch_size)
        for layer in ("norm1", "norm2"):
            tracked = state.parts["extractor"][f"{layer}.num_batches_tracked"]
            assert tracked.item() == batches


def test_shards_must_fit_the_job(make_job, make_shards):
    job = make_job()
    shards = make_shards(job)
    shards.pop("a")
    with refused("data was given for silos"):
        simulate(job, shards)


def begin(job, shards, begun=None):
    records = {silo: Records(*sides) for silo, sides in shards.items()}
    return Simulation(job, Serial(job, records), begun=begun)


def held(snapshot):
    """All of a snapshot, for comparison."""
    shelved = snapshot.shelved
    tensors = [dict(snapshot.coordinator), *shelved.published.values(), *shelved.versions.values()]
    tensors += shelved.mail.values()
    return (
        snapshot.round,
        {silo: state_to_bytes(state) for silo, state in snapshot.held.items()},
        snapshot.trained,
        (sorted(shelved.published), sorted(shelved.versions), sorted(shelved.mail)),
        [(name, tensor.tolist()) for of in tensors for name, tensor in of.items()],
    )


def test_a_snapshot_is_what_goes_on_and_no_later_round_changes_it(make_job, make_shards):
    job = make_job("pfedsim", participation=0.5, silos=["a", "b", "c", "d"], rounds=4)
    shards = make_shards(job)
    simulation = begin(job, shards)
    assert (simulation.snapshot().round, simulation.snapshot().trained) == (0, set())
    taken = []
    for _ in range(job.length):
        taken.append(simulation.snapshot())
        before = held(taken[-1])
        simulation.step()
        assert held(taken[-1]) == before
    for number, snapshot in enumerate(taken):
        assert snapshot.trained == {silo for round_ in range(number) for silo in job.cohort(round_)}
        assert set(snapshot.shelved.published) == ({"model"} if number else set())
        assert set(snapshot.shelved.versions) == {
            ("extractor", s) for r in range(2, number) for s in job.cohort(r)
        }
        again = begin(job, shards, snapshot)
        while again.round < job.length:
            again.step()
        assert held(again.snapshot()) == held(simulation.snapshot())


def test_only_the_states_of_a_cohort_are_other_objects_after_a_round(make_job, make_shards):
    job = make_job("fedavg", participation=0.5, silos=["a", "b", "c", "d"], rounds=3)
    simulation = begin(job, make_shards(job))
    for round_ in range(job.length):
        before = dict(simulation.states)
        simulation.step()
        after = dict(simulation.states)
        assert {silo for silo in job.silos if after[silo] is not before[silo]} == set(
            job.cohort(round_)
        )


def test_a_round_that_an_engine_cannot_train_changes_nothing(make_job, make_shards):
    job = make_job("pfedsim", participation=0.5, silos=["a", "b", "c", "d"], rounds=3)
    simulation = begin(job, make_shards(job))
    simulation.step()
    before = held(simulation.snapshot())

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation.step(interrupted)
    assert held(simulation.snapshot()) == before
    assert simulation.round == 1


def test_a_look_changes_nothing(make_job, make_shards):
    job = make_job("fedavg", participation=0.5, silos=["a", "b", "c", "d"], rounds=3)
    simulation = begin(job, make_shards(job))
    simulation.step()
    before, ticks = held(simulation.snapshot()), []
    looks = simulation.look(lambda: ticks.append(1))
    assert (set(looks), len(ticks)) == (set(job.silos), 4)
    assert held(simulation.snapshot()) == before


def test_models_are_kept_after_the_last_round_only(make_job, make_shards):
    job = make_job("local", participation=0.5, silos=["a", "b", "c", "d"], rounds=2)
    simulation = begin(job, make_shards(job))
    simulation.step()
    with refused("job 'test' has done 1 of 2 rounds; run the rest"):
        simulation.finish(simulation.look())


def test_versions_lie_where_silos_train_if_there_is_room(make_job, make_shards, monkeypatch):
    """On the CPU by another name, as if it were a GPU: the same bits, in a simulation that goes on
    from another too.
    """
    there = torch.device("cpu:0")
    job = make_job("pfedsim", {"rho": 0.25})
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}

    def ended(engine, between=lambda one: one):
        simulation = Simulation(job, engine)
        while simulation.round < job.length:
            simulation.step()
            simulation = between(simulation)
        return simulation, {
            silo: state_to_bytes(state) for silo, state in simulation.states.items()
        }

    folded, mix = [], PlainExchange.mix_rows
    watched = lambda self, *given: folded.append(self._device) or mix(self, *given)
    monkeypatch.setattr(PlainExchange, "mix_rows", watched)
    _, whole = ended(Serial(job, records))
    assert set(folded) == {CPU}
    folded.clear()
    engine = Serial(job, records, device=there)
    on, same = ended(engine, lambda one: Simulation(job, engine, begun=one.snapshot()))
    assert set(folded) == {there}
    assert same == whole
    assert versions_bytes(job) == 3 * sum(
        t.nbytes for t in next(iter(on.snapshot().shelved.versions.values())).values()
    )
    folded.clear()
    monkeypatch.setattr(
        "staddle.algorithms.engines.simulation.room", lambda _: versions_bytes(job) - 1
    )
    _, same = ended(Serial(job, records, device=there))
    assert set(folded) == {CPU}
    assert same == whole


def test_too_little_memory_for_versions_changes_nothing(make_job, make_shards, monkeypatch):
    job = make_job("pfedsim", {"rho": 0})
    simulation = Simulation(
        job, Serial(job, {s: Records(*own) for s, own in make_shards(job).items()})
    )
    simulation.step()
    before, spooled, calls = simulation.snapshot(), Simulation._spooled, []

    def greedy(self, part, given):
        calls.append(part.name)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return spooled(self, part, given)

    monkeypatch.setattr(Simulation, "_spooled", greedy)
    with refused("CUDA out of memory; free memory of this GPU, or choose another device"):
        simulation.step()
    after = simulation.snapshot()
    assert after.round == before.round == 1
    assert all(after.shelved.versions[key] is held for key, held in before.shelved.versions.items())
    assert all(after.held[silo] is state for silo, state in before.held.items())


def test_a_simulation_on_a_cpu_keeps_the_very_versions_that_it_begins_with(make_job, make_shards):
    """What a checkpoint holds already is not written again."""
    job = make_job("pfedsim", {"rho": 0})
    engine = Serial(job, {s: Records(*own) for s, own in make_shards(job).items()})
    simulation = Simulation(job, engine)
    simulation.step()
    begun = simulation.snapshot()
    again = Simulation(job, engine, begun=begun).snapshot()
    assert begun.shelved.versions
    assert all(again.shelved.versions[key] is held for key, held in begun.shelved.versions.items())
