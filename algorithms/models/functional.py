"""The parts that a loss receives, as functions of parameters that are not their own.

For methods whose loss evaluates the model at other parameters, such as a mixture of two models or
the result of a gradient step. A part is a module where silos train one by one, and ``BoundModule``
where they train at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..exchange.parts import Tensors


@dataclass(frozen=True, eq=False)
class BoundModule:
    """A module with values that replace its own parameters and buffers of these names.

    All others keep the module's values.
    """

    module: nn.Module
    values: Mapping[str, Tensor]

    def __call__(self, *args: object) -> Tensor:
        """The module's output; changes of buffers go into ``values``."""
        # ``functional_call`` takes a dict. Layers write buffers in place, so ``values`` sees them.
        output: Tensor = functional_call(self.module, dict(self.values), args)
        # Layers may compute in bfloat16, which is too coarse for losses.
        return output.float() if output.dtype == torch.bfloat16 else output


def mapped(
    values: Mapping[str, Tensors], change: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The same values by part and name, each tensor changed.

    ``values`` itself is not changed.
    """
    changed: dict[str, dict[str, Tensor]] = {}
    for part, named in values.items():
        changed[part] = {name: change(tensor) for name, tensor in named.items()}
    return changed


def parameters_of(part: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The parameters of a part by name, as the loss is to be differentiated by them.

    TypeError if the part is neither a module nor a ``BoundModule``.
    """
    match part:
        case BoundModule(module, values):
            return {name: values.get(name, own) for name, own in module.named_parameters()}
        case nn.Module():
            return dict(part.named_parameters())
    raise TypeError(f"{type(part).__name__} is not a part of a model")


def on_trial(part: Callable[..., Tensor]) -> BoundModule:
    """The part with copies of its buffers, so that a call changes only the copies.

    TypeError if it is neither a module nor a ``BoundModule``.
    """
    # Inside ``torch.func.grad`` a buffer from outside cannot change, as batch norm's running
    # statistics do in training.
    module, values = (part.module, part.values) if isinstance(part, BoundModule) else (part, {})
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(part).__name__} is not a part of a model")
    buffers = {name: values.get(name, own).clone() for name, own in module.named_buffers()}
    return BoundModule(module, {**values, **buffers})


def called_with(part: Callable[..., Tensor], parameters: Tensors, *args: object) -> Tensor:
    """The output of a part with these parameters in place of those of the same names.

    Its buffers stay its own.
    """
    match part:
        case BoundModule(module, values):
            return BoundModule(module, {**values, **parameters})(*args)
        case nn.Module():
            output: Tensor = functional_call(part, dict(parameters), args)
            return output
    raise TypeError(f"{type(part).__name__} is not a part of a model")
