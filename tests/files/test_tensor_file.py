"""Files of tensors that show what a disk did to them."""

import hashlib

import pytest
import torch
from safetensors import safe_open

from staddle.errors import LocalError
from staddle.files import tensor_file

TENSORS = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "n": torch.tensor(7),
    "none": torch.empty(0, 4), "half": torch.tensor([0.5, -2.0], dtype=torch.float64),
}  # fmt: skip
METADATA = {"b": 'a "quoted" text, "sha256":"no"', "a": "[1, 2]", "ü": "ß\n\t\x01"}


def same(found, wanted=TENSORS):
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in wanted.items()
    )


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "some.safetensors"
    made.touch()
    tensor_file.write(made, TENSORS, METADATA)
    return made


def test_what_was_written_is_read(path):
    for tensors, metadata in (
        tensor_file.read(path),
        tensor_file.from_bytes(path.read_bytes(), "x"),
    ):
        same(tensors)
        assert metadata == METADATA
    with safe_open(path, "pt") as file:  # and by anybody else
        same({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        own = file.metadata()["sha256"]
    data = path.read_bytes()
    assert data.count(own.encode()) == 1
    assert hashlib.sha256(data.replace(own.encode(), b"0" * 64)).hexdigest() == own


def test_the_same_gives_the_same_bytes_in_memory_and_on_the_disk(path):
    reordered = dict(reversed(METADATA.items()))
    found = {tensor_file.to_bytes(TENSORS, each) for each in (METADATA, reordered) * 8}
    assert found == {path.read_bytes()}
    assert tensor_file.to_bytes(TENSORS) == tensor_file.to_bytes(TENSORS, {})


def test_tensors_in_one_memory_are_written_each_for_itself(tmp_path):
    """As a state has them whose kept tensor is one of its parts, or a part contributed twice."""
    w = torch.arange(6.0)
    shared = {"w": w, "again": w, "rows": w.reshape(2, 3)[1:]}
    apart = {name: tensor.clone() for name, tensor in shared.items()}
    assert tensor_file.to_bytes(shared) == tensor_file.to_bytes(apart)
    (made := tmp_path / "shared.safetensors").touch()
    tensor_file.write(made, shared)
    assert made.read_bytes() == tensor_file.to_bytes(apart)


def test_a_bit_that_a_disk_changed_is_found_wherever_it_is(path):
    data = bytearray(path.read_bytes())
    assert len(data) < 2000
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            why = r"^here: (is not as it was written|not a file of tensors)"
            with pytest.raises(LocalError, match=why):
                tensor_file.from_bytes(bytes(data), "here")
            data[at] ^= 1 << bit
    path.write_bytes(data[:-1] + b"\xff")
    why = r"some\.safetensors: is not as it was written: the disk changed it"
    with pytest.raises(LocalError, match=why):
        tensor_file.read(path)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
@pytest.mark.parametrize("more", [b"", b"\0"])
def test_what_is_cut_or_longer_is_refused(path, kept, more):
    path.write_bytes(path.read_bytes()[: None if more else kept] + more)
    with pytest.raises(LocalError, match=r"some\.safetensors: "):
        tensor_file.read(path)
    with pytest.raises(LocalError, match=r"^here: "):
        tensor_file.from_bytes(path.read_bytes(), "here")


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(LocalError, match=r"gone\.safetensors: .*No such file"):
        tensor_file.read(tmp_path / "gone.safetensors")
