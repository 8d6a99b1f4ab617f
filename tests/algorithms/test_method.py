from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from staddle.algorithms.catalog import configure
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT, Kind, Mix, Part, Sum, TensorSpec
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state, specs_of_buffers, specs_of_parameters

STATISTICS = {f"extractor.norm{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")}
SHARING = (
    "cfl", "fedala", "fedas", "fedavg", "fedbabu", "fedfomo", "fedpac", "fedper", "fedrep",
    "fedsimsup", "pfedfda", "pfedsim", "ppfl",
)  # fmt: skip


@pytest.fixture
def make(make_job):
    """A job with batch norm and a policy for its buffers, in which one of four silos is away."""

    def job(method, buffers, **fields):
        # λ is refused where cohorts vary
        options = {"ppfl": {"lam": 0}, "fedrep": {"head_epochs": 1}}.get(method, {})
        model = {"norm": "batch", "buffers": buffers}
        return make_job(
            method, options, model=model, silos=list("abcd"), participation=0.7, **fields
        )

    return job


def names_in(parts):
    return [spec.name for part in parts for spec in part.tensors]


def test_buffers_are_statistics_without_the_count_of_batches():
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)
    )
    assert [spec.name for spec in specs_of_parameters(module)] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"
    ]  # fmt: skip
    assert specs_of_buffers(module) == tuple(
        TensorSpec(f"1.running_{name}", "float32", (3,), least)
        for name, least in (("mean", None), ("var", 0.0))
    )


@pytest.mark.parametrize("method", SHARING)
def test_global_buffers_cross_with_the_parameters_of_their_part(make, method):
    local, shared = (make(method, buffers).method() for buffers in ("local", "global"))
    for round_ in range(6):  # a census, and what follows the last round
        for way in ("up", "down"):
            for one, other in zip(
                getattr(local, way)(round_), getattr(shared, way)(round_), strict=True
            ):
                assert replace(other, tensors=one.tensors) == one
                assert not STATISTICS & set(names_in([one]))
                assert not any("tracked" in name for name in names_in([one, other]))
                added = STATISTICS if "extractor.norm1.weight" in names_in([one]) else set()
                assert set(names_in([other])) == set(names_in([one])) | added
    state = initial_state(shared, "a")
    parts = [part for part in ("extractor", "classifier", "canonical") if part in shared.template]
    assert list(shared.flat(state, *parts)) == [spec.name for spec in shared.flat_specs(*parts)]


def test_methods_that_share_no_norm_are_as_they_were(make):
    for method in ("local", "fedbn", "fedssa", "lg-fedavg"):
        job = make(method, "local")
        one, other = (
            configure(method, {}, replace(job.setting(), buffers=b)) for b in ("local", "global")
        )
        assert all(one.up(r) == other.up(r) and one.down(r) == other.down(r) for r in range(5))


def test_statistics_follow_the_policy(make, make_shards):
    """Statistics stay apart under the local policy and are averaged under the global one."""
    for buffers, together in (("local", 1), ("global", 4)):
        job = make("fedavg", buffers, rounds=2)
        states = simulate(job, make_shards(job)).states
        for name in sorted(STATISTICS):
            values = [
                state.parts["extractor"][name.removeprefix("extractor.")]
                for state in states.values()
            ]
            alike = sum(torch.equal(values[0], value) for value in values)
            assert alike == together, (buffers, name)


@pytest.mark.parametrize("method", SHARING)
def test_statistics_stay_variances_through_a_whole_job(make, make_shards, method):
    job = make(method, "global", rounds=3)
    for state in simulate(job, make_shards(job, 9)).states.values():
        for name, value in state.parts["extractor"].items():
            assert bool((value > 0).all()) or "running_var" not in name
            assert bool(value.isfinite().all())


variances = st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=3, max_size=3)
shares = st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(lambda w: sum(w) > 1e-9)


@given(variances, shares)
def test_a_mean_of_variances_is_positive(values, weights):
    spec = TensorSpec("extractor.norm1.running_var", "float32", (1,))
    given_ = {
        i: {spec.name: torch.tensor([v]), WEIGHT: torch.tensor(w).double()}
        for i, (v, w) in enumerate(zip(values, weights, strict=True))
    }
    read = lambda silo, name: given_[silo][name]
    folded = PLAIN.collect(Part("model", Kind.WHOLE_MODEL, Sum("mean"), (spec,)), range(3), read)[
        spec.name
    ]
    row = PLAIN.mix(
        Part("extractor", Kind.BACKBONE, Mix(), (spec,)), "r", dict(enumerate(weights)), read
    )[spec.name]
    counted = [v for v, w in zip(values, weights, strict=True) if w]
    for mean in (folded, row):
        assert 0 < min(counted) * (1 - 1e-6) <= mean.item() <= max(counted) * (1 + 1e-6)
