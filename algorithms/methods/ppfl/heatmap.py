"""The heat map of PPFL's memberships: one row per silo, one column per canonical model.

Darker cells are nearer to one. A silo that released nothing has a row of zeros, which is no
membership; it is drawn grey, with dashes. The memberships were released to the coordinator, or they
are those that a silo or the simulator keeps; drawing releases nothing.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ....errors import LocalError
from ...course import SiloState
from ...exchange.delivery import CoordinatorState

CELL = 16  # pixels
WHITE, DARK = np.array([255.0, 255.0, 255.0]), np.array([8.0, 29.0, 88.0])  # colours of 0 and 1
GREY = np.array([224, 224, 224], np.uint8)  # not on the way from white to dark
TOLERANCE = 1e-3  # of a row's sum; a float32 point of the simplex is within 1e-5


def released(coordinator: CoordinatorState) -> Tensor:
    """Memberships [N, K] that silos released, with rows of zeros for silos that did not.

    LocalError where no silo did.
    """
    memberships = coordinator.get("memberships")
    if memberships is None or not bool(memberships.any()):
        raise LocalError(
            'no membership was released; run a ppfl job with release_membership = "last", '
            "where the policies of the silos allow it"
        )
    return memberships


def simulated(states: Mapping[str, SiloState]) -> Tensor:
    """Memberships [N, K] of a simulation's final states, in their order.

    LocalError if a state has none.
    """
    without = [silo for silo, state in states.items() if "membership" not in state.parts]
    if without or not states:
        raise LocalError(
            f"states of {without or 'no silo'} hold no membership; simulate a ppfl job"
        )
    return torch.stack([state.parts["membership"]["c"] for state in states.values()])


def check(memberships: Tensor, labels: Sequence[str] = ()) -> None:
    """LocalError unless these are rows [N, K] of a simplex or of zeros, and labels fit the rows."""
    if memberships.ndim != 2 or 0 in memberships.shape:
        raise LocalError(f"a heat map takes memberships [N, K], not {list(memberships.shape)}")
    if labels and len(labels) != len(memberships):
        raise LocalError(
            f"{len(labels)} labels for {len(memberships)} rows; give one per row, or none"
        )
    inside = ((memberships >= 0) & (memberships <= 1)).all(1)  # NaN is not
    # A silo that released nothing has zeros, and is drawn too.
    whole = ((memberships.sum(1) - 1).abs() < TOLERANCE) | (memberships == 0).all(1)
    named = zip(labels or range(len(memberships)), (inside & whole).tolist(), strict=True)
    wrong = [name for name, fits in named if not fits]
    if wrong:
        raise LocalError(
            f"the rows of {wrong} are not memberships: between 0 and 1, with the sum 1"
        )


def picture(memberships: Tensor, labels: Sequence[str] = ()) -> bytes:
    """PNG of memberships [N, K] in 0…1, with any labels of the rows on the left.

    Cells are squares of ``CELL`` pixels. LocalError as in ``check``.
    """
    check(memberships, labels)
    shade = memberships.double().numpy()[..., None]  # [N, K, 1]
    colours = np.rint(WHITE + shade * (DARK - WHITE)).astype(np.uint8)
    silent = (memberships == 0).all(1).numpy()  # [N]
    colours[silent] = GREY
    cells = Image.fromarray(colours.repeat(CELL, 0).repeat(CELL, 1))

    # Cells of a silo that released nothing get a dash, since they show no membership.
    draw = ImageDraw.Draw(cells)
    for row, left in product(np.flatnonzero(silent).tolist(), range(0, cells.width, CELL)):
        draw.line((left + 6, row * CELL + 8, left + 10, row * CELL + 8), "black")
    margin = max((int(draw.textlength(label)) + 8 for label in labels), default=0)
    image = Image.new("RGB", (margin + cells.width, cells.height), "white")
    image.paste(cells, (margin, 0))
    for row, label in enumerate(labels):
        ImageDraw.Draw(image).text((4, row * CELL + 2), label, fill="black")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
