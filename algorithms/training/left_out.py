"""What a silo uploads in the form of the job's codec, and what that leaves out of it.

A codec with error feedback keeps, by tensor, what a round's upload was short of, and adds it to
what the next one codes; so errors do not add up over rounds (Seide et al., 2014; Karimireddy et
al., 2019). It is part of the silo's state: on the disk with it, back with it where a round does not
count, as it was where the silo was away, and never sent. Neither a method nor a model that a silo
keeps sees it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import LocalError
from ..course import SiloState
from ..exchange.codec import base_of, codable
from ..exchange.delivery import Results
from ..exchange.parts import Part, Tensors, value_fault

LEFT = "@left/"  # in ``SiloState.extra``: a method's own names have no "@"
NOTHING = torch.zeros(())


def encoded(
    parts: Iterable[Part], laid: Mapping[str, Tensors], before: Tensors, came: Results
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Exactly ``Part.wire`` by part, and what is left out once this upload counts.

    ``laid`` is what the exchanges made of a round's contributions, ``before`` what earlier rounds
    left out, ``came`` what was delivered in this round. LocalError for a value that no longer is
    one once it is coded.
    """
    left = dict(before)
    given = {part.name: _coded(part, laid[part.name], left, came) for part in parts}
    return given, left


def _coded(part: Part, laid: Tensors, left: dict[str, Tensor], came: Results) -> dict[str, Tensor]:
    """One part; ``left`` is brought up to date."""
    if part.codec is None:
        return dict(laid)
    made: dict[str, Tensor] = {}
    base = base_of(part, came.get(part.name)) if part.codec.compares else {}
    for spec in part.given:
        value, key = laid[spec.name], f"{LEFT}{part.name}/{spec.name}"
        if not codable(spec):
            made[spec.name] = value
            continue
        wanted = value - base.get(spec.name, NOTHING) + left.get(key, NOTHING)
        own, stands_for = part.codec.encode(spec, wanted)
        made |= own
        if part.codec.feeds_back:
            left[key] = wanted - stands_for

    for spec in part.wire:
        # A float32 next to the largest rounds to infinity.
        if fault := value_fault(spec, made[spec.name]):
            raise LocalError(
                f"part {part.name!r}: tensor {spec.name!r} {fault} once it is coded; training has"
                " diverged, lower the lr"
            )
    return made


def with_left(state: SiloState, left: Tensors) -> SiloState:
    """The state with what its upload leaves out; the very state where nothing is."""
    return replace(state, extra={**state.extra, **left}) if left else state


def apart(state: SiloState) -> tuple[SiloState, dict[str, Tensor]]:
    """The state as methods and kept models have it, and what was left out.

    The very state where nothing was.
    """
    left = {name: value for name, value in state.extra.items() if name.startswith(LEFT)}
    own = {name: value for name, value in state.extra.items() if name not in left}
    return replace(state, extra=own) if left else state, left
