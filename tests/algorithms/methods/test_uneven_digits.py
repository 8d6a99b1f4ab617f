"""What methods of the papers reach on few digits, dealt unevenly, beside local training and FedAvg.

Seen figures are means over silos.
"""

import functools
import statistics

import pytest
import torch

from staddle.algorithms.data import dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.methods.fedssa.method import FedSSA, rows_of
from staddle.algorithms.partition import draw as partition

TRAINING = {"epochs": 2, "batch_size": 16, "lr": 0.05, "momentum": 0.9}
MLP = {"name": "ppfl-mlp", "input": [1, 8, 8]}  # a fifth of the time of "cnn-digits"
DIGITS = functools.cache(dataset.digits)  # read once
THREE = ["digits-cnn-a", "digits-cnn-b", "digits-cnn-c"]


def dealt(silos, records, alpha, seed):
    """The first digits, Dirichlet over the silos, 30% of each silo's for testing."""
    digits = dataset.Dataset(DIGITS().x[:records], DIGITS().y[:records])
    parts = partition.dirichlet(digits.y.numpy(), len(silos), alpha, seed)
    return {
        s: dataset.split(digits.take(p), s.encode(), 0.3) for s, p in zip(silos, parts, strict=True)
    }


@pytest.fixture
def reach(make_job):
    """The mean accuracy of a job on such digits."""

    def mean(method, options, silos, records, alpha=0.3, seed=1, model=None, **fields):
        training = TRAINING | fields.pop("training", {})
        model = {"classes": 10, **(model or {})}
        job = make_job(method, options, model, training, silos=silos, seed=seed, **fields)
        accuracy = simulate(job, dealt(silos, records, alpha, seed)).scores(job.method().product)
        return statistics.mean(accuracy.values())

    return mean


def test_pfedsim_beats_local_and_fedavg(reach):
    """800 digits, Dirichlet 0.3 over four silos, 10 rounds of 2 epochs, draw 2, a perceptron.

    Seen: local 0.908, FedAvg 0.937, pFedSim 0.973. With "cnn-digits", over draws 7, 1 and 2: local
    0.887, FedAvg's one model 0.899 and 0.914 as trained on at each silo, pFedSim 0.930, 0.944 with
    ``similarity = "per_class"``. Not asserted, because it does not hold: FedPer has 0.936, so at
    four silos it is the private classifier that helps; whose extractors are mixed by which weights
    hardly matters.
    """
    silos = [f"silo-{i}" for i in range(4)]
    local, fedavg, pfedsim = (
        reach(name, {}, silos, 800, seed=2, model=MLP, rounds=10)
        for name in ("local", "fedavg", "pfedsim")
    )
    assert pfedsim > max(0.9, local + 0.02, fedavg + 0.01), (local, fedavg, pfedsim)


def test_fedaims_beats_local_and_fedavg(reach):
    """600 digits, Dirichlet 0.1 over six silos, draw 1, 6 rounds of one epoch in batches of 8.

    Seen: local 0.451, FedAvg's one model 0.181; FedAIMS 0.675, and 0.666 with μ = 0.1. With
    ``aux_ce = "head"`` it has 0.585, and 0.704 with μ = 0.1: a loss of a head at a middle block
    outweighs the model's own, and with μ = 1 the pull to the prototypes of an untrained backbone
    comes on top.
    """
    silos = [f"silo-{i}" for i in range(6)]
    fields = {"model": {"name": "convnet-digits", "norm": "group"}, "rounds": 6}
    training = {"epochs": 1, "batch_size": 8, "lr": 0.1}
    local, fedavg, fedaims, heads = (
        reach(name, own, silos, 600, 0.1, **fields, training=dict(training))
        for name, own in (
            ("local", {}), ("fedavg", {}), ("fedaims", {}), ("fedaims", {"aux_ce": "head"}),
        )
    )  # fmt: skip
    assert fedaims > max(local + 0.1, fedavg + 0.3, heads + 0.04), (local, fedavg, fedaims, heads)


def test_fedsimsup_beats_training_alone_and_the_model_of_fedavg(reach):
    """600 digits, Dirichlet 0.3 over eight silos, half of them in each of 8 rounds, six local
    epochs, a perceptron, draw 1: local 0.835, FedAvg's global model 0.784, FedSimSup 0.932.

    Seen over draws 7, 1 and 2: 0.865, 0.851 and 0.923 (0.858 with the exchange turned off by C =
    1e-6). With "cnn-digits": 0.731, 0.772 and 0.814 (0.745, and 0.832 with supervisors
    of three architectures). Not asserted, because it does not hold: what FedAvg's silos have right
    after local training is better (0.872 there). They start each round from the mean of a whole
    cohort, while a silo here moves only when it is away, by α ≤ λ, about one half, towards those
    that were not. Nor is the gain robust: with 500 records and five epochs FedSimSup stayed behind
    local on the same draws, 0.637 to 0.674.
    """
    fields = {"model": MLP, "rounds": 8, "participation": 0.5, "training": {"epochs": 6}}
    silos = [f"s{i}" for i in range(8)]
    local, fedavg, fedsimsup = (
        reach(method, {}, silos, 600, **fields) for method in ("local", "fedavg", "fedsimsup")
    )
    assert fedsimsup > max(local + 0.03, fedavg), (local, fedavg, fedsimsup)


def test_fedssa_beats_training_alone(reach):
    """800 digits over four silos, 10 rounds of 2 epochs in batches of 32, T_stable = 5, draw 7.

    Seen: local 0.810, FedAvg 0.559, FedSSA 0.921. With batches of 16, over draws 7, 1 and 2: local
    0.886, FedAvg 0.854, FedSSA 0.921 (0.912 with three architectures, where local has 0.887). This
    lead is not the exchange: a control whose rows grow by the same 1 + μ_t and are not exchanged
    reaches 0.920 (0.923). Eq. 4 works here as a larger learning rate below the header. So does its
    harm: T_stable = 20, beyond the end of the job, gives 0.470, and 0.910 with clip = 1.
    """
    silos, model = [f"s-{i}" for i in range(4)], {"name": "digits-cnn-a"}
    local, fedavg, fedssa = (
        reach(name, own, silos, 800, seed=7, model=model, rounds=10, training={"batch_size": 32})
        for name, own in (("local", {}), ("fedavg", {}), ("fedssa", {"t_stable": 5}))
    )
    assert fedssa > max(0.87, local + 0.06, fedavg + 0.05), (local, fedavg, fedssa)


def test_where_silos_are_small_and_often_away_the_exchange_of_fedssa_itself_helps(
    reach, monkeypatch
):
    """600 digits over ten silos of three architectures, half of them a round, 16 rounds, draw 7.

    The exchange helps in each of draws 7, 1 and 2, by 0.129, 0.041 and 0.039.

    Seen over them: local 0.513, growing rows without exchange 0.572, FedSSA 0.641, with
    ``stale_inclusive`` 0.594.
    """
    silos, options = [f"s-{i}" for i in range(10)], {"t_stable": 5, "extractors": THREE}
    fields = {"seed": 7, "model": {"name": THREE[0]}, "rounds": 16, "participation": 0.5}
    fedssa, fuse = reach("fedssa", options, silos, 600, **fields), FedSSA.deliver

    def fuse_with_own(self, state, delivered, facts):
        own = {"rows": rows_of(state.parts["classifier"]), "status": torch.full((10,), 2)}
        return fuse(self, state, {"header": own}, facts)

    monkeypatch.setattr(FedSSA, "deliver", fuse_with_own)
    assert fedssa > reach("fedssa", options, silos, 600, **fields) + 0.03
