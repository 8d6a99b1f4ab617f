"""Values of a state that stand still next to adapters: sharded while a round is computed.

A process that shares a round keeps a piece of each large one. None of them comes back to the agent,
which has them.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...algorithms.course import SiloState
from ...algorithms.job.job import Job
from ...algorithms.numerics.frozen import standing_still
from ...algorithms.numerics.ranks import Ranks
from ...algorithms.numerics.sharded_weight import sharded, whole
from ...algorithms.training.silo_round import state_of
from .trainer import SiloRound


def still_names(job: Job, silo: str) -> set[str]:
    """Names of the values that no training moves, as ``SiloState.flat`` has them."""
    if job.model.lora is None:
        return set()
    with torch.device("meta"):
        modules = job.method().modules(silo)
    return standing_still(modules)


def shared_out(asked: SiloRound, ranks: Ranks) -> SiloRound:
    """The round, of whose values that stand still each process holds a piece."""
    flat = asked.state.flat
    for number, name in enumerate(sorted(still_names(asked.of.job, asked.silo)), 1):
        flat[name] = sharded(flat[name], ranks, number)
    return replace(asked, state=_with(asked.state, flat))


def moved(asked: SiloRound, state: SiloState) -> SiloState:
    """A later state without the values that stand still; all processes must ask for it in turn.

    Where a method has moved such a value all the same, it is there, whole.
    """
    before, after = asked.state.flat, state.flat
    names = still_names(asked.of.job, asked.silo) & before.keys() & after.keys()
    # In one order in all processes, since comparing gathers them.
    for name in sorted(names):
        if torch.equal(before[name], after[name]):
            del after[name]
    return _with(state, {name: whole(value) for name, value in after.items()})


def completed(asked: SiloRound, state: SiloState) -> SiloState:
    """A state that the trainer wrote, with the values that stood still and that it left out."""
    before = asked.state.flat
    names = still_names(asked.of.job, asked.silo) & before.keys()
    return _with(state, {name: before[name] for name in names} | state.flat)


def _with(state: SiloState, flat: Mapping[str, Tensor]) -> SiloState:
    """The state with other tensors, which are in the same order in all processes."""
    made = state_of(dict(sorted(flat.items())), {}, "the state")
    return replace(state, parts=made.parts, extra=made.extra)
