"""Preprocessing as a module against the reader of files."""

from pathlib import Path

import pytest
import torch
from support.trained_models import CSV, table_job

from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.bundle.raw_records import TableColumns, raw_form
from staddle.bundle.trained import load

NAN = float("nan")


def columns(**fields):
    table = {**CSV, "file": Path("x.csv"), **fields}
    return Csv.model_validate(table)


def test_a_row_becomes_a_record():
    table = columns(center={"age": 50.0}, scale={"age": 10.0}, missing={"chol": 240.0, "sex": "m"})
    found = TableColumns(table)(torch.tensor([[60.0, 0.0, NAN], [45.0, NAN, 300.0]]))
    # age, the two categories of sex, chol
    assert found.tolist() == [[[[1.0, 1.0, 0.0, 240.0]]], [[[-0.5, 0.0, 1.0, 300.0]]]]


def test_what_may_not_be_missing_stays_nan():
    found = TableColumns(columns())(torch.tensor([[NAN, 0.0, 1.0]]))
    assert found.isnan().tolist() == [[[[True, False, False, False]]]]


@pytest.mark.parametrize("value", [NAN, -1.0, 2.0, 0.5])
def test_what_is_no_category_gets_no_answer(value):
    """Neither of the sexes is an answer about a patient of none."""
    found = TableColumns(columns())(torch.tensor([[60.0, value, 200.0]]))
    assert found.isnan().tolist() == [[[[False, True, True, False]]]]


def test_values_far_off_are_cut_as_the_reader_cuts_them():
    """Where the scale is the job's, no value stands out by more than 50 of it."""
    table = columns()
    table._reach = {"age": 50.0}
    found = TableColumns(table)(torch.tensor([[1e6, 0.0, 1e6], [-1e6, 1.0, 0.0]]))
    assert found[:, 0, 0, 0].tolist() == [50.0, -50.0]
    assert found[0, 0, 0, 3] == 1e6


@pytest.mark.parametrize("which", ["table", "image", "arrays"])
def test_the_made_up_records_are_read_alike(which, request):
    model = load(request.getfixturevalue(which))
    form = raw_form(model.contract, model.job)
    assert torch.allclose(form.module(form.raw), form.ready, atol=1e-6)
    assert form.ready.shape[1:] == torch.Size({"table": (1, 1, 4)}.get(which, (1, 8, 8)))


def test_inputs_say_what_each_number_is(table):
    model = load(table)
    inputs = raw_form(model.contract, model.job).inputs
    age, sex, chol = inputs
    ranged = {"least": 18.0, "most": 100.0, "center": 50.0, "scale": 12.5}
    assert age == {"name": "age", "unit": "years", **ranged, "missing": None}
    assert sex == {"name": "sex", "categories": ["f", "m"], "missing": "f"}
    assert chol["missing"] == 240.0


def test_a_record_that_is_one_thing_has_its_shape(image):
    model = load(image)
    (whole,) = raw_form(model.contract, model.job).inputs
    assert whole == {"record": "pixels from 0 to 1", "shape": [1, 8, 8]}


def test_pixels_count_as_the_contract_says(image):
    model = load(image)
    contract = model.contract.model_copy(update={"pixels": "bytes", "mean": (0.5,)})
    form = raw_form(contract, model.job)
    assert torch.allclose(form.module(form.raw), form.ready, rtol=1e-6)
    assert form.ready.max() > 100


def test_days_stand_for_dates():
    table = columns(
        features=["born", "chol"], categories={}, dates={"born": "%d.%m.%Y"}, scale={"born": 365.0}
    )
    form = raw_form(table, table_job())
    assert torch.allclose(form.module(form.raw), form.ready)
