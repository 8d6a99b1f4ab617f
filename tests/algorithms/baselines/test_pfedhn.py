"""pFedHN: its hypernetwork in NumPy and float64, back-propagated by hand."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused
from support.whole_jobs import trained

from staddle.algorithms.baselines import pfedhn
from staddle.algorithms.engines.aggregation import MemoryArchive, deliver
from staddle.algorithms.exchange.parts import nbytes_of
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state

TINY = {"hidden": 6, "layers": 2, "embedding": 3}
BODY = ("body.0", "body.2", "body.4")


def forward(phi, v):
    """θ_i, and what each linear layer was given."""
    given = []
    for layer in BODY:
        given.append(v)
        v = phi[f"network.{layer}.weight"] @ v + phi[f"network.{layer}.bias"]
        if layer != BODY[-1]:
            v = v.clip(min=0)
    given.append(v)
    return phi["network.last.weight"] @ v + phi["network.last.bias"], given


def backward(phi, given, error, slopes, row):
    """Adds what one silo's gradient by θ_i makes of φ and of its embedding."""
    for layer, came in zip(("last", *reversed(BODY)), reversed(given), strict=True):
        slopes[f"network.{layer}.weight"] += np.outer(error, came)
        slopes[f"network.{layer}.bias"] += error
        error = phi[f"network.{layer}.weight"].T @ error
        if layer not in {"last", BODY[0]}:
            error = error * (came > 0)
    slopes["embeddings"][row] += error


def stepped(phi, velocity, slopes, clip):
    """The authors' SGD, with a momentum of 0.8 and a decay of 0.02, at a rate of 0.05."""
    length = np.sqrt(sum((slope**2).sum() for slope in slopes.values()))
    for name, slope in slopes.items():
        step = min(1, clip / length) * slope + 0.02 * phi[name]
        velocity[name] = 0.8 * velocity[name] + step
    return {name: value - 0.05 * velocity[name] for name, value in phi.items()}, length


@pytest.mark.parametrize(("clip", "cut"), [(50.0, False), (0.3, True)])
def test_rounds_of_some_uneven_silos_are_its_equations(clip, cut):
    options = {"server_lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, "clip": clip, **TINY}
    job, shards = oracle.uneven("pfedhn", options)
    begun = job.method().begin()
    phi = {n: v.double().numpy() for n, v in begun.items() if not n.startswith("velocity/")}
    velocity = {name: np.zeros_like(value) for name, value in phi.items()}
    for round_ in range(job.rounds):
        slopes = {name: np.zeros_like(value) for name, value in phi.items()}
        for silo in job.cohort(round_):
            row = job.silos.index(silo)
            flat, given = forward(phi, phi["embeddings"][row])
            theta = oracle.Theta(flat[:192].reshape(3, 64), flat[192:])
            after, _ = oracle.trained(job, shards, silo, round_, theta)
            change = after - theta
            error = -np.concatenate([change.weight.reshape(-1), change.bias])
            backward(phi, given, error, slopes, row)
        phi, length = stepped(phi, velocity, slopes, clip)
        assert (length > clip) == cut
    simulation = trained(job, shards)
    for name, value in phi.items():
        np.testing.assert_allclose(simulation.coordinator[name].double(), value, atol=2e-5)
    for silo, seen in simulation.look().items():
        flat, _ = forward(phi, phi["embeddings"][job.silos.index(silo)])
        expected = oracle.Theta(flat[:192].reshape(3, 64), flat[192:])
        oracle.check_close(oracle.numbers(seen.delivered.parts["classifier"]), expected, 5e-5)


def test_models_begin_near_that_of_the_job_and_apart_from_one_another(make_job):
    job = make_job("pfedhn", model={"norm": "batch"})
    method = job.method()
    state, initial = method.begin(), method.initial()
    down = [deliver(method, PLAIN, state, 0, silo, MemoryArchive())["model"] for silo in job.silos]
    assert not torch.equal(down[0]["classifier.weight"], down[1]["classifier.weight"])
    assert not any("running" in name for name in initial)
    for name, value in initial.items():
        assert torch.allclose(down[0][name], value, atol=0.3), name
    held = initial_state(method, "a")
    taken = method.deliver(held, {"model": down[0]}, None)
    assert torch.equal(taken.parts["extractor"]["conv1.weight"], down[0]["extractor.conv1.weight"])
    assert torch.equal(taken.extra["classifier.bias"], down[0]["classifier.bias"])
    running = "norm1.running_var"
    assert torch.equal(taken.parts["extractor"][running], held.parts["extractor"][running])


def test_states_are_values(make_job):
    method = make_job("pfedhn", TINY).method()
    state = method.begin()
    before = {name: value.clone() for name, value in state.items()}
    change = {spec.name: torch.ones(2, *spec.shape) for spec in method.specs}
    after = method.combine(state, 0, ("a", "c"), {"change": change}).state
    assert after.keys() == state.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not torch.equal(after["embeddings"][0], state["embeddings"][0])
    assert not after["embeddings"].requires_grad


def test_changes_that_would_spoil_all_models_are_refused(make_job):
    method = make_job("pfedhn", TINY).method()
    change = {spec.name: torch.full((2, *spec.shape), 3e38) for spec in method.specs}
    with refused("pfedhn, round 3: silos changed their models by more than float32 can propagate"):
        method.combine(method.begin(), 2, ("a", "c"), {"change": change})


def test_a_hypernetwork_that_the_coordinator_cannot_keep_is_refused(make_job):
    model = {"name": "resnet18", "norm": "group"}
    with refused("would keep .* bytes of a hypernetwork .*; lower method.options.hidden, or"):
        make_job("pfedhn", model=model).method()
    make_job("pfedhn", {"hidden": 4}, model).method()


def test_its_size_is_that_of_the_state(make_job, monkeypatch):
    method = make_job("pfedhn", TINY).method()
    size = nbytes_of(method.begin().values())
    monkeypatch.setattr(pfedhn, "LARGEST_STATE", size)
    type(method)(method.setting, method.options)
    monkeypatch.setattr(pfedhn, "LARGEST_STATE", size - 1)
    with refused(f"would keep {size:,} bytes"):
        type(method)(method.setting, method.options)
