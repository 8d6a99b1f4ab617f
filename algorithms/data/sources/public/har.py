"""UCI HAR (Anguita et al., ESANN 2013): windows of a smartphone's sensors, six activities.

It was worn by 30 persons. A record has shape [9, 1, 128]: 2.56 s at 50 Hz of body acceleration x,
y, z (g), angular velocity x, y, z (rad/s) and total acceleration x, y, z (g), as they are. It is
read from

- ``har.npz``: x [N, 9, 128], y [N] 0 … 5 and subject [N] 1 … 30, the windows of a subject in their
  official order; or
- ``UCI HAR Dataset/{train,test}/``: the official text files, with their folders ``Inertial
  Signals``.

Windows overlap by half: those of one unbroken recording are one group, which the split keeps on one
side.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .....errors import LocalError, reason
from .....files.file_bounds import check_fits, open_regular
from ...arrays import read_arrays
from ...dataset import Dataset

SUBJECTS = tuple(map(str, range(1, 31)))
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying")
SIGNALS = tuple(
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
# Total acceleration: overlapping windows agree to the last digit, which filtered signals need not.
RAW = slice(6, 9)
LENGTH = 128
# bytes in memory for each of a table of numbers: "1 " is an int64, while the array grows twice that
TEXT_GROWS = 4
FILE, FOLDER = "har.npz", "UCI HAR Dataset"

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # x, y from 0, subject


def read_har(folder: Path) -> Dataset:
    """All windows; an id is the subject and the window's place among the subject's.

    x is [N, 9, 1, 128] in g and rad/s. Sources are subjects, groups are unbroken recordings.
    """
    if (folder / FILE).is_file():
        arrays = read_arrays(folder / FILE, ("x", "y", "subject"))
        x, y, subject = arrays["x"], arrays["y"], arrays["subject"]
    elif (folder / FOLDER).is_dir():
        x, y, subject = _official(folder / FOLDER)
    else:
        raise LocalError(
            f"{folder}: has neither {FILE} nor {FOLDER!r}; unpack UCI's HAR data set there"
        )
    shapes = (y.ndim, subject.shape, x.shape)
    if x.dtype.kind != "f" or shapes != (1, y.shape, (*y.shape, len(SIGNALS), LENGTH)):
        raise LocalError(
            f"{folder}: HAR: x is {x.dtype} {list(x.shape)}, y {list(y.shape)}, subject"
            f" {list(subject.shape)}; give x [N, {len(SIGNALS)}, {LENGTH}] and for each window its"
            " y and subject"
        )
    if y.dtype.kind not in "iu" or subject.dtype.kind not in "iu":
        raise LocalError(
            f"{folder}: HAR: y is {y.dtype} and subject {subject.dtype}; give whole numbers"
        )

    # Places and recordings count per person: ids stay the same where other persons are left out.
    places = np.zeros(len(y), np.int64)
    chains = np.zeros(len(y), np.int64)
    for person in np.unique(subject):
        own = np.flatnonzero(subject == person)
        places[own] = np.arange(len(own))
        chains[own] = _chains(x[own])
    return Dataset(
        # [N, 9, 1, 128]: signals are channels of an image that is one pixel high.
        torch.from_numpy(np.ascontiguousarray(x, np.float32))[:, :, None],
        torch.from_numpy(y.astype(np.int64)),
        CLASSES,
        ids=_by_person(subject, places),
        sources=tuple(map(str, subject.tolist())),
        groups=_by_person(subject, chains),
    )


def _by_person(subject: NDArray[Any], numbers: NDArray[np.int64]) -> tuple[str, ...]:
    pairs = zip(subject.tolist(), numbers.tolist(), strict=True)
    return tuple(f"{person}/{number}" for person, number in pairs)


def _chains(x: NDArray[Any]) -> NDArray[np.int64]:
    """The number of each window's recording.

    A window belongs to the recording of the one before if its first half is that one's last half.
    """
    # Consecutive windows of a recording overlap by half.
    half = LENGTH // 2
    joined = (x[1:, RAW, :half] == x[:-1, RAW, half:]).all((1, 2))
    return np.concatenate([[0], np.cumsum(~joined)]).astype(np.int64)


def _official(folder: Path) -> Arrays:
    x, y, subject = zip(*(_part(folder / part, part) for part in ("train", "test")), strict=True)
    return np.concatenate(x), np.concatenate(y), np.concatenate(subject)


def _part(folder: Path, part: str) -> Arrays:
    x = [
        _text(folder / "Inertial Signals" / f"{signal}_{part}.txt", np.float32)
        for signal in SIGNALS
    ]
    y, subject = (_text(folder / f"{name}_{part}.txt", np.int64)[:, 0] for name in ("y", "subject"))
    if any(signal.shape != (len(y), LENGTH) for signal in x) or len(subject) != len(y):
        raise LocalError(
            f"{folder}: its files differ in their numbers of lines; unpack UCI's HAR data set again"
        )
    # Official labels start at 1.
    return np.stack(x, 1), y - 1, subject


def _text(file: Path, dtype: type[Any]) -> NDArray[Any]:
    try:
        with open_regular(file) as opened:
            check_fits(file, file.stat().st_size * TEXT_GROWS, "its numbers")
            # Without ``ndmin`` a file of one line would become a vector.
            return np.loadtxt(opened, dtype, ndmin=2)
    except OSError as error:
        raise LocalError(
            f"{file}: cannot read it: {reason(error)}; unpack UCI's HAR data set again"
        ) from error
    # Without its cause, whose text has the numbers.
    except ValueError:
        raise LocalError(
            f"{file}: is not a table of numbers; unpack UCI's HAR data set again"
        ) from None
