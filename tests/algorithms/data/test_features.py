"""The data contract: a silo's declaration and its values against the job's."""

from math import inf

import pytest
import torch
from pydantic import ValidationError
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.features import (
    REACH,
    Feature,
    declarations_differ,
    out_of_range,
    outside,
    shown,
    width,
)
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.job.job import Job
from staddle.algorithms.training.record_checks import check_records, range_advice
from staddle.errors import LocalError
from staddle.files.documents import canonical_json, parse_json

AGE = {"name": "age", "unit": "years", "least": 0, "most": 120, "center": 60, "scale": 10}
SEX = {"name": "sex", "categories": ["f", "m"], "missing": "f"}
SUGAR = {"name": "glucose", "unit": "mmol/l", "least": 0.5, "most": 40, "missing": 5.5}
FEATURES = [AGE, SEX, SUGAR]
MODEL = {"name": "mlp", "classes": 2, "input": [1, 1, 4], "class_names": ["alive", "dead"]}
TABLE = {
    "kind": "csv",
    "file": "p.csv",
    "label": "outcome",
    "classes": ["alive", "dead"],
    "features": ["age", "sex", "glucose"],
    "units": {"glucose": "mmol/l"},
    "categories": {"sex": ["f", "m"]},
    "center": {"age": 60},
    "scale": {"age": 10},
    "missing": {"glucose": 5.5},
}
CONSTANTS = ("center", "scale", "missing")
ROWS = "age,sex,glucose,outcome\n63,f,5.1,alive\n0,m,,dead\n120,f,40,dead\n"


@pytest.fixture
def job(make_job):
    return make_job("fedavg", model=MODEL, features=FEATURES)


@pytest.fixture
def read(tmp_path):
    """The records of a table with some keys changed."""

    def made(rows=ROWS, **changes):
        (tmp_path / "p.csv").write_text(rows)
        return Csv.model_validate({**TABLE, **changes}).below(tmp_path).read()

    return made


def test_what_agrees_is_taken_and_the_signed_job_says_it(job, read):
    check_records(job, read(), "here")
    check_records(job, read(units={}, missing={"glucose": 5.5, "sex": "f"}), "here")
    taken = read().take(torch.tensor([2, 0]).numpy())
    assert taken.features == read().features
    check_records(job, taken, "here")
    document = parse_json(canonical_json(job.document()), "wire")
    assert Job.from_document(document, "wire", None) == job
    age, sex, sugar = document["features"]
    assert (age["most"], sex["categories"], sugar["missing"]) == ("120.0", ["f", "m"], "5.5")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"features": ["glucose", "sex", "age"]},
            "feature 0 is 'age' in the job and 'glucose' here; put data.features in the job's or"),
        ({"features": ["age", "sex"], "units": {}, "missing": {}},
            "the job has 'glucose', which this data set lacks; declare the job's features"),
        ({"categories": {"sex": ["m", "f"]}},
            "feature 'sex': category 0 is 'f' in the job and 'm' here; write the job's categories"),
        ({"center": {"age": 50}}, "feature 'age': center is 60.0 in the job and 50.0 here"),
        ({"scale": {}}, "feature 'age': scale is 10.0 in the job and 1.0 here"),
        ({"units": {"glucose": "mg/dl"}},
            "its unit is 'mmol/l' in the job and 'mg/dl' here; convert"),
        ({"missing": {"glucose": 6}},
            "a missing value counts as '6.0' here, in the job as '5.5'; write what the job says"),
        ({"missing": {"glucose": 5.5, "age": 60}},
            "'age': a missing value counts as '60.0' here, in the job as 'none at all'"),
        ({"classes": ["dead", "alive"]}, "class 0 is 'alive' in the job and 'dead' here; reorder"),
    ],
)  # fmt: skip
def test_another_declaration_is_refused_with_both_sides(job, read, changes, why):
    with refused(f"here: .*{why}"):
        check_records(job, read(**changes), "here")


@pytest.fixture
def agreed(tmp_path):
    """The records of a table that leaves constants to a job."""

    def made(job, rows=ROWS, **changes):
        (tmp_path / "p.csv").write_text(rows)
        table = {key: value for key, value in TABLE.items() if key not in CONSTANTS}
        own = Csv.model_validate({**table, **changes}).below(tmp_path)
        return own.load(None, job.features, wary=True)

    return made


def test_constants_that_a_silo_leaves_out_are_the_jobs(job, read, agreed):
    found = agreed(job)
    check_records(job, found, "here")
    assert found.features == (*read().features[:1], job.features[1], *read().features[2:])
    assert torch.equal(found.x, read().x)
    # what a silo states stands, and is compared
    with refused("feature 'age': center is 60.0 in the job and 50.0 here"):
        check_records(job, agreed(job, center={"age": 50}), "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scale": 1}, "feature 'age': center is 60.0 in the job and 0.0 here"),
        ({"center": 1e5}, "feature 'age': center is 100000.0 in the job and 0.0 here"),
        ({"missing": -1}, "feature 'age': center is 60.0 in the job and 0.0 here"),
        ({"most": None}, "feature 'age': center is 60.0 in the job and 0.0 here"),
    ],
)
def test_constants_by_which_single_records_would_stand_out_are_not_taken(
    make_job, agreed, change, why
):
    job = make_job("fedavg", model=MODEL, features=[{**AGE, **change}, SEX, SUGAR])
    with refused(why):
        check_records(job, agreed(job), "here")


def test_a_value_outside_the_range_stands_out_no_further_than_the_reach(make_job, agreed, read):
    """The job's range is a single number and its scale tiny: a rare value would be a million."""
    flat = {"name": "age", "unit": "years", "least": 0, "most": 0, "scale": 1e-6}
    job = make_job("fedavg", model=MODEL, features=[flat, SEX, SUGAR])
    ages = agreed(job).x[:, 0, 0, 0]
    assert ages.tolist() == [REACH, 0.0, REACH]
    assert outside(job.features[:1], ages[:, None]) == {"age": (2, 3)}
    # what a silo states itself is as it says
    own = read(center={}, scale={"age": 1e-6})
    assert own.x[0, 0, 0, 0] == pytest.approx(63e6)


def test_a_value_that_is_no_number_is_not_hidden_by_the_reach(make_job, agreed, read):
    job = make_job("fedavg", model=MODEL, features=[AGE, SEX, SUGAR])
    rows = ROWS.replace("63,f", "1e400,f")
    assert read(rows).x[0, 0, 0, 0] == inf
    with refused("x holds NaN or a value beyond float32 in record 0; clean it first"):
        check_records(job, agreed(job, rows, units={"age": "years", "glucose": "mmol/l"}), "here")


def test_what_is_missing_does_not_hide_another_unit():
    """Nine of ten records are missing, and the rest is in mg/dl."""
    sugar = Feature(name="glucose", least=0.5, most=40, missing=0)
    x = torch.tensor([[0.0]] * 90 + [[92.0]] * 10)
    (fault,) = out_of_range([sugar], x, 0.15)
    assert "10 of 10 records are outside" in fault


def test_a_category_and_a_number_of_one_name_are_told_apart_before_constants_are_taken(
    make_job, agreed
):
    age = {"name": "age", "categories": ["old", "young"], "missing": "old"}
    model = {**MODEL, "input": [1, 1, 5]}
    job = make_job("fedavg", model=model, features=[age, SEX, SUGAR])
    with refused("feature 'age': category 0 is 'old' in the job and None here"):
        check_records(job, agreed(job), "here")


def test_a_stand_in_may_lie_outside_the_range():
    marked = Feature(name="n", least=1, most=3, missing=-1, center=2, scale=0.5)
    x = torch.tensor([[(value - 2) / 0.5] for value in (-1, 1, 3, -2, 4)])
    assert outside([marked], x) == {"n": (2, 4)}
    assert marked.constants(wary=False) == {"center": 2.0, "scale": 0.5, "missing": -1.0}
    assert marked.constants() == {}  # a model would see such records stand out


def test_values_in_another_unit_are_refused_by_their_range(job, read):
    """Glucose in mg/dl under a unit that nobody wrote down; no value stands in the error."""
    rows = "age,sex,glucose,outcome\n63,f,92,alive\n50,m,101,dead\n40,f,39,dead\n"
    with refused("here: feature 'glucose': 2 of 3 records are outside 0.5 to 40 mmol/l") as caught:
        check_records(job, read(rows, units={}), "here")
    assert "92" not in str(caught.value)


def test_bounds_themselves_are_inside_whatever_the_rounding():
    """Thirds and sevenths, which float32 rounds."""
    for center, scale in ((1 / 3, 7.0), (0.1, 1 / 7), (1e6 + 0.1, 3e-3)):
        feature = Feature(name="n", least=0.3, most=0.7, center=center, scale=scale)
        x = torch.tensor([(0.3 - center) / scale, (0.7 - center) / scale], dtype=torch.float64)
        assert outside([feature], x.float()[:, None]) == {}
    wide = Feature(name="n", least=1)
    x = torch.tensor([[0.99], [0.5], [1e30]])
    assert outside([wide], x) == {"n": (2, 3)}
    assert "2 of 3 records are outside 1 to inf" in out_of_range([wide], x, 0.05)[0]
    assert out_of_range([wide], x, 0.7) == []
    assert out_of_range([wide], x[1:], 0.05) == []  # a single record decides nothing


def test_numbers_behind_categories_are_found_at_their_place():
    features = [Feature.model_validate(one) for one in (SEX, SUGAR)]
    assert width(features) == 3
    x = torch.tensor([[1, 0, 5.0], [0, 1, 50.0]])
    assert outside(features, x) == {"glucose": (1, 2)}


def test_data_without_names_does_not_meet_a_contract(job):
    x, y = torch.zeros(4, 1, 1, 4), torch.tensor([0, 1, 0, 1])
    with refused("the job declares 3 features, and this data set names none; use a table"):
        check_records(job, Dataset(x, y), "here")
    unnamed = Dataset(x + 1, y, features=job.features)
    with refused("the job names its classes, and this data set does not; name them"):
        check_records(job, unnamed, "here")


@pytest.mark.parametrize(
    ("features", "model", "why"),
    [
        (
            [AGE, SEX],
            {},
            r"features have 3 numbers, so a record has the shape \[1, 1, 3\]",
        ),
        (FEATURES, {"input": [4]}, r"'mlp' takes \[4\]; write model.input = \[1, 1, 4\]"),
        ([AGE, SEX, {"name": "age"}], {}, "features names 'age' 2 times; name each once"),
        (FEATURES, {"class_names": None}, "features without model.class_names"),
    ],
)
def test_a_contract_that_does_not_go_with_the_model_is_refused(make_job, features, model, why):
    with refused(why):
        make_job("fedavg", model={**MODEL, **model}, features=features)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"categories": ["a", "a"]}, "names one twice"),
        ({"categories": ["a"], "missing": "b"}, "is none of its categories"),
        ({"categories": ["a"], "most": 3}, "most does nothing for a feature with categories"),
        ({"categories": ["a"], "unit": "m"}, "unit does nothing"),
        ({"least": 3, "most": 2}, "least = 3.0 is above most = 2.0; lower it"),
        ({"missing": "none"}, "is no number; declare categories, or give a number"),
        ({"missing": "inf"}, "is no number"),
        ({"missing": "5.50"}, "is no number"),  # 5.5 has one spelling
        ({"scale": 0}, "greater than 0"),
        ({"mean": 3}, "mean"),
    ],
)
def test_a_feature_without_sense_is_refused(changes, why):
    with pytest.raises(ValidationError, match=why):
        Feature.model_validate({"name": "n", **changes})


def test_all_faults_are_named_and_many_are_counted():
    job = [Feature(name=str(n), center=n) for n in range(8)]
    own = [Feature(name=str(n)) for n in range(8)]
    faults = declarations_differ(job, own)
    assert len(faults) == 7
    assert shown(faults).endswith("; and 2 more")
    assert "feature '1': center is 1.0 in the job and 0.0 here" in shown(faults)
    composed, split = Feature(name="Gr\u00f6\u00dfe"), Feature(name="Gro\u0308\u00dfe")
    assert declarations_differ([composed], [split]) == []  # two spellings of one text
    ways = ([one, "m"] for one in ("f\u00e9", "fe\u0301"))
    one, other = (Feature(name="n", categories=way, missing=way[0]) for way in ways)
    assert declarations_differ([one], [other]) == []
    many = Feature(name="n", categories=[f"{n}\n" * 40 for n in range(9_999)])
    assert len(shown(declarations_differ([many], [one]))) < 500
    assert "\n" not in shown(declarations_differ([many], [one]))
    assert "140.0 in the job and 140.0000001 here" in shown(
        declarations_differ(
            [Feature(name="n", center=140)], [Feature(name="n", center=140.0000001)]
        )
    )
    (fault, *_) = declarations_differ([Feature(name="n")], [one])
    assert "category 0 is None in the job and 'f\u00e9' here" in fault


def test_answers_depend_on_no_single_record_and_in_a_private_job_on_none(make_job):
    """An operator who chooses ranges would find the oldest patient by the answers to some jobs."""
    x = torch.zeros(100, 1, 1, 4)
    x[:, 0, 0, 3] = 5.0
    x[:, 0, 0, 1] = 1.0
    y = torch.arange(100) % 2
    privacy = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5}
    jobs = [
        make_job("fedavg", model=MODEL, features=FEATURES, **fields)
        for fields in ({}, {"privacy": privacy})
    ]
    for outside_it, answers in ((5, [True, True]), (6, [False, True]), (100, [False, True])):
        some = x.clone()
        some[:outside_it, 0, 0, 3] = 50.0
        data = Dataset(some, y, ("alive", "dead"), features=jobs[0].features)
        taken = []
        for job in jobs:
            try:
                check_records(job, data, "here")
                taken.append(True)
            except LocalError:
                taken.append(False)
        assert taken == answers
        (said,) = range_advice(jobs[1], data)
        assert f"feature 'glucose': {outside_it} of 100 records are outside the range" in said
    assert range_advice(jobs[0], Dataset(x, y)) == []
