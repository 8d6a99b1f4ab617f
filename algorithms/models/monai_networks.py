"""Networks of MONAI: ``monai:UNet`` is ``monai.networks.nets.UNet``.

The job's input and number of outputs are given to a network under the names that its signature has
for them. ``model.options`` gives the rest, and may replace these. MONAI is no dependency of
Staddle: a job with one of its networks runs code of the installed package ``monai``, which stands
in the signed job and which policies have to list.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any

from torch import nn

from ...errors import LocalError
from ...files.documents import closest
from ...files.packages import MONAI
from .registry import Shape

# in the name of an argument by which values come
FETCHED = re.compile("pretrained|weights|repo|filename|url|^checkpoint|^path|path$")
# By network: why none is made, whatever a job's options say.
REFUSED = {
    "Transchex": "downloads values, or reads the file of its path_or_repo_id",
    "TopologySearch": "is made in a time that grows eightfold with each of its num_depths",
}
# They return what is to be trained first, and then what was computed on the way.
FIRST_OF_SEVERAL = frozenset({"ViT"})

Network = Callable[..., nn.Module]


def monai_builder(nets: ModuleType, name: str) -> Network:
    """The builder of ``monai:NAME``; ``nets`` is the module that has it.

    LocalError for an unknown name. The builder refuses options that bring values from elsewhere.
    """
    own, classes = name.removeprefix(MONAI), _classes(nets)
    networks = classes | _functions(nets, classes)
    if own not in networks:
        # Spellings differ in capitals, too.
        lower = dict(zip(map(str.lower, networks), networks, strict=True))
        near = lower.get(own.lower(), closest(own, networks))
        hint = f" did you mean {MONAI + near!r}?" if near else ""
        known = ", ".join(sorted({*map(attrgetter("__name__"), networks.values())} & {*networks}))
        raise LocalError(f"unknown model {name!r};{hint} monai.networks.nets has {known}")
    make = networks[own]
    if why := REFUSED.get(getattr(make, "__name__", "")):
        raise LocalError(f"model {name!r} {why}; choose another network")
    taken = _parameters(make, classes)

    def build(shape: Shape, outputs: int, **options: Any) -> nn.Module:
        _check_fetches_nothing(name, options)
        said = _said(shape, outputs)
        filled = {argument: said[argument] for argument in taken & said.keys()}
        made: nn.Module = make(**{**filled, **options})
        if type(made).__name__ in FIRST_OF_SEVERAL:
            made.register_forward_hook(_first)
        return made

    return build


def _said(shape: Shape, outputs: int) -> dict[str, Any]:
    """What a job says of a network, by all names that MONAI's signatures have for it."""
    channels, *sides = shape
    return {
        "spatial_dims": len(sides),
        **dict.fromkeys(("in_channels", "n_input_channels", "num_channels"), channels),
        **dict.fromkeys(("out_channels", "num_classes", "classes"), outputs),
        "in_shape": shape,
        "out_shape": (outputs,),
        "img_size": tuple(sides),
        "classification": True,
        "pretrained": False,
    }


def _check_fetches_nothing(name: str, options: Mapping[str, Any]) -> None:
    """LocalError for options with which MONAI would download values or read a file."""
    fetched = list(filter(FETCHED.search, options))
    if any(map(options.get, fetched)):
        raise LocalError(
            f"model {name!r}: model.options.{' and '.join(fetched)} brings values from elsewhere,"
            " which no silo would see in the job; leave it out, and name a file in [model.weights]"
        )


def _classes(nets: ModuleType) -> dict[str, Any]:
    """The module's networks by name, also by their further spellings."""
    return dict(inspect.getmembers(nets, lambda made: nn.Module in getattr(made, "__mro__", ())))


def _functions(nets: ModuleType, classes: Mapping[str, Any]) -> dict[str, Any]:
    """Functions that make one: they say which, or take what it takes and say nothing."""
    made = {*classes, "kwargs"}
    return dict(
        inspect.getmembers(nets, lambda each: inspect.isfunction(each) and _makes(each) in made)
    )


def _makes(function: Callable[..., Any]) -> str:
    """The name of the class that a function says that it returns, or else its arguments."""
    said = function.__annotations__.get("return", ", ".join(inspect.signature(function).parameters))
    return str(getattr(said, "__name__", said))


def _usual(spatial_dims: int, in_channels: int, out_channels: int) -> None:
    """The signature that stands for one that says nothing, such as that of MedNeXtS."""


def _parameters(make: Any, classes: Mapping[str, Any]) -> frozenset[str]:
    """Names of a network's arguments, with those that ``**kwargs`` passes on."""
    own = inspect.signature(make).parameters
    if inspect.Parameter.VAR_KEYWORD not in map(attrgetter("kind"), own.values()):
        return frozenset(own)
    inner = getattr(make, "__base__", None) or classes.get(_makes(make), _usual)
    return frozenset(own) | _parameters(inner, classes)


def _first(_: nn.Module, __: object, made: tuple[Any, ...]) -> Any:
    return made[0]
