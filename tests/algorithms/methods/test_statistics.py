"""Federated statistics: by hand, against numpy, blind and private."""

from collections import Counter
from math import isnan

import numpy as np
import pytest
import torch
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.methods.statistics import STEPS, summaries
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.security.blind.plan import simulated

AGE = {"name": "age", "least": 0, "most": 100, "center": 60, "scale": 10}
SEX = {"name": "sex", "categories": ["f", "m", "?"]}
BMI = {"name": "bmi", "least": 10, "most": 60, "missing": -1}
CLASSES = {"name": "glm", "classes": 2, "class_names": ["alive", "dead"]}
BLIND = {"security": {"secure_aggregation": "required"}, "min_cohort": 3}


def make(features, **fields):
    width = sum(len(one.get("categories", "1")) for one in features)
    model, options = {**CLASSES, "input": [1, 1, width]}, fields.pop("options", None)
    fields = {"silos": list("abcd"), "rounds": 1, "features": features, **fields}
    return make_job("statistics", options, model, **fields)


def dataset(rows, y, job):
    x = torch.tensor(rows, dtype=torch.float32)[:, None, None]
    return Dataset(x, torch.tensor(y), ("alive", "dead"), features=job.features)


def alone(job, rows, y):
    """What one silo with these records contributes, by tensor."""
    own = dataset(rows, y, job)
    found = simulate(job, dict.fromkeys(job.silos, (own, own))).coordinator
    # all four have the same records
    assert all(torch.equal(tensor % 4, torch.zeros_like(tensor)) for tensor in found.values())
    return {name: (tensor // 4).tolist() for name, tensor in found.items()}


def test_by_hand():
    """Ages 25, 50, 100 and one of -10, that is below; a value at an edge is in the upper bin."""
    job = make([AGE, SEX], options={"bins": 4, "fewest": 0})
    rows = [[-3.5, 1, 0, 0], [-1.0, 1, 0, 0], [4.0, 0, 1, 0], [-7.0, 0, 1, 0]]
    found = alone(job, rows, [0, 0, 0, 1])
    assert (found["records"], found["classes"], found["present"]) == ([4], [3, 1], [4])
    assert found["histogram"] == [[1, 0, 1, 1, 1, 0]]
    assert found["categories"] == [2, 2, 0]
    # 0.25, 0.5, 1, and what is below counts as 0
    assert found["sums"] == [STEPS * 7 // 4]
    assert found["squares"] == [STEPS * 21 // 16]
    sums = {name: torch.tensor(value) for name, value in found.items()}
    said = summaries(job.features, sums, (0.5,))
    assert said.categories == {"sex": {"f": 2, "m": 2, "?": 0}}
    age = said.numbers["age"]
    assert (age.left_out, age.outside, age.mean) == (0, 1, 43.75)
    assert age.deviation == pytest.approx(100 * (21 / 64 - (7 / 16) ** 2) ** 0.5)
    assert age.quantiles == (50.0,)


def test_what_is_missing_is_known_by_the_number_that_stands_in():
    job = make([BMI], options={"bins": 5, "fewest": 0})
    found = alone(job, [[-1.0], [20.0], [60.0], [60.1]], [0, 0, 0, 1])
    assert found["present"] == [3]
    assert found["histogram"] == [[0, 0, 1, 0, 0, 1, 1]]
    assert found["sums"] == [round(STEPS * 2.2)]
    sums = {name: torch.tensor(value) for name, value in found.items()}
    bmi = summaries(job.features, sums, ()).numbers["bmi"]
    assert (bmi.left_out, bmi.outside) == (1, 1)
    nothing = {name: tensor * 0 for name, tensor in sums.items()}
    none = summaries(job.features, nothing, (0.1, 0.2)).numbers["bmi"]
    assert all(map(isnan, (none.mean, none.deviation, *none.quantiles)))


def test_a_silo_shows_no_cell_of_few_records():
    """Of nine ages four are in one bin, five in the other; of two body-mass indices nothing."""
    job = make([AGE, SEX, BMI], options={"bins": 2})
    rows = [[-4.0, 1, 0, 0, -1.0]] * 4 + [[2.0, 0, 1, 0, -1.0]] * 3 + [[2.0, 0, 1, 0, 30.0]] * 2
    found = alone(job, rows, [0] * 8 + [1])
    assert (found["records"], found["classes"]) == ([9], [8, 0])
    assert found["categories"] == [0, 5, 0]
    assert found["present"] == [5, 0]
    assert found["histogram"] == [[0, 0, 5, 0], [0, 0, 0, 0]]
    # nor do the sums show what is in the other bin
    assert found["sums"] == [5 * round(STEPS * 0.8), 0]
    assert found["squares"] == [5 * round(STEPS * 0.64), 0]


def test_a_cell_has_one_record_at_least_so_one_is_none():
    rows = [[-3.5, 1, 0, 0], [-1.0, 1, 0, 0], [4.0, 0, 1, 0]]
    found = [alone(make([AGE, SEX], options={"fewest": n}), rows, [0, 0, 1]) for n in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["present"] == [3]


def test_features_that_are_all_categories_have_counts_alone():
    job = make([SEX], options={"fewest": 0})
    (phase, *_) = job.document()["schema"]
    assert [part["name"] for part in phase["up"]] == ["counts", "metrics"]
    found = alone(job, [[1, 0, 0], [0, 0, 1]], [0, 1])
    assert found == {"records": [2], "classes": [1, 1], "categories": [1, 0, 1]}


@pytest.fixture(scope="module")
def shards():
    torch.set_num_threads(1)
    rng, job, made = np.random.default_rng(5), make([AGE, SEX, BMI]), {}
    for number, silo in enumerate("abcd"):
        n = 150 + 10 * number
        age, bmi = rng.integers(0, 101, n), rng.normal(30, 6, n)
        bmi = np.where(rng.random(n) < 0.3, -1, bmi.clip(10, 60))
        code = np.eye(3)[rng.integers(0, 2, n)]
        rows = np.column_stack([(age - 60) / 10, code, bmi])
        own = dataset(rows.tolist(), rng.integers(0, 2, n).tolist(), job)
        made[silo] = own, own.take(np.arange(20))
    return made


def pooled(shards):
    return torch.cat([train.x for train, _ in shards.values()]).flatten(1).double().numpy()


def test_the_sums_say_what_numpy_says_of_all_records(shards):
    job = make([AGE, SEX, BMI], options={"fewest": 0})
    found, rows = simulate(job, shards).coordinator, pooled(shards)
    age, bmi = rows[:, 0] * 10 + 60, rows[:, 4]
    said = summaries(job.features, found, (0.25, 0.5, 0.75))
    known = {"age": age, "bmi": bmi[bmi != -1]}
    for name, values in known.items():
        one = said.numbers[name]
        assert one.left_out == len(rows) - len(values)
        assert one.mean == pytest.approx(values.mean(), abs=1e-3)
        assert one.deviation == pytest.approx(values.std(), abs=1e-3)
        assert np.abs(np.subtract(one.quantiles, np.quantile(values, (0.25, 0.5, 0.75)))).max() < 5
    for row, (low, high, values) in enumerate(((0, 100, age), (10, 60, known["bmi"]))):
        # the same edges, without the rounding of numbers that are no integers
        counts = np.histogram(values.round(6), bins=20, range=(low, high))[0]
        assert found["histogram"][row].tolist() == [0, *counts, 0]
    assert list(said.categories["sex"].values()) == rows[:, 1:4].sum(0).tolist()


def test_engines_and_blind_sums_have_the_same_bits_and_every_silo_keeps_them(shards):
    features = [AGE, SEX, BMI]
    job, blind = make(features), make(features, **BLIND)
    ends = [simulate(job, shards), simulate(blind, shards, exchanges=simulated(blind))]
    simulation = Simulation(job, Stacked(job, {s: Records(*own) for s, own in shards.items()}))
    simulation.step()
    simulation.finish(simulation.look())
    for other in (*ends, simulation):
        for name, value in ends[0].coordinator.items():
            assert torch.equal(other.coordinator[name].long(), value)
            for state in other.states.values():
                assert torch.equal(state.extra[name], value)
    begun = job.method().modules("a")
    for part, module in begun.items():
        for name, value in module.state_dict().items():
            assert torch.equal(ends[0].states["a"].parts[part][name], value)


def test_a_records_share_has_a_norm_of_one_at_most(shards):
    """So a private job, which pays for that, cuts nothing; values at the bounds come close."""
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5}
    job = make([AGE, SEX, BMI], privacy=privacy)
    rows = torch.tensor([[4.0, 1, 0, 0, 60.0], [-6.0, 0, 0, 1, -1.0], [99.0, 0, 1, 0, 10.0]])
    norms = []
    for x in (*rows, *shards["a"][0].x):
        found = job.method().measure({}, x.reshape(1, 1, 1, 5), torch.tensor([0]))
        norms.append(float(torch.cat([value.flatten() for value in found.values()]).norm()))
    assert max(norms) <= 1
    assert norms[0] > 0.99


class Still:
    """The same number in place of each draw."""

    def __init__(self, each):
        self.each = each

    def normal(self, count):
        return np.full(count, self.each)


def test_a_private_job_pays_once_and_adds_its_noise_to_each_cell(shards):
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
    fields = {"options": {"fewest": 0}, "privacy": {**privacy, "statistics_sigma": 2.0}}
    job = make([AGE, SEX, BMI], **fields)
    plain = simulate(make([AGE, SEX, BMI], options={"fewest": 0}), shards).coordinator
    share = 170 / 512  # at most 1 / √9, for two numbers and a category
    for each in (0.0, 1.5):
        accounts = {silo: MemoryAccount(job) for silo in job.silos}
        account = lambda silo, own=accounts, each=each: PrivateSilo(own[silo], lambda: Still(each))
        found = simulate(job, shards, private=account).coordinator
        for name, sums in plain.items():
            if name not in ("records", "classes"):
                unit = STEPS if name in ("sums", "squares") else 1
                noise = round(each * 2.0 / share * unit)  # at each of four silos
                more = found[name] - sums
                assert torch.equal(more, torch.full_like(more, 4 * noise)), name
        for own in accounts.values():
            taken = sum((spending.taken for spending in own.spendings), Counter())
            assert taken == {"histogram": 1, "statistics": 1}


def test_noise_below_all_counts_leaves_zeros_as_none_can_be_negative(shards):
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
    job = make([AGE, SEX, BMI], privacy={**privacy, "statistics_sigma": 2.0})
    accounts = {silo: MemoryAccount(job) for silo in job.silos}
    # the first noise is that of the class counts, of which some have to be left
    draws = {silo: iter((Still(0.0), Still(-1e4))) for silo in job.silos}
    account = lambda silo: PrivateSilo(accounts[silo], lambda: next(draws[silo]))
    found = simulate(job, shards, private=account).coordinator
    for name in ("present", "histogram", "categories", "sums", "squares"):
        assert not found[name].any(), name


@pytest.mark.parametrize(
    ("features", "fields", "why"),
    [
        ([], {}, "the job declares no features; add"),
        ([{**AGE, "most": None}], {}, "feature 'age' has no range; give it least and most"),
        ([{**AGE, "least": None}], {}, "feature 'age' has no range"),
        ([{**AGE, "least": 100}], {}, "feature 'age' has no range"),
        ([{**BMI, "missing": 10}], {}, "missing = 10 is in its range, so values that are there"),
        ([AGE], {"rounds": 2}, "records are counted once, not 2 times; write rounds = 1"),
        ([AGE], {"options": {"bins": 0}}, "bins"),
        ([AGE], {"options": {"fewest": -1}}, "fewest"),
    ],
)
def test_what_cannot_be_counted_is_refused(features, fields, why):
    model = {**CLASSES, "input": [1, 1, 1]}
    with refused(why):
        make_job(
            "statistics", model=model, **{"features": features, "rounds": 1, **fields}
        ).method()


def test_more_records_than_the_sums_hold_are_refused(shards, monkeypatch):
    monkeypatch.setattr("staddle.algorithms.methods.statistics.MOST_RECORDS", 149)
    with refused("150 training records, 149 are the most"):
        simulate(make([AGE, SEX, BMI]), shards)


def test_sums_of_other_features_are_refused(shards):
    job = make([AGE, SEX, BMI])
    found = dict(simulate(job, shards).coordinator)
    for features in (job.features[:2], job.features[1:], job.features[:1]):
        with pytest.raises(ValueError, match="zip"):
            summaries(features, found, ())
