"""The model of a job: two parts, ``extractor`` and ``classifier``.

They are equal at every silo before the first round.

Initial values are not torch's: Linear and Conv weights and biases are U(-1/sqrt(fan_in),
1/sqrt(fan_in)) from the job's own streams, so neither the torch release nor its global generator
changes them, nor are they changed by us.
"""

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import LocalError
from ...files.documents import Strict, closest
from ..numerics.streams import Seed, stream, uniform
from .class_names import names_fault
from .registry import NETWORKS, Norm, Shape

# raised when a model of this file, or what it begins with, changes: it enters the job's model
# digest
MODEL_VERSION = 2

# parameters, 1 GiB: whoever reads a job builds its model, so a job must not take all memory
LARGEST_MODEL = 2**28

Size = Annotated[int, Field(strict=True, ge=1, le=4096)]


class ModelOptions(Strict):
    """The [model] table of a job file.

    The model's digest is made of these fields and the tensors. ValueError if the network does not
    take the input or norm, or has too many parameters.
    """

    name: str
    classes: Annotated[int, Field(strict=True, ge=2, le=100_000)]
    norm: Norm = "none"
    buffers: Literal["local", "global"] = "local"
    """Batch norm's running statistics never leave a silo, or cross with the parameters."""
    input: tuple[Size, Size, Size] | None = None
    """Channels, height, width; left out, the architecture's own, such as [3, 32, 32] for lenet5."""

    @pydantic.field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in NETWORKS:
            near = closest(name, NETWORKS)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueError(f"no such model; {hint}known: {', '.join(NETWORKS)}")
        return name

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "ModelOptions":
        # Size comes last: a network can be sketched only with an input and a norm that fit.
        network = NETWORKS[self.name]
        if fault := network.fault(input_shape(self)):
            raise ValueError(f"{self.name} {fault}; choose another model or model.input")
        if self.norm not in network.norms:
            raise ValueError(
                f"model {self.name!r} has norm {' or '.join(network.norms)}, not {self.norm!r}"
            )
        # A job names the size, and a silo must not run out of memory by building the model.
        # A sketch has all shapes, and takes no memory.
        modules = _sketched(self).values()
        size = sum(tensor.numel() for module in modules for tensor in module.parameters())
        if size > LARGEST_MODEL:
            raise ValueError(
                f"model {self.name!r} with this input and these classes has {size:,} parameters; "
                f"lower input or classes, {LARGEST_MODEL:,} are the most"
            )
        if self.buffers == "global" and not any(
            b.is_floating_point() for m in modules for b in m.buffers()
        ):
            raise ValueError(
                f'buffers = "global", but model {self.name!r} with norm {self.norm!r} keeps no'
                " running statistics; leave buffers out, or choose a model and norm that do"
            )
        return self

    class_names: tuple[str, ...] | None = None
    """Meanings of the labels 0, 1, …; a silo whose data file says otherwise declines the job."""

    @pydantic.model_validator(mode="after")
    def _named(self) -> "ModelOptions":
        if self.class_names is not None and (fault := names_fault(self.class_names, self.classes)):
            raise ValueError(fault)
        return self


def input_shape(options: ModelOptions) -> Shape:
    """Channels, height and width of one record.

    It is the job's, or else the architecture's default.
    """
    return options.input or NETWORKS[options.name].default_input


def sketch(options: ModelOptions) -> dict[str, nn.Module]:
    """The model's modules by part, without values.

    They are on torch's device "meta", and have only names, shapes and dtypes.
    """
    return {part: _twin(module) for part, module in _sketched(options).items()}


def _sketched(options: ModelOptions) -> dict[str, nn.Module]:
    """The kept modules, which nobody may change."""
    asked = options.name, input_shape(options), options.classes, options.norm
    return _laid_out(*asked, torch.get_default_dtype())


@lru_cache(maxsize=64)
def _laid_out(
    name: str, shape: Shape, classes: int, norm: Norm, _: torch.dtype
) -> dict[str, nn.Module]:
    """A network's modules, kept: each silo of a simulation asks for them in each round.

    Layers are of torch's default dtype, so what is kept is told apart by it too.
    """
    with torch.device("meta"):  # construction draws nothing from torch's generator
        return NETWORKS[name].build(shape, classes, norm)


def _twin(module: nn.Module) -> nn.Module:
    """The same layers again with tensors of their own, in a tenth of the time of construction.

    The networks' layers share no tensor.
    """
    made = copy.copy(module)
    own = vars(made)
    # The tables too: a hook that is added to one must not run in the other.
    own.update({name: table.copy() for name, table in own.items() if isinstance(table, dict)})
    copies: dict[str, Callable[[Any], object]] = {
        "_parameters": nn.Parameter,
        "_buffers": Tensor.detach,  # without values, nothing is shared
        "_modules": _twin,
    }
    for table, copied in copies.items():
        # A layer has None for what it might hold and does not.
        own[table] = {
            name: None if value is None else copied(value) for name, value in own[table].items()
        }
    return made


def build(options: ModelOptions, seed: Seed) -> dict[str, nn.Module]:
    """A freshly initialised model by part.

    The same options and seed give the same bits everywhere. Values are float32.
    """
    parts = sketch(options)
    for part, module in parts.items():
        fill(module, seed, part)
    return parts


def fill(module: nn.Module, seed: Seed, prefix: str) -> None:
    """Give a new module its initial values, unless torch's device is "meta".

    Each tensor has its own stream, named by ``prefix`` and its path in the module.
    """
    # On "meta" the caller has other values, and drawing initial ones would take time for nothing.
    if torch.get_default_device().type != "meta":
        # As Module.to_empty does it, which would first import symbolic shapes, for half a second.
        module._apply(_empty)  # type: ignore[no-untyped-call] # noqa: SLF001
        initialise(module, seed, prefix)


def _empty(sketched: Tensor) -> Tensor:
    return torch.empty(sketched.shape, dtype=sketched.dtype)


@torch.no_grad()
def initialise(module: nn.Module, seed: Seed, prefix: str) -> None:
    """Fill a module's parameters and buffers from the streams ``init/<prefix>.<name>``.

    Norms start as identities.
    """
    # The order does not matter, since each tensor has its own stream.
    for name, leaf in module.named_modules():
        own = (*leaf.parameters(recurse=False), *leaf.buffers(recurse=False))
        if not own:
            continue
        # Its own tensors would be drawn by no rule of this function.
        if any(True for _ in leaf.children()):
            raise LocalError(
                f"model: {type(leaf).__name__} {name!r} holds tensors next to its submodules"
            )
        # ``_draw`` takes an embedding's width as its fan_in.
        if isinstance(leaf, nn.Linear | nn.Conv2d | nn.Embedding):
            path = ".".join(filter(None, (prefix, name)))
            _draw(leaf, seed, path)
        elif isinstance(leaf, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            # weight 1, bias 0, running mean 0, running variance 1: nothing random
            leaf.reset_parameters()
        else:
            raise LocalError(
                f"model: no initialisation is defined for {type(leaf).__name__} {name!r}; add it"
                " here"
            )


def _draw(layer: nn.Linear | nn.Conv2d | nn.Embedding, seed: Seed, path: str) -> None:
    """Draw each parameter uniformly in ±fan_in^(-1/2), from the stream of its own name."""
    # All weights of one unit, so a convolution's fan_in includes its kernel.
    bound = layer.weight[0].numel() ** -0.5  # fan_in = inputs of one unit
    for name, tensor in layer.named_parameters():
        full_name = ".".join(filter(None, (path, name)))
        rng = stream(seed, "", 0, f"init/{full_name}")
        values = uniform(rng, tensor.shape, -bound, bound)
        tensor.copy_(torch.from_numpy(values))
