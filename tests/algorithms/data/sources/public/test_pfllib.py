import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data import pickled
from staddle.algorithms.data.sources.public.pfllib import Pfllib
from staddle.files import file_bounds

X = np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)


def write(folder, **change):
    """Two clients with training and test records; ``change`` replaces a file's content."""
    for side in ("train", "test"):
        (folder / side).mkdir(exist_ok=True)
        for client in (10, 9):
            data = {"x": X + client, "y": np.array([2, 0, 1])}
            np.savez_compressed(folder / side / f"{client}.npz", data=data)
    for name, data in change.items():
        np.savez_compressed(folder / "test" / f"{name.removeprefix('of_')}.npz", data=data)
    return Pfllib(kind="pfllib", folder=folder)


def test_a_client_is_a_source_and_training_records_come_first(tmp_path):
    found = write(tmp_path, of_10={"x": X[:1].astype(np.float64), "y": np.array([7], np.int32)})
    data = found.read()
    assert data.x.shape == (10, 1, 2, 2)
    assert data.y.tolist() == [2, 0, 1] * 3 + [7]
    assert data.sources == ("9",) * 3 + ("10",) * 3 + ("9",) * 3 + ("10",)
    assert data.ids[2:4] == ("train/9/2", "train/10/0")
    assert data.ids[-1] == "test/10/0"
    assert torch.equal(data.x[3:6], torch.from_numpy(X + 10))
    assert found.has_official_parts
    assert found.lacking() is None
    assert "none/{train,test}, as PFLlib's" in Pfllib(kind="pfllib", folder="none").lacking()


def test_bytes_that_become_numbers_of_four_are_asked_for(tmp_path, monkeypatch):
    found = write(tmp_path, of_9={"x": np.zeros((500, 2000), np.uint8), "y": np.zeros(500, int)})
    small = tmp_path / "test" / "9.npz"
    assert small.stat().st_size < 10_000
    # Enough for the file's own bytes, thrice.
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 3_900_000)
    monkeypatch.setattr(pickled, "STEP_BYTES", 0)  # of which this file has a few
    with refused(r"9\.npz, holds .* bytes: its records would take 4,004,000 bytes of memory"):
        found.read()


class Command:
    def __reduce__(self):
        return os.mkdir, ("run",)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"x": X, "y": np.array([1, 2])}, r"test/9\.npz: x is \[3, 1, 2, 2\] and y \[2\]"),
        ({"x": X[:0], "y": np.array([], np.int64)}, "one record or more are needed"),
        ({"x": [[1, 2], [3]], "y": np.array([1, 2])}, "x is no array of numbers"),
        ({"x": X, "y": np.array([0.5, 1, 2])}, "y is no array of numbers"),
        ({"x": X}, r"test/9\.npz: holds no x and y of a client; make it again with PFLlib"),
        (None, "holds no x and y of a client"),
        (X, r"test/9\.npz: data is float32 \[3, 1, 2, 2\], and one pickled object is needed"),
        ({"x": X[:, 0], "y": np.array([0, 1, 2])}, r"records of shape \[2, 2\], and \[1, 2, 2\]"),
        ({"x": X, "y": Command()}, "not a pickle of plain numbers, lists and arrays: it asks for"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, data, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(text):
        write(tmp_path, of_9=data).read()
    assert not Path("run").exists()


def test_a_client_with_one_side_is_refused(tmp_path):
    table = write(tmp_path)
    (tmp_path / "test" / "9.npz").unlink()
    with refused(r"2 clients have train/NUMBER\.npz, and 1 have test/NUMBER\.npz; name the folder"):
        table.read()


def test_a_bomb_is_measured_against_the_memory(tmp_path, monkeypatch):
    table = write(tmp_path, of_9={"x": np.zeros((500, 1, 100, 100), np.float32), "y": X})
    monkeypatch.setattr("staddle.files.file_bounds.available_memory", lambda: 10_000_000)
    with refused(r"test/9\.npz, holds .* data of what its header claims would take 60,"):
        table.read()
