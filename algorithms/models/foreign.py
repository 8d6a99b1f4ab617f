"""Models from outside the table: torchvision's builders, and those of installed packages.

``torchvision:resnet50`` names a classifier of ``torchvision.models``. A package of another project
names its models as entry points, in its own pyproject.toml::

    [project.entry-points."staddle.models"]
    lung-net = "lung:lung_net"

Each is a function that makes an ``nn.Module`` from the declared input and the number of outputs::

    def lung_net(shape: tuple[int, int, int], outputs: int, width: int = 32) -> nn.Module: ...

Further arguments come from the job's ``model.options``. The job declares which submodules are the
head: they become the part ``classifier``, and the module without them becomes ``extractor``. So
tensors keep the names that they have in the module's own ``state_dict``.

Whoever installed the package decided to run its code; a job only names a model, and no code comes
with it. A package is imported when a job names its model, and not before.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...files import packages
from ..numerics.streams import Seed, stream
from ..numerics.torch_draws import drawing
from .registry import Shape
from .torchvision_import import torchvision

TORCHVISION = "torchvision:"
DEFAULT_INPUT = (3, 224, 224)  # of torchvision's classifiers
# What another project's code may raise where it is called with what it does not take.
MISUSES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
DRAWS = "draws_randomly"  # attribute of a part whose training takes random numbers

Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class Foreign:
    """A model from outside the table, as a job asks for it.

    ``options`` are further arguments of its builder, as pairs of name and value.
    """

    name: str
    shape: Shape
    outputs: int
    head: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()


def names() -> list[str]:
    """Names of the models of installed packages; none of them is imported."""
    return sorted({entry.name for entry in entry_points(group=packages.MODELS)})


def releases_of(name: str) -> dict[str, str]:
    """Versions, by package, of the code that makes a model: torch, and its own package."""
    own = {"torchvision": version("torchvision")}
    if not name.startswith(TORCHVISION):
        own = {
            each.dist.name: each.dist.version
            for each in packages.entries(packages.MODELS, name)
            if each.dist
        }
    return {"torch": torch.__version__, **own}


def builder(name: str) -> Builder:
    """The function that makes a model; ValueError names the package whose entry point is wrong."""
    if name.startswith(TORCHVISION):
        return _of_torchvision(name)
    found = packages.entries(packages.MODELS, name)
    if not found:
        raise ValueError(f"unknown model {name!r}; install the package that has it")
    if len(found) > 1:
        owners = " and ".join(sorted(map(packages.shown, found)))
        raise ValueError(
            f"model {name!r} is in {owners}, which are installed here; uninstall all but one"
        )
    where = f"model {name!r}, which is {found[0].value!r} of package {packages.shown(found[0])}"
    try:
        made: Any = found[0].load()
    # Another project's code: an error in its import must name the package.
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{where}, cannot be imported: {error}; reinstall that package") from error
    if not callable(made):
        raise ValueError(f"{where}, is no function; correct the entry point")  # noqa: TRY004
    return made  # type: ignore[no-any-return]


def _of_torchvision(name: str) -> Builder:
    models = torchvision("models", f"model {name!r}")
    own = name.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if own not in known:
        raise ValueError(
            f"unknown model {name!r}; torchvision.models has {', '.join(sorted(known))}"
        )

    def make(_: Shape, outputs: int, **options: Any) -> nn.Module:
        # The names of its arguments, since builders pass any others on to their networks.
        made: nn.Module = models.get_model(own, weights=None, num_classes=outputs, **options)
        return made

    return make


def construct(wanted: Foreign, seed: Seed, prefix: str = "") -> nn.Module:
    """The whole model on the CPU, with the values that its own code gives it.

    The same seed, prefix and releases give the same values. ValueError where it cannot be made.
    """
    make = builder(wanted.name)
    # Not on "meta", which the caller may have set: the values are needed.
    with torch.device("cpu"), drawing(stream(seed, "", 0, f"init/{prefix}")):
        try:
            whole = make(wanted.shape, wanted.outputs, **dict(wanted.options))
        except MISUSES as error:
            raise ValueError(
                f"model {wanted.name!r} with input {list(wanted.shape)}, {wanted.outputs} outputs"
                f" and options {dict(wanted.options)} cannot be made: {error}"
            ) from error
    if not isinstance(whole, nn.Module):
        raise ValueError(  # noqa: TRY004 - pydantic reports ValueError only
            f"model {wanted.name!r} is a {type(whole).__name__}, not a torch.nn.Module"
        )
    # In place, a layer would overwrite the input that gradients per record need.
    for module in whole.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return whole


def split(whole: nn.Module, model: str, head: Sequence[str]) -> dict[str, nn.Module]:
    """The module's parts: ``classifier`` is its head, ``extractor`` is the module without it.

    ``head`` names submodules in the order in which they run. ``whole`` becomes the extractor, with
    an identity in place of each. ValueError where a name is none of its submodules.
    """
    last = ", ".join(repr(each) for each in _last(whole))
    if not head:
        raise ValueError(
            f"model {model!r}: model.head is missing; name the submodules that run last, which"
            f" become the classifier; the last ones with parameters are {last}"
        )
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for name in head:
        try:
            found[name] = whole.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"model.head = {name!r}: unknown submodule of {model!r}; the last ones with"
                f" parameters are {last}"
            ) from error
    for name in head:
        outer, _, own = name.rpartition(".")
        setattr(whole.get_submodule(outer), own, nn.Identity())
    if len(found) == 1:
        (classifier,) = found.values()
    else:
        # A name with a dot is none that a module can have.
        named = ((name.replace(".", "_"), module) for name, module in found.items())
        classifier = nn.Sequential(OrderedDict(named))
    return {"extractor": whole, "classifier": classifier}


def _last(whole: nn.Module, most: int = 4) -> list[str]:
    """The last submodules that have parameters, in definition order."""
    own = [
        name for name, layer in whole.named_modules() if name and any(True for _ in _held(layer))
    ]
    return own[-most:]


def _held(layer: nn.Module) -> Iterator[Tensor]:
    return chain(layer.parameters(recurse=False), layer.buffers(recurse=False))


def check(wanted: Foreign, seed: Seed = 0) -> dict[str, nn.Module]:
    """The model's parts without values, checked; a ValueError says what is wrong with them.

    Two made-up records go through the whole module and through its parts, in evaluation and in
    training mode: the outputs must be the same bit for bit. Parts are marked where training takes
    random numbers, as with dropout.
    """
    whole = construct(wanted, seed)
    parts = split(copy.deepcopy(whole), wanted.name, wanted.head)
    side = prod(wanted.shape)
    x = torch.linspace(-1, 1, 2 * side).reshape(2, *wanted.shape)
    draws = False
    with torch.no_grad(), torch.device("cpu"):
        for training in (False, True):
            for module in (whole, *parts.values()):
                module.train(training)
            # Both draw the same, so dropout before and after the head would show.
            with drawing(stream(0, "", 0, "check")):
                before = torch.get_rng_state()
                expected = _called(wanted, whole, x)
                draws = not torch.equal(before, torch.get_rng_state())
            with drawing(stream(0, "", 0, "check")):
                features = _called(wanted, parts["extractor"], x)
                found = _called(wanted, parts["classifier"], features)
            _check_outputs(wanted, expected, features, found)

    for part, module in parts.items():
        if fault := tensors_fault(module):
            raise ValueError(f"model {wanted.name!r}: its {part} {fault}")
    shared = {*map(id, _tensors(parts["extractor"]))} & {*map(id, _tensors(parts["classifier"]))}
    if shared:
        raise ValueError(
            f"model {wanted.name!r}: its head shares tensors with the layers before it; name a"
            " head that has its own"
        )
    for module in parts.values():
        setattr(module, DRAWS, draws)
        module.to("meta")
    return parts


def _called(wanted: Foreign, module: nn.Module, x: Tensor) -> Tensor:
    """What a module makes of two records; ValueError where it is no tensor of two rows."""
    try:
        y: Any = module(x)
    except MISUSES as error:
        raise ValueError(
            f"model {wanted.name!r} does not take two records {list(x.shape)}: {error}; correct"
            " model.input or model.head"
        ) from error
    if not isinstance(y, Tensor) or not y.ndim or len(y) != 2:
        shown = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"model {wanted.name!r} makes {shown} of two records; it has to return one tensor with"
            " a row per record, in training too"
        )
    return y


def _check_outputs(wanted: Foreign, expected: Tensor, features: Tensor, found: Tensor) -> None:
    if tuple(expected.shape) != (2, wanted.outputs):
        raise ValueError(
            f"model {wanted.name!r} makes {list(expected.shape)} of two records, and the job has"
            f" {wanted.outputs} classes; it has to return [2, {wanted.outputs}]"
        )
    if features.ndim != 2:
        raise ValueError(
            f"model {wanted.name!r}: what comes before the head is {list(features.shape)} of two"
            " records, and has to be [2, features]; name a later submodule in model.head"
        )
    if not torch.equal(expected, found):
        raise ValueError(
            f"model {wanted.name!r}: its head, {' then '.join(wanted.head)}, after the layers"
            " before it does not give the output of the whole model; name in model.head exactly"
            " what runs last, in order"
        )


def tensors_fault(module: nn.Module) -> str:
    """What is wrong with a part's tensors, for a text that begins with its name; or empty."""
    named = [*module.named_parameters(remove_duplicate=False)]
    owners: dict[int, str] = {}
    for name, tensor in named:
        if tensor.dtype != torch.float32:
            return f"has parameter {name!r} of {tensor.dtype}; parameters have to be float32"
        if id(tensor) in owners:
            return (
                f"has one tensor as {owners[id(tensor)]!r} and {name!r}; tied weights do not work"
                " yet, so give each its own"
            )
        owners[id(tensor)] = name
    return ""


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def draws_randomly(modules: Mapping[str, nn.Module]) -> bool:
    """True if training one of these parts takes random numbers from torch's generator."""
    return any(getattr(module, DRAWS, False) for module in modules.values())
