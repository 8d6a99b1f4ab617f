import io
import warnings

import numpy as np
import pydantic
import pytest
import torch
from PIL import Image
from support.refusals import refused

from staddle.algorithms.data.sources.formats import pictures
from staddle.algorithms.data.sources.formats.images import Images
from staddle.errors import LocalError

GREY, COLOUR = (1, 4, 5), (3, 4, 5)  # channels, height, width
rng = np.random.default_rng(0)


def pixels(*shape, dtype=np.uint8):
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def write(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return array


@pytest.fixture
def read(tmp_path):
    def call(shape=GREY, **fields):
        return Images(kind="images", folder=tmp_path, **fields).read_at(shape)

    return call


@pytest.fixture
def fault(read):
    def call(shape=GREY, **fields):
        with pytest.raises(LocalError) as caught:
            read(shape, **fields)
        return str(caught.value)

    return call


def test_without_a_job_images_and_classes_are_counted(tmp_path):
    def examined(**fields):
        return Images(kind="images", folder=tmp_path, **fields).examine()

    with pytest.raises(LocalError) as caught:
        examined()
    assert str(caught.value) == (
        f"{tmp_path}: has no images; give each class a folder with its own, as"
        f" {tmp_path}/CLASS/*.png"
    )
    write(tmp_path / "b" / "1.png", pixels(4, 5))
    (tmp_path / "b" / "2.png").write_bytes(b"not opened")
    assert examined() == "2 files of images, 1 classes"
    assert examined(classes=["a", "b"]) == "2 files of images, 2 classes"
    with pytest.raises(LocalError, match=r"b: is not in data.classes \(a, c\)"):
        examined(classes=["a", "c"])
    with pytest.raises(LocalError, match="cannot read it: No such file"):
        examined(domains=["sketch"])


def test_folders_are_classes_and_paths_are_ids(tmp_path, read):
    second = write(tmp_path / "b" / "2.png", pixels(4, 5))
    first = write(tmp_path / "b" / "1.PNG", pixels(4, 5))
    deep = write(tmp_path / "a" / "visit" / "1.png", pixels(4, 5))
    (tmp_path / "a" / ".hidden").write_text("no image")
    (tmp_path / ".hidden").write_text("no image")
    data = read()
    assert data.ids == ("a/visit/1.png", "b/1.PNG", "b/2.png")
    assert (data.y.tolist(), data.class_names) == ([0, 1, 1], ("a", "b"))
    assert torch.equal(
        data.x, torch.from_numpy(np.stack([deep, first, second])[:, None] / np.float32(255))
    )


LEFT = ("Thumbs.db", "thumbs.db", ".DS_Store", "._1.png", "desktop.ini", "ehthumbs_vista.db")
BINS = ("__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "#recycle", ".Trashes")


@pytest.mark.parametrize("domains", [None, ["d"]])
def test_what_systems_leave_in_folders_is_no_image_and_no_class(tmp_path, read, domains):
    root = tmp_path / "d" if domains else tmp_path
    for name in "ab":
        write(root / name / "visit" / "1.png", pixels(4, 5))
    alone = read(domains=domains)
    for folder in (tmp_path, root, root / "a", root / "b" / "visit"):
        for name in (*LEFT, "Icon\r", "lost+found"):
            (folder / name).write_bytes(b"no image")
        for name in BINS:
            write(folder / name / "2.png", pixels(4, 5))
            (folder / name / "other.bin").write_bytes(b"no image")
    assert read(domains=domains).ids == alone.ids
    assert torch.equal(read(domains=domains).x, alone.x)


@pytest.mark.parametrize("name", ["Thumbs.db.bin", "my desktop.ini", "lost+found.txt", "a.db"])
def test_any_other_file_that_is_no_image_is_named(tmp_path, fault, name):
    write(tmp_path / "a" / "1.png", pixels(4, 5))
    (tmp_path / "a" / name).write_bytes(b"no image")
    assert fault().startswith(f"{tmp_path / 'a' / name}: is not a PNG, JPEG, NIfTI or DICOM")
    (tmp_path / "a" / name).rename(tmp_path / name)
    assert fault().startswith(f"{tmp_path / name}: lies next to the classes' folders")


def test_declared_classes_have_their_order_and_may_be_absent(tmp_path, read):
    for name in "ab":
        write(tmp_path / name / "1.png", pixels(4, 5))
    data = read(classes=["b", "none", "a"], class_names=["ill", "rare", "well"])
    assert (data.y.tolist(), data.ids) == ([0, 2], ("b/1.png", "a/1.png"))
    assert data.class_names == ("ill", "rare", "well")
    assert read(classes=["b", "none", "a"]).class_names == ("b", "none", "a")


def test_constants_are_subtracted_and_divided_by(tmp_path, read):
    array = write(tmp_path / "a" / "1.png", pixels(4, 5, 3))
    plain = torch.from_numpy(array / np.float32(255)).permute(2, 0, 1)
    data = read(COLOUR, mean=[0.5, 0.4, 0.3], std=[0.2])
    assert torch.allclose(data.x[0], (plain - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.2)


def test_colours_are_what_the_model_takes(tmp_path, read):
    grey = write(tmp_path / "a" / "1.png", pixels(4, 5))
    colour = write(tmp_path / "a" / "2.png", pixels(4, 5, 3))
    deep = write(tmp_path / "a" / "3.png", pixels(4, 5, dtype=np.uint16))
    Image.fromarray(colour).quantize().save(tmp_path / "a" / "4.png")
    Image.fromarray(grey > 127).save(tmp_path / "a" / "5.png")
    in_grey, in_colour = read(GREY).x, read(COLOUR).x
    assert torch.equal(in_grey[0, 0], torch.from_numpy(grey / np.float32(255)))
    assert torch.equal(in_colour[0], in_grey[0].expand(3, 4, 5))
    assert torch.equal(in_colour[1], torch.from_numpy(colour / np.float32(255)).permute(2, 0, 1))
    luma = colour @ np.array([0.299, 0.587, 0.114])
    assert np.abs(in_grey[1, 0].numpy() * 255 - luma).max() <= 1
    # not cut off at 255
    assert torch.allclose(in_grey[2, 0], torch.from_numpy(deep / np.float32(65535)))
    assert torch.equal(in_colour[2], in_grey[2].expand(3, 4, 5))
    assert (in_colour[3] - in_colour[1]).abs().max() < 0.1
    assert torch.equal(in_grey[4, 0], torch.from_numpy((grey > 127).astype(np.float32)))


def test_jpeg_is_read_upright(tmp_path, read):
    ramp = np.repeat(np.arange(0, 240, 48, dtype=np.uint8)[:, None], 4, 1)  # 5 high, 4 wide
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show it
    write(tmp_path / "a" / "1.jpeg", ramp, exif=exif, quality=100)
    assert np.abs(read().x[0, 0].numpy() * 255 - ramp[::-1].T).max() < 6


def test_another_size_is_resized_only_if_asked(tmp_path, read, fault):
    write(tmp_path / "a" / "1.png", np.full((8, 9), 51, np.uint8))
    write(tmp_path / "a" / "2.png", np.full((8, 9), 13107, np.uint16))
    why = fault()
    assert why.startswith(
        f"{tmp_path / 'a' / '1.png'}: 9 x 8 pixels, the job's model takes 5 x 4; resize it, or set"
    )
    for shape in (GREY, COLOUR):
        assert torch.allclose(read(shape, resize=True).x, torch.full((2, *shape), 0.2))


def test_what_is_no_image_is_named(tmp_path, fault):
    good = tmp_path / "a" / "1.png"
    write(good, pixels(40, 50))
    whole = good.read_bytes()
    bad = tmp_path / "b" / "1.png"
    bad.parent.mkdir()
    gif = io.BytesIO()
    Image.fromarray(pixels(4, 5)).save(gif, "GIF")
    for content in (b"", b"text", whole[:-200], whole[:40], gif.getvalue()):
        bad.write_bytes(content)
        assert fault((1, 40, 50)).startswith(f"{bad}: cannot read it as PNG or JPEG: ")


def test_no_broken_image_raises_anything_else(tmp_path, read):
    """Flipped bytes either give an image or an error of ours."""
    for suffix in ("png", "jpg"):
        path = tmp_path / "a" / f"1.{suffix}"
        write(path, pixels(4, 5, 3))
        whole = path.read_bytes()
        failed = []
        for place in range(0, len(whole), 1 + len(whole) // 150):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            try:
                read(COLOUR, resize=True)
            except LocalError as error:
                failed.append(str(error))
        assert failed
        assert all(why.startswith(str(path)) for why in failed)
        path.unlink()


@pytest.mark.parametrize("most", ["ours", "Pillow's"])
def test_an_image_that_claims_too_much_is_refused_before_it_is_decoded(
    tmp_path, fault, monkeypatch, most
):
    path = tmp_path / "a" / "bomb.png"
    write(path, np.zeros((40, 50), np.uint8))
    if most == "ours":
        monkeypatch.setattr(pictures, "MOST_PIXELS", 1999)
    else:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 999)
    monkeypatch.setattr(pictures.ImageOps, "exif_transpose", lambda _: pytest.fail("decoded"))
    assert fault((1, 40, 50)).startswith(
        f"{path}, holds {path.stat().st_size:,} bytes: claims more than "
    )


def test_the_limit_lies_below_pillows_warning(tmp_path, read):
    assert Image.MAX_IMAGE_PIXELS > pictures.MOST_PIXELS
    write(tmp_path / "a" / "1.png", pixels(4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read()


def test_transparency_and_printing_colours_are_refused(tmp_path, fault):
    path = tmp_path / "a" / "1.png"
    for array, mode in [(pixels(4, 5, 4), "RGBA"), (pixels(4, 5, 2), "LA")]:
        write(path, array)
        assert fault().startswith(
            f"{path}: mode {mode}, with transparency or unusual colours; store it"
        )
    write(path, pixels(4, 5), transparency=3)
    assert "mode L, with transparency" in fault()
    path.unlink()
    Image.fromarray(pixels(4, 5, 3)).convert("CMYK").save(tmp_path / "a" / "1.jpg")
    assert "1.jpg: mode CMYK" in fault()


def test_what_lies_elsewhere_is_named_instead_of_left_out(tmp_path, read, fault):
    write(tmp_path / "a" / "1.png", pixels(4, 5))
    write(tmp_path / "b" / "1.png", pixels(4, 5))
    assert f"{tmp_path / 'b'}: is not in data.classes (a, c); add it, or move it away" in fault(
        classes=["a", "c"]
    )
    (tmp_path / "a" / "notes.txt").write_text("x")
    assert (
        f"{tmp_path / 'a' / 'notes.txt'}: is not a PNG, JPEG, NIfTI or DICOM by its name" in fault()
    )
    (tmp_path / "a" / "notes.txt").unlink()
    write(tmp_path / "2.png", pixels(4, 5))
    assert f"{tmp_path / '2.png'}: lies next to the classes' folders" in fault()
    (tmp_path / "2.png").unlink()
    assert len(read()) == 2


def test_other_channels_and_folders_that_are_none(tmp_path, read, fault):
    assert (
        "images are [channels, height, width] with 1 or 3 channels, the job's model takes [2, 4, 5]"
        in fault((2, 4, 5))
    )
    assert len(read(classes=["a", "b"])) == 0
    with refused("none: cannot read it: No such file"):
        Images(kind="images", folder=tmp_path / "none").read_at(GREY)
    with pytest.raises(pydantic.ValidationError, match="classes: 'a' is listed twice"):
        Images(kind="images", folder=tmp_path, classes=["a", "a"])


def test_domains_hold_the_classes_folders_and_are_the_sources(tmp_path, read, fault):
    for path in ("sketch/zebra/1.png", "photo/ant/2.png", "photo/zebra/3.png", "clipart/bee/4.png"):
        write(tmp_path / path, pixels(4, 5))
    (tmp_path / "sketch_train.txt").write_text("beside the domains, as DomainNet has it")
    data = read(domains=["sketch", "photo"])
    assert data.ids == ("sketch/zebra/1.png", "photo/ant/2.png", "photo/zebra/3.png")
    assert (data.sources, data.y.tolist()) == (("sketch", "photo", "photo"), [1, 0, 1])
    assert data.class_names == ("ant", "zebra")
    assert read(domains=["clipart"], classes=["ant", "bee"]).y.tolist() == [1]
    assert "photo/ant: is not in data.classes (zebra, bee)" in fault(
        domains=["photo"], classes=["zebra", "bee"]
    )
    assert fault(domains=["real"]) == f"{tmp_path}/real: cannot read it: No such file or directory"


def test_a_subset_of_the_classes(tmp_path, read):
    for path in ("a/1.png", "b/2.png", "c/3.png"):
        write(tmp_path / path, pixels(4, 5))
    data = read(classes=["c", "a"], subset=True)
    assert (data.ids, data.y.tolist(), data.sources) == (("c/3.png", "a/1.png"), [0, 1], None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"subset": True}, "name the classes"),
        ({"domains": ["a", "a"]}, "domains: 'a' is listed twice"),
    ],
)
def test_domains_and_subsets_that_contradict_themselves(tmp_path, fields, said):
    with pytest.raises(pydantic.ValidationError, match=said):
        Images(kind="images", folder=tmp_path, **fields)


@pytest.mark.parametrize("workers", [0, 2])
def test_lazy_images_are_those_in_memory(tmp_path, read, workers):
    for n in range(5):
        write(tmp_path / "ab"[n % 2] / f"{n}.png", pixels(4, 5))
    constants = {"mean": [0.5], "std": [0.25]}
    held, lazy = read(**constants, workers=workers), read(**constants, workers=workers, lazy=True)
    assert torch.equal(lazy.x.whole(), held.x)
    assert (lazy.ids, lazy.y.tolist()) == (held.ids, held.y.tolist())
    before = lazy.x.identity()
    assert before == read(**constants, lazy=True).x.identity()
    assert before != read(lazy=True).x.identity()
    (tmp_path / "a" / "0.png").write_text("no image")
    with refused(r"a/0\.png: cannot read it as PNG or JPEG"):
        lazy.x.whole()
    assert before != read(**constants, lazy=True).x.identity()


def test_a_link_to_nothing_is_told_before_anything_is_read(tmp_path, fault):
    write(tmp_path / "a" / "1.png", pixels(4, 5))
    (tmp_path / "a" / "2.png").symlink_to(tmp_path / "gone.png")
    assert "2.png: cannot read it: No such file or directory" in fault()
