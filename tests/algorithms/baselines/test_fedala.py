from dataclasses import replace

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_states

from staddle.algorithms import catalog
from staddle.algorithms.baselines.fedala import FedALA
from staddle.algorithms.course import Change, Optimiser, SiloState
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.algorithms.training.silo_round import local_round

STILL = 1e-12  # a learning rate that moves nothing
LINE = {"name": "glm", "input": [1, 1, 1], "classes": 2}  # logits W x + b of one number x
ONE = Dataset(torch.ones(1, 1, 1, 1), torch.tensor([1]))  # x = 1 of class 1
WHOLE = {"batch_size": 64}  # a batch of all records, in whatever order


def line(method, weight, bias=(0.0, 0.0)):
    """A silo's state with this model."""
    state = initial_state(method, "a")
    head = {"weight": torch.tensor(weight).reshape(2, 1), "bias": torch.tensor(bias)}
    return SiloState({**state.parts, "classifier": head}, state.extra)


def delivered(weight, bias=(0.0, 0.0)):
    head = {"weight": torch.tensor(weight).reshape(2, 1), "bias": torch.tensor(bias)}
    model = {f"classifier.{name}": value for name, value in head.items()}
    return {"model": model}


def played(make_job, state, down, round_=1, **options):
    job = make_job("fedala", {"start_epochs": 1, **options}, LINE, {"lr": STILL})
    return local_round(job.method(), job, state(job.method()), round_, down, ONE, ONE, "a")


def aggregation(outcome):
    return outcome.state.parts["weights"]["classifier/weight"].flatten().tolist()


@pytest.mark.parametrize(("eta", "weight"), [(0.25, 0.559601), (1.0, 0.0)])
def test_eqs_1_to_3_by_hand(make_job, eta, weight):
    """Old logits (0, 0), new ones (2, 0), so (2w, 0): ℓ = log(1 + e^2w), dℓ/dw = 2 σ(2w), at w = 1
    2 · 0.880797.
    """
    outcome = played(
        make_job, lambda method: line(method, (0.0, 0.0)), delivered((2.0, 0.0)), eta=eta
    )
    # 1 - 0.25 · 1.761594; 1 - 1.761594 is cut to 0
    assert aggregation(outcome) == pytest.approx([weight, 1.0])
    mixed = outcome.state.parts["classifier"]["weight"].flatten().tolist()
    assert mixed == pytest.approx([2 * weight, 0.0], abs=1e-6)
    assert outcome.contributions["model"].tensors[
        "classifier.weight"
    ].flatten().tolist() == pytest.approx(mixed)
    assert outcome.state.extra == {"learned": torch.tensor(1)}  # what was mixed is gone


def test_weights_are_cut_at_one_too(make_job):
    """Class 1 gains by the global model: dℓ/dw = -2 σ(-2w) at logits (0, 2w), so w would rise above
    1.
    """
    outcome = played(make_job, lambda method: line(method, (0.0, 0.0)), delivered((0.0, 2.0)))
    assert aggregation(outcome) == [1.0, 1.0]
    assert outcome.state.parts["classifier"]["weight"].flatten().tolist() == pytest.approx(
        [0.0, 2.0]
    )


def test_the_weights_of_the_last_round_are_those_that_a_delivery_is_taken_by(make_job):
    method = make_job("fedala", {}, LINE).method()
    state = line(method, (0.0, 4.0))
    half = {
        "classifier/weight": torch.tensor([[0.5], [0.25]]),
        "classifier/bias": torch.tensor([1.0, 0.0]),
    }
    state = SiloState({**state.parts, "weights": half}, {"learned": torch.tensor(1)})
    taken = method.deliver(state, delivered((2.0, 0.0), (7.0, 7.0)), None)
    # 0 + 2/2; 4 + (0 - 4)/4
    assert taken.parts["classifier"]["weight"].flatten().tolist() == [1.0, 3.0]
    assert taken.parts["classifier"]["bias"].tolist() == [7.0, 0.0]


def test_epochs_of_learning_weights(make_job):
    """Nothing is learned before there is a global model then long and then for an epoch."""
    method = make_job("fedala", {}, LINE, {"epochs": 3}).method()
    state = line(method, (0.0, 0.0))
    assert [step.trains for step in method.stages(method.deliver(state, {}, None), None)] == [
        ("extractor", "classifier")
    ]
    taken = method.deliver(state, delivered((2.0, 0.0)), None)
    later = replace(taken, extra={**taken.extra, "learned": torch.tensor(1)})
    for held, epochs in ((taken, 11), (later, 1)):
        weights, change, local = method.stages(held, None)
        assert isinstance(change, Change)
        assert (weights.trains, weights.epochs) == (("weights",), epochs)
        assert weights.optimiser == Optimiser(1.0, within=(0.0, 1.0))
        assert (local.trains, local.epochs) == (("extractor", "classifier"), 2)


def test_lower_layers_are_taken_whole(make_job):
    def mixed(layers):
        return {
            f"{part}.{spec.name}"
            for part, specs in make_job("fedala", {"layers": layers}).method().upper.items()
            for spec in specs
        }

    assert mixed(1) == {"classifier.weight", "classifier.bias"}
    assert mixed(2) == mixed(1) | {"extractor.fc1.weight", "extractor.fc1.bias"}
    assert len(mixed(4)) == 8
    with refused("fedala: layers = 5, the model has 4; lower it"):
        make_job("fedala", {"layers": 5}).method()
    method = make_job("fedala").method()
    state = initial_state(method, "a")
    model = {
        name: value + 1 for name, value in method.flat(state, "extractor", "classifier").items()
    }
    nothing = {name: 0 * value for name, value in state.parts["weights"].items()}
    held = SiloState({**state.parts, "weights": nothing}, state.extra)
    taken = method.deliver(held, {"model": model}, None)
    for part in ("extractor", "classifier"):
        for name, value in state.parts[part].items():
            assert torch.equal(taken.parts[part][name], value + 1 if part == "extractor" else value)


def test_the_extractors_weights_are_learned_through_it(make_job, make_data):
    job = make_job("fedala", {"layers": 2, "start_epochs": 1})
    method, data = job.method(), make_data(8)
    state = initial_state(method, "a")
    model = {
        name: value + 0.1 for name, value in method.flat(state, "extractor", "classifier").items()
    }
    weights = local_round(method, job, state, 1, {"model": model}, data, data, "a").state.parts[
        "weights"
    ]
    assert all((weight < 1).any() for weight in weights.values())


class Kept(FedAvg):
    """FedAvg whose silos keep what they trained last."""

    product = "trained"


def test_at_a_learning_rate_of_nothing_it_is_fedavg(make_job, make_shards, monkeypatch):
    monkeypatch.setitem(catalog.METHODS, "fedavg", Kept)
    options, fields = {"eta": STILL, "layers": 3, "start_epochs": 1}, {"participation": 0.67}
    job = make_job("fedala", options, training=WHOLE, **fields)
    other, shards = make_job("fedavg", training=WHOLE, **fields), make_shards(job)
    check_states(simulate(job, shards).states, simulate(other, shards).states, 1e-5)


class Own(FedALA):
    """Takes nothing of the global model."""

    def modules(self, silo):
        parts = super().modules(silo)
        with torch.no_grad():
            for weight in parts["weights"].parameters():
                weight.zero_()
        return parts


def test_with_weights_of_nothing_on_all_layers_it_is_local_training(
    make_job, make_shards, monkeypatch
):
    monkeypatch.setitem(catalog.METHODS, "fedala", Own)
    job = make_job("fedala", {"eta": STILL, "layers": 4, "start_epochs": 1}, training=WHOLE)
    other, shards = make_job("local", training=WHOLE), make_shards(job)
    check_states(simulate(job, shards).states, simulate(other, shards).states, 1e-5)


def test_weights_begin_at_one_and_stay_at_the_silo(make_job):
    state = initial_state(make_job("fedala", {"layers": 3}).method(), "a")
    assert set(state.parts) == {"extractor", "classifier", "weights"}
    assert all((weight == 1).all() for weight in state.parts["weights"].values())


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_running_statistics_are_never_mixed(make_job, make_shards, buffers):
    job = make_job("fedala", {"layers": 4}, {"norm": "batch", "buffers": buffers}, rounds=2)
    method = job.method()
    names = {spec.name for spec in method.model.tensors}
    assert ("extractor.norm1.running_mean" in names) == (buffers == "global")
    assert not any("running" in name for name in initial_state(method, "a").parts["weights"])
    simulation = simulate(job, make_shards(job))
    one, other = (simulation.states[silo].parts["extractor"]["norm1.running_mean"] for silo in "ab")
    assert not torch.equal(one, other)  # each trained last


def test_silos_whose_labels_differ_learn_what_is_theirs(make_job, make_data):
    """b and d call class k what a and c call k + 1.

    Of FedAvg's one model 0.57 is right at the silo with the most.
    """
    training = {"lr": 0.05, "momentum": 0.5, "epochs": 2}
    shards = {silo: (make_data(40, i), make_data(100, 100 + i)) for i, silo in enumerate("abcd")}
    shards |= {
        silo: tuple(Dataset(side.x, (side.y + 1) % 3) for side in shards[silo]) for silo in "bd"
    }
    found = simulate(make_job("fedala", {}, {}, training, silos=list("abcd")), shards)
    assert min(found.scores("trained").values()) > 0.6
