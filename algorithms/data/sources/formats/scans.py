"""Scans: NIfTI files, DICOM files, and folders of DICOM files, one slice each.

A volume is turned so that its slices are axial, as radiologists see them: z from the feet up, y
from front to back, x from the patient's right to the left. So all silos have the same sides at the
same places, whatever wrote their files. A single slice of DICOM stays as it is stored.

An oblique scan is turned to the nearest of these axes; its values stay what they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name for it
from numpy.typing import NDArray
from torch import Tensor

from .....errors import LocalError, StaddleError, check_local, reason
from .....files.file_bounds import check_fits
from ....models.registry import Shape

SLICE = 3  # sides of a slice's record, channels included
COPIES = 8  # bytes of a value: as it is, and in another size
AXES = ("L", "P", "S")  # towards which x, y and z grow
ROUNDING = 1e-9  # of the largest value: a deviation below it is none
IMAGING = "pip install 'staddle[imaging]'"

Window: TypeAlias = tuple[float, float] | Literal["each"]


@dataclass(frozen=True, eq=False)
class Scan:
    """Values [channels, z, y, x] float32 in the file's units, such as Hounsfield's."""

    values: NDArray[np.float32]
    spacing: tuple[float, ...] | None  # millimetres between centres, z, y, x; None if unknown
    place: NDArray[np.float64] | None = None  # [4, 4]: x, y, z → millimetres; None if unknown


@dataclass(frozen=True)
class Fit:
    """How scans become records of one size.

    ``window`` are the values that become 0 and 1, beyond which all are cut; with ``"each"`` a
    scan's own mean and deviation are taken off. ``spacing`` is that of the records.
    """

    window: Window | None
    spacing: tuple[float, ...] | None
    resize: bool

    def record(self, path: Path, scan: Scan, shape: Shape) -> NDArray[np.float32]:
        """The scan as a record of this shape [channels, (depth,) height, width].

        LocalError, which names the path, for a scan that cannot be one.
        """
        if self.window is None:
            raise LocalError(
                f"{path}: holds values of any range; name those that become 0 and 1, such as"
                ' data.window = [-1000, 400], or data.window = "each"'
            )
        if len(scan.values) not in (1, shape[0]):
            raise LocalError(
                f"{path}: has {len(scan.values)} channels, the job's model takes {shape[0]}"
            )
        sized = self._sized(path, scan, shape, _smooth)
        if self.window == "each":
            values = _standard(sized)
            whole = _centred(values, _sides(shape), float(values.min()))
        else:
            whole = _centred(_within(sized, *self.window), _sides(shape), 0.0)
        return np.broadcast_to(whole.numpy().reshape(-1, *shape[1:]), shape)

    def classes(self, path: Path, scan: Scan, shape: Shape) -> NDArray[np.uint8]:
        """The classes of a scan's voxels, of one channel, for records of this shape.

        What lies around the scan is of class 0.
        """
        sized = self._sized(path, scan, shape, partial(F.interpolate, mode="nearest-exact"))
        whole = _centred(sized, _sides(shape), 0.0)
        return whole.numpy().astype(np.uint8).reshape(shape[1:])

    def _sized(
        self,
        path: Path,
        scan: Scan,
        shape: Shape,
        scaled: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> Tensor:
        """The values in the record's spacing, or its size if they are resized."""
        _check_dimensions(path, scan, shape)
        values, wanted = torch.from_numpy(np.ascontiguousarray(scan.values)), _sides(shape)
        found = values.shape[1:]
        if self.resize:
            size = wanted
        elif self.spacing is not None:
            size = _spaced(path, scan, self.spacing)
        elif tuple(found) == wanted:
            return values
        else:
            raise LocalError(
                f"{path}: {' x '.join(map(str, found))} values, the job's model takes"
                f" {' x '.join(map(str, wanted))}; set data.spacing in millimetres, after which"
                " scans are cut or filled up around their centre, or data.resize = true"
            )
        check_fits(path, COPIES * len(values) * prod(size), "its values in the record's spacing")
        return values if tuple(found) == size else scaled(values[None], size)[0]


def _check_dimensions(path: Path, scan: Scan, shape: Shape) -> None:
    """Refuse a volume where the model takes slices, and a slice where it takes volumes."""
    slices = scan.values.shape[1]
    if len(shape) != SLICE and scan.place is None:
        raise LocalError(
            f"{path}: is one slice, and the job's model takes volumes; name the folder of its"
            " series, or choose a model with input [channels, height, width]"
        )
    if len(shape) == SLICE and slices > 1:
        raise LocalError(
            f"{path}: holds {slices} slices, and the job's model takes images; store one"
            " slice a file, or choose a model with input [channels, depth, height, width]"
        )


def _sides(shape: Shape) -> tuple[int, ...]:
    """Depth, height and width of a record; a slice is one deep."""
    return (1, *shape[1:])[-3:]


def _spaced(path: Path, scan: Scan, spacing: Sequence[float]) -> tuple[int, ...]:
    """The size that a scan has in another spacing, of which a slice names two sides."""
    if scan.spacing is None:
        raise LocalError(
            f"{path}: its header says no spacing; leave data.spacing out, or set data.resize = true"
        )
    # A slice is not made thinner or thicker.
    kept = scan.spacing[: 3 - len(spacing)]
    both = zip(scan.values.shape[1:], scan.spacing, (*kept, *spacing), strict=True)
    return tuple(max(1, round(count * own / wanted)) for count, own, wanted in both)


def _smooth(values: Tensor, size: Sequence[int]) -> Tensor:
    """Values [1, channels, …] in another size: means where it is smaller, else linear between."""
    # Linear interpolation alone would skip values where a side shrinks to less than a half.
    fewer = [min(sides) for sides in zip(values.shape[2:], size, strict=True)]
    means = F.interpolate(values, fewer, mode="area")
    return F.interpolate(means, list(size), mode="trilinear")


def _within(values: Tensor, low: float, high: float) -> Tensor:
    return values.sub(low).div_(high - low).clamp_(0, 1)


def _standard(values: Tensor) -> Tensor:
    """Each channel's values less their mean, over their deviation; a constant one is 0."""
    exact, sides = values.double(), (1, 2, 3)
    # Rounding of the mean gives a constant channel a deviation, too.
    least = exact.abs().amax(sides, keepdim=True) * ROUNDING
    exact -= exact.mean(sides, keepdim=True)
    deviation = exact.std(sides, keepdim=True, correction=0)
    return torch.where(deviation > least, exact / deviation, 0).float()


def _centred(values: Tensor, sides: Sequence[int], fill: float) -> Tensor:
    """The middle of the values [channels, …], with ``fill`` around where there are too few."""
    edges: list[int] = []
    # torch counts from the last side; a negative edge cuts.
    for found, wanted in zip(reversed(values.shape[1:]), reversed(sides), strict=True):
        before = int((wanted - found) / 2)
        edges += before, wanted - found - before
    return F.pad(values, edges, value=fill)


def turned(path: Path, values: NDArray[Any], place: NDArray[np.float64]) -> Scan:
    """A volume [x, y, z, channels] in any orientation, as a scan.

    ``place`` [4, 4] gives the millimetres of a voxel in NIfTI's frame, which grows towards right,
    anterior and superior. LocalError where it is no frame.
    """
    from nibabel import orientations  # noqa: PLC0415 - installed for those who have scans

    of: Any = orientations  # without types
    if not (np.isfinite(place).all() and np.linalg.norm(place[:3, :3], axis=0).all()):
        raise LocalError(f"{path}: its voxels have no place or size; correct its header")
    turn = of.ornt_transform(of.io_orientation(place), of.axcodes2ornt(AXES))
    affine = place @ of.inv_ornt_aff(turn, values.shape[:3])
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    whole = of.apply_orientation(values, turn).transpose(3, 2, 1, 0)
    return Scan(whole.astype(np.float32, copy=False), tuple(spacing[::-1].tolist()), affine)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """LocalError, which names the path and no value, in place of what a library raises."""
    try:
        yield
    except (StaddleError, KeyboardInterrupt, MemoryError):
        raise
    # Nobody can list what other people's code raises of a damaged file, and one record must not end
    # a private job. Its text may have what stands in the file.
    except BaseException as error:
        what = reason(error) if isinstance(error, OSError) else type(error).__name__
        raise LocalError(f"{path}: cannot read it as {kind}: {what}; replace it") from error


def check_sound(path: Path, scan: Scan) -> Scan:
    """The scan; LocalError where it has a spacing or values that are no numbers."""
    spacing = np.array(scan.spacing or (1.0, 1.0, 1.0))
    if spacing.shape != (3,) or not (np.isfinite(spacing) & (spacing > 0)).all():
        raise LocalError(f"{path}: its spacing is not positive numbers; correct its header")
    check_local(
        bool(np.isfinite(scan.values).all()),
        f"{path}: holds NaN or a value beyond float32; clean it first",
    )
    return scan
