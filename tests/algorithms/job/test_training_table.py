"""The [training] table: optimisers, and the keys that each of them heeds."""

import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.refusals import refused

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job
from staddle.algorithms.method import initial_state
from staddle.algorithms.training import loop
from staddle.algorithms.training.loop import at_least_float32
from staddle.algorithms.training.silo_round import facts_of, local_round
from staddle.files.documents import canonical_json, parse_json

ADAM = {"optimiser": "adam", "lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6}


@pytest.mark.parametrize(
    ("training", "why"),
    [
        ({"optimiser": "adam", "momentum": 0.9}, "momentum does nothing with optimiser = 'adam'"),
        ({"optimiser": "adamw", "momentum": 0.9}, "momentum does nothing"),
        ({"betas": [0.9, 0.99]}, "betas does nothing with optimiser = 'sgd'; take it out"),
        ({"eps": 1e-6}, "eps does nothing with optimiser = 'sgd'"),
        ({"optimiser": "adam", "betas": [0.9, 1.0]}, "betas"),
        ({"optimiser": "lion"}, "optimiser"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_keys_without_effect_and_values_without_sense_are_refused(make_job, training, why):
    with pytest.raises(ValidationError, match=why):
        make_job("fedavg", training=training)


def test_a_job_with_adam_is_read_back(make_job):
    job = make_job("fedavg", training={**ADAM, "weight_decay": 0.1, "clip": 2.0, "warmup": 1})
    assert job.training.rule == Optimiser(0.01, 0.0, 0.1, 2.0, "adam", betas=(0.8, 0.95), eps=1e-6)
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", None)
    assert (back, back.digest) == (job, job.digest)
    assert job.document()["training"]["betas"] == ["0.8", "0.95"]


def test_a_job_says_what_becomes_of_the_last_batch(make_job):
    """Jobs that do not say it have the document that they always had."""
    plain, job = make_job("fedavg"), make_job("fedavg", training={"last_batch": "drop"})
    assert "last_batch" not in plain.document()["training"]
    assert job.document()["training"]["last_batch"] == "drop"
    assert Job.from_document(job.document(), "wire", None) == job
    with pytest.raises(ValidationError, match="last_batch"):
        make_job("fedavg", training={"last_batch": "pad"})


@pytest.mark.parametrize(("last", "steps"), [(None, 3), ("fill", 3), ("keep", 2), ("drop", 2)])
def test_methods_count_the_steps_that_are_taken(make_job, make_shards, last, steps):
    """17 records in batches of 8, of which one is left over: FedNova divides by the steps."""
    job = make_job("fednova", training={"last_batch": last, "epochs": 2})
    train, test = make_shards(job, 17)["a"]
    state = initial_state(job.method(), "a")
    outcome = local_round(job.method(), job, state, 1, {}, train, test, "a")
    assert facts_of(job, "a", 1, train).steps == steps
    assert outcome.report.work.steps == 2 * steps


@pytest.mark.parametrize("last", ["fill", "keep", "drop"])
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("method", ["fedavg", "pfedsim"])
def test_silos_that_train_at_once_have_the_same_last_batches(
    make_job, make_shards, last, norm, method
):
    """Silos of 9, 13 and 17 records in batches of 8: 1, 5 and 1 are left over."""
    job = make_job(
        method, model={"norm": norm}, training={"last_batch": last, "epochs": 2}, rounds=2
    )
    found = {}
    for silo, count in zip(job.silos, (9, 13, 17), strict=True):
        found[silo] = make_shards(job, count)[silo]
    check_engines_agree(job, found)


def test_a_job_says_that_records_keep_their_order(make_job):
    """Jobs that shuffle have the document that they always had, whether they say it or not."""
    plain, job = make_job("fedavg"), make_job("fedavg", training={"shuffle": False})
    assert "shuffle" not in plain.document()["training"]
    assert make_job("fedavg", training={"shuffle": True}).digest == plain.digest != job.digest
    assert job.document()["training"]["shuffle"] is False
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", None)
    assert (back, back.digest) == (job, job.digest)
    with pytest.raises(ValidationError, match="shuffle"):
        make_job("fedavg", training={"shuffle": "never"})
    stages = job.method().stages(initial_state(job.method(), "a"), None)
    (shuffled, ordered) = (own.paced(stages, 0)[0].shuffle for own in (plain, job))
    assert (shuffled, ordered) == (True, False)


@pytest.mark.parametrize("last", ["fill", "keep", "drop"])
@pytest.mark.parametrize("method", ["fedavg", "pfedsim", "fedrep"])
def test_silos_that_train_at_once_keep_the_order_of_their_records(
    make_job, make_shards, monkeypatch, last, method
):
    """Silos of 9, 13 and 17 records in batches of 8; neither engine draws an order."""
    training = {"last_batch": last, "epochs": 2, "shuffle": False}
    job = make_job(method, model={"norm": "batch"}, training=training, rounds=2)
    found = {}
    for silo, count in zip(job.silos, (9, 13, 17), strict=True):
        found[silo] = make_shards(job, count)[silo]
    monkeypatch.setattr(loop, "permutation", lambda *_: pytest.fail("an order was drawn"))
    check_engines_agree(job, found)


@pytest.mark.parametrize("last", ["fill", "keep", "drop"])
def test_an_epoch_without_a_shuffle_is_one_step_per_slice(make_job, make_shards, last):
    """Slowly: 17 records in batches of 8, each step by hand."""
    training = {"last_batch": last, "epochs": 3, "shuffle": False, "momentum": 0.0}
    job = make_job("fedavg", training=training)
    train, test = make_shards(job, 17)["a"]
    state = initial_state(job.method(), "a")
    outcome = local_round(job.method(), job, state, 1, {}, train, test, "a")
    modules = job.method().modules("a")
    for part, module in modules.items():
        module.load_state_dict(state.parts[part])
    slices = [[*range(8)], [*range(8, 16)], [16, *range(7)]][: 3 if last == "fill" else 2]
    for places in slices * 3:
        outputs = modules["classifier"](modules["extractor"](train.x[places]))
        loss = torch.nn.functional.cross_entropy(outputs, train.y[places])
        parameters = [p for module in modules.values() for p in module.parameters()]
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data -= job.training.lr * g
    for part, module in modules.items():
        for name, value in module.state_dict().items():
            torch.testing.assert_close(outcome.state.parts[part][name], value)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedbabu", "ppfl"])
def test_pieces_of_a_batch_add_up_to_it(make_job, make_shards, method, monkeypatch):
    """Batches of 8 in pieces of 3, 3 and 2; one method has a penalty, one a step on all records."""
    sizes, ends = [], []
    watched = lambda losses: sizes[-1].add(len(losses)) or at_least_float32(losses)
    monkeypatch.setattr(loop, "at_least_float32", watched)
    for rows in (None, 3):
        job = make_job(method, training={"physical_batch": rows, "momentum": 0.9})
        train, test = make_shards(job)["a"]
        sizes.append(set())
        state = initial_state(job.method(), "a")
        ends.append(local_round(job.method(), job, state, 1, {}, train, test, "a"))
    assert (max(sizes[0]) >= 8, max(sizes[1])) == (True, 3)
    one, other = ends
    assert one.report.loss == pytest.approx(other.report.loss, rel=1e-5)
    for name, value in one.state.flat.items():
        torch.testing.assert_close(other.state.flat[name], value, rtol=1e-4, atol=1e-5)


def test_pieces_that_would_change_the_result_are_refused(make_job, make_shards):
    with pytest.raises(ValidationError, match="would change what batch norm does"):
        make_job("fedavg", model={"norm": "batch"}, training={"physical_batch": 4})
    job = make_job("pfedme", training={"physical_batch": 4})
    records = {silo: Records(*sides) for silo, sides in make_shards(job, 10).items()}
    for engine in (Serial(job, records), Stacked(job, records)):
        with refused("depends on all records of a batch at once; take training.physical_batch out"):
            Simulation(job, engine).step()


# What a stage's steps are is its method's, and how one goes the optimiser's.
@pytest.mark.parametrize(
    ("method", "optimiser"),
    [
        *((method, "adamw") for method in ("fedavg", "ditto", "fedssa", "ppfl", "pfedme")),
        ("fedavg", "adam"),
        ("ppfl", "adam"),
    ],
)
def test_both_engines_train_alike(make_job, make_shards, method, optimiser):
    """Uneven silos, so some stand still while others step; the rate rises and falls."""
    training = {**ADAM, "optimiser": optimiser, "weight_decay": 0.01, "clip": 1.0, "epochs": 2}
    # Adam divides by the gradient, and so makes much of its last bits where eps is small.
    training["eps"] = 0.01
    more = {"warmup": 1, "schedule": {"kind": "cosine"}}
    job = make_job(method, training={**training, **more}, rounds=3)
    records = {silo: Records(*sides) for silo, sides in make_shards(job, 10).items()}
    ends = []
    for engine in (Serial(job, records), Stacked(job, records)):
        simulation = Simulation(job, engine)
        while simulation.round < job.length:
            simulation.step()
        ends.append(simulation.states)
    one, other = ends
    for silo in job.silos:
        for name, value in one[silo].flat.items():
            torch.testing.assert_close(other[silo].flat[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("method", "model"), [("fedssa", {}), ("fedkd", {}), ("fedavg", {}), ("ditto", {})]
)
def test_the_jobs_clip_reaches_every_stage(make_job, make_data, method, model):
    job = make_job(method, model=model, training={"clip": 0.5})
    own, data = job.method(), make_data(20)
    facts = facts_of(job, "a", 1, data)
    stages = [s for s in own.stages(initial_state(own, "a"), facts) if isinstance(s, Stage)]
    assert {stage.optimiser.clip for stage in stages} == {0.5}
    if "clip" in type(own.options).model_fields:
        job = make_job(method, {"clip": 2.0}, model=model, training={"clip": 0.5})
        (stage,) = job.method().stages(initial_state(job.method(), "a"), facts)
        assert stage.optimiser.clip == 2.0
