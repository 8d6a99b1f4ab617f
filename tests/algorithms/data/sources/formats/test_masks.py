"""Images with masks: pairs by name, values that become classes, and faults that name the file."""

import resource
import shutil
import zlib

import numpy as np
import pydantic
import pytest
import torch
from PIL import Image
from support.scans import series_affine, write_nifti, write_series, write_slice

from staddle.algorithms.data.sources.formats.masks import ORIENTATION, Masks
from staddle.errors import LocalError

SHAPE = (1, 4, 5)
rng = np.random.default_rng(0)
BEGIN = rng.bit_generator.state


@pytest.fixture(autouse=True)
def _from_the_beginning():
    """So that no test's values depend on which others ran before it."""
    rng.bit_generator.state = BEGIN


def write(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return array


def grey(*shape):
    return rng.integers(0, 255, shape or SHAPE[1:], np.uint8, endpoint=True)


def labels(classes=2, shape=SHAPE[1:]):
    return rng.integers(0, classes, shape, np.uint8)


@pytest.fixture
def pair(tmp_path):
    def call(name, image=None, mask=None, ending="png"):
        image = grey() if image is None else image
        mask = labels() if mask is None else mask
        write(tmp_path / "images" / f"{name}.{ending}", image)
        write(tmp_path / "masks" / f"{name}.png", mask)
        return image, mask

    return call


@pytest.fixture
def read(tmp_path):
    def call(shape=SHAPE, **fields):
        return Masks(kind="masks", folder=tmp_path, **fields).read_at(shape)

    return call


@pytest.fixture
def fault(read):
    def call(**fields):
        with pytest.raises(LocalError) as caught:
            read(**fields)
        return str(caught.value)

    return call


def test_new_images_are_not_masks(pair, tmp_path):
    """A folder as a silo has it holds both; one without masks has images wherever they are."""
    names = [pair(name) and f"{name}.png" for name in ("a", "b")]
    table = Masks(kind="masks", folder=tmp_path)
    (both,) = table.new_records(tmp_path, SHAPE, 8)
    (images,) = table.new_records(tmp_path / "images", SHAPE, 8)
    assert both.names == images.names == names
    assert torch.equal(both.x, images.x)
    shutil.rmtree(tmp_path / "masks")
    (alone,) = table.new_records(tmp_path, SHAPE, 8)
    assert alone.names == [f"images/{name}" for name in names]


def test_each_image_has_the_mask_of_its_name(pair, read):
    second = pair("b", mask=labels(3))
    first = pair("a/visit", ending="PNG")
    data = read(class_names=["tissue", "lesion", "vessel"])
    assert data.ids == ("a/visit.PNG", "b.png")
    assert (data.y.dtype, tuple(data.y.shape)) == (torch.uint8, (2, 4, 5))
    for place, (image, mask) in enumerate((first, second)):
        assert np.array_equal(data.x[place, 0].numpy(), image / np.float32(255))
        assert np.array_equal(data.y[place].numpy(), mask)
    assert data.class_names == ("tissue", "lesion", "vessel")
    lazy = read(lazy=True, workers=1)
    assert torch.equal(lazy.x.whole(), data.x)
    assert torch.equal(lazy.y, data.y)
    known = lazy.x.identity()
    assert known == read(lazy=True).x.identity()
    assert known != read(lazy=True, mean=[0.5]).x.identity()
    pair("c")
    assert known != read(lazy=True).x.identity()


def test_what_systems_leave_in_folders_has_no_partner(pair, read, tmp_path):
    pair("a")
    alone = read()
    for folder in (tmp_path, tmp_path / "images", tmp_path / "masks"):
        for name in ("Thumbs.db", ".DS_Store", "desktop.ini"):
            (folder / name).write_bytes(b"no image")
    assert (read().ids, torch.equal(read().y, alone.y)) == (alone.ids, True)


def test_values_become_classes_in_their_order(pair, read, fault, tmp_path):
    _, mask = pair("a", mask=np.array([[0, 255, 255, 0, 0]] * 4, np.uint8))
    assert np.array_equal(read(values=[0, 255]).y[0].numpy(), mask // 255)
    assert np.array_equal(read(values=[255, 0]).y[0].numpy(), 1 - mask // 255)
    assert fault(values=[0, 1]) == (
        f"{tmp_path}/masks/a.png: has the value 255, which is not in data.values (0, 1); add it, or"
        " correct the mask"
    )
    with pytest.raises(pydantic.ValidationError, match="values: '0' is listed twice"):
        read(values=[0, 0])
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 255"):
        read(values=[0, 256])


def test_a_palettes_indices_and_single_bits_are_numbers(pair, read, tmp_path):
    pair("a")
    image = Image.fromarray(labels(3), mode="P")
    image.putpalette([255, 0, 0, 9, 9, 9, 0, 0, 7])
    image.save(tmp_path / "masks" / "a.png")
    assert np.array_equal(read().y[0].numpy(), np.asarray(image))
    bits = labels().astype(bool)
    Image.fromarray(bits).save(tmp_path / "masks" / "a.png")
    assert np.array_equal(read().y[0].numpy(), bits)


def test_a_mask_of_one_bit_among_others_is_not_a_new_class(pair, fault, tmp_path):
    pair("a", mask=labels() * np.uint8(255))
    pair("b")
    Image.fromarray(np.eye(4, 5).astype(bool)).save(tmp_path / "masks" / "b.png")
    assert fault(values=[0, 255]) == (
        f"{tmp_path}/masks/b.png: has the value 1, which is not in data.values (0, 255); its pixels"
        " have one bit, 0 or 1: store all masks alike, with 8 bits per pixel, or where all have one"
        " bit, say data.values = [0, 1]"
    )


def test_a_value_that_a_smaller_size_would_lose_is_told(pair, fault):
    mask = np.zeros((8, 10), np.uint8)
    mask[0, 0] = 9
    pair("a", grey(8, 10), mask)
    assert "has the value 9, which is not in" in fault(resize=True, values=[0, 1])


def test_masks_are_resized_without_new_values(pair, read, fault):
    mask = np.kron(labels(3), np.ones((2, 2), np.uint8))
    pair("a", grey(8, 10), mask)
    assert "a.png: 10 x 8 pixels, the job's model takes 5 x 4; resize it, or set" in fault()
    assert np.array_equal(read(resize=True).y[0].numpy(), mask[::2, ::2])
    pair("a", grey(8, 10))
    said = "masks/a.png: 5 x 4 pixels, its image 10 x 8; give them one size"
    assert said in fault()
    assert said in fault(resize=True)


def test_a_mask_is_turned_as_its_image_is(pair, read, fault, tmp_path):
    """A camera's image lies on its side, and says so."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image, mask = pair("a", grey(5, 4), labels(3, (5, 4)))
    write(tmp_path / "images" / "a.png", image, exif=exif)
    assert "masks/a.png: 4 x 5 pixels, its image 4 x 5; give them one size and, in Exif," in fault()
    write(tmp_path / "masks" / "a.png", mask, exif=exif)
    data = read()
    assert np.array_equal(data.y[0].numpy(), np.rot90(mask, -1))
    assert np.array_equal(data.x[0, 0].numpy(), np.rot90(image, -1) / np.float32(255))


@pytest.mark.parametrize("lazy", [False, True])
def test_masks_that_do_not_fit_the_memory_are_refused_before_they_are_read(pair, lazy, tmp_path):
    for name in "abcdefgh":
        pair(name)
    table = Masks(kind="masks", folder=tmp_path, resize=True, lazy=lazy)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, hard))
    try:
        with pytest.raises(LocalError, match="8 masks of 65536 x 65536"):
            table.read_at((1, 2**16, 2**16))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_grey_of_few_bits_is_refused_since_its_numbers_would_change(pair, read, fault, tmp_path):
    pair("a")
    path = tmp_path / "masks" / "a.png"
    image = Image.fromarray(labels(3), mode="P")
    image.putpalette([*range(12)])
    image.save(path, bits=2)
    assert np.array_equal(read().y[0].numpy(), np.asarray(image))
    raw = path.read_bytes()
    place = raw.index(b"IHDR")
    header = bytearray(raw[place : place + 17])
    header[13] = 0  # grey, in place of a palette's indices
    start = raw.index(b"PLTE") - 4
    end = raw.index(b"IDAT") - 4
    grey_ = raw[:place] + header + zlib.crc32(header).to_bytes(4, "big") + raw[place + 21 : start]
    path.write_bytes(grey_ + raw[end:])
    assert "masks/a.png: has 2 or 4 bits per pixel; store 8, or a palette" in fault()


def test_files_without_a_partner_are_told(pair, read, fault, tmp_path):
    pair("a")
    pair("b")
    (tmp_path / "masks" / "b.png").unlink()
    write(tmp_path / "images" / "c.png", grey())
    assert fault() == (
        f"{tmp_path}/images/b.png: has no mask of its name; add it, or move it away (2 in all)"
    )
    (tmp_path / "images" / "b.png").unlink()
    (tmp_path / "images" / "c.png").unlink()
    write(tmp_path / "masks" / "b.png", labels())
    assert "masks/b.png: has no image of its name; add it" in fault()
    (tmp_path / "masks" / "b.png").unlink()
    write(tmp_path / "images" / "a.jpg", grey())
    assert fault() == f"{tmp_path}/images/a.png: a.jpg has the same name; keep one of them"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: write(path.with_suffix(".jpg"), labels()), "is a JPEG, and masks are PNG"),
        (lambda path: write(path, labels(), format="JPEG"), "is a JPEG, and masks are PNG"),
        (lambda path: write(path, labels().astype(np.uint16)), "mode I;16; store one number"),
        (lambda path: write(path, rng.integers(0, 9, (4, 5, 3), np.uint8)), "mode RGB; store one"),
        (lambda path: path.write_bytes(b"no image"), "cannot read it as PNG or JPEG"),
        (lambda path: path.mkdir(), "has no mask of its name"),
    ],
)
def test_masks_that_are_none(pair, fault, tmp_path, make, why):
    pair("a")
    path = tmp_path / "masks" / "a.png"
    path.unlink()
    make(path)
    assert why in fault()


@pytest.fixture
def examined(tmp_path):
    """What is said without a job."""

    def call(**fields):
        table = Masks(kind="masks", folder=tmp_path, **fields)
        try:
            return table.examine()
        except LocalError as error:
            return str(error)

    return call


def test_without_a_job_pairs_and_masks_are_looked_at(pair, examined, tmp_path):
    pair("a", mask=np.array([[0, 255, 255, 0, 0]] * 4, np.uint8))
    pair("b", grey(3, 7), np.zeros((3, 7), np.uint8))
    assert examined() == "2 images with a mask each, whose classes are 0, 255"
    assert examined(values=[0, 255]) == "2 images with a mask each, whose classes are 0, 1"
    assert "a.png: has the value 255, which is not in data.values" in examined(values=[0, 1])
    assert examined(class_names=["tissue", "lesion"]) == (
        f"{tmp_path}/masks/a.png: has class 255, and data.class_names has 2 names, from class 0 on;"
        " name each class, or say in data.values what masks have for them"
    )
    assert "classes are 0, 1" in examined(values=[0, 255], class_names=["tissue", "lesion"])
    write(tmp_path / "masks" / "b.png", labels())
    assert "masks/b.png: 5 x 4 pixels, its image 7 x 3" in examined()
    (tmp_path / "masks" / "b.png").write_bytes(b"no image")
    assert "masks/b.png: cannot read it as PNG" in examined()
    (tmp_path / "masks" / "b.png").unlink()
    assert "images/b.png: has no mask of its name" in examined()


def test_names_of_classes_are_as_many_as_the_values(tmp_path):
    with pytest.raises(pydantic.ValidationError) as caught:
        Masks(kind="masks", folder=tmp_path, values=[0, 255], class_names=["a", "b", "c"])
    assert "class_names has 3 names, values says 2 classes; give one" in str(caught.value)
    with pytest.raises(pydantic.ValidationError, match="classes 0 and 1 are both named 'a'"):
        Masks(kind="masks", folder=tmp_path, class_names=["a", "a"])


def test_a_folder_of_another_level_or_without_images_is_told(pair, examined, fault, tmp_path):
    pair("masks/a")  # the folder above the right one
    (tmp_path / "masks").rename(tmp_path / "labels")
    said = (
        f"{tmp_path}: images/ and masks/ are expected in this folder; make both, or correct"
        " data.folder"
    )
    assert examined() == said
    assert fault() == said
    with pytest.raises(LocalError, match="are expected in this folder"):
        Masks(kind="masks", folder=tmp_path).check_present()
    with pytest.raises(LocalError, match="no such folder"):
        Masks(kind="masks", folder=tmp_path / "none").check_present()
    (tmp_path / "masks").mkdir()
    (tmp_path / "images" / "masks" / "a.png").unlink()
    empty = (
        f"{tmp_path}: images/ and masks/ are empty; put each image in images/, and its mask of the"
        " same name in masks/"
    )
    assert examined() == empty
    assert fault() == empty


def test_what_lacks_is_named(pair, read, fault, tmp_path):
    table = Masks(kind="masks", folder=tmp_path)
    assert table.lacking() == f"{tmp_path}/{{images,masks}}/*.png"
    pair("a")
    assert table.lacking() is None
    assert "takes [3, 4]" in fault(shape=(3, 4))
    assert "data.mean has 2 numbers for 1 channels" in fault(mean=[0, 1])
    assert read(mean=[0.5], std=[0.5]).x.min() < 0


DEEP = (1, 3, 4, 5)  # channels, z, y, x


@pytest.fixture
def volumes(tmp_path):
    """Two volumes with masks: a series, and a NIfTI file whose axes point the other way."""
    found = []
    for name in ("a", "b"):
        values, mask = rng.integers(0, 100, DEEP[1:]).astype(np.int16), labels(3, DEEP[1:])
        found.append((values, mask))
        write_nifti(tmp_path / "masks" / f"{name}.nii.gz", mask.transpose(2, 1, 0), series_affine())
    write_series(tmp_path / "images" / "a", found[0][0])
    affine = series_affine() @ np.diag([-1, 1, 1, 1])
    affine[:3, 3] += series_affine()[:3, 0] * 4
    flipped = np.ascontiguousarray(found[1][0].transpose(2, 1, 0)[::-1])
    write_nifti(tmp_path / "images" / "b.nii", flipped, affine)
    return found


def test_a_volumes_mask_is_of_the_same_grid(tmp_path, volumes, read):
    data = read(DEEP, window=[0, 100], class_names=["none", "liver", "tumour"], grouped=True)
    assert (data.ids, data.groups) == (("a", "b.nii"), ("a", "b.nii"))
    for place, (values, mask) in enumerate(volumes):
        assert np.allclose(data.x[place, 0].numpy(), values / 100, atol=1e-6)
        assert np.array_equal(data.y[place].numpy(), mask)
    lazy = read(DEEP, window=[0, 100], lazy=True)
    assert torch.equal(lazy.x.whole(), data.x)


def test_a_mask_is_cut_and_filled_up_as_its_image_is(volumes, read):
    """Around a scan is class 0, though ``values`` have no 0."""
    data = read((1, 5, 2, 5), window=[0, 100], spacing=[2.0, 0.5, 0.75], values=[2, 1, 0])
    for place, (values, mask) in enumerate(volumes):
        assert np.allclose(data.x[place, 0, 1:4].numpy(), values[:, 1:3] / 100, atol=1e-6)
        assert np.array_equal(data.y[place, 1:4].numpy(), 2 - mask[:, 1:3])
    assert not data.y[:, [0, 4]].any()
    assert not data.x[:, :, [0, 4]].any()
    coarse = read((1, 3, 2, 5), window=[0, 100], resize=True)
    assert set(coarse.y.unique().tolist()) <= {0, 1, 2}


def test_masks_of_volumes_that_do_not_fit_are_named(tmp_path, volumes, fault):
    where, how = tmp_path / "masks" / "a.nii.gz", {"shape": DEEP, "window": [0, 100]}
    mask, moved = np.zeros(DEEP[:0:-1], np.uint8), series_affine()
    moved[2, 3] += 4.5
    write_nifti(where, mask, moved)
    assert "a.nii.gz: lies 4.50 mm from its image; draw it on the image's grid" in fault(**how)
    write_nifti(where, mask[:-1], series_affine())
    assert "a.nii.gz: 3 x 4 x 4 values, its image 3 x 4 x 5; draw it on the" in fault(**how)
    write_nifti(where, mask + np.float32(0.5), series_affine())
    assert "a.nii.gz: holds more than the whole numbers 0 to 255; correct it" in fault(**how)
    write_nifti(where, np.stack([mask, mask], -1), series_affine())
    assert "a.nii.gz: is no mask of a; give NIfTI for a volume, a PNG for a slice" in fault(**how)
    where.unlink()
    write(tmp_path / "masks" / "a.png", labels())
    assert "a.png: is no mask of a; give NIfTI" in fault(**how)


def test_a_slices_mask_is_a_picture(tmp_path, read, fault):
    image, mask = rng.integers(0, 100, SHAPE[1:]).astype(np.int16), labels(3)
    for name in "ab":
        write_slice(tmp_path / "images" / f"{name}.dcm", image)
        write(tmp_path / "masks" / f"{name}.png", mask)
    data = read(window=[0, 100])
    assert np.array_equal(data.y[0].numpy(), mask)
    assert np.allclose(data.x[0, 0].numpy(), image / 100, atol=1e-6)
    write(tmp_path / "masks" / "a.png", labels(2, (4, 4)))
    assert "a.png: 1 x 4 x 4 values, its image 1 x 4 x 5" in fault(window=[0, 100])


def test_a_mask_takes_the_spacing_of_its_image(tmp_path, read):
    """Where both round to another size, by 1e-5 of their headers, they would be shifted."""
    values, mask = np.zeros((5, 4, 5), np.int16), np.zeros((5, 4, 5), np.uint8)
    mask[1] = 1
    values[1] = 100
    other = series_affine((2.00001, 0.5, 0.75))
    for name in "ab":
        write_nifti(tmp_path / "images" / f"{name}.nii", values.transpose(2, 1, 0), series_affine())
        write_nifti(tmp_path / "masks" / f"{name}.nii", mask.transpose(2, 1, 0), other)
    data = read((1, 3, 4, 5), window=[0, 100], spacing=[4.0, 0.5, 0.75])
    assert data.x[0, 0].flatten(1).any(1).tolist() == [True, False, False]
    assert data.y[0].flatten(1).any(1).tolist() == [True, False, False]
    # And a picture, which has none, is brought to its slice's.
    write_slice(tmp_path / "x" / "images" / "a.dcm", values[0], PixelSpacing=[1.0, 1.0])
    write(tmp_path / "x" / "masks" / "a.png", mask[1])
    table = Masks(kind="masks", folder=tmp_path / "x", window=[0, 100], spacing=[2.0, 1.0])
    assert table.read_at((1, 2, 5)).y.shape == (1, 2, 5)


def test_volumes_are_examined_without_a_job(tmp_path, volumes):
    table = Masks(kind="masks", folder=tmp_path)
    assert table.examine() == "2 images with a mask each, whose classes are 0, 1, 2"


def test_a_mask_that_is_turned_about_its_diagonal_lies_elsewhere(tmp_path, volumes, fault):
    """Its first and last voxel stay."""
    affine = series_affine()
    diagonal = affine[:3, :3] @ (np.array(DEEP[:0:-1]) - 1.0)
    axis = diagonal / np.linalg.norm(diagonal)
    cross = np.cross(np.eye(3), axis)
    turn = np.eye(3) + 0.5 * cross + (1 - 0.75**0.5) * cross @ cross
    affine[:3, :3] = turn @ affine[:3, :3]
    write_nifti(tmp_path / "masks" / "a.nii.gz", np.zeros(DEEP[:0:-1], np.uint8), affine)
    assert "from its image; draw it on the image's grid" in fault(shape=DEEP, window=[0, 100])
