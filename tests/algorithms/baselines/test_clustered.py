from itertools import product

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_tensors

from staddle.algorithms.baselines.clustered import bipartition
from staddle.algorithms.course import SiloState
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.delivery import Row
from staddle.algorithms.exchange.parts import Gram, Mix
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round
from staddle.security.blind.plan import simulated

LINE = {"name": "glm", "input": [1, 1, 1], "classes": 2}  # logits W x + b of one number x
ONE = Dataset(torch.ones(1, 1, 1, 1), torch.tensor([1]))  # x = 1 of class 1
FOUR = {"silos": list("abcd")}
EQUAL = {"weights": "equal"}


def gram(*vectors):
    stacked = torch.tensor(vectors, dtype=torch.float64)
    return stacked @ stacked.T


def results(*vectors):
    return {"update": {"gram": gram(*vectors)[None]}}


@pytest.fixture
def make(make_job):
    return lambda silos="abcd", **options: make_job("cfl", options, silos=list(silos)).method()


def test_eq_1_by_hand(make_job):
    """At logits (0, 0) of x = 1, class 1: the gradient of W and of b is (0.5, -0.5).

    One step of 0.2.
    """
    job = make_job("cfl", {}, LINE, {"lr": 0.2})
    state = initial_state(job.method(), "a")
    away = {"weight": torch.full((2, 1), 5.0), "bias": torch.zeros(2)}
    down = {"model": {"classifier.weight": torch.zeros(2, 1), "classifier.bias": torch.zeros(2)}}
    held = SiloState({**state.parts, "classifier": away}, state.extra)
    outcome = local_round(job.method(), job, held, 1, down, ONE, ONE, "a")
    update = outcome.contributions["update"].tensors["update"]
    assert update.tolist() == [pytest.approx([-0.1, 0.1, -0.1, 0.1])]
    assert outcome.contributions["model"].tensors["classifier.bias"].tolist() == pytest.approx(
        [-0.1, 0.1]
    )
    first = local_round(job.method(), job, held, 0, {}, ONE, ONE, "a")  # from where the silo is
    assert first.contributions["update"].tensors["update"][0, :2].tolist() == pytest.approx(
        [-0.1, 0.1], abs=1e-6
    )


def test_eq_2_by_hand(make):
    """Updates (3, 1) and (-2, 1): the mean (0.5, 1) is of length √1.25 = 1.1180, the longest is √10
    = 3.1623.
    """
    pair = gram((3.0, 1.0), (-2.0, 1.0))
    assert make(eps_1=1.119, eps_2=3.162).leaving(pair).tolist() == [False, True]
    assert not make(eps_1=1.118, eps_2=3.162).leaving(pair).any()
    assert not make(eps_1=1.119, eps_2=3.163).leaving(pair).any()
    assert not make().leaving(pair[:1, :1]).any()


def test_eq_3_by_hand():
    """Joined from the top: 0-1 (.9), 2-3 (.8), 1-2 (.1) would be next, so {0, 1} and {2, 3} are .1
    alike at most.
    """
    alike = torch.tensor(
        [[1, 0.9, -0.5, 0.0], [0.9, 1, 0.1, -0.2], [-0.5, 0.1, 1, 0.8], [0.0, -0.2, 0.8, 1]]
    )
    assert bipartition(alike).tolist() == [False, False, True, True]
    alone = torch.tensor([[1, -0.1, -0.2], [-0.1, 1, 0.5], [-0.2, 0.5, 1]])
    # the smaller one, wherever the first is
    assert bipartition(alone).tolist() == [True, False, False]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_eq_3_is_the_best_of_all_bipartitions(n):
    rng = torch.Generator().manual_seed(n)
    for _ in range(20):
        drawn = torch.rand(n, n, generator=rng) * 2 - 1
        alike = (drawn + drawn.T) / 2

        def across(second, alike=alike):
            return alike[~second][:, second].max().item()

        splits = (
            torch.tensor((False, *rest))
            for rest in product((False, True), repeat=n - 1)
            if any(rest)
        )
        assert across(bipartition(alike)) == min(map(across, splits))


def test_eq_4_by_hand(make):
    """Updates (3, 0) and (0, 3): a cosine of 0, √(1/2) = 0.7071; the mean is 2.1213 long."""
    square = gram((3.0, 0.0), (0.0, 3.0))
    assert make(eps_1=3, gamma_max=0.707).leaving(square).any()
    assert not make(eps_1=3, gamma_max=0.708).leaving(square).any()
    # the likest pair across decides, here one of 0, not of -1
    odd = gram((3.0, 0.0), (0.0, 3.0), (-3.0, 0.0))
    assert make(eps_1=3, gamma_max=0.707).leaving(odd).any()
    assert not make(eps_1=3, gamma_max=0.708).leaving(odd).any()
    three = gram((3.0, 0.0), (3.0, 0.1), (-3.0, 0.0))
    assert make(eps_1=3, smallest=1).leaving(three).tolist() == [False, False, True]
    assert not make(eps_1=3, smallest=2).leaving(three).any()


def test_clusters_split_and_those_who_are_away_stay(make):
    method = make("abcdef")
    start = method.begin()
    came = results((2.0, 0), (2.0, 0.1), (-2.0, 0), (-2.1, 0), (1.9, 0))
    first = method.combine(start, 0, tuple("abcde"), came).state
    assert first["cluster"].tolist() == [0, 0, 1, 1, 0, 0]  # f was away
    assert first["gave"].tolist() == [0, 0, 0, 0, 0, -1]
    assert start["cluster"].tolist() == [0] * 6  # states are values
    came = results((2.0, 0), (-3.9, 0), (1.0, 0), (1.0, 0), (2.0, 0.1))
    second = method.combine(first, 1, tuple("abcdf"), came).state
    assert second["cluster"].tolist() == [0, 2, 1, 1, 0, 0]  # e stays with the more
    assert second["gave"].tolist() == [1, 1, 1, 1, 0, 1]
    third = method.combine(second, 2, ("b", "c"), results((9.0, 0), (-9.0, 0))).state
    assert third["cluster"].tolist() == second["cluster"].tolist()  # each alone of its cluster
    tie = method.combine(method.begin(), 0, ("b", "c"), results((-2.0, 0), (2.0, 0))).state
    assert tie["cluster"].tolist() == [0, 0, 1, 0, 0, 0]


def test_eq_5_is_of_those_of_the_cluster_who_came_last(make):
    method = make()
    assert method.deliveries(method.begin(), 1, "a") == ()
    state = {"cluster": torch.tensor([0, 1, 0, 0]), "gave": torch.tensor([2, 5, 4, 4])}
    both = (Row("model", {"c": 1.0, "d": 1.0}),)
    assert method.deliveries(state, 6, "a") == both  # away, it gets what they made
    assert method.deliveries(state, 6, "c") == both
    assert method.deliveries(state, 6, "b") == (Row("model", {"b": 1.0}),)
    state = {"cluster": torch.tensor([0, 1, 0, 0]), "gave": torch.tensor([2, -1, 4, 4])}
    assert method.deliveries(state, 6, "b") == ()


def test_what_crosses(make_job):
    job = make_job("cfl", {"start": 2})
    model, update, _ = job.up(2)
    assert (model.exchange, update.exchange) == (Mix(), Gram())
    assert [part.name for part in job.up(1)] == ["model", "metrics"]
    assert (job.down(0), [part.name for part in job.down(4)]) == ((), ["model"])
    size = sum(spec.elements for spec in model.tensors)
    assert update.tensors[0].shape == (1, size)
    short = make_job("cfl", {"sketch": 32}).up(0)[1]
    assert (short.exchange, short.wire[0].shape) == (Gram(32, 7), (1, 32))
    assert make_job("cfl", {"sketch": 32}, LINE).up(0)[1].exchange == Gram()  # it would be longer
    batch = {"norm": "batch", "buffers": "global"}
    model, update, _ = make_job("cfl", {}, batch).up(0)
    lengths = {spec.name: spec.elements for spec in model.tensors}
    statistics = sum(n for name, n in lengths.items() if "running" in name)
    assert statistics == 96  # of 16 and of 32 channels
    assert update.tensors[0].elements == sum(lengths.values()) - statistics
    assert "extractor.norm1.running_var" not in {
        spec.name for spec in make_job("cfl", {}, {"norm": "batch"}).up(0)[0].tensors
    }


def test_a_cluster_that_never_splits_is_fedavg_of_equal_silos(make_job, make_shards):
    fields = {**FOUR, "participation": 0.75}
    job, plain = make_job("cfl", {"eps_1": 0.0}, **fields), make_job("fedavg", EQUAL, **fields)
    found, expected = (simulate(each, make_shards(job)).states["d"] for each in (job, plain))
    check_tensors(found.parts, expected.parts, 1e-5)


def turned(sides, by):
    return tuple(Dataset(side.x, (side.y + by) % 3) for side in sides)


@pytest.mark.parametrize("options", [{}, {"sketch": 64}])
def test_silos_whose_labels_differ_part_and_learn(make_job, make_data, options):
    """0.53 of the test records are right, in the mean, by FedAvg's one model."""
    options = {"eps_1": 10.0, "eps_2": 0.0, "gamma_max": 0.6, "start": 1, **options}
    job = make_job("cfl", options, {}, {"lr": 0.05, "momentum": 0.5, "epochs": 2}, **FOUR)
    sides = {silo: (make_data(40, i), make_data(100, 100 + i)) for i, silo in enumerate(job.silos)}
    found = simulate(job, {silo: turned(own, silo in "bd") for silo, own in sides.items()})
    assert found.coordinator["cluster"].tolist() == [0, 1, 0, 1]
    assert min(found.scores("delivered").values()) > 0.7
    one, same, other = (found.states[silo].parts["classifier"]["weight"] for silo in "acb")
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_blind_a_cluster_of_few_silos_is_not_mixed(make_job, make_shards):
    fields = {**FOUR, "min_cohort": 3, "rounds": 3}
    security = {"secure_aggregation": "required", "clip_exponent": 6}
    options = {"sketch": 64, "eps_1": 0.0}
    shards = make_shards(make_job("cfl", **fields))
    apart = make_job("cfl", {**options, "eps_1": 1e3, "eps_2": 0.0}, security=security, **fields)
    # no cluster has three silos beside one
    alone = simulate(apart, shards, exchanges=simulated(apart)).states
    assert len({state.parts["classifier"]["weight"].sum().item() for state in alone.values()}) == 4
    with refused("too long to be rotated; choose a smaller model, or options by which"):
        make_job(
            "cfl", {}, {"name": "lenet5", "input": [3, 40, 40]}, security=security, **fields
        ).document()
