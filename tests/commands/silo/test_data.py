"""``staddle data inspect``: a table's columns, all its faults, and a [data] table to begin with."""

import json
import tomllib

import pyarrow as pa
import pytest
from pyarrow import parquet
from support import saved_sets
from support.jobs import make_job
from typer.testing import CliRunner

from staddle.algorithms.data.features import declarations_differ
from staddle.algorithms.data.registry import KINDS
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.commands.main import app
from staddle.commands.terminal.toml import to_toml
from staddle.errors import LocalError

FAULTY = """patient;age;sex;glucose;visit;outcome
1;63;f;5,1;2020-01-02;alive
2;50;m;NA;2020-02-02;dead
3;x;m;92;2020-01-02;dead
3;44;;5.5;2020-01-02;alive
5;44;f;5.5
"""
GOOD = "age,sex,glucose,outcome\n63,f,5.1,1\n50,m,NA,0\n40,m,7,0\n"
FEATURES = [
    {"name": "glucose", "unit": "mmol/l", "least": 0.5, "most": 40, "missing": 5.5},
    {"name": "age", "center": 60, "scale": 10},
    {"name": "sex", "categories": ["m", "f"]},
]
MODEL = {"name": "mlp", "classes": 2, "input": [1, 1, 4], "class_names": ["alive", "dead"]}


@pytest.fixture
def inspect(tmp_path):
    def call(text, *options, code=0):
        file = tmp_path / "p.csv"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        result = CliRunner().invoke(app, ["data", "inspect", str(file), *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return call


def draft(output):
    return tomllib.loads(output[output.index("[data]") :])["data"]


def test_all_faults_are_named_at_once(inspect):
    lines = inspect(FAULTY, "--delimiter", ";", "--label", "outcome", "--id", "patient", code=1)
    said = [line for line in lines.splitlines() if line.startswith(("lines ", "column ", "id '"))]
    for start in (
        "lines with more or fewer columns than the first, which has 6: 1, in lines 6;",
        "column 'age': cells that are no numbers: 1, the first in line 4;",
        "column 'glucose': decimals with a comma: 1, the first in line 2;",
        "column 'visit': has dates",
        "id 'patient': records whose id stands twice: 1",
    ):
        assert [line for line in said if line.startswith(start)], start
    assert len(said) == 5
    assert "m 2, f 1" in lines
    assert draft(lines)["features"] == ["age", "sex", "glucose"]


def test_the_draft_of_a_good_table_reads_it(inspect, tmp_path):
    output = inspect(GOOD, "--label", "outcome")
    assert "no fault found" in output
    table = draft(output)
    assert "classes" not in table  # numbers from 0 on
    assert table["categories"] == {"sex": ["f", "m"]}
    with pytest.raises(LocalError, match="column 'glucose': is missing"):
        Csv.model_validate(table).read()
    records = Csv.model_validate({**table, "missing": {"glucose": 5}}).read()
    assert (records.x.shape, records.y.tolist()) == ((3, 1, 1, 4), [1, 0, 0])
    texts = inspect(GOOD.replace(",1\n", ",ill\n").replace(",0\n", ",well\n"), "--label", "outcome")
    assert draft(texts)["classes"] == ["ill", "well"]
    assert "give --label COLUMN" in inspect(GOOD)


def test_marks_are_drafted_for_the_columns_that_have_them(inspect):
    text = "a,b,c,d,y\n1,NA,1,4,0\n2,5,,-,1\n3,?,2,9,0\n4,7,3,,1\n"
    table = draft(inspect(text, "--label", "y"))
    assert table["missing_marks"] == {"b": ["", "?", "NA"], "d": ["", "-"]}
    missing = dict.fromkeys("bcd", 0)
    assert len(Csv.model_validate({**table, "missing": missing}).read()) == 4
    assert "missing_marks" not in draft(inspect("a,y\n1,0\n,1\n3,1\n", "--label", "y"))


@pytest.mark.parametrize("signed", [True, False])
def test_a_jobs_features_are_compared_and_drafted(inspect, tmp_path, signed):
    job = make_job("fedavg", model=MODEL, features=FEATURES)
    path = tmp_path / ("job.json" if signed else "job.toml")
    if signed:
        path.write_text(json.dumps({"document": job.document()}))
    else:
        rows = "\n".join("[[features]]\n" + to_toml(feature) for feature in FEATURES)
        path.write_text(to_toml({"model": MODEL}) + rows)
    output = inspect(GOOD, "--label", "outcome", "--job", str(path))
    table = Csv.model_validate(draft(output))
    # a feature with a range takes its constants from the job, and its stand-in
    assert draft(output)["center"] == {"age": 60.0}
    assert "missing" not in draft(output)
    agreed = table.load(None, job.features)
    assert declarations_differ(job.features, agreed.features) == []
    assert table.class_names == ("alive", "dead")
    bad = GOOD.replace("5.1", "92").replace("63", "").replace(",m,", ",x,")
    said = inspect(bad, "--label", "outcome", "--job", str(path), code=1)
    assert "column 'glucose': 1 of 2 values are outside 0.5 to 40 mmol/l; they are 7 to 92" in said
    assert "column 'age': missing values: 1, and in the job none may be missing" in said
    assert "column 'sex': has 'x', the job's categories are m, f" in said
    gone = inspect(GOOD.replace("age", "alter"), "--label", "outcome", "--job", str(path), code=1)
    assert "the job's feature 'age' is no column here" in gone


@pytest.fixture
def model_job(tmp_path):
    """A job with these classes, in this order."""

    def written(*names):
        path = tmp_path / "job.toml"
        path.write_text(to_toml({"model": {**MODEL, "class_names": list(names)}}))
        return str(path)

    return written


def test_values_that_are_no_class_of_the_job_are_for_people_to_order(inspect, model_job):
    """Sorted, 'diseased' would have become 'absent', and nobody would have noticed."""
    text = "age,y\n60,healthy\n50,diseased\n"
    said = inspect(text, "--label", "y", "--job", model_job("absent", "present"), code=1)
    assert (
        "label 'y': its values are 'diseased', 'healthy'; the job's classes are 'absent',"
        " 'present'. Write data.classes so that its first value means 'absent'"
    ) in " ".join(said.split())
    assert {"classes", "class_names"}.isdisjoint(draft(said))
    assert "# In the order of class_names: classes = [?, ?]" in said
    assert '# class_names = ["absent", "present"]' in said
    for values in ("healthy,absent", "1,2", "0,1,2"):
        rows = "".join(f"60,{value}\n" for value in values.split(","))
        job = model_job("absent", "present")
        assert "Write data.classes" in inspect(
            f"age,y\n{rows}", "--label", "y", "--job", job, code=1
        )


def test_the_jobs_own_classes_are_drafted_in_its_order(inspect, model_job):
    text = "age,y\n60,died\n50,survived\n"
    table = draft(inspect(text, "--label", "y", "--job", model_job("survived", "died", "unknown")))
    assert table["classes"] == ["survived", "died", "unknown"]
    assert Csv.model_validate(table).load(None).y.tolist() == [1, 0]
    digits = inspect("age,y\n60,0\n50,1\n", "--label", "y", "--job", model_job("1", "0"))
    assert draft(digits)["classes"] == ["1", "0"]


def test_numbers_are_drafted_with_what_they_count_as(inspect, model_job):
    said = inspect("age,y\n60,0\n50,1\n", "--label", "y", "--job", model_job("absent", "present"))
    assert "# Is it so? 0 counts as 'absent', 1 counts as 'present'" in said
    assert draft(said)["class_names"] == ["absent", "present"]


def test_the_draft_names_its_file_wherever_it_is_copied_to(inspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.csv").write_text(GOOD)
    result = CliRunner().invoke(app, ["data", "inspect", "here.csv", "--label", "outcome"])
    assert draft(result.output)["file"] == str(tmp_path / "here.csv")


def test_columns_that_a_job_does_not_use_are_no_faults_of_it(inspect, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(to_toml({"features": [{"name": "age"}], "model": MODEL}))
    text = "age,ca,outcome\n60,0,alive\n50,0,dead\n"
    assert "no fault" in inspect(text, "--label", "outcome", "--job", str(job))
    assert "column 'ca': has 0 in all" in inspect(text, "--label", "outcome", code=1)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (FAULTY, ("--label", "outcome"), r"visit;outcome; is it --delimiter ';'\?"),
        ("", (), "is empty; give a line with the columns' names"),
        (GOOD, ("--label", "outcom"), "has no column 'outcom'; its columns: age, sex"),
    ],
)
def test_what_cannot_be_read_is_said(inspect, text, options, why):
    with pytest.raises(LocalError, match=why):
        inspect(text, *options)


@pytest.mark.parametrize("content", [b"[[features", b"name = '\xff'"])
def test_a_job_that_is_no_toml_is_said(inspect, tmp_path, content):
    (tmp_path / "j.toml").write_bytes(content)
    with pytest.raises(LocalError, match=r"j\.toml: not valid TOML"):
        inspect(GOOD, "--job", str(tmp_path / "j.toml"))


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n"])
def test_a_delimiter_is_one_character(inspect, delimiter):
    with pytest.raises(LocalError, match=r"--delimiter .*: give one character"):
        inspect(GOOD, "--delimiter", delimiter)


def test_large_classes_keep_all_their_digits(inspect):
    text = "age,ward\n" + "".join(f"{age},{1234567 + age % 2}\n" for age in range(9))
    assert draft(inspect(text, "--label", "ward"))["classes"] == ["1234567", "1234568"]


def test_faults_of_whole_files_and_labels(inspect):
    twice = inspect("a,a\n1,2\n", code=1)
    assert "2 columns are named 'a'; name them apart" in twice
    assert "has no records" in inspect("a,b\n", code=1)
    assert "its first line has a single column; is --delimiter another?" in inspect(FAULTY, code=1)
    one = inspect("a,y\n1,x\n2,x\n3,\n", "--label", "y", code=1)
    assert "label 'y': missing values: 1" in one
    assert "label 'y': 1 class; at least 2 are needed" in one
    constant = " ".join(inspect("a,chol\n1,0\n2,0\n3,\n", code=1).split())
    assert (
        "column 'chol': has 0 in all records that have a value; if it stands for a missing one, add"
        " it in quotes to the column's list in data.missing_marks"
    ) in constant
    empty = inspect("a,b\n1,\n2,NA\n", code=1)
    assert "column 'b': has no value" in empty


OTHERS = "id,age,days,died,nodule,fracture\na,63,5.5,1,0,1\nb,50,7,0,1,1\nc,44,1.25,1,0,0\n"


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (("--target", "days"), "target", "days"),
        (("--survival", "days", "died"), "survival", ["days", "died"]),
        (("--labels", "nodule", "--labels", "fracture"), "labels", ["nodule", "fracture"]),
    ],
)
def test_drafts_of_other_tasks_are_read(inspect, tmp_path, options, key, value):
    output = inspect(OTHERS, *options, "--id", "id")
    assert "no fault found" in output
    table = draft(output)
    assert table[key] == value
    assert "label" not in table
    assert not set(value if isinstance(value, list) else [value]) & set(table["features"])
    data = Csv.model_validate(table).load(None)
    assert len(data) == 3


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (OTHERS.replace("7,0", "long,0"), ("--target", "days"),
            "target 'days': cells that are no numbers: 1, the first in line 3"),
        (OTHERS.replace("7,0", ",0"), ("--target", "days"), "target 'days': missing values: 1"),
        (OTHERS.replace("7,0", "0,0"), ("--survival", "days", "died"),
            "survival 'days': has times that are not above 0"),
        (OTHERS.replace("7,0", "7,3"), ("--survival", "days", "died"),
            "survival 'died': has 3, and only 0 and 1 may stand there"),
        (OTHERS.replace("0,0\n", "0,2\n"), ("--labels", "nodule", "--labels", "fracture"),
            "labels 'fracture': has 2, and only 0 and 1 may stand there"),
    ],
)  # fmt: skip
def test_faults_of_other_targets_are_named(inspect, text, options, why):
    assert why in " ".join(inspect(text, *options, code=1).split())


def test_one_kind_of_target_is_given(inspect):
    with pytest.raises(LocalError, match="--label and --target: give one of them"):
        inspect(OTHERS, "--label", "died", "--target", "days")
    with pytest.raises(LocalError, match="has no column 'weeks'"):
        inspect(OTHERS, "--survival", "weeks", "died")


def test_tables_that_are_written_in_another_way_are_drafted_so(inspect, tmp_path):
    text = "größe;bmi;y\n1,5;27,5;0\n1,7;25,0;1\n"
    output = inspect(
        text.encode("cp1252"), "--delimiter", ";", "--decimal", ",", "--encoding", "cp1252",
        "--label", "y",
    )  # fmt: skip
    table = draft(output)
    assert "no fault found" in output
    assert (table["decimal"], table["encoding"], table["delimiter"]) == (",", "cp1252", ";")
    assert KINDS["csv"](**table).read().x.flatten().tolist() == [1.5, 27.5, 1.7000000476837158, 25]
    with pytest.raises(LocalError, match="is not UTF-8; save it as UTF-8, or name its encoding"):
        inspect(text.encode("cp1252"), "--delimiter", ";")
    said = inspect(text, "--delimiter", ";", code=1)
    assert 'say data.decimal = "," (here --decimal ,) if all have one' in said
    dates = inspect("a,seen\n1,01.02.2024\n2,02.02.2024\n", code=1)
    assert "has dates; as a feature they need data.dates" in dates


def test_a_parquet_file_is_drafted_as_one(tmp_path):
    path = tmp_path / "records.parquet"
    parquet.write_table(pa.table({"age": [63.5, None], "y": ["ill", "well"]}), path)
    result = CliRunner().invoke(app, ["data", "inspect", str(path), "--label", "y"])
    assert result.exit_code == 0, result.output
    table = draft(result.output)
    assert table["kind"] == "parquet"
    assert "50.0%" in result.output
    data = KINDS["parquet"](**table, missing={"age": 60}).read()
    assert data.x.flatten().tolist() == [63.5, 60]


def test_a_saved_data_set_is_shown_and_drafted(tmp_path):
    columns = {
        "patient": [1, 2, 3],
        "sex": [0, 1, 1],
        "age": [63.0, None, 40.0],
        "codes": [[1], [2], [3]],
        "seen": pa.array([{"a": 1}] * 3),
        "ill": [1, 1, 0],
    }
    features = {"sex": saved_sets.label("f", "m", "x"), "ill": saved_sets.label("no", "yes")}
    save = saved_sets.save
    save(tmp_path / "d" / "train", columns, features)
    save(tmp_path / "d" / "scans", columns | {"scan": saved_sets.images([b"x"] * 3)}, features)
    save(tmp_path / "d" / "texts", {key: columns[key] for key in ("codes", "ill")}, features)
    splits = '{"splits": ["train", "scans", "texts"]}'
    (tmp_path / "d" / "dataset_dict.json").write_text(splits)

    def inspect(split, *options, code=0):
        asked = ["data", "inspect", str(tmp_path / "d"), "--split", split, "--label", "ill"]
        result = CliRunner().invoke(app, [*asked, *options])
        assert result.exit_code == code, result.output
        return result.output

    output = inspect("train", "--id", "patient")
    for part in ("array", "list<item: int64>", "other", "struct<a: int64>", "m 2, f 1", "33.3%"):
        assert part in output
    assert "# Column 'codes' holds lists: for a model that takes it, name it as array in" in output
    table = draft(output)
    assert table == {
        "kind": "huggingface", "folder": str(tmp_path / "d"), "split": "train", "label": "ill",
        "id": "patient", "classes": ["no", "yes"], "features": ["sex", "age"],
        "categories": {"sex": ["f", "m", "x"]},
    }  # fmt: skip
    data = KINDS["huggingface"].model_validate(table | {"missing": {"age": 50}}).load(None)
    assert data.x[:, 0, 0].tolist() == [[1, 0, 0, 63], [0, 1, 0, 50], [0, 1, 0, 40]]
    table = draft(inspect("scans"))
    assert (table["image"], "features" in table) == ("scan", False)
    assert draft(inspect("texts"))["array"] == "codes"
    job = tmp_path / "job.toml"
    model = {**MODEL, "class_names": ["no", "yes"]}
    job.write_text(to_toml({"features": [{"name": "age", "missing": 25}], "model": model}))
    assert draft(inspect("scans", "--job", str(job)))["features"] == ["age"]
    with pytest.raises(LocalError, match=r"d: name one of its splits, as split: train, scans"):
        CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "d")], catch_exceptions=False)
