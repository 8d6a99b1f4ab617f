"""A column of images, in memory or read when they are used."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.refusals import refused
from support.saved_sets import images, label, png, save

from staddle.algorithms.data.lazy import LazyRecords
from staddle.algorithms.data.sources.hugging_face.source import HuggingFace

SHAPE = (1, 2, 3)


@pytest.fixture
def table(tmp_path):
    def call(entries, columns=None, **fields):
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        count = len(entries)
        held = entries if isinstance(entries, pa.Array) else images(entries)
        own = {"image": held, "y": [each % 2 for each in range(count)], **(columns or {})}
        save(folder, own, {"image": {"_type": "Image"}, "y": label("a", "b")}, shards=2)
        given = {"kind": "huggingface", "folder": folder, "image": "image", "label": "y"}
        return HuggingFace(**given | fields)

    return call


def test_images_are_decoded_in_the_size_of_the_model(table):
    entries = [png(value) for value in range(9)]
    found = table(entries, mean=[0.5], std=[0.25]).read_at(SHAPE)
    assert found.x.shape == (9, *SHAPE)
    expected = (np.arange(9) / 255 - 0.5) / 0.25
    assert np.allclose(found.x[:, 0, 1, 2].numpy(), expected, atol=1e-6)
    assert (found.y.tolist(), found.class_names) == ([0, 1] * 4 + [0], ("a", "b"))
    assert (found.ids, found.sources, found.groups) == (None, None, None)
    assert table(entries, resize=True).read_at((3, 4, 4)).x.shape == (9, 3, 4, 4)
    ids = {"id": [f"p{each}" for each in range(9)]}
    assert table(entries, ids, id="id").read_at(SHAPE).ids == tuple(ids["id"])
    with refused(r"record 1, column 'image': 3 x 2 pixels, the job's model takes 4 x 4; resize it"):
        table(entries).read_at((1, 4, 4))
    with refused(r"images are \[channels, height, width\] with 1 or 3 channels"):
        table(entries).read_at((1, 2, 2, 2))
    with refused(r"data\.mean has 2 numbers for 1 channels"):
        table(entries, mean=[1, 2]).read_at(SHAPE)


@pytest.mark.parametrize("workers", [0, 1])
def test_lazy_images_are_the_same(table, workers):
    entries = [png(value) for value in range(8)]
    whole = table(entries).read_at(SHAPE)
    lazy = table(entries, lazy=True, workers=workers).read_at(SHAPE)
    assert isinstance(lazy.x, LazyRecords)
    order = np.array([7, 0, 4, 3])
    assert torch.equal(lazy.x.take(order).whole(), whole.x[torch.from_numpy(order)])
    other = table(entries, lazy=True, mean=[0.5]).read_at(SHAPE)
    assert lazy.x.identity() == table(entries, lazy=True).read_at(SHAPE).x.identity()
    assert other.x.identity() != lazy.x.identity()


def test_bytes_may_stand_alone(table):
    entries = pa.array([png(5), png(6)], pa.large_binary())
    assert (table(entries).read_at(SHAPE).x[:, 0, 0, 0] * 255).round().tolist() == [5, 6]


def test_a_path_is_only_of_a_file_in_the_folder(table, tmp_path):
    source = table([png(0), "own.png"])
    (source.folder / "own.png").write_bytes(png(9))
    (tmp_path / "other.png").write_bytes(png(9))
    (source.folder / "link.png").symlink_to(tmp_path / "other.png")
    assert source.examine() == "2 images of a saved data set"
    assert (source.read_at(SHAPE).x[1] * 255).round().unique().tolist() == [9]
    for path in ("../other.png", str(tmp_path / "other.png"), "https://a.b/c.png", "", "a\0b",
                 "x" * 5000):  # fmt: skip
        bad = table([png(0), path])
        for act in (bad.examine, lambda: bad.read_at(SHAPE)):  # noqa: B023 - called at once
            with refused(
                r"record 2, column 'image': holds no image, nor the path of one in"
            ) as told:
                act()
            assert path not in str(told.value) or not path
    linked = table(["link.png", png(0)])
    (linked.folder / "link.png").symlink_to(tmp_path / "other.png")
    with refused("record 1, column 'image': holds no image, nor the path of one"):
        linked.examine()


def test_a_missing_image_and_a_damaged_one_are_named(table):
    missing = images([png(0)] * 4).to_pylist()
    missing[3] = None
    with refused("record 4, column 'image': holds no image, nor"):
        table(pa.array(missing, images([]).type)).read_at(SHAPE)
    for data in (b"", b"no image", b"GIF89a" + bytes(50), png(0)[:40]):
        with refused("record 2, column 'image': cannot read it as PNG or JPEG: ") as told:
            table([png(0), data]).read_at(SHAPE)
        assert "BytesIO" not in str(told.value)
    # Lazy images are not read, but one that is not there shows at once.
    with refused("record 1, column 'image': holds no image, nor"):
        table(["gone.png", png(0)], lazy=True).read_at(SHAPE)
    lazy = table([png(0), b"x"], lazy=True).read_at(SHAPE)
    with refused("record 2, column 'image': cannot read it as PNG or JPEG"):
        lazy.x.whole()
    assert lazy.x.forgiving().whole()[1].isnan().all()


def test_a_file_that_claims_too_many_pixels_is_not_decoded(table):
    header = bytearray(png(0))
    header[16:24] = (50_000).to_bytes(4) * 2
    with refused(r"column 'image', holds 7\d bytes: claims more than|column 'image': cannot read"):
        table([bytes(header), png(0)]).read_at(SHAPE)


def test_what_is_no_column_of_images_is_named_with_its_type(table):
    with refused(r"column 'y': holds ClassLabel, int64, not images; name a column of type Image"):
        table([png(0)], {"z": [0]}, image="y", label="z").examine()
    with refused(r"has no column 'scan'; its columns: image, y"):
        table([png(0)], image="scan").read_at(SHAPE)
