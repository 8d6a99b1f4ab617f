"""Tied weights: one parameter that several layers of a module use, or one layer in several places.

torch keeps such a parameter once and names it once per layer, in ``state_dict`` too. Parts of a
model cross tensor by tensor and are computed with values that are not their own, so a parameter
must have one name. ``tie`` leaves it to the first layer; the others read it there. So it crosses
once, begins once, and its gradient is the sum over its uses. A layer in several places stays in the
first of them, and the others refer to it.
"""

from functools import lru_cache
from typing import Any

from torch import nn

from ...errors import LocalError

# attribute of a layer: by name, (the layer that owns it, its name there), empty for a whole layer
OWNERS = "_staddle_owners"
# They go through their layers, so these cannot only be referred to.
CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict


def tie(whole: nn.Module, where: str) -> None:
    """Give each tied parameter of a module one owner.

    LocalError, which begins with ``where``, for recurrent layers, which keep references to their
    parameters.
    """
    _place_once(whole)
    first: dict[int, tuple[nn.Module, str]] = {}
    for path, layer in whole.named_modules():
        owners: dict[str, tuple[nn.Module, str]] = {}
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in first:
                first[id(parameter)] = layer, name
                continue
            if isinstance(layer, nn.RNNBase):
                raise LocalError(
                    f"{where}: recurrent layer {path!r} shares {name!r} with another layer, which"
                    " does not work; give each its own"
                )
            owners[name] = first[id(parameter)]
            delattr(layer, name)
        if owners:
            _note(layer, owners)
            layer.__class__ = _reading(type(layer), tuple(owners))  # type: ignore[arg-type]


def _place_once(whole: nn.Module) -> None:
    """Leave each layer in the first of its places; in others it becomes a plain attribute."""
    placed: set[int] = set()
    for layer in list(whole.modules()):
        listed = isinstance(layer, CONTAINERS)
        # Not ``named_children``, which leaves out what it has seen.
        for name, child in list(vars(layer)["_modules"].items()):
            if child is not None and id(child) in placed and not listed:
                delattr(layer, name)
                vars(layer)[name] = child
                _note(layer, {name: (child, "")})
            placed.add(id(child))


def _note(layer: nn.Module, owners: dict[str, tuple[nn.Module, str]]) -> None:
    # Not a submodule: a tuple is no module, so torch does not register it.
    setattr(layer, OWNERS, getattr(layer, OWNERS, {}) | owners)


def strays(part: nn.Module) -> list[str]:
    """Names of a part's tied parameters and layers whose owner is not in the part."""
    inside = set(map(id, part.modules()))
    return [
        f"{path}.{name}" if path else name
        for path, layer in part.named_modules()
        for name, (owner, _) in getattr(layer, OWNERS, {}).items()
        if id(owner) not in inside
    ]


@lru_cache(maxsize=64)
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The same type of layer, whose parameters of these names are read from their owners."""
    # The type's own name stays: errors and listings are for people who wrote the layer.
    return type(kind.__name__, (kind,), {name: _read(name) for name in names})


def _read(name: str) -> property:
    def read(layer: nn.Module) -> Any:
        owner, own = getattr(layer, OWNERS)[name]
        return getattr(owner, own)

    return property(read)
