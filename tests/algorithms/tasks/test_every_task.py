"""Methods on tasks other than classification: which can, that they learn, both engines alike."""

import pytest
import torch
from support.other_tasks import MODELS, SILOS, TASKS, document, shards
from support.refusals import refused

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.training.silo_round import final_report
from staddle.security.blind.plan import simulated

ANY = [name for name, method in METHODS.items() if not method.needs_classes]
OPTIONS = {
    "fedala": {"start_epochs": 1},
    "fedavg-ft": {"tuning_epochs": 1},
    "fedcp": {"lam": 0.5},
    "fedbabu": {"tuning_epochs": 1},
    "ditto": {"model_epochs": 2, "own_epochs": 2},
    "fedrep": {"head_epochs": 1, "extractor_epochs": 2},
    "cfl": {"sketch": 64},
    "fedamp": {"sketch": 64},
    "fedadam": {"server_lr": 1.0, "beta1": 0.3, "tau": 0.5},
    "fedyogi": {"server_lr": 1.0, "beta1": 0.3, "tau": 0.5},
    "fedavgm": {"momentum": 0.5},
    "per-fedavg": {"alpha": 0.05},
    "pfedhn": {"hidden": 20, "server_lr": 0.1, "momentum": 0.5},
    "pfedme": {"steps": 2},
}
SLOW = {("segmentation", "fedbn"): {}, ("segmentation", "pfedme"): {"steps": 5}}
SHARED = ("name", "input", "options")  # keys of [model] whatever the task
# many convolutions, one after another, amplify what sums in another order differ in
CLOSE = dict.fromkeys(TASKS, 1e-4) | {"segmentation": 2e-3}
BLIND = {"secure_aggregation": "required", "clip_exponent": 6}


def make(kind, method, **fields):
    options = OPTIONS.get(method, {}) | SLOW.get((kind, method), {})
    whole = document(kind, method={"name": method, "options": options}, **fields)
    if method == "fedbn":
        whole["model"]["norm"] = "group"
    if method in {"fedbn", "pfedhn"}:
        whole["rounds"] = 8
    if (kind, method) in SLOW:
        whole["training"]["lr"] = 0.3
    return Job.from_file(JobFile.model_validate(whole), "test")


def test_twenty_eight_methods_run_any_task():
    assert len(ANY) == 28
    assert {"fedavg", "fedper", "pfedsim", "ditto", "local"} <= set(ANY)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(ANY)))
def test_methods_that_need_classes_say_so(method):
    job = make("regression", method, silos=list("abcdef"))
    does = METHODS[method].needs_classes
    with refused(f"method {method!r} {does}, and the task is regression; methods for any task: "):
        job.document()


def has_of(whole):
    """The key that says how many outputs a model has."""
    return next(key for key in ("classes", "outputs") if key in whole["model"])


def learnt(kind, first, last):
    """How much better than one answer for all records, or than the initial model."""
    if kind == "survival":  # few records have few pairs to put in order
        return first.said()["loss"] - last.said()["loss"]
    return last.baseline - last.score if kind == "regression" else last.score - last.baseline


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("method", ANY)
def test_methods_learn_and_the_engines_agree(kind, method):
    # a step of convolutions at each position takes five times that of a perceptron
    silos = SILOS[:3] if kind == "segmentation" else SILOS
    job = make(kind, method, silos=list(silos))
    records = {silo: Records(*sides) for silo, sides in shards(kind, silos).items()}
    serial = Simulation(job, Serial(job, records))
    first = serial.step().reports
    while serial.round < job.length - 1:
        serial.step()
    # Silos that train at once do the last round, which has something of all phases in its states.
    stacked = Simulation(job, Stacked(job, records), begun=serial.snapshot())
    mine, theirs = serial.step().metrics, stacked.step().metrics
    seen = serial.look()
    serial.finish(seen)
    stacked.finish(stacked.look())

    product = job.method().product
    gains = [
        learnt(kind, own.delivered, getattr(final_report(job, seen[silo]), product))
        for silo, own in first.items()
    ]
    assert sum(gains) > 0
    for silo in job.silos:
        one, other = serial.states[silo].flat, stacked.states[silo].flat
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=CLOSE[kind])
    # Records on the edge of a bin may fall on either side.
    assert mine.keys() == theirs.keys()
    assert mine["tested"] == theirs["tested"]


@pytest.mark.parametrize("kind", TASKS)
def test_a_blind_job_has_the_same_sums(kind):
    job = make(kind, "fedavg", security=BLIND)
    data = shards(kind)
    plain, blind = (
        simulate(make(kind, "fedavg"), data),
        simulate(job, data, exchanges=simulated(job)),
    )
    for mine, theirs in zip(plain.metrics, blind.metrics, strict=True):
        for name, total in mine.items():
            if name.endswith(".delivered") and total.ndim == 0 and kind == "regression":
                # Models differ in their last bits.
                assert theirs[name] / total == pytest.approx(1, rel=1e-3)
        assert mine["tested"] == theirs["tested"]
    first = [own.metrics[0] for own in (plain, blind)]
    delivered = [name for name in first[0] if name.endswith("delivered")]
    assert delivered
    for name in delivered:  # of the initial model, which is the same
        assert torch.equal(first[0][name], first[1][name])


@pytest.mark.parametrize("kind", TASKS)
def test_models_for_whole_records_and_for_positions_are_told_apart(kind):
    dense = kind == "segmentation"
    own, other = document(kind), document("regression" if dense else "segmentation")
    model = {**other["model"], has_of(own): 3}
    model = {key: value for key, value in model.items() if key in (has_of(own), *SHARED)}
    gives = "for the whole record" if dense else "for each position"
    with pytest.raises(ValueError, match=f"has outputs {gives}, and the task {kind} takes them"):
        JobFile.model_validate({**own, "model": model, "metrics": {}})


@pytest.mark.parametrize("kind", TASKS)
def test_models_and_metrics_that_do_not_go_with_the_task_are_told(kind):
    has, lacks = ("outputs", "classes")[:: 1 if "outputs" in MODELS[kind] else -1]
    wrong = {lacks: 3}
    whole = document(kind)
    model = {key: value for key, value in whole["model"].items() if key != has} | wrong
    with pytest.raises(ValueError, match=f"the task is {kind}, so the model has {has}; write"):
        JobFile.model_validate({**whole, "model": model})
    idle = {"confusion": True} if lacks == "classes" else {"targets": True}
    with pytest.raises(ValueError, match=f"does nothing where the task is {kind}; take it out"):
        JobFile.model_validate({**whole, "metrics": idle})
