"""A second model next to the job's own, such as one that a silo keeps to itself.

The names of its parts are those of the job's model with a prefix.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ....errors import LocalError
from ...course import Parts, SiloState
from ...exchange.parts import Tensors
from ...method import Setting
from ...models.build import fill
from ...models.registry import NETWORKS
from .heterogeneous import sketched

MODEL = ("extractor", "classifier")
BEGUN = "begun"  # in a silo's ``extra``: whether its second model has values of its own


def names(second: str) -> tuple[str, ...]:
    """The parts of a second model, such as ``own_extractor`` and ``own_classifier`` of "own"."""
    return tuple(f"{second}_{part}" for part in MODEL)


def with_second_models(setting: Setting, *seconds: str) -> dict[str, nn.Module]:
    """The job's model and further ones like it, all with the same initial values.

    Each is built from the same streams of the job.
    """
    # The job's own parts keep their names, by which the wire list has them.
    modules = dict(setting.build())
    for second in seconds:
        modules |= dict(zip(names(second), setting.build().values(), strict=True))
    return modules


def with_other_model(
    setting: Setting, second: str, architecture: str | None, prefix: str
) -> dict[str, nn.Module]:
    """The job's model and a second one of the named architecture, or else of the job's.

    The second model's initial values are drawn from streams under this prefix, and are equal at
    every silo.
    """
    if not architecture:
        modules = setting.build(f"{prefix}/{second}_")
        return {**setting.build(), **dict(zip(names(second), modules.values(), strict=True))}
    # Under names of their own, which no wire list has.
    own = dict(zip(names(second), sketched(architecture, setting).values(), strict=True))
    for name, module in own.items():
        fill(module, setting.seed, f"{prefix}/{name}")
    return {**setting.build(), **own}


def check_other(option: str, architecture: str | None, setting: Setting) -> None:
    """LocalError unless an option names an architecture that takes the job's input.

    ``option`` is the option's name, for the error. None means the job's own model, and passes.
    """
    if architecture is None:
        return
    if architecture not in NETWORKS:
        raise LocalError(
            f"{option} = {architecture!r}: no such model; choose one of {', '.join(NETWORKS)}"
        )
    if fault := NETWORKS[architecture].fault(setting.input):
        raise LocalError(
            f"{option} = {architecture!r} {fault}; choose one for the job's model.input"
        )


def logits(parts: Parts, x: Tensor, second: str = "") -> Tensor:
    """Logits [B, classes] of the job's model, or of the second one of this name.

    ``x`` is [B, channels, height, width].
    """
    extractor, classifier = names(second) if second else MODEL
    return parts[classifier](parts[extractor](x))


def taken(parts: Mapping[str, Tensors], second: str) -> dict[str, Tensors]:
    """The parts of the second model with copies of the job's model's values, buffers included.

    A later change of either model does not reach the other.
    """
    return {
        name: {key: value.clone() for key, value in parts[part].items()}
        for name, part in zip(names(second), MODEL, strict=True)
    }


def not_begun() -> dict[str, Tensor]:
    """``extra`` of a silo before its first round.

    The mark is a tensor, since states hold only tensors.
    """
    return {BEGUN: torch.tensor(0)}


def begun(state: SiloState, second: str) -> SiloState:
    """The state of a silo whose second model has begun: as a copy of the job's model."""
    # It begins when the silo first takes part: so a silo that never trained has the averaged model
    # in the end, and not an untrained one.
    if int(state.extra[BEGUN]):
        return state
    parts = {**state.parts, **taken(state.parts, second)}
    return SiloState(parts, {**state.extra, BEGUN: torch.tensor(1)})
