"""Folders that ``save_to_disk`` writes, and folders that are none."""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.refusals import refused
from support.saved_sets import label, save

from staddle.algorithms.data import saved_set
from staddle.algorithms.data.saved_set import inside, open_saved, saved_folder
from staddle.algorithms.data.sources.hugging_face.source import HuggingFace
from staddle.errors import LocalError

WRITTEN = Path(__file__).parent / "saved_by_datasets"

COLUMNS = {
    "age": pa.array([63, None, 5, 7], pa.int8()),
    "sex": [1, 0, -1, None],
    "note": [["a"], [], ["b"], []],
}
FEATURES = {"sex": label("f", "m"), "note": [{"_type": "Value"}]}


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "set", COLUMNS, FEATURES, shards=2)


def test_rows_have_the_names_of_classes_and_only_what_is_used(saved, monkeypatch):
    monkeypatch.setattr(saved_set, "AT_ONCE", 1)
    found = open_saved(saved)
    assert (len(found), found.names) == (4, ["age", "sex", "note"])
    rows = list(found.rows(["age", "sex"]))
    assert rows[0] == (0, ["age", "sex", "note"])
    assert [row[:2] for _, row in rows[1:]] == [["63", "m"], ["", "f"], ["5", ""], ["7", ""]]
    assert [number for number, _ in rows] == [0, 1, 2, 3, 4]
    assert [row for _, row in found.rows(["sex"], ["sex"])][1:3] == [["", "1", ""], ["", "0", ""]]
    with refused(r"set, column 'note': holds list<item: string>, and a cell can only be a number"):
        list(found.rows(["note"]))


def test_a_class_beyond_the_names_is_told(tmp_path):
    found = open_saved(save(tmp_path / "s", {"y": [0, 2]}, {"y": label("a", "b")}))
    with refused("column 'y': has class numbers beyond its 2 class names"):
        list(found.rows(["y"]))


def test_the_same_set_elsewhere_is_the_same(saved, tmp_path):
    save(tmp_path / "other", COLUMNS, FEATURES, shards=2)
    save(tmp_path / "more", {"age": [1] * 99}, FEATURES, shards=2)
    same, other, more = (open_saved(tmp_path / name).identity for name in ("set", "other", "more"))
    assert same == other != more
    assert str(tmp_path) not in same


def test_a_split_is_named_where_there_are_several(saved, tmp_path):
    both = tmp_path / "both"
    save(both / "train", COLUMNS)
    save(both / "test", COLUMNS)
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test", "gone"]}')
    assert saved_folder(both, "train") == both / "train"
    assert saved_folder(saved, None) == saved
    for folder, split, said in (
        (both, None, r"both: name one of its splits, as split: train, test, gone"),
        (both, "dev", r"both: name one of its splits, as split: train, test, gone"),
        (both, "gone", r"both/gone: has no state\.json, so it is no saved data set"),
        (saved, "train", r"set: has no splits; leave split out"),
        (tmp_path, None, r"has no state\.json, so it is no saved data set; write it again"),
        (tmp_path / "no", None, r"no: no such folder"),
    ):
        with refused(said):
            saved_folder(folder, split)
    (both / "dataset_dict.json").write_text('{"splits": 3}')
    with refused(r"dataset_dict\.json: splits = 3: give a list"):
        saved_folder(both, "train")


STATE = "data-00000-of-00001.arrow"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("state.json", "[]", r"state\.json: give a table"),
        ("state.json", "{", r"state\.json: not valid JSON"),
        ("state.json", "{}", r"state\.json: missing key '_data_files'"),
        ("state.json", '{"_data_files": 3}', r"state\.json: _data_files = 3: give a list"),
        ("state.json", '{"_data_files": [3]}', r"_data_files\.0 = 3: give a table"),
        ("state.json", '{"_data_files": [{"filename": 3}]}',
            r"_data_files\.0\.filename = 3: give a text"),
        ("state.json", '{"_data_files": [{"filename": "../a"}]}', r"no file in the folder"),
        ("state.json", '{"_data_files": [{"filename": "/etc/hosts"}]}', r"no file in the folder"),
        ("state.json", '{"_data_files": [{"filename": "http://a"}]}', r"no file in the folder"),
        ("state.json", '{"_data_files": [{"filename": "%s"}]}' % ("a" * 9999), "no file in the"),
        ("state.json", '{"_data_files": [{"filename": "\\u0000"}]}', r"no file in the folder"),
        ("dataset_info.json", '{"features": [1]}', r"features: give a table"),
        ("dataset_info.json", '{"features": {"y": {"_type": "ClassLabel"}}}',
            "column 'y': names: give a list of 1"),
        ("dataset_info.json", '{"features": {"y": {"_type": "ClassLabel", "names": ["a", "a"]}}}',
            r"info\.json, column 'y': names: a class is named twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_its_texts_is_named(tmp_path, file, text, said):
    folder = save(tmp_path / "s", {"y": [0, 1]})
    (folder / file).write_text(text)
    with refused(said):
        open_saved(folder)


def test_records_chosen_by_indices_are_refused(tmp_path):
    state = {"_indices_data_files": [{"filename": "indices.arrow"}]}
    with refused("its records are chosen by indices, as old versions of datasets wrote them"):
        open_saved(save(tmp_path / "s", {"y": [0]}, state=state))


def test_a_missing_file_a_fifo_and_a_link_to_elsewhere_are_refused(tmp_path):
    folder = save(tmp_path / "s", {"y": [0, 1]})
    (folder / STATE).rename(tmp_path / STATE)
    (folder / STATE).symlink_to(tmp_path / STATE)
    with refused("names 'data-00000-of-00001.arrow', no file in the folder"):
        open_saved(folder)
    (folder / "dataset_info.json").unlink()
    with refused(r"dataset_info\.json: cannot read it: No such file"):
        open_saved(folder)
    os.mkfifo(folder / "dataset_info.json")
    with refused(r"dataset_info\.json: is a FIFO"):
        open_saved(folder)
    assert inside(folder, STATE) is None
    assert inside(folder, "state.json") == folder.resolve() / "state.json"


def test_files_of_other_columns_are_told(saved, tmp_path):
    other = save(tmp_path / "other", {"age": ["x"]})
    (saved / "data-00001-of-00002.arrow").write_bytes((other / STATE).read_bytes())
    with refused(r"data-00001-of-00002\.arrow: has other columns than the data set's first"):
        open_saved(saved)


def test_no_damaged_file_raises_anything_else(tmp_path):
    texts = [f"text {number}" * 5 for number in range(50)]
    columns = {"y": list(range(50)), "t": texts, "d": pa.array(texts).dictionary_encode()}
    folder = save(tmp_path / "s", columns)
    whole = (folder / STATE).read_bytes()
    stream = np.random.default_rng(3)
    faults = []
    for attempt in range(300):
        data = bytearray(whole)
        for place in stream.integers(0, len(data), 8):
            data[place] = stream.integers(0, 256)
        (folder / STATE).write_bytes(
            data[: len(data) if attempt % 3 else stream.integers(len(data))]
        )
        try:
            list(open_saved(folder).rows(["y", "t", "d"]))
        except LocalError as error:
            faults.append(str(error))
    assert len(faults) > 100
    assert not any("text 1" in fault for fault in faults)


def test_an_empty_file_is_told(tmp_path):
    folder = save(tmp_path / "s", {"y": [0, 1]})
    (folder / STATE).write_bytes(b"")
    with refused("its Arrow files are damaged: ArrowInvalid; write it again"):
        open_saved(folder)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_compressed_records_are_refused_before_they_are_unpacked(tmp_path, codec, dictionary):
    folder = save(tmp_path / "set", {"x": [1.0]})
    texts = pa.array(["a" * 1_000_000])
    held = pa.table({"x": texts.dictionary_encode() if dictionary else texts})
    written = pa.ipc.IpcWriteOptions(compression=codec)
    path = folder / "data-00000-of-00001.arrow"
    with pa.ipc.new_stream(path, held.schema, options=written) as stream:
        stream.write_table(held)
    before = pa.total_allocated_bytes()
    with refused("00001.arrow: its records are compressed, and would take any memory"):
        open_saved(folder)
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_a_dictionary_that_is_not_compressed_is_read(tmp_path):
    column = pa.array(["a", "b"]).dictionary_encode()
    assert len(open_saved(save(tmp_path / "set", {"x": column}))) == 2


def test_nothing_is_unpickled(tmp_path):
    """Old versions of the library stored a class of its own, pickled, as an extension type."""
    marks = tmp_path / "marks"
    evil = b"cos\nsystem\n(S'touch " + bytes(marks) + b"'\ntR."
    field = pa.field("x", pa.list_(pa.float32()), metadata={
        "ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": evil,
    })  # fmt: skip
    table = pa.table([pa.array([[1.0], [2.0]], pa.list_(pa.float32()))], schema=pa.schema([field]))
    found = open_saved(save(tmp_path / "s", table))
    assert found.form("x") == "array"
    assert found.pieces("x")[0].to_pylist() == [[1.0], [2.0]]
    assert not marks.exists()


def test_without_pyarrow_it_says_what_to_install(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(r"are read by pyarrow; pip install 'staddle\[huggingface\]'"):
        open_saved(saved)


def test_what_the_library_writes_is_read():
    """The folder was written by ``DatasetDict.save_to_disk`` of datasets 5.2.0.

    Split ``chosen`` was made by ``select([3, 2, 1])``, with a format that shows ``age`` alone.
    """
    whole, chosen = (open_saved(saved_folder(WRITTEN, name)) for name in ("train", "chosen"))
    expected = [["63", "m", "2024-02-01"], ["41", "f", "2024-02-02"], ["", "", "2024-02-03"],
                ["70", "m", "2024-02-04"]]  # fmt: skip
    used = ["age", "sex", "seen"]
    assert [row[:3] for _, row in whole.rows(used)][1:] == expected
    assert [row[:3] for _, row in chosen.rows(used)][1:] == expected[:0:-1]
    assert whole.class_names == {"sex": ("f", "m"), "ill": ("no", "yes")}
    forms = ["cell", "cell", "cell", "array", "array", "image", "cell"]
    assert list(map(whole.form, whole.names)) == forms
    assert whole.held("image") == "Image, struct<bytes: binary, path: string>"
    given = {"kind": "huggingface", "folder": WRITTEN, "split": "train", "label": "ill"}
    grid = HuggingFace(**given, array="grid").read()
    assert torch.equal(grid.x, torch.arange(16.0).reshape(4, 2, 2))
    assert HuggingFace(**given, array="tokens").read().x[1].tolist() == [4, 5, 6]
    images = HuggingFace(**given, image="image").read_at((1, 2, 3))
    assert (images.x[:, 0, 1, 1] * 255).round().tolist() == [0, 1, 2, 3]
    assert (images.y.tolist(), images.class_names) == ([1, 0, 0, 1], ("no", "yes"))
