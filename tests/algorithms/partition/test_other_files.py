import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.partition.file import read, save
from staddle.algorithms.partition.other_files import read_partition

LABELS = np.arange(6)
# As FL-bench's generate_data.py leaves it, with arrays of int32 and empty lists.
PICKLED = {
    "separation": {"train": [0, 1], "val": [0, 1], "test": [0, 1], "total": 2},
    "data_indices": [
        {"train": np.array([4, 0], np.int32), "val": np.array([], np.int64), "test": [5]},
        {"train": np.array([2], np.int32), "val": [np.int64(3)], "test": np.array([1])},
    ],
}
GIVEN = {"a b": {"train": [4, 0], "test": [5]}, "1": {"train": [2], "validation": [3], "test": [1]}}


def sides_of(found):
    return {
        name: (own.train.tolist(), own.validation.tolist(), own.test.tolist())
        for name, own in found.sides().items()
    }


def write_csv(path, lines=None):
    rows = [f"{i},{c},{side}" for c, own in GIVEN.items() for side in own for i in own[side]]
    path.write_text("\n".join(["record,client,side", *rows] if lines is None else lines) + "\n")


def write_npz(path, **change):
    arrays = {f"{side}_{c}": np.array(i) for c, own in GIVEN.items() for side, i in own.items()}
    np.savez(path, **(arrays | change))


def write(path):
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(GIVEN))
        case ".csv":
            write_csv(path)
        case ".npz":
            write_npz(path)
        case ".pkl":
            path.write_bytes(pickle.dumps(PICKLED))


@pytest.mark.parametrize(
    ("name", "form"),
    [("p.json", "json"), ("p.csv", "csv"), ("p.npz", "npz"), ("partition.pkl", "fl-bench")],
)
def test_every_format_says_the_same(tmp_path, name, form):
    path = tmp_path / name
    write(path)
    found = read_partition(path, LABELS, "digits")
    first = "0" if form == "fl-bench" else "a b"
    assert sides_of(found) == {first: ([0, 4], [], [5]), "1": ([2], [3], [1])}
    assert (found.data, found.records, found.seed) == ("digits", 6, None)
    assert found.how == {"kind": "given", "format": form, "file": name}
    # The content shows the format, whatever the file is called, and it may be named.
    other = path.rename(tmp_path / "partition.of-others")
    assert sides_of(read_partition(other, LABELS, "digits")) == sides_of(found)
    assert sides_of(read_partition(other, LABELS, "digits", form)) == sides_of(found)
    save(tmp_path / "own.json", found)
    own = read_partition(tmp_path / "own.json", LABELS, "digits")
    assert own == read_partition(tmp_path / "own.json", LABELS, "digits", "staddle") == found
    with refused("other labels or in another order"):
        read_partition(tmp_path / "own.json", LABELS[::-1], "digits")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"a": {"train": [0, 6]}}, r"p\.json, client 'a', train: index 6 of 6 records; count from"),
        ({"a": {"test": [3, -1]}}, "client 'a', test: index -1 of 6 records"),
        ({"a": {"test": [2**70]}}, f"client 'a', test: index {2**70} of 6 records"),
        ({"a": {"train": [1, 2, 1]}},
            r"record 1 is given to client 'a' \(train\) and to client 'a' \(train\); keep one"),
        ({"a": {"train": [1, 4], "test": [4]}},
            r"record 4 is given to client 'a' \(train\) and to client 'a' \(test\)"),
        ({"a": {"train": [4]}, "b": {"train": [2], "validation": [4]}},
            r"record 4 is given to client 'a' \(train\) and to client 'b' \(validation\)"),
        ({"a": {"train": [1.0]}}, "client 'a', train: holds something else than whole numbers"),
        ({"a": {"train": [True]}}, "client 'a', train: holds something else than whole numbers"),
        ({"a": {"train": "01"}}, "client 'a', train: is no list; give whole numbers"),
        ({"a": {"trian": [1]}}, "client 'a': unknown side 'trian'; known: train, validation, test"),
        ({"a": [1, 2]}, "client 'a': has no sides; write"),
        ({}, r"p\.json: names no client; give each its indices"),
        ([1], "no table of clients"),
    ],
)  # fmt: skip
def test_wrong_indices_are_refused_by_client_and_index(tmp_path, given, text):
    (tmp_path / "p.json").write_text(json.dumps(given))
    with refused(text):
        read_partition(tmp_path / "p.json", LABELS, "digits")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"train_1": np.array([2, 4])}, "record 4 is given to client 'a b'"),
        ({"train_1": np.array([2.0])}, r"client '1', train: is float64 \[1\]; a list of whole"),
        ({"train_1": np.array([[2]])}, r"client '1', train: is int64 \[1, 1\]; a list of whole"),
        ({"train_1": np.array([True])}, r"client '1', train: is bool \[1\]"),
        ({"train_1": np.array([200], np.uint8)}, "client '1', train: index 200 of 6 records"),
        ({"train_1": np.array([None])}, "not a .npz file of plain arrays"),
        ({"x": np.array([1])}, "unknown array 'x'; save train_NAME and test_NAME of each client"),
        ({"train_": np.array([1])}, "unknown array 'train_'"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, change, text):
    write_npz(tmp_path / "p.npz", **change)
    with refused(text):
        read_partition(tmp_path / "p.npz", LABELS, "digits")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "the first line is not record,client,side"),
        (["0,a,train", "1,a,test"], "the first line is not record,client,side"),
        (["record,client,side"], "names no client"),
        (["record,client,side", "0,a"], "line 2: give a record, a client and a side"),
        (["record,client,side", "", "0,a,train", "1,a,test,x"], "line 4: give a record"),
        (["record,client,side", "0,a,train", "x,a,train"], "line 3: record is no whole number"),
        (["record,client,side", "9" * 5000 + ",a,train"], "line 2: record is no whole number"),
        (["record,client,side", "-1,a,train"], "client 'a', train: index -1 of 6 records"),
        (["record,client,side", "1,a,training"], "line 2: unknown side 'training'"),
        (["record,client,side", '1,"a,test'], "not a CSV file in UTF-8"),
        (["record,client,side", "\udcff,a,test"], "not a CSV file in UTF-8"),
    ],
)
def test_wrong_lines_are_refused(tmp_path, lines, text):
    (tmp_path / "p.csv").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with refused(text):
        read_partition(tmp_path / "p.csv", LABELS, "digits")


def test_an_archive_without_arrays_names_no_client(tmp_path):
    np.savez(tmp_path / "p.npz")
    with refused(r"p\.npz: names no client"):
        read_partition(tmp_path / "p.npz", LABELS, "digits")


SHARED = {"train": np.arange(6), "test": []}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"data_indices": [[1, 2]]}, "not FL-bench's partition.pkl, which has data_indices"),
        ([{"train": [1]}], "not FL-bench's partition.pkl"),
        ({"data_indices": [{"train": [0], "test": [0]}]},
            r"record 0 is given to client '0' \(train\) and to client '0' \(test\)"),
        ({"data_indices": [{"train": [0], 3: [0]}]}, "client '0': unknown side '3'"),
        ({"data_indices": [{"train": {0}}]}, "not a pickle of plain numbers"),
        ({"data_indices": [{"train": np.array([0, None])}]}, "client '0', train: is no list"),
        # A small file that names one array often ends at the second.
        ({"data_indices": [SHARED] * 6}, r"client '0' \(train\) and to client '1' \(train\)"),
        ({"data_indices": [{}] * 10_000}, "names 10,000 clients, and there are 6 records; leave"),
        ({"data_indices": [{"train": [0] * 7}]}, "holds 7 indices, and there are 6 records; give"),
        ({"data_indices": [{"train": [[0], [1, 2]]}]}, "holds something else than whole numbers"),
    ],
)  # fmt: skip
def test_wrong_pickles_are_refused(tmp_path, content, text):
    (tmp_path / "partition.pkl").write_bytes(pickle.dumps(content))
    with refused(text):
        read_partition(tmp_path / "partition.pkl", LABELS, "digits")


def test_nothing_of_a_partition_is_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    (tmp_path / "partition.pkl").write_bytes(pickle.dumps({"data_indices": [Hostile()]}))
    with refused(r"partition\.pkl: not a pickle of plain numbers, lists and arrays: it asks for"):
        read_partition(tmp_path / "partition.pkl", LABELS, "digits")
    assert not (tmp_path / "run").exists()


PPFL = {
    "train_idx": np.array([4, 0, 2, 3], np.int32),
    "train_ptr": np.array([0, 2, 4, 4], np.int32),
    "test_idx": np.array([5, 1], np.int32),
    "test_ptr": np.array([0, 1, 2, 2], np.int32),
}


def test_the_layout_of_the_published_splits(tmp_path):
    np.savez(tmp_path / "split.npz", **PPFL, similarity=np.eye(3))
    found = read_partition(tmp_path / "split.npz", np.arange(6), "mnist")
    sides = {name: (own.train.tolist(), own.test.tolist()) for name, own in found.sides().items()}
    assert sides == {"0": ([0, 4], [5]), "1": ([2, 3], [1]), "2": ([], [])}
    assert found.data == "mnist"
    assert found.records == 6
    assert found.seed is None
    assert found.how["file"] == "split.npz"
    save(tmp_path / "p.json", found)
    assert read(tmp_path / "p.json") == found
    with refused("deals out 6 records, there are 7; take the data set that it is of"):
        read_partition(tmp_path / "split.npz", np.arange(7), "mnist")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"test_ptr": np.array([0, 2, 1, 2])}, "test_ptr does not rise from 0 to 2"),
        ({"test_ptr": np.array([0, 1])}, "test_ptr does not rise"),
        ({"test_ptr": np.array([0, 2])}, "3 clients train and 1 test"),
        ({"test_idx": np.array([5, 4])}, "record 4 is given"),
        ({"test_idx": np.array([5, 6])}, "index 6 of 6 records"),
        ({"test_idx": np.array([5.0, 1.0])}, "test_idx is float64"),
        ({"test_idx": np.array([None, None])}, "not a .npz file of plain arrays"),
        (None, (r"has no array 'train_idx', only \['x'\]; save train_idx, train_ptr, test_idx and"
            r" test_ptr")),
    ],
)  # fmt: skip
def test_wrong_published_splits_are_refused(tmp_path, change, text):
    np.savez(tmp_path / "split.npz", **({"x": np.eye(2)} if change is None else PPFL | change))
    with refused(text):
        read_partition(tmp_path / "split.npz", np.arange(6), "mnist", "ppfl")


def test_no_split_where_there_is_no_archive(tmp_path):
    with refused("cannot read it"):
        read_partition(tmp_path / "split.npz", np.arange(6), "mnist", "ppfl")
    for content in (b"", b"PK\x03\x04", b"text"):
        (tmp_path / "split.npz").write_bytes(content)
        with refused(r"not a \.npz file of plain arrays; write one with"):
            read_partition(tmp_path / "split.npz", np.arange(6), "mnist", "ppfl")
    np.save(tmp_path / "one.npy", np.arange(3))
    with refused(r"one\.npy: holds one array; save train_idx"):
        read_partition(tmp_path / "one.npy", np.arange(6), "mnist", "ppfl")


@pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)
def test_the_published_mnist_split_spreads_groups_of_digits():
    folder = Path(os.environ["STADDLE_DATA"])
    files = [folder / f"MNIST/raw/{part}-labels-idx1-ubyte" for part in ("train", "t10k")]
    raw = b"".join(file.read_bytes()[8:] for file in files)
    labels = np.frombuffer(raw, np.uint8).astype(np.int64)
    path = folder / "ppfl_splits/mnist_100clients_4domains_alpha1.0.npz"
    sides = read_partition(path, labels, "mnist").sides()
    assert len(sides) == 100
    everything = np.sort(np.concatenate([own.all() for own in sides.values()]))
    assert np.array_equal(everything, np.arange(70000))
    held = np.array([np.bincount(labels[own.all()], minlength=10) for own in sides.values()])
    shares = held / held.sum(0)
    # one group: records are in the official order
    assert np.abs(shares[:, 0] - shares[:, 6]).max() < 0.01
    assert np.abs(shares[:, 0] - shares[:, 1]).max() > 0.02
