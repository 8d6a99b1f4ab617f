"""Which silos can be trained at once: those whose modules are alike but for their values, and whose
stages are.

What cannot be told to be the same counts as different: such a silo is trained on its own.
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

# of a module's own
OTHERWISE = {"training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that is the same as itself alone."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def architecture(modules: Modules) -> Key:
    """Equal where the modules of all parts compute the same from the same parameters and
    buffers.
    """
    return tuple(
        (part, specs(module.state_dict()), _layers(module)) for part, module in modules.items()
    )


def course(steps: Course) -> Key:
    """Equal where silos of one architecture go through the same stages but for the values of their
    contexts.

    Surveys must be the same; a change is made silo by silo.

    A loss or penalty is the same where it is one function, one method of one object, or a
    ``partial`` of such with the same numbers and texts; one that a stage makes for itself, and so
    may hold what is one silo's, never is.
    """
    return tuple(map(_step, steps))


def paced_alike(stage: Stage) -> Key:
    """Equal for stages that are the same but for the values of their contexts and the learning
    rate.
    """
    return _step(replace(stage, optimiser=replace(stage.optimiser, lr=0.0)))


def _step(step: Stage | Survey | Change) -> Key:
    match step:
        case Stage():
            return _same(replace(step, context={})), specs(step.context)
        case Survey():
            return _same(step)
        case Change():
            return Change


def specs(tensors: Tensors) -> Key:
    """Names, shapes and dtypes, whatever their order."""
    return frozenset((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def _layers(module: nn.Module) -> Key:
    layers = module.named_modules(remove_duplicate=False)
    return tuple((name, type(layer), _same(_static(layer))) for name, layer in layers)


def _static(layer: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(layer).items() if name not in OTHERWISE}


def _same(value: object) -> Key:
    """Equal for two values exactly where they are known to be the same."""
    match value:
        case None | bool() | int() | float() | str():
            return type(value), repr(value)
        case tuple() | list():
            return type(value), tuple(map(_same, value))
        case dict():
            return type(value), tuple((_same(key), _same(held)) for key, held in value.items())
        case partial():
            return type(value), _same(value.func), _same(value.args), _same(value.keywords)
        case MethodType():
            return type(value), _Itself(value.__self__), _Itself(value.__func__)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_same(getattr(value, field.name)) for field in fields(value))
    return _Itself(value)
