"""Parquet files hold the same records as CSV files."""

import sys
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from support.refusals import refused

from staddle.algorithms.data import rows
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.data.sources.formats.parquet import Parquet

KEYS = {
    "features": ["age", "sex", "bmi", "smokes", "seen"],
    "categories": {"sex": ["f", "m"]},
    "dates": {"seen": "%Y-%m-%d"},
    "missing": {"bmi": 25, "sex": "f"},
    "label": "outcome",
    "classes": ["alive", "dead"],
    "id": "patient",
}
COLUMNS = {
    "patient": ["a", "b", "c"],
    "age": pa.array([63, 41, 5], pa.int8()),
    "sex": pa.array(["m", None, "f"]).dictionary_encode(),
    "bmi": [27.25, None, float("nan")],
    "smokes": [True, False, True],
    "seen": [date(1970, 1, 2), date(1970, 1, 3), date(2024, 2, 29)],
    "outcome": ["dead", "alive", "alive"],
    "unused": [[1], [2, 3], []],
}
CSV = """patient,age,sex,bmi,smokes,seen,outcome
a,63,m,27.25,1,1970-01-02,dead
b,41,,,0,1970-01-03,alive
c,5,f,,1,2024-02-29,alive
"""


@pytest.fixture
def written(tmp_path):
    def call(columns=COLUMNS, **options):
        path = tmp_path / "records.parquet"
        parquet.write_table(pa.table(columns), path, **options)
        return path

    return call


def test_records_are_those_of_a_csv_file(written, tmp_path):
    (tmp_path / "records.csv").write_text(CSV)
    expected = Csv(kind="csv", file=tmp_path / "records.csv", **KEYS).read()
    found = Parquet(kind="parquet", file=written(), **KEYS).read()
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)
    assert found.ids == expected.ids == ("a", "b", "c")
    assert found.class_names == ("alive", "dead")
    assert found.features == expected.features


def test_numbers_read_back_as_they_are(written, monkeypatch):
    monkeypatch.setattr(rows, "AT_ONCE", 2)
    values = [0.1, 1e-300, -2.5e17, 3.0, 1e22]
    columns = {
        "x": values,
        "y": [0.0, 1.0, 1.0, 0.0, 1.0],
        "z": list(map(Decimal, ["1.25", "2.00", "3.5", "4", "5"])),
    }
    path = written(columns, row_group_size=3)
    data = Parquet(
        kind="parquet", file=path, features=["x", "z"], scale={"x": 1e-300}, label="y"
    ).read()
    assert data.y.tolist() == [0, 1, 1, 0, 1]
    assert data.x[:, 0, 0, 1].tolist() == [1.25, 2, 3.5, 4, 5]
    with rows.parquet_rows(path) as found:
        assert next(found) == (0, ["x", "y", "z"])
        assert [(number, float(row[0])) for number, row in found] == list(enumerate(values, 1))


def test_errors_name_the_record_and_the_column(written, tmp_path):
    path = written({"age": ["old", "1"], "y": [0, 1]})
    with refused(r"records\.parquet, record 1, column 'age': is not a number; write it like -3\.5"):
        Parquet(kind="parquet", file=path, features=["age"], label="y").read()
    with refused("has no column 'agee'; did you mean 'age'"):
        Parquet(kind="parquet", file=path, features=["agee"], label="y").read()
    with refused("has no column 'age'; it has a single one; name that, or give another file"):
        Parquet(kind="parquet", file=written({"y": [0, 1]}), features=["age"], label="y").read()
    path.write_bytes(b"PAR1 is no more")
    with refused(r"records\.parquet: cannot read it as Parquet: .*; write it again"):
        Parquet(kind="parquet", file=path, features=["age"], label="y").read()
    with refused("cannot read it: No such file"):
        Parquet(kind="parquet", file=tmp_path / "none", features=["age"], label="y").read()


def test_a_damaged_file_is_told_while_it_is_read(written):
    path = written({"age": list(range(50_000)), "y": [0] * 50_000}, compression="snappy")
    data = bytearray(path.read_bytes())
    data[100:2000] = b"\xff" * 1900
    path.write_bytes(data)
    with refused("cannot read it as Parquet|cannot read it: "):
        Parquet(kind="parquet", file=path, features=["age"], label="y").read()


def test_without_pyarrow_it_says_what_to_install(written, monkeypatch):
    path = written()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(r"Parquet files are read by pyarrow; pip install 'staddle\[parquet\]'"):
        Parquet(kind="parquet", file=path, **KEYS).read()


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([0, 1], pa.timestamp("ns")),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([0, 2**31 - 1], pa.date32()),
        pa.array([b"a", b"\xff"]).view(pa.string()),
    ],
)
def test_values_that_python_cannot_hold_are_told_and_not_shown(written, cells):
    path = written({"age": cells, "y": [0, 1]})
    with refused(r"column 'age': Python cannot hold one of its values, of type .*; write") as told:
        Parquet(kind="parquet", file=path, features=["age"], label="y").read()
    assert "2147483647" not in str(told.value)
    # Its cause would be in a traceback.
    assert told.value.__cause__ is None
    assert told.value.__suppress_context__
