import csv
import os
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.data import rows
from staddle.algorithms.data.features import Feature
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.errors import LocalError

TABLE = {"features": ["age", "bmi"], "label": "y"}
GOOD = "id,age,sex,bmi,y\np1,63,f,27.5,1\np2,41,m,-3e1,0\n"
TRUTHS = "age,bmi,y,z\n63,1,2.5,1\n41,2,-3e1,0\n"  # of other tasks than classification


@pytest.fixture
def read(tmp_path):
    def call(text, **fields):
        path = tmp_path / "records.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Csv(kind="csv", file=path, **{**TABLE, **fields}).read()

    return call


@pytest.fixture
def fault(read, tmp_path):
    def call(text, **fields):
        with pytest.raises(LocalError) as caught:
            read(text, **fields)
        assert str(caught.value).startswith(str(tmp_path / "records.csv"))
        return str(caught.value).removeprefix(str(tmp_path / "records.csv"))

    return call


def test_the_beginning_of_a_file_shows_what_columns_are_missing_and_no_more_is_read(tmp_path):
    table = Csv(kind="csv", file=tmp_path / "records.csv", **TABLE)
    begins = {"age,y\n63,1\n": "has no column 'bmi'", "age,bmi,y\n63,1\n": "2 columns, not 3"}
    for text, why in {**begins, "": "is empty"}.items():
        table.file.write_text(text)
        with refused(why):
            table.check_first()
    for text in ("age,bmi,y\n63,1,2\n63\n", "age,bmi,y\n"):
        table.file.write_text(text)
        table.check_first()


def test_declared_columns_are_read_in_the_declared_order(read):
    data = read(GOOD, features=["bmi", "age"])
    assert data.x.shape == (2, 1, 1, 2)
    assert data.x.flatten().tolist() == [27.5, 63, -30, 41]
    assert data.y.tolist() == [1, 0]
    assert (data.ids, data.class_names) == (None, None)


def test_a_job_takes_those_features_of_a_table_that_it_declares_in_its_order(tmp_path):
    """Others stay, also with all that is said of them; one that is missing is told as ever."""
    path = tmp_path / "records.csv"
    path.write_text(GOOD)
    fields = {"features": ["age", "sex", "bmi"], "categories": {"sex": ["f", "m"]}}
    table = Csv(kind="csv", file=path, label="y", center={"age": 60}, **fields)
    job = [Feature(name="bmi"), Feature(name="age", center=60)]
    data = table.load(None, job)
    assert data.x.flatten().tolist() == [27.5, 3, -30, -19]
    assert [feature.name for feature in data.features] == ["bmi", "age"]
    assert table.load(None).x.shape[-1] == 4  # without a job all, of which sex is two
    other = table.load(None, [Feature(name="bmi"), Feature(name="weight")])
    assert [feature.name for feature in other.features] == ["age", "sex", "bmi"]


@pytest.mark.parametrize(
    ("truth", "y", "names"),
    [
        ({"target": "y"}, torch.tensor([2.5, -30]), None),
        ({"survival": ("y", "z")}, torch.tensor([[2.5, 1], [-30, 0]]), None),
        ({"labels": ["z"]}, torch.tensor([[1], [0]]), ("z",)),
    ],
)
def test_what_is_true_of_a_record_may_be_other_columns_than_a_class(read, truth, y, names):
    data = read(TRUTHS, label=None, **truth)
    assert (data.y.dtype, data.y.tolist(), data.class_names) == (y.dtype, y.tolist(), names)
    assert data.x.flatten().tolist() == [63, 1, 41, 2]
    assert len(read("age,bmi,y,z\n", label=None, **truth)) == 0


@pytest.mark.parametrize(
    ("truth", "cells", "why"),
    [
        ({"target": "y"}, "SECRET,0", "column 'y': is not a number; correct it, or leave"),
        ({"target": "y"}, ",0", "column 'y': is not a number"),
        ({"survival": ("y", "z")}, "4,SECRET", "column 'z': is not a number"),
        ({"labels": ["z", "y"]}, "0,2", "column 'z': is neither 0 nor 1; correct it"),
        ({"labels": ["z", "y"]}, "1.0,0", "column 'y': is neither 0 nor 1; correct it"),
        ({"target": "w"}, "1,0", "has no column 'w'"),
    ],
)
def test_what_is_wrong_with_other_truths_is_named_without_a_value(fault, truth, cells, why):
    found = fault(f"age,bmi,y,z\n1,2,{cells}\n", label=None, **truth)
    assert why in found
    assert "SECRET" not in found


def test_ids_categories_classes_and_constants(read):
    data = read(
        GOOD,
        id="id",
        features=["age", "sex", "bmi"],
        categories={"sex": ["m", "x", "f"]},
        center={"age": 40},
        scale={"age": 10, "bmi": 2.5},
        classes=["1", "0"],
        class_names=["ill", "well"],
    )
    expected = torch.tensor([[2.3, 0, 0, 1, 11], [0.1, 1, 0, 0, -12]])
    assert torch.equal(data.x.flatten(1), expected)
    assert (data.y.tolist(), data.ids, data.class_names) == ([0, 1], ("p1", "p2"), ("ill", "well"))
    assert read(GOOD, classes=["0", "1"]).class_names == ("0", "1")
    assert read(GOOD, class_names=["well", "ill"]).class_names == ("well", "ill")


def test_arithmetic_is_in_64_bits_and_rounds_once(read):
    text = "age,bmi,y\n16777217.5,0.1,0\n"
    data = read(text, center={"age": 16777216}, scale={"bmi": 3})
    assert data.x.flatten().tolist() == [1.5, float(np.float32(0.1 / 3))]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + GOOD,  # as Excel writes it
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("\n", "\n\n"),
        GOOD.rstrip("\n"),
        GOOD.replace(",", " , "),
        GOOD.replace("63", '"63"').replace("p1", '"p,1\n"'),
    ],
    ids=[
        "byte order mark", "carriage returns", "blank lines", "no last newline", "spaces", "quotes",
    ],
)  # fmt: skip
def test_spellings_of_one_table(read, text):
    assert read(text).x.flatten().tolist() == [63, 27.5, 41, -30]
    assert len(read(text, id="id").ids) == 2


def test_other_delimiters_and_files_without_names(read):
    assert read(GOOD.replace(",", ";"), delimiter=";").y.tolist() == [1, 0]
    assert read(GOOD.replace(",", "\t"), delimiter="\t").y.tolist() == [1, 0]
    bare = read(GOOD.partition("\n")[2], columns=["id", "age", "sex", "bmi", "y"])
    assert bare.x.flatten().tolist() == [63, 27.5, 41, -30]


def test_missing_values_count_as_what_is_declared(read, fault):
    text = "age,bmi,y\n?,,1\n5, NA ,0\n"
    fields = {"missing_marks": ["", "?", "NA"], "center": {"age": 1}}
    assert read(text, **fields, missing={"age": 3, "bmi": 7.5}).x.flatten().tolist() == [
        2, 7.5, 4, 7.5,
    ]  # fmt: skip
    assert "line 2, column 'bmi': is missing; complete it" in fault(
        text, **fields, missing={"age": 3}
    )
    chosen = {"categories": {"bmi": ["low", "high"]}, "missing": {"age": 0, "bmi": "high"}}
    assert read("age,bmi,y\n1,,0\n", **chosen).x.flatten().tolist() == [1, 0, 1]


def test_a_column_may_have_marks_of_its_own(read, fault):
    """A cholesterol of 0 is none, and an ST depression of 0 is one."""
    text = "age,bmi,y\n0,0,1\n,,0\n?,5,0\n"
    fields = {"missing": {"age": -1, "bmi": 25}, "missing_marks": {"bmi": ["", "0"]}}
    assert read(text.replace("?", "7"), **fields).x.flatten().tolist() == [0, 25, -1, 25, 7, 5]
    # a column without marks of its own has none but the empty text
    assert "line 4, column 'age': is not a number" in fault(text, **fields)
    with pytest.raises(pydantic.ValidationError, match="missing_marks: 'BMI' is not in features"):
        read(text, missing_marks={"BMI": ["0"]})


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("", {}, "is empty; give a line with the columns' names"),
        ("\n\n", {}, "is empty; give a line with the columns' names"),
        ("age,BMI,y\n1,2,0\n", {}, "has no column 'bmi'; its columns: age, BMI, y"),
        ("age,bmii,y\n1,2,0\n", {}, "has no column 'bmi'; did you mean 'bmii'?"),
        ("age,bmi,bmi,y\n1,2,3,0\n", {}, "has 2 columns 'bmi'; name them apart"),
        ("age;bmi;y\n1;2;0\n", {},
            "has no column 'age'; its first line has no ',': separate columns so"),
        ("anna,63,27\n", {},
            ("nor any other that is declared; where a file has no line with the columns' names,"
            " give")),
        ("1,2,0\n", {"columns": ["age", "bmi", "z"]},
            "data.columns has no 'y'; add it where it stands"),
        ("age,bmi,y\n1,2,0\n1,2\n", {}, ", line 3: 2 columns, not 3"),
        ("age,bmi,y\n1,2,0,\n", {}, ", line 2: 4 columns, not 3"),
        ('age,bmi,y\n1,"2"5,0\n', {}, ", line 2: ',' expected after '\"'; correct its quotes"),
        ('age,bmi,y\n1,"2,0\n', {}, ", line 2: unexpected end of data; correct its quotes"),
        ("age,bmi,y\n1,2,0\n9,,0\n", {},
            ", line 3, column 'bmi': is missing; complete it"),
        ("age,bmi,y\n1,SECRET,0\n", {},
            ", line 2, column 'bmi': is not a number; write it like -3.5"),
        ("age,bmi,y\n1,2,SECRET\n", {},
            ", line 2, column 'y': is not a class number; declare what stands there"),
        ("age,bmi,y\n1,2,1.0\n", {}, ", line 2, column 'y': is not a class number"),
        ("age,bmi,y\n1,2,9999999999999999999\n", {}, ", line 2, column 'y': is not a class number"),
        ("age,bmi,y\n1,2,\n", {}, ", line 2, column 'y': is not a class number"),
        ("age,bmi,y\n1,2,SECRET\n", {"classes": ["a", "b"]},
            ", line 2, column 'y': is not one of data.classes (a, b)"),
        ("age,bmi,y\n1,SECRET,0\n", {"categories": {"bmi": ["a", "b"]}},
            "is not one of its categories (a, b); correct"),
        ("id,age,bmi,y\na,1,2,0\n ,1,2,0\n", {"id": "id"},
            ", line 3, column 'id': is empty; give the record an id"),
        ("age,bmi,y\n1,2,0\n".encode("utf-16"), {}, "is not UTF-8; save it as UTF-8"),
        (b"age,bmi,y\n1,\xe4,0\n", {}, "is not UTF-8; save it as UTF-8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_without_a_value(fault, text, fields, said):
    why = fault(text, **fields)
    assert said in why
    assert "SECRET" not in why
    assert "anna" not in why


@pytest.mark.parametrize(
    "text",
    ["nan", "inf", "-", "1_000", "0x10", "1,5", "١", "1e", ".", "1 2", "True", "1e5.0", "--1"],
)
def test_what_python_or_nobody_takes_for_a_number_is_none(fault, text):
    assert "line 2, column 'bmi': is not a number" in fault(f'age,bmi,y\n1,"{text}",0\n')


def test_a_file_that_is_not_there(tmp_path):
    with refused(r"none\.csv: cannot read it: No such file"):
        Csv(kind="csv", file=tmp_path / "none.csv", **TABLE).read()


def test_what_float32_cannot_hold_is_infinity_for_the_fit_to_find(read):
    assert read("age,bmi,y\n1e300,1e999,0\n").x.isinf().all()
    assert len(read("age,bmi,y\n")) == 0


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"features": ["age", "age"]}, "targets, id, source and group: 'age' is listed twice"),
        ({"features": ["age", "y"]}, "targets, id, source and group: 'y' is listed twice"),
        ({"id": "age"}, "targets, id, source and group: 'age' is listed twice"),
        ({"features": []}, "at least 1 item"),
        ({"columns": ["a", "a"]}, "columns: 'a' is listed twice"),
        ({"classes": ["a", "a"]}, "classes: 'a' is listed twice"),
        ({"classes": ["a"]}, "at least 2 items"),
        ({"center": {"aeg": 1}}, "center: 'aeg' is not in features; known: age, bmi"),
        ({"scale": {"y": 1}}, "scale: 'y' is not in features"),
        ({"scale": {"age": 0}}, "greater than 0"),
        ({"center": {"age": float("nan")}}, "finite number"),
        ({"center": {"age": True}}, "valid number"),
        ({"categories": {"sex": ["f"]}}, "categories: 'sex' is not in features"),
        ({"categories": {"age": ["f", "f"]}}, "categories: 'f' is listed twice for 'age'"),
        ({"categories": {"age": ["f"]}, "center": {"age": 1}},
            "'age' has categories, which are not centred or scaled"),
        ({"categories": {"age": ["f"]}, "scale": {"age": 1}},
            "'age' has categories, which are not centred or scaled"),
        ({"missing": {"sex": 1}}, "missing: 'sex' is not in features"),
        ({"missing": {"age": "1"}},
            "missing: age = '1'; give a number, or declare the column's categories"),
        ({"categories": {"age": ["f"]}, "missing": {"age": "m"}},
            "missing: age = 'm'; give one of its categories: f"),
        ({"label": None}, "name what is true of a record: label, the column of its class, or one"),
        ({"target": "z"}, "name what is true of a record"),
        ({"label": None, "target": "z", "survival": ("t", "e")}, "name what is true of a record"),
        ({"label": None, "labels": []}, "name what is true of a record"),
        ({"label": None, "survival": ("t",)}, "survival: name two columns"),
        ({"label": None, "survival": ("t", "t")}, "'t' is listed twice"),
        ({"label": None, "labels": ["age"]}, "'age' is listed twice"),
        ({"label": None, "target": "bmi"}, "'bmi' is listed twice"),
        ({"label": None, "target": "z", "classes": ["a", "b"]},
            "classes and class_names are of a label; leave them out, or name it"),
        ({"label": None, "labels": ["z"], "class_names": ["a"]}, "are of a label"),
        ({"delimiter": ", "}, "match pattern"),
        ({"delimiter": '"'}, "match pattern"),
    ],
)  # fmt: skip
def test_a_table_that_contradicts_itself_is_refused(fields, complaint):
    with pytest.raises(pydantic.ValidationError, match=complaint):
        Csv(**{"kind": "csv", "file": Path("x"), **TABLE, **fields})


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 9)),
        max_size=20,
    )
)
def test_what_is_written_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["v", "y"], *([repr(v), y] for v, y in rows)])
    data = Csv(kind="csv", file=path, features=["v"], label="y").read()
    assert data.x.flatten().tolist() == [v for v, _ in rows]
    assert data.y.tolist() == [y for _, y in rows]


def test_a_declared_column_is_the_source(read, fault):
    assert read(GOOD, source="sex").sources == ("f", "m")
    both = read(GOOD, id="sex", source="id")
    assert (both.ids, both.sources) == (("f", "m"), ("p1", "p2"))
    assert read(GOOD).sources is None
    expected = ", line 3, column 'sex': is empty; give the record a source"
    assert fault(GOOD.replace(",m,", ",,"), source="sex") == expected


HEART = [
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
    "slope", "ca", "thal",
]  # fmt: skip


@pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)
@pytest.mark.parametrize(
    ("hospital", "records"),
    [("cleveland", 303), ("hungarian", 294), ("switzerland", 123), ("va", 200)],
)
def test_four_hospitals_of_uci_heart_disease(hospital, records):
    table = Csv(
        kind="csv",
        file=Path(os.environ["STADDLE_DATA"]) / "heart_disease" / f"processed.{hospital}.data",
        columns=[*HEART, "num"],
        features=HEART[:10],
        label="num",
        missing_marks=["?"],
        missing=dict.fromkeys(HEART[3:10], 0),
    )
    data = table.read()
    assert data.x.shape == (records, 1, 1, 10)
    assert {0, 1} <= set(data.y.tolist()) <= {0, 1, 2, 3, 4}
    assert 28 <= data.x[..., 0].min() <= data.x[..., 0].max() <= 77


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1," * 40, 2),  # one line without an end
        ('"\n",' * 40, 15),  # one row of many lines
        ("1,2,3\n" * 9 + '"' + "\n" * 80, 60),  # a quote that nobody closes
    ],
)
def test_a_row_without_an_end_is_refused_before_it_is_read(fault, monkeypatch, text, line):
    monkeypatch.setattr(rows, "LONGEST_ROW", 50)
    said = f", line {line}: its row is longer than 50 characters; end each record by a line break,"
    assert fault(f"age,bmi,y\n{text}").startswith(said)


def test_a_file_of_many_rows_may_be_long(read, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_ROW", 50)
    assert len(read("age,bmi,y\n" + "1,2,1\n" * 40).y) == 40


def test_a_long_text_may_stand_where_nobody_uses_it(read, fault):
    text = f"age,bmi,y,note\n1,2,1,{'n' * 5000}\n"
    assert len(read(text).y) == 1
    assert fault(text, id="note") == (
        ", line 2, column 'note': is longer than 4,096 characters; correct it, or leave the record"
        " out"
    )


def test_decimals_with_a_comma(read, fault):
    text = "age;bmi;y\n63;27,5;1\n41;-3e1;0\n"
    data = read(text, delimiter=";", decimal=",")
    assert data.x.flatten().tolist() == [63, 27.5, 41, -30]
    target = read("age;bmi;y\n1;2;27,5\n", label=None, target="y", delimiter=";", decimal=",")
    assert target.y.tolist() == [27.5]
    # It may stand for thousands.
    assert fault("age;bmi;y\n63;27.5;1\n", delimiter=";", decimal=",") == (
        ", line 2, column 'bmi': is not a number; write it like -3,5. Or the silo declares,"
        " before it trains, its categories, or adds it to data.missing_marks"
    )
    assert "write it like -3.5" in fault("age;bmi;y\n63;27,5;1\n", delimiter=";")
    with pytest.raises(pydantic.ValidationError, match="decimal and delimiter are both ','"):
        read(GOOD, decimal=",")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8"])
def test_other_encodings(read, encoding):
    text = "größe,bmi,y\n1,2,0\n3,4,1\n".encode(encoding)
    data = read(text, features=["größe", "bmi"], encoding=encoding)
    assert data.x.flatten().tolist() == [1, 2, 3, 4]


def test_another_encoding_than_declared_is_told(fault):
    assert fault(b"age,bmi,y\n1,\x81,0\n", encoding="cp1252") == (
        ": is not CP1252; save it as UTF-8, or name its encoding"
    )
    assert "is not UTF-16" in fault(b"age,bmi,y\n1,2,0", encoding="utf-16")
    with pytest.raises(pydantic.ValidationError, match="encoding"):
        Csv(kind="csv", file="a", **TABLE, encoding="utf-7")


def test_dates_are_days_since_1970(read, fault):
    text = "age,bmi,y\n01.01.1970,1,0\n29.02.2024,2,1\n,3,0\n"
    dates = {"age": "%d.%m.%Y"}
    data = read(text, dates=dates, missing={"age": 10})
    assert data.x[:, 0, 0, 0].tolist() == [0, 19782, 10]
    assert data.features[0].unit == "days since 1970-01-01"
    fields = {"missing": {"age": 10}, "center": {"age": 10}, "scale": {"age": 2}}
    scaled = read(text, dates=dates, **fields)
    assert scaled.x[:, 0, 0, 0].tolist() == [-5, 9886, 0]
    hours = "age,bmi,y\n1970-01-02T01:00+0100,1,0\n1970-01-01T12:00+0000,1,1\n"
    zoned = read(hours, dates={"age": "%Y-%m-%dT%H:%M%z"})
    assert zoned.x[:, 0, 0, 0].tolist() == [1, 0.5]
    said = fault("age,bmi,y\n30.02.2024,2,1\n", dates=dates)
    assert said == (
        ", line 2, column 'age': is not a date written like %d.%m.%Y; correct one of them"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dates": {"age": "%d.%m"}}, "dates: age = '%d.%m' does not tell one day from another"),
        ({"dates": {"age": "%Y %m %d %d"}}, "does not tell one day from another"),
        ({"dates": {"age": "%q"}}, "dates: age = '%q' does not tell one day from another"),
        ({"dates": {"z": "%Y-%m-%d"}}, "dates: 'z' is not in features"),
        ({"dates": {"age": "%Y-%m-%d"}, "categories": {"age": ["a", "b"]}},
            "'age' has categories, which are not centred or scaled, and no dates"),
    ],
)  # fmt: skip
def test_dates_that_contradict_themselves(fields, said):
    with pytest.raises(pydantic.ValidationError) as caught:
        Csv(kind="csv", file="a", **TABLE, **fields)
    assert said in str(caught.value)
