"""Silos that train different parts in one call: each one's own part, under a name common to all.

Where a silo trains one adapter and another silo the next, masks would have to reach gradients,
weight decay and momentum of all adapters. Under one name only what a silo trains is in the call, so
no optimiser needs to know. Parts of other shapes are not under one name: their silos train in
groups, as do those whose stages are not ``Aligned``.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from ..course import Course, Stage
from ..training.loop import Modules
from .grouping import architecture
from .vmap_training import Silos, Values


def shapes(steps: Course, modules: Modules) -> Hashable:
    """Equal where the parts under each common name compute the same from values of the same shapes.

    The modules are those of one architecture.
    """
    return tuple(
        architecture({name: modules[part] for name, part in step.aligned.names.items()})
        for step in steps
        if isinstance(step, Stage) and step.aligned is not None
    )


def joined(silos: Silos, stages: Sequence[Stage]) -> Silos:
    """The silos with the parts under common names in addition; these values are copies."""
    modules, values = dict(silos.modules), dict(silos.values)
    for name, parts in _by_name(stages).items():
        # The least: a step is kept by its modules, and silos take other parts in other rounds.
        modules[name] = silos.modules[min(parts)]
        values[name] = {
            tensor: torch.stack([silos.values[part][tensor][row] for row, part in enumerate(parts)])
            for tensor in silos.values[parts[0]]
        }
    return replace(silos, modules=modules, values=values)


def put_back(silos: Silos, stages: Sequence[Stage], trained: Values) -> None:
    """Write what was trained under common names into each silo's own parts."""
    for name, parts in _by_name(stages).items():
        for row, part in enumerate(parts):
            for tensor, values in silos.values[part].items():
                values[row] = trained[name][tensor][row]


def _by_name(stages: Sequence[Stage]) -> dict[str, list[str]]:
    """The part of each silo under each common name."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        names = {} if stage.aligned is None else stage.aligned.names
        for name, part in names.items():
            found.setdefault(name, []).append(part)
    return found
