"""Buffers of a module: those that are parameters which stand still, and running statistics."""

from collections.abc import Mapping

from torch import Tensor, nn

FROZEN = "_staddle_frozen"  # attribute of a layer: names of its buffers that were parameters


def frozen_names(module: nn.Module) -> set[str]:
    """Names of the buffers that were parameters before ``adapt``."""
    layers = module.named_modules()
    return {f"{name}.{own}".lstrip(".") for name, layer in layers for own in _frozen(layer)}


def standing_still(modules: Mapping[str, nn.Module]) -> set[str]:
    """The same of all parts of a model, by their names in ``SiloState.flat``."""
    found: set[str] = set()
    for part, module in modules.items():
        found.update(map(f"part/{part}/".__add__, frozen_names(module)))
    return found


def _frozen(layer: nn.Module) -> frozenset[str]:
    found: frozenset[str] = getattr(layer, FROZEN, frozenset())
    return found


def running_statistics(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's floating-point buffers by name, in definition order, but for those of adapters.

    Batch norm's count of batches is none of them.
    """
    # A count of batches is an integer: its mean over silos would mean nothing.
    buffers, frozen = module.named_buffers(), frozen_names(module)
    return [own for own in buffers if own[1].is_floating_point() and own[0] not in frozen]
