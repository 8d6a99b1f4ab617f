from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.options import DataTable, ImageFiles, Pixels, Shared


class Unread:
    def read(self):
        raise MemoryError


class Pictures(Unread, Pixels):
    pass


class Shares(Unread, Shared):
    pass


class InFile(Unread, DataTable):
    kind: Literal["in-file"] = "in-file"
    file: Path


class InFolder(ImageFiles):
    kind: Literal["in-folder"] = "in-folder"
    folder: Path
    name: str = ""

    def read_at(self, shape):
        return shape


class Inside(Unread, DataTable):
    kind: Literal["inside"] = "inside"


def test_a_source_that_says_nothing_of_itself_is_known_by_its_keys():
    folders = [InFolder(folder="sets"), InFolder(folder=".", name="ten")]
    found = [InFile(file="d.npz"), *folders, Inside()]
    assert [source.path for source in found] == [Path("d.npz"), Path("sets"), Path(), None]
    titles = [(source.title, source.long_title) for source in found]
    assert titles == [(name, name) for name in ("d.npz", "sets", "ten", "inside")]
    assert [source.examine() for source in found] == ["records", "images", "images", "records"]
    assert [source.where for source in found] == ["d.npz", "sets", ".", "inside inside"]
    assert InFolder(folder=".").title == "in-folder"
    below = [source.below(Path("/a")) for source in found]
    expected = [Path("/a/d.npz"), Path("/a/sets"), Path("/a"), None]
    assert [source.path for source in below] == expected
    assert not any(source.has_official_parts for source in found)


def test_a_source_lacks_what_is_not_at_its_path(tmp_path):
    for source in (InFile(file=tmp_path / "d"), InFolder(folder=tmp_path / "d")):
        assert source.lacking() == str(tmp_path / "d")
        with refused("no such file" if isinstance(source, InFile) else "no such folder"):
            source.check_present()
    assert Inside().lacking() is None
    Inside().check_present()
    (tmp_path / "d").mkdir()
    InFolder(folder=tmp_path / "d").check_present()
    assert InFolder(folder=tmp_path / "d").lacking() is None


def test_a_source_reads_in_its_own_shape_or_in_the_models(make_job):
    model = make_job(model={"name": "glm", "classes": 2, "input": [1, 2, 3]}).model
    assert InFolder(folder="sets").needs_model
    assert InFolder(folder="sets").load(model) == (1, 2, 3)
    with refused(r"^sets: images are read in the size that a job's model takes; give a job"):
        InFolder(folder="sets").load(None)
    for given in (model, None):
        with refused(r"^inside inside: out of memory while reading the records"):
            Inside().load(given)


def test_pixels_become_fractions_less_the_mean_divided_by_the_deviation():
    x = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2) * 10
    plain = Pictures().from_bytes(x, "here")
    assert plain.dtype == torch.float32
    assert torch.equal(plain, torch.from_numpy(x / np.float32(255)))
    own = Pictures(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0)).from_bytes(x, "here")
    for channel, (mean, std) in enumerate([(0.1, 1.0), (0.2, 2.0), (0.3, 4.0)]):
        assert torch.allclose(own[:, channel], (plain[:, channel] - mean) / std)
    assert torch.allclose(Pictures(mean=(0.5,)).from_bytes(x, "here"), plain - 0.5)


def test_constants_may_be_taken_from_pixels_of_bytes():
    """By hand: (0 - 0.5) / 0.25 = -2 and (255 - 0.5) / 0.25 = 1018."""
    x = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    found = Pictures(mean=(0.5,), std=(0.25,), pixels="bytes").from_bytes(x, "here").flatten()
    assert found[[0, 128, 255]].tolist() == [-2.0, 510.0, 1018.0]
    assert torch.equal(found, (torch.arange(256) - 0.5) / 0.25)
    one, other = (Pictures(mean=(0.5,), pixels=pixels).constants for pixels in ("unit", "bytes"))
    assert one == "(0.5,) (1.0,)" != other


@pytest.mark.parametrize("key", ["mean", "std"])
def test_constants_are_one_a_channel_or_one(key):
    with refused(rf"here: data\.{key} has 2 numbers for 3 channels; give one a channel"):
        Pictures(**{key: (1.0, 1.0)}).from_bytes(np.zeros((1, 3, 2, 2), np.uint8), "here")


@pytest.mark.parametrize(
    "fields",
    [{"std": [0.0]}, {"std": [-1.0]}, {"mean": [float("nan")]}, {"mean": []}, {"mean": [True]}],
)
def test_constants_are_numbers_to_reckon_with(fields):
    with pytest.raises(pydantic.ValidationError):
        Pictures.model_validate(fields)


def test_shares_are_disjoint_even_and_the_same_everywhere():
    shares = [Shares(share=(k, 4), seed=3).indices(10).tolist() for k in (1, 2, 3, 4)]
    assert sorted(index for share in shares for index in share) == list(range(10))
    assert sorted(map(len, shares)) == [2, 2, 3, 3]
    assert all(share == sorted(share) for share in shares)
    assert shares == [[3, 4, 7], [1, 6, 9], [2, 5], [0, 8]]
    assert Shares(share=(1, 4), seed=4).indices(10).tolist() != shares[0]
    expected = Shares(share=(1, 4), seed=0).indices(10).tolist()
    assert Shares(share=(1, 4)).indices(10).tolist() == expected
    assert Shares().indices(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"share": [4, 3]}, r"share = \[4, 3\]: give \[k, n\]"),
        ({"seed": 1}, r"seed deals out shares; give share = \[k, n\] too"),
        ({"share": [0, 3]}, "greater than or equal to 1"),
        ({"share": [1]}, "Field required"),
    ],
)
def test_what_is_no_share_is_refused(fields, complaint):
    with pytest.raises(pydantic.ValidationError, match=complaint):
        Shares.model_validate(fields)
