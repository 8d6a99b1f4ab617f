"""Fixed-point sums beside plain ones: within the bound, for every method, all job long."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange import parts as x
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.job import Job
from staddle.algorithms.partition.draw import dirichlet
from staddle.commands.federation import local_federation
from staddle.errors import LocalError
from staddle.security.blind.sum import Bounds, Quantised, deviation, folded, group
from staddle.security.blind.sum import given as given_of

SILOS = ("a", "b", "c", "d")
COUNTS = {"a": 300, "b": 120, "c": 55, "d": 80}
FLOAT32 = 2.0**-23  # both folds are rounded to it


def mean_part(form="mean", most=2.0**53, shapes=((4, 3), (4,)), dtype="float32"):
    specs = tuple(x.TensorSpec(f"t{i}", dtype, s) for i, s in enumerate(shapes))
    return x.Part("p", x.Kind.WHOLE_MODEL, x.Sum(form, most), specs)


def contributions(part, weights, seed=0, scale=1.0):
    """What each silo gives; a weight is a number, or one a row."""
    rng = torch.Generator().manual_seed(seed)
    spool = {}
    for silo, weight in weights.items():
        tensors = {}
        for spec in part.tensors:
            value = torch.randn(spec.shape, generator=rng) * scale
            whole = value.round() if spec.dtype == "int64" else value
            tensors[spec.name] = whole.to(getattr(torch, spec.dtype))
        spool[silo] = PLAIN.contribute(part, x.Contribution(tensors, weight))
    return lambda silo, name: spool[silo][name]


def agree(quantised, part, members, read):
    """The largest difference of both folds, tensor by tensor, as a part of the bound."""
    plain = PLAIN.collect(part, members, read)
    spec, opened = quantised.opened(part, members, read)
    own = spec.groups[0]
    blind = folded(part, own, opened)
    assert list(plain) == list(blind)
    used = 0.0
    for name, value in plain.items():
        assert (value.dtype, value.shape) == (blind[name].dtype, blind[name].shape), name
        if value.dtype == torch.int64:
            assert torch.equal(value, blind[name]), name
            continue
        largest = float(value.abs().max()) if value.numel() else 0.0
        if name == x.WEIGHT:
            unit = 2.0 ** -(31 if own.ring == 32 else 50)
            bound = len(members) * own.weight_most * unit + 1e-12 * largest
        else:
            rounding = largest * (FLOAT32 if value.dtype == torch.float32 else 2.0**-50)
            bound = deviation(own, spec, opened, largest) + rounding
        difference = float((value - blind[name]).abs().max()) if value.numel() else 0.0
        assert difference <= bound, (part.name, name, difference, bound)
        used = max(used, difference / bound)
    return used


@pytest.mark.parametrize(("bounds", "weights"), [
    (Bounds(weights="public"), COUNTS), (Bounds(most=1000), COUNTS),  # ring 64
    (Bounds(least=50, most=400), COUNTS),  # ring 32
    (Bounds(clip_exponent=6, least=50, most=400), COUNTS),
])  # fmt: skip
def test_a_mean_agrees(bounds, weights):
    part = mean_part()
    read = contributions(part, {silo: float(weight) for silo, weight in weights.items()})
    assert agree(Quantised(bounds, COUNTS), part, SILOS, read) > 0  # not the same bits


def test_a_model_is_not_copied_to_be_given():
    part = mean_part()
    tensors = {s.name: torch.randn(s.shape) for s in part.tensors}
    weight = torch.tensor(7.0, dtype=torch.float64)
    pieces = given_of(part, group(part, Bounds(most=9)), {**tensors, x.WEIGHT: weight}).values
    for piece, spec in zip(pieces, part.tensors, strict=True):
        assert piece.tolist() == tensors[spec.name].flatten().tolist()
        assert np.shares_memory(piece, tensors[spec.name].numpy())


def test_rings_follow_from_how_far_weights_spread():
    part = mean_part()
    assert group(part, Bounds(weights="public")).ring == 32
    assert group(part, Bounds(least=50, most=400)).ring == 32
    assert group(part, Bounds(least=1, most=1000)).ring == 64
    # presence: 0 or 1
    assert group(mean_part("ratio", 1.0), Bounds(least=50, most=1000)).ring == 32
    assert group(mean_part("total"), Bounds()).ring == 64


@pytest.mark.parametrize(("most", "bounds"), [(1.0, Bounds()), (2.0**53, Bounds(most=300))])
def test_a_ratio_agrees_row_by_row_and_rows_of_nobody_are_zero(most, bounds):
    part = mean_part("ratio", most)
    rows = torch.tensor([1.0, 0.0, 1.0, 0.0])
    weights = {silo: rows * (1 if most == 1 else COUNTS[silo]) for silo in SILOS}
    weights["c"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    read = contributions(part, weights)
    agree(Quantised(bounds), part, SILOS, read)
    folded = Quantised(bounds).collect(part, SILOS, read)
    assert folded["t0"][1].abs().max() == 0
    assert folded[x.WEIGHT].shape == (4,)


def test_totals_of_counts_are_exact_and_of_floats_within_the_bound():
    specs = (x.TensorSpec("a", "int64", ()), x.TensorSpec("b", "int64", (3,)))
    counts = x.Part("n", x.Kind.METRIC, x.Sum("total"), specs)
    read = contributions(counts, dict.fromkeys(SILOS), scale=2.0**38)
    agree(Quantised(Bounds()), counts, SILOS, read)
    specs = (x.TensorSpec("a", "float64", (5, 2)), x.TensorSpec("b", "int64", (5,)))
    mixed = x.Part("m", x.Kind.HEADER_ROWS, x.Sum("total"), specs)
    agree(Quantised(Bounds()), mixed, SILOS, contributions(mixed, dict.fromkeys(SILOS)))


def test_what_a_sum_cannot_hold_is_said():
    with pytest.raises(LocalError, match="not a secure sum"):
        group(x.Part("e", x.Kind.COUNTS, x.Each(), (x.TensorSpec("a", "float32", (2,)),)), Bounds())
    part = mean_part()
    for quantised, weight, scale, why in (
        (Quantised(Bounds()), 1.0, 100, r"its largest magnitude is .* above its clip 8"),
        (Quantised(Bounds(most=4)), 5.0, 1, "weight 5 is not between the declared 1 and 4"),
        (Quantised(Bounds(weights="public"), {"a": 3}), 1.0, 1, "no declared count of b, c, d"),
    ):  # fmt: skip
        read = contributions(part, dict.fromkeys(SILOS, weight), scale=scale)
        with pytest.raises(LocalError, match=why):
            quantised.collect(part, SILOS, read)


@given(
    st.lists(st.integers(1, 2000), min_size=2, max_size=9),
    st.integers(0, 2**31),
    st.sampled_from(["public", "private"]),
    st.integers(0, 6),
)
def test_means_of_any_weights_agree(weights, seed, how, clip):
    silos = {f"s{n}": float(weight) for n, weight in enumerate(weights)}
    part = mean_part(shapes=((3, 2), (), (0,), (5,)))
    read = contributions(part, silos, seed, scale=2.0**clip / 8)
    bounds = Bounds(clip_exponent=clip, weights=how, most=2000)
    counts = {silo: int(weight) for silo, weight in silos.items()}
    agree(Quantised(bounds, counts), part, tuple(silos), read)


METHODS = {
    "fedavg": {}, "fedbabu": {}, "fedper": {}, "pfedsim": {"rho": 0.5}, "fedssa": {"t_stable": 2},
    "ppfl": {"models": 2, "lam": 0.1}, "fedaims": {},
}  # fmt: skip


class Watched(Quantised):
    """Each fold of a whole job beside the one in the clear."""

    def __init__(self, bounds):
        super().__init__(bounds)
        self.sums = []

    def collect(self, part, members, read):
        if isinstance(part.exchange, x.Sum):
            self.sums.append((part.name, agree(self, part, members, read)))
        return super().collect(part, members, read)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    files = local_federation.make(tmp_path_factory.mktemp("blind") / "federation", SILOS)
    records = digits().take(torch.arange(600))
    parts = dirichlet(records.y.numpy(), len(SILOS), 0.5, 3, minimum=40)
    key = bytes(range(32))
    shards = {silo: split(records.take(p), key, 0.25) for silo, p in zip(SILOS, parts, strict=True)}
    return files, shards


@pytest.mark.parametrize("method", METHODS)
def test_every_sum_of_a_whole_job_is_within_its_bound(federation, method):
    files, shards = federation
    document = {
        "version": 1, "name": f"blind-{method}", "seed": 8, "rounds": 3, "silos": list(SILOS),
        "purpose": "For a test",
        "method": {"name": method, **({"options": METHODS[method]} if METHODS[method] else {})},
        "model": {"name": "convnet-digits" if method == "fedaims" else "cnn-digits", "classes": 10},
        "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
    }  # fmt: skip
    job = local_federation.sign_job(files, document)
    assert isinstance(job, Job)
    watched = Watched(Bounds(clip_exponent=6, most=2000))
    blind = simulate(job, shards, exchanges=watched)
    plain = simulate(job, shards)
    assert len(watched.sums) > job.rounds  # the metrics of each round, and what the method sums
    assert max(used for _, used in watched.sums) > 0
    for before, after in zip(plain.metrics, blind.metrics, strict=True):
        assert after["tested"] == before["tested"]
    for silo in SILOS:
        for part, tensors in plain.states[silo].parts.items():
            for name, value in tensors.items():  # rounding grows with the training that follows it
                found = blind.states[silo].parts[part][name]
                torch.testing.assert_close(found, value, atol=5e-4, rtol=1e-3)
