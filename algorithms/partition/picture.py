"""A picture of a partition: columns are silos, rows classes, and a disc's area is the count.

As in pFedSim's Figure 3. The largest disc fills its cell, and the last line says what it stands
for; a class of which a silo holds any record shows as a dot at least. Many silos are stripes, in
the order of the class that they have most of, and darkness stands for the count.
"""

import io
from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ...errors import LocalError, check_local

WIDE, NARROW = 40, 20  # pixels of a cell
FEW = 25  # silos and classes, at most, that get wide cells
SMALLEST = 1.0  # radius in pixels
INK = (8, 29, 88)
MOST_DISCS = 80  # silos; more are stripes
WIDEST = 1600  # pixels of all stripes; more silos than that share them
PALEST = 0.08  # of the ink, where a silo holds any record of a class

Counts = NDArray[np.int64]


def held(parts: Mapping[str, NDArray[np.int64]], labels: NDArray[np.int64], classes: int) -> Counts:
    """Counts [N, C] of the silos' records by class.

    Rows are in the order of ``parts``. LocalError for labels outside 0 … classes − 1.
    """
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise LocalError(
            f"picture: labels from {labels.min()} to {labels.max()} for {classes} classes; number"
            " from 0"
        )
    counts = [np.bincount(labels[part], minlength=classes) for part in parts.values()]
    return np.array(counts, dtype=np.int64)


def cell_of(counts: Counts) -> int:
    """Pixels of a cell.

    It is ``WIDE`` for few silos and classes, else ``NARROW``.
    """
    return WIDE if max(counts.shape) <= FEW else NARROW


def radii(counts: Counts) -> NDArray[np.float64]:
    """Radii of the discs in pixels; areas are in proportion to the counts.

    They are float64 [N, C], and 0 if a silo has no record of a class.
    """
    # A disc below the smallest radius would not be seen, and its silo seem to lack the class.
    largest = cell_of(counts) / 2 - 1
    # Areas follow the counts, so radii follow their square roots.
    proportional = largest * np.sqrt(counts / max(int(counts.max()), 1))
    return np.where(counts > 0, np.maximum(proportional, SMALLEST), 0.0)


def picture(counts: Counts, silos: Sequence[str] = (), classes: Sequence[str] = ()) -> bytes:
    """PNG of counts [N, C]; the silos' names stand below and the classes' on the left.

    Numbers stand for names that are left out; many silos have none. LocalError for negative counts
    or another number of names.
    """
    _check_counts(counts)
    columns = _named("silos", silos, counts.shape[0])
    rows = _named("classes", classes, counts.shape[1])
    cell = cell_of(counts)
    left = [_text(name, cell) for name in rows]
    if len(counts) > MOST_DISCS:
        order = f"{len(counts):,} silos, by the class of which they have most"
        scale = _text(f"{order}; darkest: {counts.max():,} records", cell)
        return _framed(_stripes(counts, cell), left, [], scale, cell)
    # Turned upright, since a name is wider than a cell.
    below = [_text(name, cell).rotate(90, expand=True) for name in columns]
    scale = _text(f"largest: {counts.max():,} records", cell)
    return _framed(_discs(counts), left, below, scale, cell)


def _framed(
    body: Image.Image,
    left: Sequence[Image.Image],
    below: Sequence[Image.Image],
    scale: Image.Image,
    cell: int,
) -> bytes:
    """PNG of the body with texts for each row and column, and the scale in the corner."""
    # The longest names determine the margins.
    margin = max(scale.width - body.width, *(text.width for text in left))
    height = body.height + max((text.height for text in below), default=0)
    image = Image.new("RGB", (margin + body.width, height + scale.height), "white")
    image.paste(body, (margin, 0))
    for row, text in enumerate(left):
        image.paste(text, (margin - text.width, row * cell + (cell - text.height) // 2))
    for column, text in enumerate(below):
        image.paste(text, (margin + column * cell + (cell - text.width) // 2, body.height))
    image.paste(scale, (image.width - scale.width, height))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _check_counts(counts: Counts) -> None:
    if counts.ndim != 2 or 0 in counts.shape or bool((counts < 0).any()):
        raise LocalError(
            f"picture: takes counts [silos, classes] from 0 on, not {list(counts.shape)}"
        )


def by_class(counts: Counts) -> list[int]:
    """Silos by the class of which they have most records, the purest of each class first.

    ``counts`` are records by silo and class [N, C].

    "Purest": with the largest share of its records in that class.
    """
    dominant, largest = counts.argmax(1), counts.max(1) / np.maximum(counts.sum(1), 1)
    return sorted(range(len(counts)), key=lambda silo: (dominant[silo], -largest[silo]))


def darkness(counts: Counts) -> NDArray[np.float64]:
    """Of stripes [M, C], from 0 to 1: the root of the counts' ratio to the largest.

    Silos in the order of ``by_class``, more than ``WIDEST`` as means of neighbours.
    """
    ordered = counts[by_class(counts)].astype(np.float64)
    first = np.unique(np.linspace(0, len(ordered), min(len(ordered), WIDEST), False, dtype=int))
    size = np.diff([*first, len(ordered)])
    means = np.add.reduceat(ordered, first) / size[:, None]
    dark = np.sqrt(means / max(means.max(), 1.0))
    return np.where(means > 0, np.maximum(dark, PALEST), 0.0)


def _stripes(counts: Counts, cell: int) -> Image.Image:
    dark = np.rint(255 * darkness(counts)).astype(np.uint8)
    width = max(1, WIDEST // len(dark))
    rows = np.repeat(np.repeat(dark.T, cell, axis=0), width, axis=1)
    # White between classes, so that rows can be told apart.
    rows[cell - 1 :: cell] = 0
    return ImageOps.colorize(Image.fromarray(rows), "white", INK)


def _named(what: str, names: Sequence[str], wanted: int) -> Sequence[str]:
    if not names:
        return list(map(str, range(wanted)))
    check_local(
        len(names) == wanted,
        f"picture: {len(names)} names for {wanted} {what}; give one each, or none",
    )
    return names


def _discs(counts: Counts) -> Image.Image:
    cell = cell_of(counts)
    # Distances along one axis, from the middle of a cell to the middle of its pixels.
    away = np.arange(cell) - (cell - 1) / 2
    # [cell, 1, cell] of a pixel from the middle of its cell
    distance = np.hypot(away[:, None], away)[:, None, :]
    rows = []
    for radius in radii(counts).T:  # class by class, for memory
        # Pixels within half a pixel of the edge are shaded, so that discs look round.
        covered = np.clip(radius[:, None] - distance + 0.5, 0, 1)  # [cell, N, cell]
        rows.append(np.rint(255 * covered).astype(np.uint8).reshape(cell, -1))
    return ImageOps.colorize(Image.fromarray(np.concatenate(rows)), "white", INK)


def _text(name: str, cell: int) -> Image.Image:
    """An image of a name in letters that suit a cell, with some space around them."""
    font, space = ImageFont.load_default(max(cell * 0.4, 10.0)), cell // 5
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    width = measure.textlength(name, font)
    _, top, _, bottom = measure.textbbox((0, 0), "Ág", font)  # alike for all names
    image = Image.new("RGB", (ceil(width) + 2 * space, ceil(bottom - top) + 2), "white")
    ImageDraw.Draw(image).text((space, 1 - top), name, fill="black", font=font)
    return image
