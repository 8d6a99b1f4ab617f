"""DICOM, by pydicom: a file as a slice, and a folder of slices of one series as a volume.

Values are those after the rescaling that a file declares: Hounsfield units of CT. Where dark means
much (MONOCHROME1), they are turned round. What else a header says, a patient's name included, is
not read.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .....errors import LocalError
from .....files.file_bounds import check_fits, check_regular
from .scans import IMAGING, Scan, check_finite, turned

# pydicom and its decoders raise these for a damaged file, and for one that they cannot decode.
FAULTS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)
BYTES = 16  # of a value while it is read: stored, rescaled in float64, and float32
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's frame grows towards left and posterior
UNEVEN = 0.02  # share of their distance by which slices may be off
SAME_TURN = 1e-3  # by which directions of one series differ at most
ALIKE = ("SeriesInstanceUID", "Rows", "Columns", "PixelSpacing")
PLACED = (*ALIKE, "ImageOrientationPatient", "ImagePositionPatient")
OTHERS = ("SamplesPerPixel", "NumberOfFrames", "SliceThickness", "ImagerPixelSpacing")
HEADER = [*PLACED, *OTHERS]


def read_slice(path: Path, values: bool = True) -> Scan:
    """A file's slice, as it is stored; LocalError, which names it, where it is none.

    Without ``values`` the header alone is read, and all are 0.
    """
    with _reading(path):
        header = _header(path)
        whole = (_values if values else _zeros)(path, header)[:, None]
        # Of an X-ray, on the detector.
        sides = header.get("PixelSpacing", header.get("ImagerPixelSpacing"))
        spacing = None if sides is None else (1.0, *map(float, sides))
        return check_finite(path, Scan(whole, spacing))


def read_series(folder: Path, files: Sequence[Path], values: bool = True) -> Scan:
    """The volume of a folder's files; LocalError where they are not the slices of one series.

    Without ``values`` headers alone are read, and all are 0.
    """
    headers = list(map(_header, files))
    _check_alike(folder, files, headers)
    with _reading(folder):
        return _volume(folder, files, headers, _values if values else _zeros)


def _volume(
    folder: Path,
    files: Sequence[Path],
    headers: Sequence[Any],
    values: Callable[[Path, Any], NDArray[np.float32]],
) -> Scan:
    turns = np.array(list(map(attrgetter("ImageOrientationPatient"), headers)), np.float64)
    places = np.array(list(map(attrgetter("ImagePositionPatient"), headers)), np.float64)
    if np.ptp(turns, axis=0).max() > SAME_TURN:
        raise LocalError(f"{folder}: its slices are not parallel; one folder a series")
    # Slices stand in the order of their places: a file's name says nothing.
    order = np.argsort(places @ np.cross(turns[0, :3], turns[0, 3:]))
    affine, first = np.eye(4), headers[0]
    rows, columns = map(float, first.PixelSpacing)
    affine[:3, 0], affine[:3, 1] = turns[0, :3] * columns, turns[0, 3:] * rows
    affine[:3, 2] = _step(folder, places[order], first, turns[0])
    affine[:3, 3] = places[order[0]]

    size = BYTES * len(files) * int(first.Rows) * int(first.Columns)
    check_fits(folder, size, f"a series of {len(files):,} slices")
    slices = list(map(values, files, headers))
    # [z, channels, y, x] → [x, y, z, channels]
    whole = np.stack(slices)[order].transpose(3, 2, 0, 1)
    return check_finite(folder, turned(whole, LPS_TO_RAS @ affine))


def _check_alike(folder: Path, files: Sequence[Path], headers: Sequence[Any]) -> None:
    """LocalError unless these headers are of slices of one series."""
    for (path, header), name in product(zip(files, headers, strict=True), PLACED):
        if header.get(name) is None:
            raise LocalError(
                f"{path}: says no {name}, so it is no slice of a volume; convert the series to"
                " NIfTI, or move the file away"
            )
    for name in ALIKE:
        if len(found := set(map(str, map(attrgetter(name), headers)))) > 1:
            raise LocalError(f"{folder}: its files have {len(found)} {name}; one folder a series")


def _step(
    folder: Path, places: NDArray[np.float64], first: Any, turn: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Millimetres [3] from a slice to the next; LocalError where some lack, or lie in one place."""
    if len(places) == 1:
        return np.cross(turn[:3], turn[3:]) * float(first.get("SliceThickness") or 1.0)
    steps = np.diff(places, axis=0)
    apart = np.linalg.norm(steps, axis=1)
    least, most = float(apart.min()), float(apart.max())
    if least == 0 or most - least > UNEVEN * most:
        raise LocalError(
            f"{folder}: its slices are {least:.2f} to {most:.2f} mm apart; one lacks, or it holds"
            " two series or times"
        )
    return np.asarray((places[-1] - places[0]) / (len(places) - 1))


def _header(path: Path) -> Any:
    """What a file says of the place of its values; a patient's name is not read."""
    return _opened(path, stop_before_pixels=True, specific_tags=HEADER)


def _opened(path: Path, **how: Any) -> Any:
    try:
        import pydicom  # noqa: PLC0415 - installed for those who have scans
        from pydicom.errors import InvalidDicomError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LocalError(f"{path}: DICOM files are read by pydicom; {IMAGING}") from error
    with _reading(path, InvalidDicomError):
        check_regular(path)
        return pydicom.dcmread(path, **how)


@contextmanager
def _reading(path: Path, *others: type[Exception]) -> Iterator[None]:
    """LocalError, which names the path, in place of what pydicom raises for a damaged file."""
    try:
        yield
    except (*FAULTS, *others) as error:
        # Its further lines are on plugins.
        why = str(error).partition("\n")[0] or type(error).__name__
        raise LocalError(f"{path}: cannot read it as DICOM: {why}; replace it") from error


def _values(path: Path, header: Any) -> NDArray[np.float32]:
    """Values [channels, rows, columns] of a file of one frame."""
    if int(header.get("NumberOfFrames") or 1) > 1:
        raise LocalError(f"{path}: holds several frames; convert it to NIfTI, such as by dcm2niix")
    from pydicom import pixels  # noqa: PLC0415

    of: Any = pixels  # whose types leave these two out
    channels = int(header.get("SamplesPerPixel", 1))
    size = BYTES * int(header.Rows) * int(header.Columns) * channels
    check_fits(path, size, f"an image of {header.Rows} x {header.Columns}")
    with _reading(path):
        whole = _opened(path)
        stored, kind = of.pixel_array(whole), whole.PhotometricInterpretation
        if channels > 1:
            return np.asarray(np.moveaxis(stored, -1, 0), np.float32)
        if not kind.startswith("MONOCHROME"):
            raise LocalError(f"{path}: is {kind}; store it as MONOCHROME2 or RGB")
        values = of.apply_modality_lut(stored, whole)
        if kind == "MONOCHROME1":
            ends = np.array(_range(whole), stored.dtype)
            values = of.apply_modality_lut(ends, whole).sum() - values
        return np.asarray(values, np.float32)[None]


def _zeros(_: Path, header: Any) -> NDArray[np.float32]:
    sides = int(header.get("SamplesPerPixel", 1)), int(header.Rows), int(header.Columns)
    return np.zeros(sides, np.float32)


def _range(whole: Any) -> tuple[int, int]:
    """The least and largest number that a file can store."""
    half = 1 << (int(whole.BitsStored) - 1)
    return (-half, half - 1) if whole.PixelRepresentation else (0, 2 * half - 1)
