import pytest
import torch
from support.refusals import refused
from torch import nn

from staddle.algorithms.engines import simulation
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.models.build import ModelOptions, sketch
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.tasks.table_counting import RIGHT

NORMED = {"norm": "batch"}
LAYERS = ("conv1", "conv2", "fc1")
SHARED = [f"extractor.{layer}.{what}" for layer in LAYERS for what in ("weight", "bias")]


def test_all_but_the_norm_layers_crosses(make_job):
    for norm in ("batch", "group"):
        part, metrics = make_job("fedbn", model={"norm": norm}).up(0)
        expected = [*SHARED, "classifier.weight", "classifier.bias"]
        assert [spec.name for spec in part.tensors] == expected
        assert metrics == RIGHT


@pytest.mark.parametrize(
    ("name", "network"), [(n, w) for n, w in NETWORKS.items() if "batch" in w.norms]
)
def test_of_each_network_the_norms_are_all_that_stays(make_job, name, network):
    """Counted another way: every parameter but two of each module that is a norm by its class's
    name.
    """
    model = {"name": name, "input": network.default_input, "norm": "batch"}
    task = {"kind": "segmentation" if network.dense else "classification"}
    part, _ = make_job("fedbn", model=model, task=task).up(0)
    modules = sketch(ModelOptions(name=name, classes=3, norm="batch"))
    everything = sum(len(list(module.parameters())) for module in modules.values())
    layers = [layer for module in modules.values() for layer in module.modules()]
    norms = sum(type(layer).__name__.startswith("BatchNorm") for layer in layers)
    assert norms
    assert len(part.tensors) == everything - 2 * norms


def test_the_mean_of_the_rest_by_hand_and_norms_as_each_silo_has_them(make_job, make_data):
    """Biases 1, 2 and 6 of silos with 10, 30 and 20 records: (10 + 60 + 120) / 60 = 19/6.

    Scales stay 1, 2 and 6.
    """
    job = make_job("fedbn", model=NORMED, rounds=1, training={"lr": 1e-30})
    modules, own = job.method().modules, {"a": 1.0, "b": 2.0, "c": 6.0}

    def different(silo):
        parts = modules(silo)
        nn.init.constant_(parts["classifier"].bias, own[silo])
        nn.init.constant_(parts["extractor"].norm2.weight, own[silo])
        return parts

    job.method().modules = different
    shards = {
        silo: (make_data(n, n), make_data(6, 1)) for silo, n in (("a", 10), ("b", 30), ("c", 20))
    }
    for silo, state in simulate(job, shards).states.items():
        assert state.parts["classifier"]["bias"].tolist() == pytest.approx([19 / 6] * 3)
        assert set(state.parts["extractor"]["norm2.weight"].tolist()) == {own[silo]}


def test_nothing_of_a_norm_is_given_in_any_round_and_they_come_apart(
    make_job, make_shards, monkeypatch
):
    given = []

    class Recorder(type(simulation.PLAIN)):
        def contribute(self, part, contribution):
            given.extend(contribution.tensors)
            return super().contribute(part, contribution)

    monkeypatch.setattr(simulation, "PLAIN", Recorder())
    job = make_job("fedbn", model=NORMED, rounds=2)
    states = simulate(job, make_shards(job)).states
    assert given
    assert not any("norm" in name for name in given)
    for name, value in states["a"].parts["extractor"].items():
        same = all(torch.equal(value, states[silo].parts["extractor"][name]) for silo in "bc")
        assert same != ("norm" in name), name


def test_a_model_without_norms_and_statistics_that_should_cross_are_refused(make_job):
    with refused(r'no norm layer .*choose model.norm = "batch" or "group" .* method fedavg'):
        make_job("fedbn").document()
    with refused(r"model.buffers = 'global', but method 'fedbn' uploads no running statistics"):
        make_job("fedbn", model={**NORMED, "buffers": "global"}).document()
