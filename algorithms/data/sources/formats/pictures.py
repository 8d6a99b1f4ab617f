"""Pictures: PNG and JPEG, decoded into numbers of 0 … 1.

8-bit grey and colour, 16-bit grey. Colour is turned into grey and grey into colour as the job's
model asks; nothing is done to a picture with transparency or of four printing colours but to name
it.
"""

import io
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .....errors import LocalError
from .....files.file_bounds import check_fits, open_regular
from ....models.registry import Shape

FORMATS = ("PNG", "JPEG")  # no other decoder of Pillow's is reached
SUFFIXES = (".png", ".jpg", ".jpeg")
MOST_PIXELS = 64 * 2**20  # a small file can claim any size: checked before a pixel is decoded
# Pillow's mode → read as
MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "I;16": "I;16", "I;16B": "I;16"}
COLOURS = {1: "L", 3: "RGB"}  # Pillow's mode by the channels that a model takes
OPENING = Lock()  # what warnings do is the process's, and silos of a simulation read in threads
# Pillow's decoders raise any of these for a damaged file.
FAULTS = (OSError, EOFError, SyntaxError, ValueError, TypeError, IndexError, KeyError, struct.error)


def check_shape(folder: Path, shape: Shape) -> None:
    """LocalError unless records of this shape can be made of pictures."""
    if len(shape) != 3 or shape[0] not in COLOURS:
        raise LocalError(
            f"{folder}: images are [channels, height, width] with 1 or 3 channels, the job's model"
            f" takes {list(shape)}"
        )


def read_all(folder: Path, paths: Sequence[Path], shape: Shape, resize: bool) -> Tensor:
    """All images as [records, channels, height, width] in 0 … 1.

    They are float32. LocalError if they do not fit the memory, or one image cannot be read; it
    names the file.
    """
    records = len(paths)
    size = records * math.prod(shape) * np.dtype(np.float32).itemsize
    # Twice: the split copies every record.
    check_fits(folder, 2 * size, f"{records:,} images of {' x '.join(map(str, shape))}")
    # Filled in place: stacking a list would need the memory twice.
    x = np.empty((records, *shape), np.float32)
    for record, path in enumerate(paths):
        x[record] = read_pixels(path, shape, resize)
    return torch.from_numpy(x)


def read_pixels(
    path: Path, shape: Shape, resize: bool, held: bytes | None = None
) -> NDArray[np.float32]:
    """One image as [channels, height, width] in 0 … 1; ``held`` as in ``decoded``.

    It is float32. LocalError for a file that is not a PNG or JPEG, has too many pixels, or without
    ``resize`` has another size.
    """
    with decoded(path, held) as image:
        return _converted(path, image, shape, resize)


@contextmanager
def decoded(path: Path, held: bytes | None = None) -> Iterator[Image.Image]:
    """A PNG or JPEG, of which only the header is read yet.

    It is a file's, or of bytes ``held`` in memory, which ``path`` then names in errors. LocalError
    for another file or one with too many pixels, and in place of what its decoder raises.
    """
    try:
        with open_regular(path) if held is None else io.BytesIO(held) as file:
            # Pillow warns of an image above half its limit; ours is lower.
            with OPENING, warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                opened = Image.open(file, formats=FORMATS)  # reads its header alone
            with opened as image:
                # A small file can claim any size, and decoding allocates it.
                if image.width * image.height > MOST_PIXELS:
                    raise LocalError(_too_large(path, held))
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LocalError(_too_large(path, held)) from error
    # Its text names an object of Python's where there is no file.
    except UnidentifiedImageError:
        raise LocalError(
            f"{path}: cannot read it as PNG or JPEG: it is neither; replace it"
        ) from None
    except FAULTS as error:
        raise LocalError(f"{path}: cannot read it as PNG or JPEG: {error}; replace it") from error


def _converted(path: Path, image: Image.Image, shape: Shape, resize: bool) -> NDArray[np.float32]:
    channels, height, width = shape
    if image.mode not in MODES or "transparency" in image.info:
        raise LocalError(
            f"{path}: mode {image.mode}, with transparency or unusual colours; store it as grey"
            " or RGB"
        )
    upright = ImageOps.exif_transpose(image)  # as a viewer shows it
    highest = np.float32(255)
    # convert() would cut 16 bits off at 255.
    if MODES[upright.mode] == "I;16":
        flat = Image.fromarray(np.asarray(upright).astype(np.float32) / 65535)
        highest = np.float32(1)
    else:
        flat = upright.convert(COLOURS[channels])
    if flat.size != (width, height):
        if not resize:
            raise LocalError(
                f"{path}: {flat.width} x {flat.height} pixels, the job's model takes {width} x"
                f" {height}; resize it, or set data.resize = true"
            )
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(flat, dtype=np.float32).reshape(height, width, -1).transpose(2, 0, 1)
    # A 16-bit grey image has one channel; it is repeated for a model that takes three.
    return np.broadcast_to(pixels / highest, shape)


def _too_large(path: Path, held: bytes | None) -> str:
    size = path.stat().st_size if held is None else len(held)
    return (
        f"{path}, holds {size:,} bytes: claims more than {MOST_PIXELS:,} pixels; scale it down, or"
        " replace it"
    )
