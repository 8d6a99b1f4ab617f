"""Decides which silos can train at once: those whose modules and stages differ only in values.

Objects that cannot be compared count as different: such a silo trains on its own.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MethodType
from typing import TypeAlias

from torch import nn

from ..course import Change, Course, Stage, Survey
from ..exchange.parts import Tensors
from ..training.loop import Modules

Key: TypeAlias = Hashable

# attributes of a module that are compared elsewhere (``specs``, submodules) or are no difference
OTHERWISE = {"training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that equals only itself."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def architecture(modules: Modules) -> Key:
    """Equal where all parts' modules compute the same from the same parameters and buffers."""
    return tuple(
        (part, specs(module.state_dict()), _layers(module)) for part, module in modules.items()
    )


def course(steps: Course) -> Key:
    """Equal where silos of one architecture have stages that differ only in their contexts' values.

    Surveys must be the same; a change is made silo by silo. Aligned stages may differ in the parts
    that they train (alignment.py, ``shapes``).

    A loss or penalty is the same where it is one function, one method of one object, or a
    ``partial`` of such with the same numbers and texts; one that a stage makes for itself, and so
    may hold what is one silo's, never is.
    """
    return tuple(map(_step, steps))


def paced_alike(stage: Stage) -> Key:
    """Equal for stages that differ only in their contexts' values and the learning rate."""
    # A recorded step reads the learning rate from a tensor, so a schedule needs no new recording.
    return _step(replace(stage, optimiser=replace(stage.optimiser, lr=0.0)))


def _step(step: Stage | Survey | Change) -> Key:
    match step:
        case Stage():
            common = step.common
            return _same(replace(common, context={})), specs(common.context)
        case Survey():
            return _same(step)
        # Changes are made silo by silo, so they may be any.
        case Change():
            return Change


def specs(tensors: Tensors) -> Key:
    """Names, shapes and dtypes, whatever their order.

    Tensors are found by name, so two orders of the same tensors are alike.
    """
    return frozenset((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def _layers(module: nn.Module) -> Key:
    # With duplicates: a layer that is used twice must be used in the same places of both models.
    keys: list[Key] = []
    for name, layer in module.named_modules(remove_duplicate=False):
        static = {key: value for key, value in vars(layer).items() if key not in OTHERWISE}
        keys.append((name, type(layer), _same(static)))
    return tuple(keys)


def _same(value: object) -> Key:
    """Equal for two values exactly where they are known to be the same."""
    kind = type(value)
    match value:
        # As text NaN equals itself, and 0.0 differs from −0.0.
        case None | bool() | int() | float() | str():
            return kind, repr(value)
        case tuple() | list():
            return kind, tuple(map(_same, value))
        case dict():
            keys, values = map(_same, value), map(_same, value.values())
            return kind, tuple(zip(keys, values, strict=True))
        case partial():
            return kind, _same(value.func), _same(value.args), _same(value.keywords)
        case MethodType():
            # By identity: the objects of two equal methods may hold data of one silo.
            return kind, _Itself(value.__self__), _Itself(value.__func__)
    if is_dataclass(kind):
        held = (getattr(value, field.name) for field in fields(kind))
        return kind, tuple(map(_same, held))
    # Anything else may hold data of one silo, so it equals only itself.
    return _Itself(value)
