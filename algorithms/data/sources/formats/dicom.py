"""DICOM, by pydicom: a file as a slice, and a folder of slices of one series as a volume.

Values are those after the rescaling that a file declares: Hounsfield units of CT. Those of
MONOCHROME1, where dark means much, are inverted. Only the elements that place and scale the values
are parsed.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .....errors import LocalError, check_local
from .....files.file_bounds import check_fits, check_regular
from .scans import IMAGING, Scan, check_sound, reading, turned

BYTES = 16  # of a value while it is read: stored, rescaled in float64, and float32
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's frame grows towards left and posterior
UNEVEN = 0.02  # share of their distance by which slices may be off
SAME_TURN = 1e-3  # by which directions of one series differ at most
DEFLATED = "1.2.840.10008.1.2.1.99"  # of which a small file can become any size
ALIKE = ("SeriesInstanceUID", "Rows", "Columns", "PixelSpacing")
PLACED = (*ALIKE, "ImageOrientationPatient", "ImagePositionPatient")
OTHERS = ("SamplesPerPixel", "NumberOfFrames", "SliceThickness", "ImagerPixelSpacing")
HEADER = [*PLACED, *OTHERS]
# What it takes to decode values; all else, such as a patient's name, is not parsed.
PIXELS = [
    *HEADER,
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration"),
    *("PhotometricInterpretation", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("PixelData", "ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
]


def read_slice(path: Path, values: bool = True) -> Scan:
    """A file's slice, as it is stored; LocalError, which names it, where it is none.

    Without ``values`` the header alone is read, and all are 0.
    """
    with reading(path, "DICOM"):
        header = _opened(path, HEADER)
        whole = (_values if values else _zeros)([path], [header]).swapaxes(0, 1)
        # Of an X-ray, on the detector.
        sides = header.get("PixelSpacing") or header.get("ImagerPixelSpacing")
        spacing = (1.0, *map(float, sides)) if sides else None
    return check_sound(path, Scan(whole, spacing))


def read_series(folder: Path, files: Sequence[Path], values: bool = True) -> Scan:
    """The volume of a folder's files; LocalError where they are not the slices of one series.

    Without ``values`` headers alone are read, and all are 0.
    """
    with reading(folder, "DICOM"):
        headers = list(map(partial(_opened, names=HEADER), files))
        _check_alike(folder, files, headers)
        volume = _volume(folder, files, headers, _values if values else _zeros)
    return check_sound(folder, volume)


def _volume(
    folder: Path,
    files: Sequence[Path],
    headers: Sequence[Any],
    values: Callable[[Sequence[Path], Sequence[Any]], NDArray[np.float32]],
) -> Scan:
    """``values`` gives those of slices [z, channels, rows, columns], in the order of the files."""
    turns = np.array(list(map(attrgetter("ImageOrientationPatient"), headers)), np.float64)
    places = np.array(list(map(attrgetter("ImagePositionPatient"), headers)), np.float64)
    if np.ptp(turns, axis=0).max() > SAME_TURN:
        raise LocalError(f"{folder}: its slices are not parallel; give each series its folder")
    # Slices stand in the order of their places: a file's name says nothing.
    order = np.argsort(places @ np.cross(turns[0, :3], turns[0, 3:])).tolist()
    affine, first = np.eye(4), headers[0]
    rows, columns = map(float, first.PixelSpacing)
    affine[:3, 0], affine[:3, 1] = turns[0, :3] * columns, turns[0, 3:] * rows
    affine[:3, 2] = _step(folder, places[order], first, turns[0])
    affine[:3, 3] = places[order[0]]

    size = BYTES * len(files) * prod(_sides(first))
    check_fits(folder, size, f"a series of {len(files):,} slices")
    in_order = list(map(files.__getitem__, order)), list(map(headers.__getitem__, order))
    # [z, channels, y, x] → [x, y, z, channels]
    return turned(folder, values(*in_order).transpose(3, 2, 0, 1), LPS_TO_RAS @ affine)


def _check_alike(folder: Path, files: Sequence[Path], headers: Sequence[Any]) -> None:
    """LocalError unless these headers are of slices of one series."""
    for path, header in zip(files, headers, strict=True):
        _check_frames(path, header)
    for (path, header), name in product(zip(files, headers, strict=True), PLACED):
        if header.get(name) is None:
            raise LocalError(
                f"{path}: says no {name}, so it is no slice of a volume; convert the series to"
                " NIfTI, or move the file away"
            )
    for name in ALIKE:
        if len(found := set(map(str, map(attrgetter(name), headers)))) > 1:
            raise LocalError(
                f"{folder}: its files have {len(found)} {name}; give each series its folder"
            )


def _step(
    folder: Path, places: NDArray[np.float64], first: Any, turn: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Millimetres [3] from a slice to the next; LocalError where some lack, or lie in one place."""
    if len(places) == 1:
        return np.cross(turn[:3], turn[3:]) * float(first.get("SliceThickness") or 1.0)
    # Along the slices' normal; what is left over is a shift within their plane.
    normal = np.cross(turn[:3], turn[3:])
    steps = np.diff(places, axis=0)
    apart = steps @ normal
    least, most = float(apart.min()), float(apart.max())
    if least <= 0 or most - least > UNEVEN * most:
        raise LocalError(
            f"{folder}: its slices are {least:.2f} to {most:.2f} mm apart; a slice is missing, or"
            " the folder holds two series or times"
        )
    if np.abs(steps - np.outer(apart, normal)).max() > UNEVEN * most:
        raise LocalError(
            f"{folder}: its slices are shifted (a tilted gantry); straighten the series, such as by"
            " dcm2niix"
        )
    return np.asarray((places[-1] - places[0]) / (len(places) - 1))


def _opened(path: Path, names: Sequence[str]) -> Any:
    """A file, of which these elements are parsed, and its values if ``PixelData`` is one."""
    try:
        import pydicom  # noqa: PLC0415 - installed for those who have scans
    except ModuleNotFoundError as error:
        raise LocalError(f"{path}: DICOM files are read by pydicom; {IMAGING}") from error
    # What it warns of, and logs, has what stands in a file.
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    with reading(path, "DICOM"):
        check_regular(path)
        # Its text has an advice for developers.
        with suppress(pydicom.errors.InvalidDicomError):
            check_local(
                pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID") != DEFLATED,
                f"{path}: is deflated; store it without, such as by dcmconv",
            )
            header = "PixelData" not in names
            return pydicom.dcmread(path, stop_before_pixels=header, specific_tags=list(names))
    raise LocalError(f"{path}: is no DICOM file; move it away")


def _values(files: Sequence[Path], headers: Sequence[Any]) -> NDArray[np.float32]:
    """Values [files, channels, rows, columns] of files of one frame each."""
    return np.stack(list(map(_frame, files, headers)))


def _zeros(_: Sequence[Path], headers: Sequence[Any]) -> NDArray[np.float32]:
    """As ``_values``, all 0, which take no memory."""
    return np.broadcast_to(np.float32(0), (len(headers), *_sides(headers[0])))


def _frame(path: Path, header: Any) -> NDArray[np.float32]:
    _check_frames(path, header)
    from pydicom import pixels  # noqa: PLC0415

    of: Any = pixels  # whose types leave these two out
    channels, *sides = _sides(header)
    size = BYTES * channels * prod(sides)
    check_fits(path, size, f"an image of {' x '.join(map(str, sides))}")
    with reading(path, "DICOM"):
        whole = _opened(path, PIXELS)
        kind = whole.PhotometricInterpretation
        check_local(
            whole.HighBit == whole.BitsStored - 1,
            f"{path}: has values at other bits than the lowest; convert it",
        )
        if channels == 1 and not kind.startswith("MONOCHROME"):
            raise LocalError(f"{path}: is neither grey nor RGB; store it as MONOCHROME2 or RGB")
        stored = _decoded(path, whole, of)
        if channels > 1:
            return np.asarray(np.moveaxis(stored, -1, 0), np.float32)
        values = of.apply_modality_lut(stored, whole)
        if kind == "MONOCHROME1":
            ends = np.array(_range(whole), stored.dtype)
            values = of.apply_modality_lut(ends, whole).sum() - values
    return np.asarray(values, np.float32)[None]


def _decoded(path: Path, whole: Any, of: Any) -> NDArray[Any]:
    try:
        return np.asarray(of.pixel_array(whole))
    # So pydicom says that a decoder is missing, or that it fails.
    except RuntimeError as error:
        from pydicom import uid  # noqa: PLC0415

        # By pydicom's name for it: what stands in the file may be anything.
        known: Any = uid
        form, *_ = known.UID_dictionary.get(whole.file_meta.TransferSyntaxUID, ("its form",))
        raise LocalError(
            f"{path}: no decoder here can read {form}; decompress it, such as by dcmdjpeg or"
            " gdcmconv --raw, or install one of pydicom's decoders"
        ) from error


def _check_frames(path: Path, header: Any) -> None:
    if int(header.get("NumberOfFrames") or 1) > 1:
        raise LocalError(f"{path}: holds several frames; convert it to NIfTI, such as by dcm2niix")


def _sides(header: Any) -> tuple[int, ...]:
    """Channels, rows and columns of a file."""
    return int(header.get("SamplesPerPixel", 1)), int(header.Rows), int(header.Columns)


def _range(whole: Any) -> tuple[int, int]:
    """The least and largest number that a file can store."""
    half = 1 << (int(whole.BitsStored) - 1)
    return (-half, half - 1) if whole.PixelRepresentation else (0, 2 * half - 1)
