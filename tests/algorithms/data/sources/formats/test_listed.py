"""Images that a CSV file lists: any truth, ids, and lines that name no image."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.scans import series_affine, write_nifti, write_series

from staddle.algorithms.data.sources.formats.listed import ListedImages
from staddle.errors import LocalError

GREY = (1, 4, 5)
rng = np.random.default_rng(0)
BEGIN = rng.bit_generator.state


@pytest.fixture(autouse=True)
def _from_the_beginning():
    """So that no test's values depend on which others ran before it."""
    rng.bit_generator.state = BEGIN


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, GREY[1:], np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels / np.float32(255)


@pytest.fixture
def table(tmp_path):
    def call(lines, **fields):
        (tmp_path / "list.csv").write_text("\n".join(lines))
        how = {"file": tmp_path / "list.csv", "folder": tmp_path / "images", "image": "file"}
        return ListedImages(kind="listed", **{**how, "delimiter": ";", **fields})

    return call


@pytest.fixture
def images(tmp_path):
    return {name: write(tmp_path / "images" / name) for name in ("v1/a.png", "v1/b.png", "c.png")}


TIMES = ["file;person;months;died", "c.png;7;12,5;1", "v1/a.png;8;40;0", "v1/b.png;8;3;1"]
TIMED = {"survival": ["months", "died"], "decimal": ","}


def test_records_are_in_the_order_of_the_file(table, images):
    read = table(TIMES, **TIMED).read_at(GREY)
    assert read.ids == ("c.png", "v1/a.png", "v1/b.png")
    assert read.y.tolist() == [[12.5, 1.0], [40.0, 0.0], [3.0, 1.0]]
    for place, name in enumerate(read.ids):
        assert np.array_equal(read.x[place, 0].numpy(), images[name])
    assert read.groups is None
    grouped = table(TIMES, grouped=True, **TIMED).read_at(GREY)
    assert grouped.groups == ("c.png", "v1", "v1")
    by_column = table(TIMES, group="person", grouped=True, **TIMED).read_at(GREY)
    assert (by_column.groups, by_column.ids) == (("7", "8", "8"), read.ids)
    assert table(TIMES, id="person", **TIMED).read_at(GREY).ids == ("7", "8", "8")
    assert table(TIMES, **TIMED).examine() == "3 images that a file lists"
    lazy = table(TIMES, lazy=True, workers=1, **TIMED).read_at(GREY)
    assert torch.equal(lazy.x.whole(), read.x)
    shorter = table(TIMES[:3], lazy=True, **TIMED).read_at(GREY)
    assert shorter.x.identity() != lazy.x.identity()


@pytest.mark.usefixtures("images")
def test_classes_labels_and_numbers(table):
    lines = ["file;kind;wet;cold;price", "c.png;B;1;0;2.5", "v1/a.png;A;0;0;-1"]
    classes = table(lines, label="kind", classes=["A", "B"]).read_at(GREY)
    assert (classes.y.tolist(), classes.class_names) == ([1, 0], ("A", "B"))
    labels = table(lines, labels=["wet", "cold"]).read_at(GREY)
    assert (labels.y.tolist(), labels.class_names) == ([[1, 0], [0, 0]], ("wet", "cold"))
    assert table(lines, target="price").read_at(GREY).y.tolist() == [2.5, -1.0]


def test_volumes_are_files_and_folders(table, tmp_path):
    values = rng.integers(0, 100, (3, 4, 5)).astype(np.int16)
    write_series(tmp_path / "images" / "p1", values)
    write_nifti(tmp_path / "images" / "p2.nii.gz", values.transpose(2, 1, 0), series_affine())
    lines = ["file;price", "p1;1", "p2.nii.gz;2"]
    read = table(lines, target="price", window=[0, 100]).read_at((1, 3, 4, 5))
    assert torch.equal(read.x[0], read.x[1])
    assert np.allclose(read.x[0, 0].numpy(), values / 100, atol=1e-6)


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(
    "text", ["", "d.png", "v1/A.png", "{images}/c.png", "../list.csv", ".", "x" * 300, "v1\\a.png"]
)
def test_a_line_that_names_no_image_is_told_without_its_text(table, tmp_path, text):
    lines = [*TIMES, f"{text.format(images=tmp_path / 'images')};9;1;1"]
    with pytest.raises(LocalError) as caught:
        table(lines, **TIMED).read_at(GREY)
    assert str(caught.value) == (
        f"{tmp_path / 'list.csv'}, line 5, column 'file': names no image in data.folder; correct"
        " the path, or add the image"
    )


@pytest.mark.usefixtures("images")
def test_the_image_is_no_truth(table):
    with pytest.raises(ValueError, match="features, targets, id, source and group: 'file' is"):
        table(TIMES, target="file")
