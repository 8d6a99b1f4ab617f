"""Records that a program holds."""

import datetime as dt

import numpy as np
import pandas as pd
import pytest
import torch
from support.jobs import make_data
from support.other_tasks import document, records
from support.refusals import refused
from support.trained_models import CSV, HEADER, made, table_job, table_rows

import staddle
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.job.job import Job, JobFile

PATIENTS = {
    "patient": ["p1", "p2", "p3"],
    "age": [44, 71, 33],
    "sex": ["f", "m", None],
    "chol": [300.0, float("nan"), 180.5],
}
ROWS = "patient,age,sex,chol\np1,44,f,300\np2,71,m,\np3,33,,180.5\n"


@pytest.fixture(scope="module")
def model(table):
    return staddle.load_model(table)


@pytest.fixture(scope="module")
def told(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "new.csv"
    path.write_text(ROWS)
    return model.predict(path)


def test_columns_are_read_as_a_file_is(model, told):
    found = model.predict(PATIENTS)
    assert list(found) == ["record", "predicted", "p(no)", "p(yes)", "outside"]
    assert found["record"] == ["p1", "p2", "p3"]
    assert found["predicted"] == told["predicted"]
    assert np.array_equal(found["p(yes)"], told["p(yes)"])
    x = [[-0.48, 1, 0, 1.0], [1.68, 0, 1, -0.2], [-1.36, 1, 0, -1.39]]
    wanted = model.module.answers(torch.tensor(x)[:, None, None])
    assert np.allclose(found["p(yes)"], wanted[:, 1].numpy(), atol=1e-6)


@pytest.mark.parametrize("dtypes", ["plain", "nullable", "category"])
def test_a_data_frame_gets_a_data_frame_with_its_index(model, told, dtypes):
    frame = pd.DataFrame(PATIENTS).set_index("patient")
    if dtypes == "nullable":
        frame = frame.convert_dtypes()
    if dtypes == "category":
        frame["sex"] = frame["sex"].astype("category")
    found = model.predict(frame)
    assert list(found.index) == ["p1", "p2", "p3"]
    assert list(found.columns) == ["predicted", "p(no)", "p(yes)", "outside"]
    assert np.array_equal(found["p(yes)"], told["p(yes)"])
    assert found["p(no)"].dtype == float


def test_frames_of_another_contract_are_refused(model, arrays):
    with refused("the data frame: has no column 'chol'"):
        model.predict(pd.DataFrame(PATIENTS).drop(columns="chol"))
    with refused("the columns have from 2 to 3 values"):
        model.predict({**PATIENTS, "age": [44, 45]})
    with refused("the data frame, record 1, column 'age': is not a number"):
        model.predict({**PATIENTS, "age": [44, "old", 33]})
    with refused("column 'sex': is not one of its categories"):
        model.predict({**PATIENTS, "sex": ["f", "x", "m"]})
    with refused("a column is no list of values; give one per record"):
        model.predict({"age": 44, "sex": "f", "chol": 300.0})
    with refused("the columns have from 2 to 3 values; give one per record"):
        model.predict({**PATIENTS, "age": [44, 71]})
    with refused("the array holds what is no number"):
        model.predict(pd.DataFrame(PATIENTS).to_numpy())
    with refused("list: give a data frame, columns by name, an array or a path"):
        model.predict([[1, 2, 3]])
    with refused("the model takes no table"):
        staddle.load_model(arrays).predict(PATIENTS)


def test_labelled_records_measure_a_model(model, tmp_path):
    path = tmp_path / "labelled.csv"
    path.write_text(HEADER + "".join(table_rows(60)))
    found = model.evaluate(str(path))
    right = [called == "yes" for called in model.predict(path)["predicted"]]
    ill = [row.endswith("yes\n") for row in table_rows(60)]
    (own,) = found.thresholds
    assert found.measured.records == 60
    assert own.sensitivity == np.mean([one for one, truth in zip(right, ill, strict=True) if truth])


def test_a_notebook_shows_whose_model_it_is(model):
    assert repr(model) == "<LoadedModel of job 'heart', silo 'a': p(no), p(yes)>"


def near(found, by_file):
    """Equal but for the last bits: on some processors they depend on how long a batch is.

    A day's difference in a date would be fifty times as much.
    """
    return np.allclose(found, by_file, rtol=1e-5, atol=0)


def test_dates_are_written_as_the_contract_says(tmp_path):
    features = [{"name": "born", "unit": "days since 1970-01-01", "scale": 365.0}]
    job = table_job(
        features=features,
        model={"name": "mlp", "classes": 2, "input": [1, 1, 1], "class_names": ["no", "yes"]},
    )
    contract = {"kind": "csv", "features": ["born"], "dates": {"born": "%d.%m.%Y"}, "label": "ill"}
    contract |= {
        "classes": ["no", "yes"],
        "scale": {"born": 365.0},
        "decimal": ",",
        "delimiter": ";",
    }
    path = tmp_path / "records.csv"
    path.write_text("born;ill\n" + "01.02.1990;no\n02.03.1950;yes\n" * 8)
    own = {key: value for key, value in contract.items() if key != "kind"}
    data = Csv(kind="csv", file=path, **own).read()
    model = staddle.load_model(made(tmp_path / "model", job, data, contract))
    by_file = model.predict(path)["p(yes)"][:2]
    days = [dt.date(1990, 2, 1), dt.date(1950, 3, 2)]
    assert near(model.predict({"born": days})["p(yes)"], by_file)
    frame = pd.DataFrame({"born": pd.to_datetime(days)})
    assert near(model.predict(frame)["p(yes)"], by_file)


def test_arrays_are_taken_as_the_model_takes_them(arrays):
    model, x = staddle.load_model(str(arrays)), make_data(600).x
    found = model.predict(x.numpy())
    assert found["record"][-1] == "599"
    assert found["p(2)"].shape == (600,)
    assert np.array_equal(model.predict(x)["p(2)"], found["p(2)"])
    with refused(r"the array is \[600, 64\], and the model takes \[N, 1, 8, 8\]"):
        model.predict(x.reshape(600, 64))


def test_positions_are_arrays_of_classes(tmp_path):
    job = Job.from_file(JobFile.model_validate(document("segmentation")), "job.toml")
    data = records("segmentation", 12, 3)
    model = staddle.load_model(made(tmp_path / "model", job, data, {"kind": "npz"}))
    found = model.predict(data.held)
    assert len(found) == 12
    wanted = model.module.answers(data.held).argmax(1)
    assert all(np.array_equal(own, other) for own, other in zip(found, wanted, strict=True))


def test_a_frame_has_numbers_whatever_the_files_are_like(tmp_path):
    """A comma before decimals, and a mark of what is missing, are those of the silo's files."""
    contract = {**CSV, "decimal": ",", "delimiter": ";", "missing_marks": {"chol": ["NA"]}}
    rows = "patient;age;sex;chol;ill\n" + "p1;44,5;f;300;no\np2;61;m;NA;yes\n" * 8
    (tmp_path / "records.csv").write_text(rows)
    own = {key: value for key, value in contract.items() if key != "kind"}
    job, source = table_job(), Csv(kind="csv", file=tmp_path / "records.csv", **own)
    data = source.load(job.model, job.features)
    model = staddle.load_model(made(tmp_path / "model", job, data, source.contract()))
    by_file = model.predict(tmp_path / "records.csv")["p(yes)"][:2]
    frame = pd.DataFrame({"age": [44.5, 61], "sex": ["f", "m"], "chol": [300.0, None]})
    assert near(model.predict(frame)["p(yes)"], by_file)
