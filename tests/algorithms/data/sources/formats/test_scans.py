"""Scans: turned alike whatever wrote them, scaled, cut, and faults that name the file."""

import math
from contextlib import suppress
from itertools import permutations, product

import nibabel
import numpy as np
import pydantic
import pydicom
import pytest
import torch
from support.refusals import refused
from support.scans import series_affine, write_nifti, write_series, write_slice

from staddle.algorithms.data.sources.formats import nifti
from staddle.algorithms.data.sources.formats.image_files import read_scan
from staddle.algorithms.data.sources.formats.images import Images
from staddle.algorithms.data.sources.formats.listed import ListedImages
from staddle.errors import LocalError

rng = np.random.default_rng(0)
BEGIN = rng.bit_generator.state


@pytest.fixture(autouse=True)
def _from_the_beginning():
    """So that no test's values depend on which others ran before it."""
    rng.bit_generator.state = BEGIN


SIDES = (3, 4, 5)  # z, y, x
WIDE = {"window": [-1000, 3000]}


def numbers(shape=SIDES):
    return rng.integers(-1000, 3000, shape).astype(np.int16)


def scaled(values, low=-1000, high=3000):
    return ((values.astype(np.float32) - low) / (high - low)).clip(0, 1)


@pytest.fixture
def read(tmp_path):
    """The folder as images of two classes, of which ``b`` has one more."""

    def call(shape=(1, *SIDES), **fields):
        write_nifti(tmp_path / "b" / "other.nii", np.zeros(SIDES[::-1], np.int16), series_affine())
        return Images(kind="images", folder=tmp_path, **{**WIDE, **fields}).read_at(shape)

    return call


def first(data):
    return data.x[0, 0].numpy()


def test_a_series_and_its_nifti_are_one_scan_whatever_their_files_are_called(tmp_path, read):
    stored = numbers()
    write_series(tmp_path / "a" / "1", stored)
    write_nifti(tmp_path / "a" / "2.nii.gz", stored.transpose(2, 1, 0), series_affine())
    data = read()
    assert data.ids == ("a/1", "a/2.nii.gz", "b/other.nii")
    assert data.y.tolist() == [0, 0, 1]
    assert torch.equal(data.x[0], data.x[1])
    assert np.allclose(first(data), scaled(stored), atol=1e-6)
    one, other = read_scan(tmp_path / "a" / "1"), read_scan(tmp_path / "a" / "2.nii.gz")
    assert one.spacing == pytest.approx((2.0, 0.5, 0.75))
    assert one.spacing == pytest.approx(other.spacing)
    assert np.allclose(one.place, other.place)


def test_what_systems_leave_beside_slices_is_no_slice(tmp_path, read):
    stored = numbers()
    write_series(tmp_path / "a" / "1", stored)
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "1"):
        for name in ("Thumbs.db", ".DS_Store", "desktop.ini", "DICOMDIR", "Icon\r"):
            (folder / name).write_bytes(b"no slice")
    data = read()
    assert data.ids == ("a/1", "b/other.nii")
    assert np.allclose(first(data), scaled(stored), atol=1e-6)


@pytest.mark.parametrize("flips", list(product((1, -1), repeat=3)))
@pytest.mark.parametrize("axes", list(permutations(range(3))))
def test_every_orientation_becomes_the_same(tmp_path, axes, flips):
    """A voxel at given millimetres stands at one place of the record, whatever the file's axes."""
    whole = numbers((2, 3, 4))  # towards the right, the front and the head, 2, 3 and 4 mm
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    turned, columns = whole.transpose(axes), affine[:, [*axes, 3]].copy()
    for axis, flip in enumerate(flips):
        if flip < 0:
            columns[:3, 3] += columns[:3, axis] * (turned.shape[axis] - 1)
            columns[:3, axis] *= -1
            turned = np.flip(turned, axis)
    scan = read_scan(write_nifti(tmp_path / "a.nii", np.ascontiguousarray(turned), columns))
    # z from the feet up, y from front to back, x from the right to the left
    assert np.array_equal(scan.values[0], whole.transpose(2, 1, 0)[:, ::-1, ::-1])
    assert scan.spacing == pytest.approx((4.0, 3.0, 2.0))
    assert np.allclose(scan.place @ [0, 0, 0, 1], [2.0, 6.0, 0.0, 1.0])


def test_an_oblique_scan_goes_to_the_nearest_axes(tmp_path):
    values, angle = numbers(), math.radians(20)
    affine = series_affine()
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    affine[:2, :2] = turn @ affine[:2, :2]
    scan = read_scan(write_nifti(tmp_path / "a.nii", values.transpose(2, 1, 0), affine))
    assert np.array_equal(scan.values[0], values)


def test_channels_are_the_fourth_axis(tmp_path, read):
    values = numbers((*SIDES[::-1], 2))
    write_nifti(tmp_path / "a" / "1.nii", values, series_affine())
    table = Images(kind="images", folder=tmp_path, classes=["a", "b"], **WIDE)
    data = table.read_at((2, *SIDES))
    assert np.allclose(data.x[0].numpy(), scaled(values.transpose(3, 2, 1, 0)), atol=1e-6)
    with refused("1.nii: has 2 channels, the job's model takes 1"):
        read()
    # One channel serves a model that takes three, as grey does.
    assert read_three(tmp_path / "grey").shape == (1, 3, *SIDES)


def read_three(folder):
    write_nifti(folder / "a" / "1.nii", numbers(SIDES[::-1]), series_affine())
    data = Images(kind="images", folder=folder, classes=["a", "b"], **WIDE).read_at((3, *SIDES))
    assert torch.equal(data.x[:, 0], data.x[:, 2])
    return data.x


def test_a_scans_own_mean_and_deviation(tmp_path, read):
    values = numbers(SIDES[::-1])
    write_nifti(tmp_path / "a" / "1.nii", values, series_affine())
    data = read(window="each")
    wanted = (values - values.mean()) / values.std()
    assert np.allclose(first(data), wanted.transpose(2, 1, 0), atol=1e-5)
    assert not data.x[1].any()  # a constant one
    write_nifti(tmp_path / "a" / "1.nii", np.full(SIDES[::-1], 0.1, np.float32), series_affine())
    assert not read(window="each").x.any()


def test_mean_and_std_come_after_the_window(tmp_path, read):
    values = numbers()
    write_series(tmp_path / "a" / "1", values)
    assert np.allclose(
        first(read(mean=[0.5], std=[0.25])), (scaled(values) - 0.5) / 0.25, atol=1e-5
    )


def test_spacing_cuts_or_fills_around_the_centre(tmp_path, read):
    """The same millimetres apart: nothing is between the values, so they are only moved."""
    values = numbers((3, 6, 5))
    write_series(tmp_path / "a" / "1", values)
    found = first(read((1, 5, 3, 5), spacing=[2.0, 0.5, 0.75]))
    assert np.allclose(found[1:4], scaled(values)[:, 1:4], atol=1e-6)
    assert not found[[0, 4]].any()
    each = first(read((1, 5, 3, 5), spacing=[2.0, 0.5, 0.75], window="each"))
    assert np.allclose(each[[0, 4]], each.min())


def test_another_spacing_means_over_what_it_holds(tmp_path, read):
    values = numbers((2, 4, 6))
    write_series(tmp_path / "a" / "1", values)
    found = first(read((1, 2, 2, 3), spacing=[2.0, 1.0, 1.5]))
    pairs = values.reshape(2, 2, 2, 3, 2).mean((2, 4))
    assert np.allclose(found, scaled(pairs), atol=1e-5)
    # And linear between two values where it is finer: halfway steps of a ramp.
    ramp = np.arange(3, dtype=np.int16)[:, None, None] * np.full((1, 4, 6), 100, np.int16)
    write_series(tmp_path / "a" / "1", ramp)
    finer = first(read((1, 6, 4, 6), spacing=[1.0, 0.5, 0.75], window=[0, 200]))
    assert np.allclose(finer[:, 0, 0], [0, 0.125, 0.375, 0.625, 0.875, 1], atol=1e-6)


def test_resize_takes_any_scan(tmp_path, read):
    values = numbers((4, 4, 4))
    write_series(tmp_path / "a" / "1", values)
    halves = values.reshape(2, 2, 2, 2, 2, 2).mean((1, 3, 5))
    assert np.allclose(first(read((1, 2, 2, 2), resize=True)), scaled(halves), atol=1e-5)


def test_lazy_scans_are_the_same(tmp_path, read):
    write_series(tmp_path / "a" / "1", numbers())
    held, lazy = read(), read(lazy=True, workers=1)
    assert torch.equal(lazy.x.whole(), held.x)
    assert lazy.x.identity() != read(lazy=True, window="each").x.identity()


def test_files_of_one_folder_stay_together(tmp_path, read):
    for name in ("p1/1", "p1/2", "p2/1"):
        write_series(tmp_path / "a" / name, numbers())
    assert read().groups is None
    assert read(grouped=True).groups == ("p1", "p1", "p2", "b/other.nii")


def test_slices_are_as_they_are_stored(tmp_path):
    stored = numbers((4, 5))
    elements = {"RescaleSlope": 2, "RescaleIntercept": -100}
    write_slice(tmp_path / "a" / "1.dcm", stored, **elements)
    write_slice(tmp_path / "b" / "2", stored)
    data = Images(kind="images", folder=tmp_path, **WIDE).read_at((1, 4, 5))
    assert data.ids == ("a/1.dcm", "b/2")
    assert np.allclose(first(data), scaled(stored * 2.0 - 100), atol=1e-6)
    assert np.allclose(data.x[1, 0].numpy(), scaled(stored), atol=1e-6)


def test_dark_is_much_in_some_x_rays(tmp_path):
    stored = rng.integers(0, 1024, (4, 5)).astype(np.uint16)
    elements = {"PhotometricInterpretation": "MONOCHROME1", "BitsStored": 10, "HighBit": 9}
    write_slice(tmp_path / "a" / "1.dcm", stored, ImagerPixelSpacing=[0.1, 0.1], **elements)
    signed = (stored.astype(np.int16) - 512).astype(np.int16)
    elements |= {"RescaleSlope": 3, "RescaleIntercept": 7}
    write_slice(tmp_path / "b" / "1.dcm", signed, **elements)
    data = Images(kind="images", folder=tmp_path, window=[0, 1023]).read_at((1, 4, 5))
    assert np.allclose(first(data), scaled(1023 - stored, 0, 1023), atol=1e-6)
    scan = read_scan(tmp_path / "b" / "1.dcm")
    assert np.array_equal(scan.values[0, 0], 7 + 3 * (-1 - signed.astype(np.float32)))
    # The spacing of an X-ray is that of its detector.
    finer = Images(kind="images", folder=tmp_path, window=[0, 1023], spacing=[0.2, 0.1])
    with refused("b/1.dcm: its header says no spacing; leave data.spacing out, or set data"):
        finer.read_at((1, 2, 5))


def test_colour_of_ultrasound(tmp_path):
    stored = rng.integers(0, 256, (4, 5, 3)).astype(np.uint8)
    for name in "ab":
        write_slice(tmp_path / name / "1.dcm", stored)
    data = Images(kind="images", folder=tmp_path, window=[0, 255]).read_at((3, 4, 5))
    assert np.allclose(data.x[0].numpy(), stored.transpose(2, 0, 1) / 255, atol=1e-6)


def damaged_nifti(folder):
    (folder / "a").mkdir()
    (folder / "a" / "1.nii.gz").write_bytes(b"no scan")


def untyped_nifti(folder):
    values = numbers(SIDES[::-1]) + 1j
    write_nifti(folder / "a" / "1.nii", values.astype(np.complex64), np.eye(4))


def flat_nifti(folder):
    write_nifti(folder / "a" / "1.nii", numbers((4, 5)), np.eye(4))


def placeless_nifti(folder):
    image = nibabel.Nifti1Image(numbers(SIDES[::-1]), None)
    image.set_sform(np.diag([1, 1, 0, 1]), 1)
    (folder / "a").mkdir()
    nibabel.save(image, folder / "a" / "1.nii")


def unknown_values(folder):
    write_nifti(folder / "a" / "1.nii", np.full(SIDES[::-1], np.nan, np.float32), np.eye(4))


def damaged_dicom(folder):
    (folder / "a" / "1").mkdir(parents=True)
    (folder / "a" / "1" / "1.dcm").write_bytes(b"no slice")


def add_slice(folder, series, turn):
    """One more file in the folder of a series."""
    write_slice(
        folder / "a" / "1" / "more.dcm",
        numbers(SIDES[1:]),
        SeriesInstanceUID=series,
        ImageOrientationPatient=turn,
        ImagePositionPatient=[0, 0, 100],
        PixelSpacing=[0.5, 0.75],
    )


def two_series(folder):
    write_series(folder / "a" / "1", numbers())
    add_slice(folder, "1.2.4", [1, 0, 0, 0, 1, 0])


def a_gap(folder):
    write_series(folder / "a" / "1", numbers((4, 4, 5)))
    (folder / "a" / "1" / "IM002.dcm").unlink()


def twice(folder):
    write_series(folder / "a" / "1", numbers(), ImagePositionPatient=[0, 0, 1])


def not_parallel(folder):
    write_series(folder / "a" / "1", numbers())
    add_slice(folder, "1.2.3", [1, 0, 0, 0, 0, 1])


def nowhere(folder):
    write_series(folder / "a" / "1", numbers(), ImagePositionPatient=None)


def frames(folder):
    write_series(folder / "a" / "1", numbers(), NumberOfFrames=2)


def palette(folder):
    write_series(folder / "a" / "1", numbers(), PhotometricInterpretation="PALETTE COLOR")


def bare(folder):
    write_series(folder / "a", numbers())


def picture(folder):
    (folder / "a").mkdir()
    (folder / "a" / "1.png").write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (damaged_nifti, "a/1.nii.gz: cannot read it as NIfTI: "),
        (untyped_nifti, r"a/1.nii: is complex64 \[5, 4, 3\]; store numbers \[x, y, z\] or"),
        (flat_nifti, r"a/1.nii: is int16 \[4, 5\]; store numbers"),
        (placeless_nifti, "a/1.nii: its voxels have no place or size; correct its header"),
        (unknown_values, "a/1.nii: holds NaN or a value beyond float32; clean it first"),
        (damaged_dicom, "a/1/1.dcm: is no DICOM file; move it away"),
        (two_series, "a/1: its files have 2 SeriesInstanceUID; give each series its"),
        (a_gap, "a/1: its slices are 2.00 to 4.00 mm apart; a slice is missing, or"),
        (twice, "a/1: its slices are 0.00 to 0.00 mm apart"),
        (not_parallel, "a/1: its slices are not parallel; give each series its"),
        (nowhere, "a/1/IM000.dcm: says no ImagePositionPatient, so it is no slice of a volume"),
        (frames, "holds several frames; convert it to NIfTI, such as by dcm2niix"),
        (palette, "is neither grey nor RGB; store it as MONOCHROME2 or RGB"),
        (bare, "lies next to other series; give each a folder of its own"),
        (picture, "a/1.png: is not a scan; move it away, or leave data.window and"),
    ],
)
def test_a_scan_that_cannot_be_read_is_named(tmp_path, read, make, error):
    make(tmp_path)
    with refused(error):
        read()


def test_what_no_table_can_mean(tmp_path, read):
    write_series(tmp_path / "a" / "1", numbers())
    with refused("a/1: holds values of any range; name those that become 0 and 1, such as data.wi"):
        read(window=None)
    with refused("a/1: 3 x 4 x 5 values, the job's model takes 3 x 4 x 6; set data.spacing in mil"):
        read((1, 3, 4, 6))
    with refused(r"data.spacing has 2 numbers, and the job's model takes \[1, 3, 4, 5\]; give one"):
        read(spacing=[1.0, 1.0])
    with pytest.raises(pydantic.ValidationError, match="resize and spacing each say how large"):
        read(spacing=[1.0, 1.0, 1.0], resize=True)
    with pytest.raises(pydantic.ValidationError, match="window: give the value that becomes 0"):
        read(window=[400, 400])


def test_a_header_that_claims_too_much_is_refused_before_a_value_is_read(tmp_path, monkeypatch):
    """A file of 352 bytes and some, whose header says 2^45 voxels."""
    path = write_nifti(tmp_path / "a.nii", numbers((2, 2, 2)), np.eye(4))
    whole = bytearray(path.read_bytes())
    whole[42:48] = np.array([32767, 32767, 32767], "<i2").tobytes()
    path.write_bytes(whole)
    monkeypatch.setattr(nifti, "turned", lambda *_: pytest.fail("read"))
    with refused("a.nii, holds 368 bytes: a scan of 32767 x 32767 x 32767 would take"):
        read_scan(path)


def test_a_header_is_enough_for_size_and_place(tmp_path):
    write_series(tmp_path / "1", numbers())
    write_nifti(tmp_path / "2.nii", numbers(SIDES[::-1]), series_affine())
    write_slice(tmp_path / "3.dcm", numbers((4, 5)), PixelSpacing=[0.5, 0.75])
    for name in ("1", "2.nii", "3.dcm"):
        whole, header = (read_scan(tmp_path / name, values) for values in (True, False))
        assert header.values.shape == whole.values.shape
        assert not header.values.any()
        assert header.spacing == whole.spacing
        assert np.array_equal(header.place, whole.place)


def test_a_volume_is_no_image(tmp_path):
    for name in "ab":
        write_nifti(tmp_path / name / "1.nii", numbers(SIDES[::-1]), series_affine())
    for how in ({"resize": True}, {"spacing": [0.5, 0.75]}):
        with refused("a/1.nii: holds 3 slices, and the job's model takes images; store one slice"):
            Images(kind="images", folder=tmp_path, **WIDE, **how).read_at((1, 4, 5))


def test_a_slice_is_no_volume(tmp_path):
    write_slice(tmp_path / "a.dcm", numbers((4, 5)))
    (tmp_path / "list.csv").write_text("file,price\na.dcm,1\na.dcm,2")
    table = {"file": tmp_path / "list.csv", "folder": tmp_path, "image": "file", "target": "price"}
    for how in ({"resize": True}, {"spacing": [1, 1, 1]}, {}):
        with refused("a.dcm: is one slice, and the job's model takes volumes; name the folder of"):
            ListedImages(kind="listed", **WIDE, **table, **how).read_at((1, 1, 4, 5))


def test_a_third_of_a_side_is_a_mean_of_three(tmp_path, read):
    values = numbers((3, 6, 9))
    write_series(tmp_path / "a" / "1", values)
    found = first(read((1, 1, 2, 3), resize=True))
    thirds = values.reshape(1, 3, 2, 3, 3, 3).mean((1, 3, 5))
    assert np.allclose(found, scaled(thirds), atol=1e-5)


def test_means_and_deviations_of_channels_of_a_volume(tmp_path):
    values = numbers((*SIDES[::-1], 2))
    write_nifti(tmp_path / "a" / "1.nii", values, series_affine())
    table = {"classes": ["a", "b"], "mean": [0.25, 0.5], "std": [0.5, 2.0], **WIDE}
    data = Images(kind="images", folder=tmp_path, **table).read_at((2, *SIDES))
    wanted = scaled(values.transpose(3, 2, 1, 0))
    assert np.allclose(data.x[0, 0].numpy(), (wanted[0] - 0.25) / 0.5, atol=1e-5)
    assert np.allclose(data.x[0, 1].numpy(), (wanted[1] - 0.5) / 2, atol=1e-5)


def test_metres_and_microns_are_told_from_millimetres(tmp_path):
    for unit, factor in (("meter", 1000), ("micron", 0.001), ("unknown", 1)):
        image = nibabel.Nifti1Image(numbers((2, 2, 2)), np.diag([2.0, 2.0, 2.0, 1.0]))
        image.header.set_xyzt_units(unit)
        nibabel.save(image, tmp_path / "1.nii")
        assert read_scan(tmp_path / "1.nii").spacing == pytest.approx((2 * factor,) * 3)


def test_files_are_known_by_uid_and_of_siemens_and_a_mediums_list_is_none(tmp_path):
    stored = numbers((4, 5))
    for name in ("a/1.2.840.113619.3", "a/0001.IMA", "b/IM1"):
        write_slice(tmp_path / name, stored)
    (tmp_path / "a" / "DICOMDIR").write_bytes(b"a list")
    data = Images(kind="images", folder=tmp_path, **WIDE).read_at((1, 4, 5))
    assert data.ids == ("a/0001.IMA", "a/1.2.840.113619.3", "b/IM1")


def test_a_tilted_gantry_is_refused(tmp_path):
    write_series(tmp_path / "1", numbers())
    for place, path in enumerate(sorted((tmp_path / "1").iterdir())):
        made = pydicom.dcmread(path)
        made.ImagePositionPatient = [0, 0.7 * place, 2.0 * place]
        made.save_as(path)
    with refused(r"1: its slices are shifted \(a tilted gantry\); straighten the series"):
        read_scan(tmp_path / "1")


def test_values_at_other_bits_and_forms_without_a_decoder(tmp_path, monkeypatch):
    path = write_slice(tmp_path / "1.dcm", numbers((4, 5)), BitsStored=12, HighBit=15)
    with refused("1.dcm: has values at other bits than the lowest; convert it"):
        read_scan(path)
    made = pydicom.dcmread(write_slice(tmp_path / "2.dcm", numbers((4, 5))))
    made.compress(pydicom.uid.RLELossless)
    made.save_as(tmp_path / "2.dcm")
    assert read_scan(tmp_path / "2.dcm").values.any()  # pydicom reads it by itself
    made = pydicom.dcmread(tmp_path / "2.dcm")
    made.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    made.save_as(tmp_path / "2.dcm")
    with refused("2.dcm: no decoder here can read JPEG-LS Lossless Image Compression; decompress"):
        read_scan(tmp_path / "2.dcm")


def test_small_files_that_become_large_are_not_opened(tmp_path):
    made = pydicom.dcmread(write_slice(tmp_path / "1.dcm", numbers((4, 5))))
    made.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    made.save_as(tmp_path / "1.dcm")
    with refused("1.dcm: is deflated; store it without, such as by dcmconv"):
        read_scan(tmp_path / "1.dcm")
    path = write_nifti(tmp_path / "a.nii", numbers((2, 2, 2)), np.eye(4))
    whole = bytearray(path.read_bytes())
    whole[108:112] = np.array([1e15], "<f4").tobytes()
    path.write_bytes(whole)
    with refused("a.nii, holds 368 bytes: what lies before its values would take"):
        read_scan(path)


def test_a_patients_name_is_not_parsed_and_no_header_text_is_told(tmp_path, monkeypatch):
    seen = []
    own = pydicom.dcmread
    monkeypatch.setattr(
        pydicom, "dcmread", lambda *given, **how: seen.append(own(*given, **how)) or seen[-1]
    )
    path = write_slice(tmp_path / "1.dcm", numbers((4, 5)), PhotometricInterpretation="DOE JANE")
    with pytest.raises(LocalError) as caught:
        read_scan(path)
    assert "MONOCHROME2 or RGB" in str(caught.value)
    assert "DOE" not in str(caught.value)
    assert len(seen) == 2
    assert not any("PatientName" in made for made in seen)


@pytest.mark.parametrize("kind", ["series", "slice", "nii", "nii.gz"])
def test_no_damaged_scan_raises_anything_else(tmp_path, kind):
    """As a lazy record of a private job, which no record may end."""
    random = np.random.default_rng(5)
    if kind == "series":
        path = write_series(tmp_path / "1", numbers())
        files = sorted(path.iterdir())
    elif kind == "slice":
        files = [write_slice(tmp_path / "1.dcm", numbers((4, 5)), PixelSpacing=[1, 1])]
    else:
        files = [write_nifti(tmp_path / f"1.{kind}", numbers((2, 2, 2)), np.eye(4))]
    path = tmp_path / "1" if kind == "series" else files[0]
    whole, read = files[0].read_bytes(), 0
    for _ in range(150):
        damaged = bytearray(whole[: random.integers(1, len(whole) + 1)])
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(0, 256)
        files[0].write_bytes(damaged)
        with suppress(LocalError):
            read += read_scan(path).values.size > 0
    assert read < 150
