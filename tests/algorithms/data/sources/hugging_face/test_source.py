"""Saved data sets as tables, and what their keys say."""

import pyarrow as pa
import pytest
import torch
from support.refusals import refused
from support.saved_sets import images, label, png, save

from staddle.algorithms.data.sources.formats.parquet import Parquet
from staddle.algorithms.data.sources.hugging_face.source import FORMS, HuggingFace
from staddle.files.documents import validate

KEYS = {
    "features": ["age", "sex", "bmi", "seen"],
    "categories": {"sex": ["m", "f"]},
    "center": {"age": 60},
    "scale": {"bmi": 5},
    "missing": {"bmi": 25, "sex": "f"},
    "missing_marks": {"bmi": ["", "-1"]},
    "dates": {"seen": "%Y-%m-%d"},
    "units": {"age": "years"},
    "id": "patient",
    "source": "ward",
    "group": "person",
}
COLUMNS = {
    "patient": ["a", "b", "c", "d"],
    "ward": [0, 0, 1, 1],
    "person": [7, 8, 8, 9],
    "age": pa.array([63, 41, 5, 70], pa.int8()),
    "bmi": pa.array([27.25, None, -1, float("nan")], pa.float32()),
    "seen": pa.array([1, 2, 3, 4], pa.date32()),
    "sick": [0, 1, 1, 0],
    "scan": [[1], [2, 3], [], []],
}
TEXTS = {"sex": ["m", None, "f", "m"], "outcome": ["dead", "alive", "alive", "dead"]}
CODES = {"sex": [1, -1, 0, 1], "outcome": [1, 0, 0, 1]}
FEATURES = {"sex": label("f", "m"), "outcome": label("alive", "dead"), "sick": label("no", "yes"),
            "ward": label("north", "south"), "scan": [{"_type": "Value"}]}  # fmt: skip


@pytest.fixture
def table(tmp_path):
    save(tmp_path / "set", COLUMNS | CODES, FEATURES, shards=2)

    def call(**fields):
        given = {"kind": "huggingface", "folder": tmp_path / "set", **KEYS, "label": "outcome"}
        return validate(given | fields, HuggingFace, "silo.toml")

    return call


def test_records_are_those_of_a_parquet_file_with_the_same_keys(table, tmp_path):
    from pyarrow import parquet  # noqa: PLC0415

    wards = {"ward": ["north", "north", "south", "south"]}
    parquet.write_table(pa.table(COLUMNS | TEXTS | wards), tmp_path / "p.parquet")
    given = {**KEYS, "label": "outcome", "classes": ["alive", "dead"]}
    expected = Parquet(kind="parquet", file=tmp_path / "p.parquet", **given).read()
    found = table().read()
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)
    assert found.by_record() == expected.by_record()
    assert found.sources == ("north", "north", "south", "south")
    assert found.class_names == expected.class_names == ("alive", "dead")
    assert found.features == expected.features
    assert torch.equal(table().load(None).x, found.x)


def test_the_silo_may_order_and_rename_the_classes(table):
    found = table(classes=["dead", "alive"], class_names=["D", "A"]).read()
    assert (found.y.tolist(), found.class_names) == ([0, 1, 1, 0], ("D", "A"))
    assert table(class_names=["A", "D"]).read().class_names == ("A", "D")
    with refused(r"set, record 1, column 'outcome': is not one of data\.classes \(0, 1\)"):
        table(classes=["0", "1"]).read()
    with refused(r"set, record 2, column 'sex': has no class; give the record one, or leave it"):
        table(label="sex", features=["age"], categories={}, center={}, scale={}, missing={},
              missing_marks={}, dates={}, units={}).read()  # fmt: skip


def test_numbers_of_classes_count_where_a_task_asks_for_numbers(table):
    found = table(label=None, labels=["sick", "outcome"]).read()
    assert found.y.tolist() == [[0, 1], [1, 0], [1, 0], [0, 1]]
    assert found.class_names == ("sick", "outcome")
    timed = table(label=None, survival=["person", "sick"], group=None).read()
    assert timed.y.tolist() == [[7, 0], [8, 1], [8, 1], [9, 0]]


def test_what_cannot_be_a_cell_is_named_with_its_type(table):
    plain = {key: {} for key in FORMS["features"]}
    with refused(r"set, column 'scan': holds list<item: int64>, and a cell can only be a number"):
        table(features=["scan"], **plain).read()
    with refused(r"set: has no column 'agee'; did you mean 'age'\?"):
        table(features=["agee"], **plain).read()
    with refused(
        r"set, record 1, column 'sex': is not a number; write it like -3\.5\. Or the silo"
    ):
        table(features=["sex"], **plain).read()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"features": []}, "name what a model takes: features, the columns of a table, or else"),
        ({"image": "scan"}, "name what a model takes: features, the columns of a table, or else"),
        ({"resize": True}, "resize does not go with features; leave it out, or name another"),
        ({"lazy": True}, "lazy does not go with features; leave it out, or name another"),
        ({"features": [], "array": "scan"}, "categories does not go with array; leave it out"),
        ({"split": "../set"}, "split = '../set'"),
        ({"label": "sex"}, "'sex' is listed twice"),
    ],
)
def test_keys_that_contradict_are_named(table, fields, said):
    with refused(said):
        table(**fields)


def test_a_split_is_a_place_and_a_name_of_its_own(table, tmp_path):
    save(tmp_path / "d" / "train", COLUMNS | CODES, FEATURES)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    source = table(folder="d", split="train").below(tmp_path)
    source.check_present()
    assert (source.title, source.where) == ("d/train", str(tmp_path / "d" / "train"))
    assert source.places == table(folder=tmp_path / "d" / "train").places
    assert source.lacking() is None
    assert len(source.read()) == len(COLUMNS["age"])
    assert table().title == "set"
    with refused("d: name one of its splits, as split: train"):
        table(folder=tmp_path / "d", split="test").check_present()
    with refused("d: name one of its splits, as split: train"):
        table(folder=tmp_path / "d").check_present()
    assert table(folder="d", split="no").below(tmp_path).lacking() == str(tmp_path / "d" / "no")


def test_only_images_need_a_model(tmp_path):
    folder = save(tmp_path / "i", {"image": images([png(1)] * 2), "y": [0, 1], "a": [[1.0]] * 2})
    given = {"kind": "huggingface", "folder": folder, "label": "y"}
    assert HuggingFace(**given, image="image").needs_model
    assert not HuggingFace(**given, array="a").needs_model
    with refused("images are read in the size that a job's model takes; give a job"):
        HuggingFace(**given, image="image").load(None)
