"""Each rule against its equations in float64 by hand, and its composition with every method."""

import pickle

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused
from support.whole_jobs import trained

from staddle.algorithms import catalog
from staddle.algorithms.baselines.scaffold import ControlVariates
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Sum
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.common.server_optimiser import (
    ServerOptimised,
    ServerRule,
    ServerYogi,
)
from staddle.security.blind.plan import simulated

OPTIONS = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}


def by_hand(job, shards, move):
    """FedAvg's Δ of each round, and what a rule makes of it."""
    x, memory = oracle.begun(job), {"m": oracle.zeros(), "v": oracle.zeros()}
    memory["v"] = memory["v"].each(lambda v: v + OPTIONS["tau"] ** 2)
    for round_ in range(job.rounds):
        cohort = job.cohort(round_)
        whole = sum(len(shards[silo][0]) for silo in cohort)
        delta = oracle.zeros()
        for silo in cohort:
            y, _ = oracle.trained(job, shards, silo, round_, x)
            delta = delta + (len(shards[silo][0]) / whole) * (y - x)
        x = x + move(memory, delta)
    return x


def sgd(memory, delta):
    memory["m"] = 0.6 * memory["m"] + delta
    return 0.5 * memory["m"]


def adam(memory, delta):
    memory["m"] = 0.8 * memory["m"] + 0.2 * delta
    memory["v"] = memory["v"].each(lambda v, d: 0.9 * v + 0.1 * d**2, delta)
    return memory["m"].each(lambda m, v: 0.1 * m / (np.sqrt(v) + 0.01), memory["v"])


def yogi(memory, delta):
    memory["m"] = 0.8 * memory["m"] + 0.2 * delta
    memory["v"] = memory["v"].each(lambda v, d: v - 0.1 * d**2 * np.sign(v - d**2), delta)
    return memory["m"].each(lambda m, v: 0.1 * m / (np.sqrt(v) + 0.01), memory["v"])


@pytest.mark.parametrize(
    ("method", "options", "move"),
    [
        ("fedavgm", {"server_lr": 0.5, "momentum": 0.6}, sgd),
        ("fedadam", OPTIONS, adam),
        ("fedyogi", OPTIONS, yogi),
    ],
)
def test_rounds_of_some_uneven_silos_are_its_equations(method, options, move):
    job, shards = oracle.uneven(method, options)
    x = by_hand(job, shards, move)
    assert abs(x.weight - oracle.begun(job).weight).max() > 0.05
    for state in simulate(job, shards).states.values():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), x)


def with_rate_one(name):
    """The method of this name with a step that ends where the round's own does."""
    still = {"server_rule": property(lambda _: ServerRule("sgd", lr=1.0))}
    inner = ControlVariates if name == "scaffold" else catalog.METHODS[name]
    own = {**still, "name": "composed", "version": 1}
    own["options_model"] = catalog.METHODS[name].options_model
    return type("Composed", (ServerOptimised, inner), own)


# what crosses as a Mix, as single values, or is no model
STILL = {"cfl", "fedamp", "fedfomo", "fedgh", "fedproto", "fedsimsup", "fedssa", "local", "pfedhn"}
WITHIN = {"fedadam", "fedavgm", "fedyogi"}  # which are such compositions themselves
SMALL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
MODELS = {"fedaims": {"name": "convnet-digits"}, "fedbn": {"name": "cnn-digits", "norm": "group"}}
# few steps: nothing here depends on how much is learnt
QUICK = {
    "fedala": {"start_epochs": 1}, "fedavg-ft": {"tuning_epochs": 1},
    "fedbabu": {"tuning_epochs": 1}, "fedrep": {"head_epochs": 1}, "pfedme": {"steps": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(catalog.METHODS.keys() - STILL - WITHIN))
def test_with_a_rate_of_one_and_no_momentum_every_method_is_itself(
    make_job, make_shards, monkeypatch, name
):
    monkeypatch.setitem(catalog.METHODS, "composed", with_rate_one(name))
    model = MODELS.get(name, SMALL)
    plain, ours = (
        make_job(each, QUICK.get(name), model, silos=list("abcd"), min_cohort=3, rounds=2)
        for each in (name, "composed")
    )
    shards = make_shards(plain)
    expected, found = (trained(job, shards) for job in (plain, ours))
    names = {part.name for round_ in range(3) for part in ours.down(round_)}
    assert any(each.endswith("-stepped") for each in names)
    assert any(key.startswith("server/x/") for key in found.coordinator)
    for silo, state in expected.states.items():
        for key, value in state.flat.items():
            assert torch.allclose(found.states[silo].flat[key], value, atol=1e-4), key


@pytest.mark.parametrize("name", sorted(STILL))
def test_where_no_model_comes_down_in_one_value_it_is_refused(make_job, name):
    method = with_rate_one(name)
    fields = {"participation": 0.75} if name == "fedsimsup" else {}
    setting = make_job(silos=list("abcd"), min_cohort=3, model=SMALL, **fields).setting()
    with refused("nothing that comes down to all silos is a model"):
        method(setting)


def test_running_statistics_take_no_step(make_job, make_shards):
    """Of which a variance could fall below zero."""
    model = {"norm": "batch", "buffers": "global"}
    fields = {"rounds": 1, "model": model}
    job, average = make_job("fedadam", {"server_lr": 0.3}, **fields), make_job("fedavg", **fields)
    one, other = (simulate(each, make_shards(each)).states["a"] for each in (job, average))
    for key, value in other.parts["extractor"].items():
        if "running" in key:
            assert torch.equal(one.parts["extractor"][key], value)
    weight = "conv1.weight"
    assert not torch.allclose(one.parts["extractor"][weight], other.parts["extractor"][weight])


def test_what_comes_down_is_declared_under_a_name_of_its_own(make_job):
    method = make_job("fedyogi").method()
    (up,), (down,) = method.up(0), method.down(0)
    assert (up.name, down.name) == ("model", "model-stepped")
    assert up.tensors == down.tensors
    assert isinstance(up.exchange, Sum)
    # a silo reads it by the method's own name
    state = initial_state(method, "a")
    flat = {name: value + 1 for name, value in method.flat(state, "classifier").items()}
    after = method.deliver(state, {"model-stepped": flat}, None)
    assert torch.equal(after.parts["classifier"]["bias"], flat["classifier.bias"])


NAMES = {"fedavg-adam": "fedadam", "fedavg-momentum": "fedavgm", "fedavg-yogi": "fedyogi"}


@pytest.mark.parametrize("name", NAMES)
def test_a_job_names_a_method_with_an_optimiser(make_job, make_shards, name):
    options = {"server_lr": 0.1, "weights": "equal"}
    ours, same = (make_job(each, options, oracle.GLM, rounds=2) for each in (name, NAMES[name]))
    shards = make_shards(ours)
    one, other = (simulate(job, shards).states["b"].flat for job in (ours, same))
    assert all(torch.equal(one[key], value) for key, value in other.items())
    document = ours.document()
    assert document["method"]["name"] == name
    assert document["method"]["version"] == 1001
    assert document["method_digest"] != same.document()["method_digest"]


def test_options_are_those_of_both(make_job):
    job = make_job("fedrep-yogi", {"head_epochs": 3, "tau": 0.01})
    method = job.method()
    assert isinstance(method, ServerYogi)
    assert isinstance(method, catalog.METHODS["fedrep"])
    assert method.server_rule == ServerRule("yogi", 0.01, 0.9, 0.99, 0.01)
    # as a simulation sends a job to its workers
    assert pickle.loads(pickle.dumps(job.method_options)) == job.method_options
    with refused(r"of fedrep-yogi: unknown key 'head'; did you mean 'head_epochs'"):
        make_job("fedrep-yogi", {"head": 3})
    with refused("tau = 0"):
        make_job("fedrep-yogi", {"tau": 0})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scaffold-adam", "scaffold has an optimiser at the coordinator already; choose its own"),
        ("fedfomo-adam", "nothing that comes down to all silos is a model"),
        ("fedrep-adan", "unknown method 'fedrep-adan'"),
        ("fedrap-adam", "unknown method 'fedrap-adam'"),
    ],
)
def test_what_cannot_be_composed_is_refused_by_name(make_job, name, said):
    with refused(said):
        make_job(name).method()


@pytest.mark.parametrize("name", ["fedrep-adam", "fedproto-yogi", "pfedsim-momentum"])
def test_a_composed_method_is_blind_and_private_as_the_method_is(make_job, make_shards, name):
    inner = name.rpartition("-")[0]
    fields = {"silos": list("abcd"), "min_cohort": 3, "rounds": 2, "model": SMALL}
    security = {"secure_aggregation": "required", "clip_exponent": 6}
    if name == "fedproto-yogi":
        with refused("nothing that comes down"):
            make_job(name, **fields).document()
        return
    options = {"server_lr": 0.05, **QUICK.get(inner, {})}
    job, blind = (
        make_job(name, options, **fields, **more) for more in ({}, {"security": security})
    )
    shards = make_shards(job)
    one = simulate(job, shards).states["c"].flat
    other = simulate(blind, shards, exchanges=simulated(blind)).states["c"].flat
    assert all(torch.allclose(other[key], value, atol=1e-3) for key, value in one.items())
    privacy = {"epsilon": 3.0, "delta": 1e-5, "clip": 1.0, "sample_rate": 0.25}
    assert make_job(name, options, **fields, privacy=privacy).document()["privacy"]
