import hashlib
import json

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.partition import file as module
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.partition.file import partition_file, read, save
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
