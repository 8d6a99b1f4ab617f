"""An order has all that a round needs, and no secret; what comes back is checked."""

import json
import os
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image
from support.engine_runs import METHODS, OPTIONS
from support.jobs import make_data
from support.ordered import ByOrder, Direct
from support.refusals import refused

from staddle.algorithms.data.dataset import split
from staddle.algorithms.data.sources.formats.images import Images
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.leaks.traps import Caution, TrapError
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.algorithms.training.paid_ahead import PaidAhead
from staddle.algorithms.training.silo_round import state_to_bytes
from staddle.errors import (
    CancelledError,
    ExhaustedError,
    LocalError,
    PeerError,
    UnwritableError,
)
from staddle.files import tensor_file
from staddle.security.blind.plan import simulated
from staddle.silo.training import order as orders
from staddle.silo.training.order import DeviceTable, OrderedRecords, OrderFolder
from staddle.silo.training.serving import serve
from staddle.silo.training.trainer import SiloRound, TrainingDevice

SILOS = list("abcd")
BLIND = {"security": {"secure_aggregation": "required", "clip_exponent": 6}}
PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
PRIVATE = {"privacy": {**PRIVACY, "histogram_sigma": 0.5}}
WHOLE = {"privacy": {**PRIVACY, "unit": "silo", "noise": "shared", "sample_rate": 1.0}, **BLIND}
DROPS = {"name": "mixed", "head": "fc", "input": [1, 8, 8], "options": {"dropout": 0.25}}
ADAMW = {"optimiser": "adamw", "lr": 0.003, "clip": 1.0, "weight_decay": 0.01}
AUGMENT = [{"kind": "RandomCrop", "padding": 1}, {"kind": "RandomHorizontalFlip"}]
SMALL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
ADAPTED = {**SMALL, "lora": {"rank": 2}}
JOBS = {
    **{method: {} for method in METHODS},
    "fedsimsup": {"options": {"tau_s": 1, "tau_theta": 2}, "participation": 0.75},
    "scaffold": {"options": {"global_lr": 0.5}},
    "knn-per": {"options": {"capacity": 20}},
    "fedem": {"options": {"models": 2}},
    "fedavg, blind": BLIND,
    "fedavg, adapters": {"model": ADAPTED},
    "fedper, adapters, private": {"model": ADAPTED, **PRIVATE},
    "fedper, dropout": {"model": DROPS},
    "fedavg, augmented": {"training": {**ADAMW, "augment": AUGMENT}},
    "fedper, private": PRIVATE,
    "fedavg, private and blind": {**PRIVATE, **BLIND},
}


def made(name):
    changes = dict(JOBS[name])
    method, _, _ = name.partition(",")
    model = {"name": "convnet-digits"} if method == "fedaims" else SMALL
    options = changes.pop("options", OPTIONS.get(method, {}))
    batches = {} if "privacy" in changes else {"batch_size": 8}
    document = {
        "version": 1,
        "name": "test",
        "seed": 7,
        "rounds": 3,
        "silos": SILOS,
        "min_cohort": 3,
        "method": {"name": method, "options": options},
        **changes,
        "model": {"classes": 3, **changes.get("model", model)},
        "training": {"epochs": 1, "lr": 0.1, **batches, **changes.get("training", {})},
    }
    return Job.from_file(JobFile.model_validate(document), "job.toml").for_federation()


class Numbered:
    """Random numbers that are no secret; each object has others than the one before."""

    def __init__(self, seeds):
        self.random = np.random.default_rng(next(seeds))

    def normal(self, number):
        return self.random.normal(size=number)

    def drawn(self, records, q):
        return np.flatnonzero(self.random.uniform(size=records) < q)


def run(job, engine_class, monkeypatch):
    """All that a simulation gives; accounts are left as they are in the end."""
    # The coordinator's half is computed in this thread, of whichever engine.
    torch.set_num_threads(1)
    records = {
        silo: Records(make_data(19 + 7 * at, at), make_data(8, 100 + at))
        for at, silo in enumerate(SILOS)
    }
    seeds, paying = count(), {}
    if job.privacy is not None:
        fresh = lambda: Numbered(seeds)
        monkeypatch.setattr(orders, "Randomness", fresh)
        paying = {silo: PrivateSilo(MemoryAccount(job), fresh) for silo in SILOS}
    exchanges = simulated(job) if job.security.required else PLAIN
    simulation = Simulation(job, engine_class(job, records, paying), exchanges=exchanges)
    reports = [simulation.step().reports for _ in range(job.length)]
    states = {silo: state_to_bytes(state) for silo, state in simulation.states.items()}
    spent = [one.account.spendings for one in paying.values()]
    known = {name: value.tolist() for name, value in simulation.coordinator.items()}
    return reports, states, known, spent


@pytest.mark.parametrize("name", JOBS)
def test_a_round_by_order_is_that_of_the_thread(name, monkeypatch):
    """The same bits, reports and spending."""
    job = made(name)
    assert run(job, ByOrder, monkeypatch) == run(job, Direct, monkeypatch)


@pytest.fixture
def asked():
    job = made("fedavg")
    of = OrderedRecords(job, make_data(20), make_data(8, 1))
    return SiloRound(of, "a", 0, initial_state(job.method(), "a"), {}, caution=Caution(3.0))


@pytest.fixture
def folder(tmp_path, asked):
    found = OrderFolder(tmp_path)
    found.put(asked, DeviceTable())
    return found


def test_an_order_says_the_policys_bounds_and_how_to_train(asked, folder):
    taken, on = folder.take()
    assert taken.caution == asked.caution
    assert (taken.silo, taken.round, taken.trained, on) == ("a", 0, True, DeviceTable())
    assert taken.of.job.digest == asked.of.job.digest


def test_weights_are_sharded_in_orders_of_plain_jobs_alone(asked, tmp_path):
    """Processes of a private one call the model as often as each has drawn records of."""
    for paid, expected in ((None, True), (PaidAhead(None, None, {}), False)):
        folder = OrderFolder(tmp_path)
        folder.put(asked, DeviceTable(shard=True), paid)
        assert folder.take()[1].shard is expected


def test_the_final_round_is_that_of_the_thread(asked, tmp_path):
    last = replace(asked, round=asked.of.job.length, trained=False)
    folder = OrderFolder(tmp_path)
    folder.put(last, DeviceTable())
    serve(folder)
    outcome, _ = folder.outcome(last)
    expected = TrainingDevice().outcome(last)
    assert state_to_bytes(outcome.state) == state_to_bytes(expected.state)
    assert (outcome.report, outcome.contributions) == (expected.report, {})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LocalError("a"), LocalError("a")),
        (CancelledError("b"), CancelledError("b")),
        (UnwritableError("c"), UnwritableError("c")),
        (ExhaustedError("d"), ExhaustedError("d")),
        (TrapError("e"), TrapError("e")),
        (PeerError("coordinator", "f"), PeerError("coordinator", "f")),
        (PeerError("another", "g"), PeerError("coordinator", "g")),
    ],
)
def test_errors_come_back_as_they_were(asked, folder, error, expected):
    folder.fail(error)
    with pytest.raises(type(expected)) as caught:
        folder.outcome(asked)
    assert (type(caught.value), str(caught.value)) == (type(expected), str(expected))


def test_an_error_of_a_methods_own_code_names_its_place(asked, folder, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("of a method")

    monkeypatch.setattr(type(asked.of.job.method()), "contribute", fails)
    serve(folder)
    with refused(r"ZeroDivisionError: of a method \(test_order\.py:\d+\); lower the batch size"):
        folder.outcome(asked)


def spoil(name, change):
    """Change a file of tensors that a trainer wrote, digest and all."""

    def spoilt(folder):
        tensors, texts = tensor_file.read(folder.path / name)
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        change(tensors)
        (folder.path / name).write_bytes(tensor_file.to_bytes(tensors, texts))

    return spoilt


def first(tensors, beginning):
    return next(name for name in sorted(tensors) if name.startswith(beginning))


def linked(folder):
    path = folder.path / orders.NEXT
    path.rename(folder.path / "elsewhere")
    path.symlink_to(folder.path / "elsewhere")


def waiting(folder):
    (folder.path / orders.GIVEN).unlink()
    os.mkfifo(folder.path / orders.GIVEN)


def large(folder):
    with (folder.path / orders.MARKS).open("r+b") as file:
        file.truncate(2**50 if os.name == "nt" else 2**40)


def said(**fields):
    return lambda folder: (folder.path / orders.OUTCOME).write_text(json.dumps(fields))


SPOILT = {
    "a state of another shape": (
        spoil(orders.NEXT, lambda own: own.update({first(own, "part/"): torch.zeros(1)})),
        "does not fit the job's model",
    ),
    "a state that lacks a tensor": (
        spoil(orders.NEXT, lambda own: own.pop(first(own, "part/"))),
        "does not fit the job's model",
    ),
    "a state that is not finite": (
        spoil(orders.NEXT, lambda own: own[first(own, "part/")].fill_(torch.nan)),
        "holds NaN or infinity",
    ),
    "a part of its own": (
        spoil(orders.GIVEN, lambda own: own.update({"records/x": torch.zeros(9)})),
        r"gave parts \['metrics', 'model', 'records'\], the job has \['metrics', 'model'\]",
    ),
    "marks of fewer records": (
        spoil(orders.MARKS, lambda own: own.update({name: own[name][1:] for name in own})),
        "did not count 8 test records",
    ),
    "no marks": (spoil(orders.MARKS, dict.clear), "did not count 8 test records"),
    "a link": (linked, "cannot read it: Too many levels of symbolic links"),
    "a pipe": (waiting, "a trainer may write a file of"),
    "a file beyond all bounds": (large, "a trainer may write a file of"),
    "an unknown key": (said(key="…"), "unknown key"),
    "a negative number of steps": (said(taken={"training": -1}), "0 or more"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_comes_back_is_checked_before_it_is_kept(asked, folder, name):
    serve(folder)
    folder.outcome(asked)
    spoilt, complaint = SPOILT[name]
    spoilt(folder)
    with refused(complaint):
        folder.outcome(asked)


def test_records_that_are_read_when_they_are_used_are_read_from_their_source(tmp_path):
    """The order has their places alone."""
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(1)
    for at in range(24):
        kind = tmp_path / "images" / "abc"[at % 3]
        kind.mkdir(exist_ok=True)
        picture = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
        picture.save(kind / f"{at}.png")
    source = Images.model_validate(
        {"kind": "images", "folder": str(tmp_path / "images"), "lazy": True, "workers": 0}
    )
    job = made("fedavg")
    records = source.load(job.model, job.features, wary=True)
    train, test = split(records, b"key", 0.3)
    asked = SiloRound(
        OrderedRecords(job, train, test), "a", 0, initial_state(job.method(), "a"), {}
    )
    folder = OrderFolder(tmp_path)
    folder.put(asked, DeviceTable(), source=source.model_dump(mode="json"))
    assert (tmp_path / orders.RECORDS).stat().st_size < 1000
    serve(folder)
    outcome, _ = folder.outcome(asked)
    expected = TrainingDevice().outcome(asked)
    assert state_to_bytes(outcome.state) == state_to_bytes(expected.state)

    (tmp_path / "images" / "c" / "23.png").unlink()
    (tmp_path / orders.OUTCOME).unlink()
    serve(folder)
    with refused("holds other records than when the job was accepted"):
        folder.outcome(asked)


def test_the_first_error_of_several_processes_counts(asked, tmp_path):
    """Those of others come of it, such as that it is gone."""
    folder = OrderFolder(tmp_path)
    folder.fail(LocalError("memory ran out"))
    folder.fail(LocalError("another process has ended"))
    with refused("^memory ran out$"):
        folder.outcome(asked)
