import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.partition import file as module
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.partition.file import partition_file, read, read_ppfl, save
from staddle.algorithms.partition.split import merged
from staddle.errors import LocalError

LABELS = np.arange(60) % 4
HOW = {"kind": "dirichlet", "silos": 3, "alpha": 0.1, "minimum": 5}


def made():
    parts = {
        f"klinik-ö{number}": part for number, part in enumerate(dirichlet(LABELS, 3, 0.1, 1, 5))
    }
    return merged(parts, "8:1:1", 1)


def test_a_file_is_read_back_and_any_json_reader_finds_the_indices(tmp_path):
    sides = made()
    written = partition_file(sides, LABELS, "digits", 1, HOW)
    save(tmp_path / "p.json", written)
    back = read(tmp_path / "p.json")
    assert back == written
    for name, own in back.sides().items():
        for side in ("train", "validation", "test"):
            assert np.array_equal(getattr(own, side), getattr(sides[name], side))
    back.check_labels(LABELS)
    plain = json.loads((tmp_path / "p.json").read_text())
    own = b"".join(int(label).to_bytes(8, "little") for label in LABELS)
    head = {"format": "staddle-partition/1", "data": "digits", "records": 60, "seed": 1, "how": HOW}
    head["labels_sha256"] = hashlib.sha256(own).hexdigest()
    rest = {"clients": plain["clients"], "file_sha256": plain["file_sha256"]}
    assert plain == {**head, **rest}
    assert [client["name"] for client in plain["clients"]] == list(sides)
    assert plain["clients"][1]["test"] == sides["klinik-ö1"].test.tolist()
    assert len((tmp_path / "p.json").read_text().splitlines()) == 5  # one line a silo


def test_one_bit_of_a_file_is_found(tmp_path):
    path = tmp_path / "p.json"
    save(path, partition_file(made(), LABELS, "digits", 1, HOW))
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            found = read(path)
        except LocalError:
            continue
        # another space
        assert found == partition_file(made(), LABELS, "digits", 1, HOW), data[at : at + 1]
    plain = json.loads(data)
    plain["clients"][0], plain["clients"][1] = plain["clients"][1], plain["clients"][0]
    path.write_text(json.dumps(plain))
    with refused(r"p\.json: changed since it was saved"):
        read(path)
    del plain["file_sha256"]  # of another program, or edited on purpose
    path.write_text(json.dumps(plain))
    assert list(read(path).sides()) != list(made())


def test_a_file_that_could_not_be_read_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 500)
    with refused(r"of 60 records takes .* bytes, at most 500"):
        save(tmp_path / "p.json", partition_file(made(), LABELS, "digits", 1, HOW))
    assert not (tmp_path / "p.json").exists()


def test_other_records_are_noticed():
    written = partition_file(made(), LABELS, "digits", 1, HOW)
    with refused("partition of digits: made for 60 records, there are 59"):
        written.check_labels(LABELS[1:])
    with refused("other labels or in another order"):
        written.check_labels(LABELS[::-1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["clients"][0].update(train=[60]), "index 60 of 60 records"),
        (lambda d: d["clients"][0].update(train=[-1]), "0 or more"),
        (lambda d: d["clients"][0].update(train=[1.5]), "whole number"),
        (lambda d: d["clients"].append({"name": "x", "train": [7], "validation": [], "test": []}),
            "record 7 is given"),
        (lambda d: d["clients"][0].update(train=[3], test=[3]),
            "record 3 is given to 'klinik-ö0' and 'klinik-ö0'"),
        (lambda d: d["clients"][0].update(name="klinik-ö1"), "klinik-ö1'] appear twice"),
        (lambda d: d.update(clients=[]), "clients"),
        (lambda d: d.update(format="staddle-partition/2"), "format"),
        (lambda d: d.update(labels_sha256="0"), "labels_sha256"),
        (lambda d: d.update(sides={}), "sides"),
        (lambda d: d.pop("records"), "records"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(tmp_path, change, text):
    path = tmp_path / "p.json"
    save(path, partition_file(made(), LABELS, "digits", 1, HOW))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(LocalError) as caught:
        read(path)
    assert text in str(caught.value)


PPFL = {
    "train_idx": np.array([4, 0, 2], np.int32),
    "train_ptr": np.array([0, 2, 3, 3], np.int32),
    "test_idx": np.array([5, 1], np.int32),
    "test_ptr": np.array([0, 1, 2, 2], np.int32),
}


def test_the_layout_of_the_published_splits(tmp_path):
    np.savez(tmp_path / "split.npz", **PPFL, similarity=np.eye(3))
    found = read_ppfl(tmp_path / "split.npz", np.arange(6), "mnist")
    sides = {name: (own.train.tolist(), own.test.tolist()) for name, own in found.sides().items()}
    assert sides == {"0": ([0, 4], [5]), "1": ([2], [1]), "2": ([], [])}  # record 3 is left over
    assert found.data == "mnist"
    assert found.records == 6
    assert found.seed is None
    assert found.how["file"] == "split.npz"
    save(tmp_path / "p.json", found)
    assert read(tmp_path / "p.json") == found


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
        read_ppfl(tmp_path / "split.npz", np.arange(6), "mnist")


def test_no_split_where_there_is_no_archive(tmp_path):
    with refused("cannot read it"):
        read_ppfl(tmp_path / "split.npz", np.arange(6), "mnist")
    for content in (b"", b"PK\x03\x04", b"text"):
        (tmp_path / "split.npz").write_bytes(content)
        with refused(r"not a \.npz file of plain arrays; write one with"):
            read_ppfl(tmp_path / "split.npz", np.arange(6), "mnist")
    np.save(tmp_path / "one.npy", np.arange(3))
    with refused(r"one\.npy: holds one array; save train_idx"):
        read_ppfl(tmp_path / "one.npy", np.arange(6), "mnist")


@pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)
def test_the_published_mnist_split_spreads_groups_of_digits():
    folder = Path(os.environ["STADDLE_DATA"])
    files = [folder / f"MNIST/raw/{part}-labels-idx1-ubyte" for part in ("train", "t10k")]
    raw = b"".join(file.read_bytes()[8:] for file in files)
    labels = np.frombuffer(raw, np.uint8).astype(np.int64)
    path = folder / "ppfl_splits/mnist_100clients_4domains_alpha1.0.npz"
    sides = read_ppfl(path, labels, "mnist").sides()
    assert len(sides) == 100
    everything = np.sort(np.concatenate([own.all() for own in sides.values()]))
    assert np.array_equal(everything, np.arange(70000))
    held = np.array([np.bincount(labels[own.all()], minlength=10) for own in sides.values()])
    shares = held / held.sum(0)
    # one group: records are in the official order
    assert np.abs(shares[:, 0] - shares[:, 6]).max() < 0.01
    assert np.abs(shares[:, 0] - shares[:, 1]).max() > 0.02
