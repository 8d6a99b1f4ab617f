"""The heat map of PPFL's memberships: one row a silo, one column a canonical model, darker is nearer to one.

It draws what was released to the coordinator, or, in the simulator, what the silos keep; it releases nothing itself.
"""

import io
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ..errors import LocalError
from .method import CoordinatorState, SiloState

CELL = 16  # pixels
WHITE, DARK = np.array([255.0, 255.0, 255.0]), np.array([8.0, 29.0, 88.0])  # colours of 0 and 1


def released(coordinator: CoordinatorState) -> Tensor:
    """Memberships [N, K] that silos released, rows of zeros for silos that did not; LocalError where none did."""
    memberships = coordinator.get("memberships")
    if memberships is None or not bool(memberships.any()):
        raise LocalError(
            'no membership was released; run the job with release_membership = "last", '
            "where the policies of the silos allow it"
        )
    return memberships


def simulated(states: Mapping[str, SiloState]) -> Tensor:
    """Memberships [N, K] of a simulation's final states, in their order."""
    without = [silo for silo, state in states.items() if "membership" not in state.parts]
    if without or not states:
        raise LocalError(f"states of {without or 'no silo'} hold no membership; simulate a ppfl job")
    return torch.stack([state.parts["membership"]["c"] for state in states.values()])


def picture(memberships: Tensor, labels: Sequence[str] = ()) -> bytes:
    """PNG of memberships [N, K] in 0…1, with the rows' labels on the left where given."""
    if memberships.ndim != 2 or 0 in memberships.shape:
        raise LocalError(f"a heat map takes memberships [N, K], not {list(memberships.shape)}")
    if not bool(((memberships >= 0) & (memberships <= 1)).all()):
        raise LocalError("a heat map takes memberships between 0 and 1")
    if labels and len(labels) != len(memberships):
        raise LocalError(f"{len(labels)} labels for {len(memberships)} rows; give one a row, or none")
    shade = memberships.double().numpy()[..., None]  # [N, K, 1]
    colours = np.rint(WHITE + shade * (DARK - WHITE)).astype(np.uint8)
    cells = Image.fromarray(colours.repeat(CELL, 0).repeat(CELL, 1))
    draw = ImageDraw.Draw(cells)
    margin = max((int(draw.textlength(label)) + 8 for label in labels), default=0)
    image = Image.new("RGB", (margin + cells.width, cells.height), "white")
    image.paste(cells, (margin, 0))
    for row, label in enumerate(labels):
        ImageDraw.Draw(image).text((4, row * CELL + 2), label, fill="black")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
