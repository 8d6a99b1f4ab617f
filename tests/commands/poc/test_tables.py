"""What is drafted of one CSV file per silo, and which files are refused."""

import tomllib
from math import floor, log10
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from staddle.algorithms.data.registry import KINDS
from staddle.algorithms.job.job import Job, JobFile
from staddle.commands.poc import tables, workspace
from staddle.commands.poc.tables import SiloTables, TableForm, read_table
from staddle.commands.terminal.toml import to_toml
from staddle.errors import LocalError
from staddle.files.documents import validate

# In b.csv a column is in another place, one value is missing and class "2" is not there.
FILES = {
    "a": "age,sex,note,ill\n60,f,x y,0\n40,m,z,1\n50,f,q,2\n",
    "b": "sex,age,note,ill\nm,?,u,0\nf,70,v,1\nm,30,w,1\n",
}
JOB = {
    "version": 1,
    "name": "first",
    "seed": 1,
    "rounds": 1,
    "silos": ["a", "b"],
    "method": {"name": "fedavg"},
    "training": {"epochs": 1, "batch_size": 2, "lr": 0.1},
}


@pytest.fixture
def read(tmp_path):
    def drafted(texts=FILES, **reading) -> SiloTables:
        written = TableForm(**{"target": "ill", **reading})
        tables = {}
        for silo, text in texts.items():
            (tmp_path / f"{silo}.csv").write_text(text)
            tables[silo] = read_table(tmp_path / f"{silo}.csv", written)
        found = SiloTables(written, tables)
        found.check()
        return found

    return drafted


def test_the_draft_is_a_job_and_tables_that_fit_it(read):
    drafted = read()
    job = {**JOB, **drafted.described}
    assert Job.from_file(validate(tomllib.loads(to_toml(job)), JobFile, "x"), "x").features
    features = {own.name: own for own in drafted.features}
    assert list(features) == ["age", "sex"]
    assert drafted.classes == ("0", "1", "2")
    assert features["sex"].categories == ("f", "m")
    # 60, 40, 50, 70, 30
    assert (features["age"].center, features["age"].scale) == (50, 14)
    assert features["age"].missing == "50.0"
    assert (features["age"].least, features["age"].most) == (0, 200)
    assert job["model"]["input"] == [1, 1, 3]


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ((29, 77), 0, 200),
        ((94, 200), 0, 1000),
        ((-2.6, 6.2), -20, 20),
        ((-40, -31), -50, -20),
        ((-4, 0), -10, 0),
        ((0, 7), 0, 20),
        ((0.0012, 0.0034), 0, 0.01),
        ((1e6, 1e6 + 1), 999_990, 1_000_010),
    ],
)
def test_a_range_is_wider_than_the_records_round_and_on_their_side_of_zero(values, least, most):
    assert tables._range(*map(float, values)) == (least, most)


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=2, unique=True).map(sorted))
def test_a_range_has_all_records_and_shows_an_extreme_one_to_their_width_at_best(values):
    first, last = values
    assume(last - first > 1e-5 * max(abs(first), abs(last), 0.1))
    least, most = tables._range(first, last)
    assert least <= first < last <= most
    # An end that zero does not limit is a multiple of the step, whatever the last digits were.
    step = 10.0 ** (floor(log10(last - first)) + 1)
    for end in (least, most):
        assert abs(end / step - round(end / step)) < 1e-6
    assert not first > 0 or least >= 0
    assert not last < 0 or most <= 0


@pytest.mark.parametrize("silo", FILES)
def test_each_silo_reads_its_file_by_its_table(read, silo, tmp_path):
    drafted = read()
    document = {**JOB, **drafted.described}
    job = Job.from_file(validate(document, JobFile, "x"), "x")
    table = drafted.tables[silo].data(drafted.reading, drafted.contract, f"{silo}.csv")
    source = KINDS["csv"].model_validate(table).below(tmp_path)
    records = source.load(job.model, job.features, wary=True)
    assert list(records.x.shape) == [3, 1, 1, 3]
    assert records.y.tolist() == {"a": [0, 1, 2], "b": [0, 1, 1]}[silo]


def test_what_to_look_at(read):
    said = "\n".join(read().notes())
    assert "left out: 'note'" in said
    assert "b: has no record of class '2'" in said


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ("age,ill\n1,0\n2,1\n", r"b\.csv: its columns differ .*lacks 'note', 'sex'"),
        ("age,sex,note,ill,more\n1,f,x,0,1\n", "has besides 'more'"),
        ("age,sex,note\n1,f,x\n", r"b\.csv: has no column 'ill' \(--target\); its first line"),
        (
            "age,sex,note,ill\n1,f,x,no\n2,m,y,yes\n",
            r"b\.csv: target 'ill' has 'no', 'yes', and other files have '0', '1', '2'; write the",
        ),
        ("age,sex,note,ill\n1,f,x,\n2,m,y,1\n", "target 'ill': missing values: 1"),
        ("age,sex,note,ill\nold,f,x,0\nnew,m,y,1\nold,f,z,1\n", "'age': cells that are no num"),
        ("age,sex,note,ill\n1,f,x,0\n2,m\n", "lines with more or fewer columns"),
        ("age,sex,note,ill\n", "has no records"),
        ("age,sex,note,ill\n1,f,x,0\nx,m,y,1\n3,m,y,1\n", "cells that are no numbers: 1"),
    ],
)  # fmt: skip
def test_files_that_do_not_go_together(read, other, fault):
    with pytest.raises(LocalError, match=fault):
        read({**FILES, "b": other})


def test_files_may_share_classes_by_way_of_another(read):
    """Only the last one joins the first two; without it, none tells which class is which."""
    rows = "a,ill\n1,{}\n2,{}\n"
    pairs = {"a": ("0", "1"), "b": ("2", "3"), "c": ("1", "2")}
    texts = {silo: rows.format(*pair) for silo, pair in pairs.items()}
    assert read(texts).classes == ("0", "1", "2", "3")
    with pytest.raises(LocalError, match=r"b\.csv: target 'ill' has '2', '3'"):
        read({silo: texts[silo] for silo in "ab"})


def test_a_target_has_some_classes(read):
    rows = "".join(f"{n},{n % 2},{n}\n" for n in range(30))
    with pytest.raises(LocalError, match="30 different values; a target has 2 to 20 classes"):
        read({"a": f"age,sex,ill\n{rows}", "b": f"age,sex,ill\n{rows}"})


def test_a_delimiter_and_decimals_of_other_countries(read):
    text = "age;bmi;ill\n1;2,5;ja\n2;3,5;nein\n"
    drafted = read({"a": text, "b": text}, decimal=",")
    assert [own.name for own in drafted.features] == ["age", "bmi"]
    table = drafted.tables["a"].data(drafted.reading, drafted.contract, "data.csv")
    assert (table["delimiter"], table["decimal"], table["classes"]) == (";", ",", ["ja", "nein"])
    with pytest.raises(LocalError, match="decimals with a comma: 2"):
        read({"a": text, "b": text})


def test_the_column_of_ids_is_no_feature(read):
    text = "who,age,ill\n1,5,0\n2,6,1\n"
    drafted = read({"a": text, "b": text}, record_id="who")
    assert [own.name for own in drafted.features] == ["age"]
    assert drafted.tables["a"].data(drafted.reading, drafted.contract, "x.csv")["id"] == "who"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("age,sex,note,ill\n60,f,x,0\n40,m,z,3\n", "the jobs know no class '3'"),
        ("age,sex,note,ill\n60,d,x,0\n40,m,z,1\n", "sex"),
        ("age,note,ill\n60,x,0\n40,z,1\n", "feature 'sex' is no column here"),
        ("age,sex,note,ill\n6000,f,x,0\n40,m,z,1\n", "outside 0 to 200"),
    ],
)  # fmt: skip
def test_what_a_silo_that_joins_lacks(read, tmp_path, text, fault):
    drafted = read()
    (tmp_path / "c.csv").write_text(text)
    table = read_table(Path(tmp_path / "c.csv"), drafted.reading)
    assert fault in "\n".join(table.faults(drafted.reading, drafted.contract))


def test_a_silo_that_joins_may_lack_a_class(read, tmp_path):
    drafted = read()
    (tmp_path / "c.csv").write_text(FILES["b"])
    table = read_table(tmp_path / "c.csv", drafted.reading)
    assert table.faults(drafted.reading, drafted.contract) == []


def test_a_file_without_a_line_of_names_is_the_first_thing_said(tmp_path):
    """Before anything is said of its own name."""
    paths = [tmp_path / f"processed.{name}.data" for name in "ab"]
    for path in paths:
        path.write_text("63.0,1.0,0\n67.0,1.0,2\n")
    choices = workspace.Choices(data=tuple(map(str, paths)), target="disease")
    with pytest.raises(LocalError, match=r"has no column 'disease' \(--target\); its first line"):
        workspace.read_tables(choices)
