import bz2
import os
import struct
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.sources.public import torchvision_sets
from staddle.algorithms.data.sources.public.torchvision_sets import SETS, Torchvision
from staddle.errors import LocalError

rng = np.random.default_rng(0)


def read(folder, name, **fields):
    return Torchvision(kind="torchvision", folder=folder, name=name, **fields).read()


def idx(path, array):
    """The layout of MNIST's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    )
    return array


def family(folder, prefixes=("train", "t10k"), first=0):
    """Five records to train on and three to test on."""
    made = {}
    for prefix, n in zip(prefixes, (5, 3), strict=True):
        raw = folder / "raw"
        x = rng.integers(0, 256, (n, 28, 28), np.uint8)
        y = np.arange(first, first + n, dtype=np.uint8)
        idx(raw / f"{prefix}-images-idx3-ubyte", x)
        idx(raw / f"{prefix}-labels-idx1-ubyte", y)
        made[prefix] = x, y
    return made


def cifar(folder, files, label_bytes=1):
    folder.mkdir(exist_ok=True)
    rows = {}
    for file in files:
        rows[file] = rng.integers(0, 256, (2, label_bytes + 3072), np.uint8)
        rows[file][:, :label_bytes] %= 10
        (folder / file).write_bytes(rows[file].tobytes())
    return rows


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "KMNIST"])
def test_both_parts_of_the_family_of_mnist(tmp_path, name):
    made = family(tmp_path / name)
    data = read(tmp_path, name)
    x = np.concatenate([made["train"][0], made["t10k"][0]])
    assert torch.equal(data.x, torch.from_numpy(x[:, None] / np.float32(255)))
    assert data.y.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert data.ids == (*(f"train/{n}" for n in range(5)), *(f"test/{n}" for n in range(3)))
    assert read(tmp_path, name, part="train").ids == data.ids[:5]
    assert read(tmp_path, name, part="test").ids == data.ids[5:]


def test_shares_keep_their_ids_and_constants_apply(tmp_path):
    family(tmp_path / "MNIST")
    whole = read(tmp_path, "MNIST")
    shares = [read(tmp_path, "MNIST", share=[k, 3], mean=[0.5], std=[0.25]) for k in (1, 2, 3)]
    assert sorted(sum((share.ids for share in shares), ())) == sorted(whole.ids)
    for share in shares:
        own = [whole.ids.index(own) for own in share.ids]
        assert torch.allclose(share.x, (whole.x[own] - 0.5) / 0.25)
        assert torch.equal(share.y, whole.y[own])


def test_letters_count_from_0_and_stay_as_they_are_stored(tmp_path):
    made = family(tmp_path / "EMNIST", ("emnist-letters-train", "emnist-letters-test"), first=1)
    data = read(tmp_path, "EMNIST", split="letters", part="train")
    assert data.y.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(
        data.x[:, 0], torch.from_numpy(made["emnist-letters-train"][0] / np.float32(255))
    )
    family(tmp_path / "EMNIST", ("emnist-balanced-train", "emnist-balanced-test"))
    assert read(tmp_path, "EMNIST", split="balanced", part="train").y.tolist() == [0, 1, 2, 3, 4]


def test_cifar_from_its_binary_layout_without_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torchvision_sets, "torchvision", lambda *_: pytest.fail("torchvision was asked for")
    )
    files = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    rows = cifar(tmp_path / "cifar-10-batches-bin", files)
    data = read(tmp_path, "CIFAR10")
    stacked = np.concatenate(list(rows.values()))
    assert data.y.tolist() == stacked[:, 0].tolist()
    assert torch.equal(
        data.x, torch.from_numpy(stacked[:, 1:].reshape(-1, 3, 32, 32) / np.float32(255))
    )
    assert (data.ids[0], data.ids[9], data.ids[10]) == ("train/0", "train/9", "test/0")
    fine = cifar(tmp_path / "cifar-100-binary", ["train.bin", "test.bin"], 2)
    assert read(tmp_path, "CIFAR100", part="test").y.tolist() == fine["test.bin"][:, 1].tolist()
    for content in (b"", b"x" * 3072, b"x" * 6147):
        (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(content)
        with refused(r"data_batch_3\.bin: .* not a whole number of records; fetch"):
            read(tmp_path, "CIFAR10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with refused(r"data_batch_3\.bin: cannot read it: No such file"):
        read(tmp_path, "CIFAR10")


def test_usps_in_libsvms_layout(tmp_path):
    lines = [
        f"{label} " + " ".join(f"{n}:{value}" for n in range(1, 257))
        for label, value in ((10, -1), (1, 1))
    ]
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    data = read(tmp_path, "USPS", part="test")
    assert data.y.tolist() == [9, 0]
    assert torch.equal(data.x, torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 1, 16, 16))


class Fake:
    """Stands for torchvision.datasets where the real files have a fixed MD5."""

    def __init__(self, **found):
        self.found, self.asked = found, None

    def __getattr__(self, name):
        def make(folder, **asked):
            self.asked = name, asked
            return type("Found", (), self.found)

        return make


def test_svhn_and_cifars_other_layout(tmp_path, monkeypatch):
    x = rng.integers(0, 256, (2, 3, 32, 32), np.uint8)
    svhn = Fake(data=x, labels=np.array([1, 0]))
    pickled = Fake(data=x.transpose(0, 2, 3, 1), targets=[1, 0])
    for name, fake, asked in [
        ("SVHN", svhn, {"split": "test"}),
        ("CIFAR100", pickled, {"train": False}),
    ]:
        monkeypatch.setattr(torchvision_sets, "torchvision", lambda *_, fake=fake: fake)
        data = read(tmp_path, name, part="test")
        assert torch.equal(data.x, torch.from_numpy(x / np.float32(255)))
        assert data.y.tolist() == [1, 0]
        assert fake.asked == (name, {"download": False, **asked})


@pytest.mark.parametrize(
    "found",
    [
        {"data": np.zeros((2, 16, 16), np.uint8)},
        {"data": np.zeros((1, 28, 28), np.uint8)},
        {"data": np.zeros((2, 28, 28), np.float32)},
    ],
)
def test_records_of_another_shape_are_refused(tmp_path, monkeypatch, found):
    monkeypatch.setattr(torchvision_sets, "torchvision", lambda *_: Fake(**found, targets=[1, 0]))
    with refused(r"MNIST, part 'train': 2 labels for .* not uint8 \[N, 1, 28, 28\]; fetch"):
        read(tmp_path, "MNIST")


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_is_not_there_is_said_where_to_put(tmp_path, name, monkeypatch):
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was asked")
    )
    with pytest.raises(LocalError) as caught:
        read(tmp_path, name, split="letters" if name == "EMNIST" else None)
    assert (
        f"{tmp_path}: no {name}, part 'train', that torchvision can read there; put the official"
        in str(caught.value)
    )
    assert SETS[name].files in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_torn_files_are_named_too(tmp_path):
    family(tmp_path / "MNIST")
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    whole = path.read_bytes()
    torn = (b"\0\0\7\3" + whole[4:], b"\0\0\x99\3" + whole[4:])
    for content in (b"", whole[:-1], whole[:10], *torn):
        path.write_bytes(content)
        with refused("no MNIST, part 'test', that torchvision can read"):
            read(tmp_path, "MNIST")
    (tmp_path / "usps.bz2").write_bytes(b"BZh9 torn")
    with refused("no USPS, part 'train', that"):
        read(tmp_path, "USPS")


@pytest.mark.parametrize("fields", [{"name": "EMNIST"}, {"name": "MNIST", "split": "letters"}])
def test_a_split_is_emnists(tmp_path, fields):
    with pytest.raises(pydantic.ValidationError, match="split is EMNIST's, which needs one"):
        Torchvision(kind="torchvision", folder=tmp_path, **fields)


def usps(**changed):
    x = np.linspace(-1, 1, 3 * 256, dtype=np.float32).reshape(3, 16, 16)
    y = np.array([9, 0, 4], np.uint8)
    return {"x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[1:], **changed}


def test_usps_from_one_file_has_the_pixels_that_torchvision_makes(tmp_path):
    np.savez(tmp_path / "usps.npz", **usps())
    data = read(tmp_path, "USPS")
    assert data.ids == ("train/0", "train/1", "train/2", "test/0", "test/1")
    assert data.y.tolist() == [9, 0, 4, 0, 4]
    # as USPS.__init__ has it
    theirs = ((usps()["x_train"] + 1) / 2 * 255).astype(np.uint8)[:, None]
    assert torch.equal(data.x[:3], torch.from_numpy(theirs / np.float32(255)))


@pytest.mark.parametrize(
    "changed",
    [
        {"x_test": np.full((2, 16, 16), 1.5, np.float32)},
        {"x_test": np.full((2, 16, 16), np.nan, np.float32)},
        {"x_test": np.zeros((2, 16, 16), np.uint8)},
        {"x_test": np.zeros((2, 256), np.float32)},
        {"y_test": np.zeros(2, np.float32)},
    ],
)
def test_usps_of_another_layout_is_refused(tmp_path, changed):
    np.savez(tmp_path / "usps.npz", **usps(**changed))
    assert len(read(tmp_path, "USPS", part="train")) == 3
    with refused(r"usps\.npz: x_test is .*; give pixels of -1"):
        read(tmp_path, "USPS", part="test")


@pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)
@pytest.mark.parametrize(
    ("name", "split", "records", "classes"),
    [
        ("MNIST", None, 10_000, 10),
        ("CIFAR10", None, 10_000, 10),
        ("EMNIST", "letters", 20_800, 26),
        ("USPS", None, 2007, 10),
    ],
)
def test_the_real_sets(name, split, records, classes):
    folder = Path(os.environ["STADDLE_DATA"])
    data = read(folder, name, split=split, part="test")
    assert data.x.shape == (records, *SETS[name].shape)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert torch.unique(data.y).tolist() == list(range(classes))
