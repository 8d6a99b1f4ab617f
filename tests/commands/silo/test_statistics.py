"""``staddle data statistics``: what a job found, as a table, and features for the next."""

import json
import tomllib

import pytest
import torch
from support.jobs import make_job
from support.refusals import refused
from typer.testing import CliRunner

from staddle.algorithms.data.features import Feature
from staddle.algorithms.methods.statistics import STEPS
from staddle.commands.main import app
from staddle.commands.terminal.toml import to_toml
from staddle.files import tensor_file

FEATURES = [
    {"name": "age", "unit": "years", "least": 0, "most": 100},
    {"name": "sex", "categories": ["f", "m"], "missing": "f"},
    {"name": "bmi", "least": 10, "most": 60, "missing": -1},
    {"name": "dose", "least": 0, "most": 1, "missing": -1},
]
SUMS = {
    "records": [200],
    "classes": [150, 50],
    "present": [200, 100, 0],
    "histogram": [[0, 50, 100, 50, 0, 0], [2, 0, 98, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "sums": [50 * STEPS, 25 * STEPS, 0],
    "squares": [20 * STEPS, 10 * STEPS, 0],
    "categories": [80, 120],
}
MODEL = {"name": "glm", "classes": 2, "class_names": ["alive", "dead"], "input": [1, 1, 5]}


@pytest.fixture
def job(tmp_path):
    """A job file; of the job, keys that the command reads."""
    path = tmp_path / "job.toml"
    path.write_text(to_toml({"features": FEATURES, "model": MODEL}))
    return path


@pytest.fixture
def show(tmp_path, job):
    def call(sums=SUMS, of=job, prefix=""):
        file = tmp_path / "found.safetensors"
        tensors = {prefix + name: torch.tensor(value) for name, value in sums.items()}
        file.write_bytes(tensor_file.to_bytes(tensors))
        result = CliRunner().invoke(app, ["data", "statistics", str(file), "--job", str(of)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return call


def test_a_table_says_what_records_are_like(show):
    said = show()
    assert "200 training records: alive 150 (75.0%), dead 50 (25.0%)" in said
    lines = (line.strip("│").split("│") for line in said.splitlines() if line.startswith("│"))
    rows = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}
    # mean 25; deviation 100 √(0.1 − 0.25²); quantiles by the bins
    assert rows["age"] == ["0", "0", "25", "19.36", "5", "37.5", "70"]
    assert rows["bmi"][:4] == ["100", "2", "22.5", "9.682"]
    assert rows["dose"] == ["200", "0", "nan", "nan", "nan", "nan", "nan"]
    assert "sex: f 80 (40.0%), m 120 (60.0%)" in said


def test_features_of_the_next_job_have_the_means_and_deviations(show):
    said = show(prefix="extra/")
    age, sex, bmi, dose = tomllib.loads(said[said.index("[[features]]") :])["features"]
    assert age == {**FEATURES[0], "center": 25.0, "scale": 19.36}
    assert sex == FEATURES[1]
    assert bmi == {**FEATURES[2], "center": 22.5, "scale": 9.682, "missing": 22.5}
    assert dose == {"name": "dose", "least": 0, "most": 1}  # nobody has a value
    for one in (age, sex, bmi, dose):
        Feature.model_validate(one)


def test_a_mean_far_from_0_is_drafted_to_a_fraction_of_the_deviation(tmp_path, show):
    feature = {"name": "year", "least": 1_000_000, "most": 1_001_000}
    path = tmp_path / "far.toml"
    model = {**MODEL, "input": [1, 1, 1]}
    path.write_text(to_toml({"features": [feature], "model": model}))
    u, deviation = 0.234, 0.01
    steps = [round(100 * STEPS * value) for value in (u, u * u + deviation**2)]
    cells = {"histogram": [[0, 100, 0, 0]], "present": [100]}
    sums = {**SUMS, **cells, "sums": steps[:1], "squares": steps[1:]}
    del sums["categories"]
    said = show(sums, path)
    (drafted,) = tomllib.loads(said[said.index("[[features]]") :])["features"]
    assert drafted["center"] == pytest.approx(1_000_234, abs=0.01 * drafted["scale"])
    assert drafted["scale"] == pytest.approx(10, rel=0.05)


def test_a_signed_job_is_read_as_well(show, tmp_path):
    model = {"input": [1, 1, 5], "class_names": ["alive", "dead"]}
    job = make_job("statistics", model={"name": "glm", "classes": 2, **model},
        features=FEATURES, rounds=1)  # fmt: skip
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"document": job.document()}))
    assert show(of=path) == show()


@pytest.mark.parametrize(
    "changed",
    [
        {"classes": [3, 2, 1]},
        {"present": [1, 2]},
        {"histogram": [[0, 0, 0]]},
        {"sums": 3},
        {"categories": [1, 2, 3]},
        {"categories": [1]},
    ],
)
def test_a_file_of_another_job_is_refused(show, changed):
    with refused("found.safetensors: has no statistics of the features of .*job.toml; give"):
        show({**SUMS, **changed})


@pytest.mark.parametrize("lacking", sorted(SUMS))
def test_a_file_without_some_sums_is_refused(show, lacking):
    with refused("found.safetensors: has no statistics of the features of"):
        show({name: value for name, value in SUMS.items() if name != lacking})
