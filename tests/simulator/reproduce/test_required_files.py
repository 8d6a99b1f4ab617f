from pathlib import Path

import pytest

from staddle.simulator.reproduce.experiments import missing, records_of
from staddle.simulator.reproduce.published import PaperSetting

DEALT = {"kind": "dirichlet", "silos": 4, "alpha": 1.0}
SETS = {
    "CIFAR10": ({"kind": "torchvision", "name": "CIFAR10"}, "cifar-10-batches-py/batches.meta"),
    "EMNIST letters": ({"kind": "torchvision", "name": "EMNIST", "split": "letters"},
        "EMNIST/raw/emnist-letters-train-images-idx3-ubyte"),
    "tiny-imagenet-200": ({"kind": "tiny-imagenet", "folder": "tiny-imagenet-200"},
        "tiny-imagenet-200/wnids.txt"),
    "set": ({"kind": "images", "folder": "set", "domains": ["a", "b"]}, "set/b/class/1.png"),
    "flat": ({"kind": "images", "folder": "flat"}, "flat/class/1.png"),
    "har": ({"kind": "natural", "name": "har", "folder": "har"}, "har/har.npz"),
    "own.npz": ({"file": "own.npz"}, "own.npz"),
}  # fmt: skip


def of(data, folder, **more):
    return records_of(PaperSetting("x", "X", {"data": data, **more}), folder)


@pytest.mark.parametrize("name", SETS)
def test_what_is_missing_is_named_with_its_place(name, tmp_path):
    data, file = SETS[name]
    records = of(data, tmp_path, partition=DEALT)
    assert records.data.long_title == name
    (what,) = missing(records.data, records.partition)
    assert what.startswith(f"{name}: {tmp_path}")
    if name == "set":
        (tmp_path / "set/a").mkdir(parents=True)
        assert missing(records.data, records.partition)  # the other domain is not there yet
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    assert missing(records.data, records.partition) == ()


def test_another_split_of_emnist_is_missing(tmp_path):
    (tmp_path / "EMNIST/raw").mkdir(parents=True)
    (tmp_path / "EMNIST/raw/emnist-letters-train-images-idx3-ubyte").touch()
    other = of(
        {"kind": "torchvision", "name": "EMNIST", "split": "byclass"}, tmp_path, partition=DEALT
    )
    (what,) = missing(other.data, other.partition)
    assert "emnist-byclass-{train,test}" in what


def test_what_comes_with_the_software_is_never_missing_but_a_partition_s_file_may_be(tmp_path):
    bundled = of({"kind": "bundled", "name": "digits"}, tmp_path, partition={"file": "p.json"})
    assert missing(bundled.data, bundled.partition) == (f"partition: {tmp_path / 'p.json'}",)
    (tmp_path / "p.json").touch()
    assert missing(bundled.data, bundled.partition) == ()
    drawn = of({"kind": "synthetic"}, Path("nowhere"))
    assert (drawn.data.long_title, missing(drawn.data, drawn.partition)) == ("synthetic", ())
