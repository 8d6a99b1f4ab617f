from dataclasses import replace

import numpy as np
import pytest
import torch
from support.pictures import pixels, whole
from support.refusals import refused
from support.simulated_jobs import make_job

from staddle.algorithms.catalog import METHODS, method_options
from staddle.algorithms.course import SiloState
from staddle.simulator.report import heatmaps
from staddle.simulator.report.heatmaps import HeatMap, by_likeness, heat_map, png

LIKE = torch.tensor(
    [[0, 0.9, 0, 0.2], [0.9, 0, 0.1, 0], [0, 0.1, 0, 0.7], [0.2, 0, 0.7, 0]], dtype=torch.float64
)
NAN = np.nan


def no_state(silo):
    raise AssertionError(silo)


def found(method, coordinator, **options):
    job = make_job(method)
    job = replace(job, method_options=method_options(method, options))
    return job.method(), heat_map(job, coordinator, no_state)


def test_pfedsim_is_drawn_by_the_weights_that_it_mixes_with():
    state = {"weights": -torch.log(1 - LIKE), "gave": torch.ones(4, dtype=torch.int64)}
    method, drawn = found("pfedsim", state)
    weights = method.weights(state, "b")
    assert drawn.values[1] == pytest.approx([weights["d"], NAN, weights["a"], NAN], nan_ok=True)
    assert drawn.values[1, 0] == pytest.approx(-np.log(1 - 0.9))
    assert drawn.pairs
    assert drawn.silos == ("d", "b", "a", "c")
    assert found("pfedsim", method.begin())[1] is None  # nobody compared yet


def test_fedsimsup_is_drawn_by_its_similarities():
    shares = torch.tensor(
        [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0], [0.2, 0.3, 0.5]], dtype=torch.float64
    )
    state = {
        "proportions": shares,
        "samples": torch.tensor([4, 4, 0, 4]),
        "unmatched": torch.zeros(4),
    }
    method, drawn = found("fedsimsup", state)
    like = method.similarities(state, "d", ["b", "c"])
    assert drawn.values[0] == pytest.approx([NAN, like["b"], NAN, like["c"]], nan_ok=True)
    assert np.isnan(drawn.values[2]).all()  # it missed the census
    assert found("fedsimsup", state, similarity="samples")[1] is None


def test_fedaims_is_drawn_where_it_clusters():
    signed = torch.where(LIKE == 0.2, -0.2, LIKE)
    drawn = found("fedaims", {"similarity": signed}, sampling="algorithm2")[1]
    assert drawn.values[0] == pytest.approx([NAN, 0.9, NAN, -0.2], nan_ok=True)
    assert drawn.scale == (-drawn.scale[1], pytest.approx(0.9, abs=0.01))
    assert found("fedaims", {})[1] is None


def test_ppfl_is_drawn_by_the_states_of_the_silos():
    rows = dict(
        zip(
            "dbac",
            torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5], [0.1, 0.2, 0.7], [0, 1, 0]]),
            strict=True,
        )
    )
    job = make_job("ppfl")
    drawn = heat_map(job, {}, lambda silo: SiloState({"membership": {"c": rows[silo]}}))
    assert np.allclose(drawn.values, torch.stack([rows[silo] for silo in job.silos]).numpy())
    assert not drawn.pairs
    assert by_likeness(drawn) == [0, 3, 1, 2]
    with refused("not memberships"):
        heat_map(job, {}, lambda silo: SiloState({"membership": {"c": 2 * rows[silo]}}))
    assert heat_map(job, {}, None) is None  # its models were not kept


def test_other_methods_compare_no_silos():
    for method in set(METHODS) - {"pfedsim", "fedsimsup", "fedaims", "ppfl"}:
        assert heat_map(make_job(method), {}, no_state) is None


def test_like_silos_stand_together():
    rng = np.random.default_rng(1)
    group = rng.integers(0, 4, 60)
    values = 0.9 * (group[:, None] == group) + rng.uniform(0, 0.1, (60, 60))
    values[rng.random((60, 60)) < 0.1] = NAN
    order = by_likeness(HeatMap("", "", values, tuple(map(str, range(60))), (0.0, 1.0), "never"))
    assert sorted(order) == list(range(60))
    assert (np.diff(group[order]) != 0).sum() == 3


def test_a_picture_shows_both_orders_and_cuts_nothing_off():
    names = tuple(f"hospital-of-a-long-name-{number}" for number in range(4))
    drawn = HeatMap("like", "cosine", np.where(LIKE == 0, NAN, LIKE), names, (0.0, 1.0), "never")
    counts = np.array([[1, 8], [6, 0], [5, 5], [0, 3]])
    made = png(drawn, counts, ["no disease", "disease"])
    assert whole(pixels(made))
    assert made != png(drawn, counts)
    assert made != png(drawn, counts[[1, 0, 2, 3]], ["no disease", "disease"])
    shares = HeatMap("ppfl", "share", np.array([[1.0, 0], [0.5, 0.5]]), ("a", "b"), (0.0, 1.0))
    assert whole(pixels(png(shares)))
    with refused("a heat map of 4 silos, and class counts of 2"):
        png(drawn, counts[:2])


def test_of_many_silos_those_that_were_compared_are_drawn(monkeypatch):
    rng = np.random.default_rng(1)
    values = np.full((200, 200), NAN)
    there = np.arange(0, 200, 10)
    values[np.ix_(there, there)] = rng.uniform(size=(20, 20))
    values[there, there] = NAN
    silos = tuple(f"silo-{number:03}" for number in range(200))
    all_of_them = HeatMap("like", "cosine", values, silos, (0.0, 1.0), "never together")
    counts = rng.integers(0, 9, (200, 3))
    made = png(all_of_them, counts)
    some = HeatMap(
        "like\n20 of 200 silos; the others: never together",
        "cosine",
        values[np.ix_(there, there)],
        silos[::10],
        (0.0, 1.0),
        "never together",
    )
    assert made == png(some, counts[::10])
    everybody = np.where(np.isnan(values), 0.5, values)
    monkeypatch.setattr(heatmaps, "replace", None)  # nobody is left out
    assert png(HeatMap("like", "cosine", everybody, silos, (0.0, 1.0), "never"), counts)
