"""Models from outside the table: torchvision's builders, and those of installed packages.

``torchvision:resnet50`` names a classifier of ``torchvision.models``, ``monai:UNet`` a network of
MONAI where that is installed (monai_networks.py). A package of another project names its models as
entry points, in its own pyproject.toml::

    [project.entry-points."staddle.models"]
    lung-net = "lung:lung_net"

Each is a function that makes an ``nn.Module`` from the declared input and the number of outputs::

    def lung_net(shape: tuple[int, ...], outputs: int, width: int = 32) -> nn.Module: ...

Further arguments come from the job's ``model.options``. The job declares which submodules are the
head: they become the part ``classifier``, and the module without them becomes ``extractor``. So
tensors keep the names that they have in the module's own ``state_dict``.

Whoever installed the package decided to run its code; a job only names a model, and no code comes
with it. A package is imported when a job names its model, and not before. Whatever its code raises
is a LocalError here.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from inspect import signature
from itertools import chain
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ...errors import LocalError
from ...files import packages
from ...files.program_code import is_program
from ..exchange.parts import MOST_TENSORS
from ..numerics.streams import Seed, stream
from ..numerics.torch_draws import drawing
from .inputs import Inputs, shapes_of, shown, unpacking
from .monai_networks import monai_builder
from .registry import Shape
from .tied import strays, tie
from .torchvision_import import torchvision

TORCHVISION = "torchvision:"
DEFAULT_INPUT = (3, 224, 224)  # of torchvision's classifiers
LARGEST_INPUT = 2**24  # numbers of a record: the check makes two records
# Parameters and buffers, 1 GiB: whoever reads a job makes its model, so a job must not take all
# memory.
LARGEST_MODEL = 2**28
FIX = "correct model.input, model.options or model.head, or choose another model"
FIX_INPUTS = "correct model.inputs, whose whole numbers need tokens, model.options or model.head"
# For two records, once: operations as torch counts them, and numbers that they make. The check runs
# a model ten times.
MOST_WORK, MOST_NUMBERS = 2 * 10**11, 2**29
TRAITS = "_staddle_traits"  # attribute of a model's part

Builder = Callable[..., nn.Module]


class TooLargeError(LocalError):
    """A model that reading a job must not make, or must not run."""


@dataclass(frozen=True)
class Foreign:
    """A model from outside the table, as a job asks for it.

    ``options`` are further arguments of its builder; ``spelt`` is their text, which stands for them
    where two are compared, since True, 1 and 1.0 are equal and not the same argument. ``shape`` is
    that of a record; a model may give outputs for the positions of the ``image``, which is a record
    as well, or one of its ``inputs``.
    """

    name: str
    shape: Shape
    image: Shape
    outputs: int
    head: tuple[str, ...]
    spelt: str
    options: Mapping[str, Any] = field(compare=False)
    inputs: Inputs = ()

    @property
    def takes(self) -> str:
        """The shape of a record for people, or those of its inputs."""
        return shown(shapes_of(self.inputs) or {"input": self.shape})

    @property
    def fix(self) -> str:
        """What to do where it does not work."""
        return FIX_INPUTS if self.inputs else FIX

    @property
    def where(self) -> str:
        """The model's name, at the beginning of an error."""
        return f"model {self.name!r}"

    def made_by(self, make: Builder) -> Any:
        """What a builder makes of it; it has its own copy of the options."""
        # The shape of a record, or of its inputs by name.
        shapes = shapes_of(self.inputs) or self.shape
        return make(shapes, self.outputs, **copy.deepcopy(dict(self.options)))


@dataclass(frozen=True)
class Traits:
    """What training a model does that not every engine, and no private job, can have."""

    draws: bool = False  # layers take random numbers, as dropout does
    # a record's output depends on the others of its batch, or changes a buffer
    couples: bool = False
    maps: bool = True  # ``torch.vmap`` can run it
    # Gradients are taken record by record in private jobs. Hooks on a whole batch would be sound
    # only if no record moved another, which two records cannot show of code that draws.
    alone: bool = False
    dense: bool = False  # outputs for each position of a record, [B, outputs, …]


def names() -> list[str]:
    """Names of the models of installed packages; none of them is imported."""
    return packages.names(packages.MODELS)


def releases_of(name: str) -> dict[str, str]:
    """Versions, by package, of the code that makes a model: torch, and its own package."""
    if name.startswith(TORCHVISION):
        return {"torch": torch.__version__, "torchvision": version("torchvision")}
    own = packages.package(packages.MODELS, name, f"model {name!r}")
    return {"torch": torch.__version__, own.name: own.version}


def builder(name: str) -> Builder:
    """The function that makes a model; LocalError names the package whose entry point is wrong."""
    if name.startswith(TORCHVISION):
        return _of_torchvision(name)
    # Not on "meta", where models are built: modules may make tensors on import.
    with torch.device("cpu"):
        made, where = packages.load(packages.MODELS, name, f"model {name!r}")
    if name.startswith(packages.MONAI):
        return monai_builder(made, name)
    if not callable(made):
        raise LocalError(f"{where}, is not a function; correct the entry point")
    return _plain(made) if is_program(name) else made


def _plain(make: Builder) -> Builder:
    """A program's function, or class, that need not take the shape and the number of outputs."""
    needed = [
        own
        for own in signature(make).parameters.values()
        if own.default is own.empty and own.kind is own.POSITIONAL_OR_KEYWORD
    ]
    return lambda *given, **options: make(*given[: len(needed)], **options)


def _of_torchvision(name: str) -> Builder:
    models = torchvision("models", f"model {name!r}")
    own = name.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if own not in known:
        raise LocalError(
            f"unknown model {name!r}; torchvision.models has {', '.join(sorted(known))}"
        )

    def make(_: Shape, outputs: int, **options: Any) -> nn.Module:
        made: nn.Module = models.get_model(own, weights=None, num_classes=outputs, **options)
        return made

    return make


def construct(wanted: Foreign, seed: Seed, prefix: str = "") -> nn.Module:
    """The whole model on the CPU, with the values that its own code gives it.

    The same seed, prefix and releases give the same values. LocalError where it cannot be made, or
    has more than LARGEST_MODEL parameters and buffers.
    """
    make = builder(wanted.name)
    what = (
        f"{wanted.where} with {wanted.takes}, {wanted.outputs} outputs and options"
        f" {wanted.spelt[: packages.LONGEST_WHY]} cannot be made"
    )
    # Not on "meta", which the caller may have set: the values are needed.
    with (
        torch.device("cpu"),
        drawing(stream(seed, "", 0, f"init/{prefix}")),
        packages.others_code(what, wanted.fix),
    ):
        with _bounded(wanted):
            whole = wanted.made_by(make)
        if not isinstance(whole, nn.Module):
            raise LocalError(f"{wanted.where} is a {type(whole).__name__}, not a torch.nn.Module")
        tie(whole, wanted.where)
        unpacking(whole, wanted.inputs)
        # In place, a layer would overwrite the input that gradients per record need.
        for module in whole.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        return whole


@contextmanager
def _bounded(wanted: Foreign) -> Iterator[None]:
    """LocalError once the modules that this thread makes have too many numbers.

    A layer registers its tensors before it fills them, so memory that was never touched is all
    that the last one has taken.
    """
    thread, size, tensors = get_ident(), 0, 0

    def count(_: nn.Module, __: str, tensor: Tensor | None) -> None:
        nonlocal size, tensors
        if tensor is None or get_ident() != thread:
            return
        size, tensors = size + tensor.numel(), tensors + 1
        if size > LARGEST_MODEL:
            raise TooLargeError(
                f"{wanted.where} has more than {LARGEST_MODEL:,} parameters and buffers, the most"
                " that a model may have; choose a smaller one"
            )
        if tensors > MOST_TENSORS:
            raise TooLargeError(
                f"{wanted.where} has more than {MOST_TENSORS:,} tensors, the most that a model may"
                " have; choose a smaller one"
            )

    hooks = (
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_size(wanted: Foreign) -> None:
    """LocalError for a model that is too large, found without its memory.

    Some layers fill a tensor before they register it, which ``_bounded`` cannot stop.
    """
    make = builder(wanted.name)
    # What needs values, or does not work at all, is found by ``construct``.
    shapes = _Shapes(wanted.where)
    with _only_too_large(), torch.device("meta"), _same_draws(), _bounded(wanted), shapes:
        wanted.made_by(make)


def _check_work(wanted: Foreign, whole: nn.Module) -> None:
    """LocalError for a model with which the check would take minutes, or gigabytes."""
    counted, numbers = FlopCounterMode(display=False), _Numbers()
    # A module that cannot be run so is one of an installed package, which somebody here has read.
    with _only_too_large(), _same_draws():
        module = copy.deepcopy(whole).to("meta").eval()
        with torch.no_grad(), counted, numbers:
            module(torch.empty(2, *wanted.shape, device="meta"))
    flops = counted.get_total_flops()
    if flops > MOST_WORK or numbers.total > MOST_NUMBERS:
        raise TooLargeError(
            f"{wanted.where} takes {flops / 1e9:,.0f} billion operations and"
            f" {numbers.total / 1e6:,.0f} million numbers for two records of {wanted.takes}, and"
            f" {MOST_WORK / 1e9:,.0f} and {MOST_NUMBERS / 1e6:,.0f} are the most; lower its shape"
        )


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors on "meta" that would take too much memory, which layers only compute with.

    A number that is read from a tensor without values is 0, so that what follows is looked at, too.
    """

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:  # noqa: SLF001
            return 0
        # Each row would be an object of its own.
        listed = func is torch.ops.aten.unbind.int and len(args[0]) > MOST_TENSORS
        made = args[0] if listed else func(*args, **(kwargs or {}))
        if listed or (isinstance(made, Tensor) and made.numel() > LARGEST_MODEL):
            raise TooLargeError(
                f"{self._where} computes with {list(made.shape)} numbers while it is made, and"
                f" {LARGEST_MODEL:,} are the most, or {MOST_TENSORS:,} one by one; choose smaller"
                " options"
            )
        return made


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            self.total += each.numel() if isinstance(each, Tensor) else 0
        return made


@contextmanager
def _only_too_large() -> Iterator[None]:
    """Whatever else other people's code raises ends the block, and nothing more."""
    try:
        with packages.others_code("", ""):
            yield
    except TooLargeError:
        raise
    except LocalError:
        return


def split(whole: nn.Module, model: str, head: Sequence[str]) -> dict[str, nn.Module]:
    """The module's parts: ``classifier`` is its head, ``extractor`` is the module without it.

    ``head`` names submodules in the order in which they run; none is within another. ``whole``
    becomes the extractor, with an identity in place of each. LocalError where a name is not that of
    a submodule.
    """
    last = ", ".join(repr(each) for each in _last(whole))
    # A program that just has a model need not know of heads.
    head = head or (_last(whole)[-1:] if is_program(model) else head)
    if not head:
        raise LocalError(
            f"model {model!r}: model.head is missing; name the submodules that run last, which"
            f" become the classifier; the last ones with parameters are {last}"
        )
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for name in head:
        try:
            found[name] = whole.get_submodule(name)
        except AttributeError as error:
            raise LocalError(
                f"model.head = {name!r}: unknown submodule of {model!r}; the last ones with"
                f" parameters are {last}"
            ) from error
    for name in head:
        outer, _, own = name.rpartition(".")
        setattr(whole.get_submodule(outer), own, nn.Identity())
    if len(found) == 1:
        (classifier,) = found.values()
    else:
        # A module's name has no dots.
        named = ((name.replace(".", "_"), module) for name, module in found.items())
        classifier = nn.Sequential(OrderedDict(named))
    return {"extractor": whole, "classifier": classifier}


def _last(whole: nn.Module, most: int = 4) -> list[str]:
    """The last submodules that have parameters, in definition order."""
    own = [
        name
        for name, layer in whole.named_modules()
        if name and next(_held(layer), None) is not None
    ]
    return own[-most:]


def _held(layer: nn.Module) -> Iterator[Tensor]:
    return chain(layer.parameters(recurse=False), layer.buffers(recurse=False))


def check(wanted: Foreign, seed: Seed = 0) -> dict[str, nn.Module]:
    """The model's parts without values, checked; a LocalError says what is wrong with them.

    Two made-up records go through the whole module and through its parts, in evaluation and in
    training mode: the outputs must be the same bit for bit. The parts have the model's ``Traits``.
    """
    if prod(wanted.shape) > LARGEST_INPUT:
        raise LocalError(
            f"{wanted.where}: a record of {wanted.takes} has over {LARGEST_INPUT:,} numbers;"
            " lower it"
        )
    _check_size(wanted)
    whole = construct(wanted, seed)
    _check_work(wanted, whole)
    with packages.others_code(f"{wanted.where} does not work", wanted.fix):
        parts = split(copy.deepcopy(whole), wanted.name, wanted.head)
        _check_tensors(wanted, parts)
        x = two_records(wanted)
        with torch.no_grad(), torch.device("cpu"):
            traits = _compared(wanted, whole, parts, x)
            del whole  # memory for the next
            maps = _maps(parts, x)
    for module in parts.values():
        setattr(module, TRAITS, replace(traits, maps=maps, alone=True))
        module.to("meta")
    return parts


def two_records(wanted: Foreign) -> Tensor:
    """Two made-up records, to try a model with."""
    return torch.linspace(-1, 1, 2 * prod(wanted.shape)).reshape(2, *wanted.shape)


def _compared(
    wanted: Foreign, whole: nn.Module, parts: Mapping[str, nn.Module], x: Tensor
) -> Traits:
    """How the module trains; LocalError unless its parts compute what it computes."""
    buffers = {name: tensor.clone() for name, tensor in whole.named_buffers()}
    traits = Traits()
    for training in (False, True):
        for module in (whole, *parts.values()):
            module.train(training)
        # Both draw the same, so dropout before and after the head would show.
        with _same_draws():
            before = torch.get_rng_state()
            expected = _called(wanted, whole, x)
            draws = not torch.equal(before, torch.get_rng_state())
        with _same_draws():
            features = _called(wanted, parts["extractor"], x)
            found = _called(wanted, parts["classifier"], features)
        _check_outputs(wanted, expected, features, found)
        traits = replace(traits, draws=draws, dense=expected.ndim > 2)

    # In training mode: the first record with another second one.
    after = dict(whole.named_buffers())
    moved = buffers.keys() != after.keys() or any(
        not torch.equal(tensor, after[name]) for name, tensor in buffers.items()
    )
    with _same_draws():
        other = _called(wanted, whole, torch.stack([x[0], -2 * x[1]]))
    same = torch.equal(expected[0].nan_to_num(), other[0].nan_to_num())
    return replace(traits, couples=moved or not same)


def _same_draws() -> Any:
    return drawing(stream(0, "", 0, "check"))


def _maps(parts: Mapping[str, nn.Module], x: Tensor) -> bool:
    """True if ``torch.vmap`` can run the parts with the values of several silos."""
    values = []
    for module in parts.values():
        # Buffers may be written, so they need memory of their own.
        own = {name: tensor.expand(2, *tensor.shape) for name, tensor in module.named_parameters()}
        own |= {name: torch.stack([tensor, tensor]) for name, tensor in module.named_buffers()}
        values.append(own)

    def run(*of: Mapping[str, Tensor]) -> Tensor:
        y = x
        for module, own in zip(parts.values(), of, strict=True):
            y = functional_call(module, dict(own), (y,))
        return y

    try:
        with _same_draws():
            vmap(run, randomness="different")(*values)
    # Not every layer has a rule for it.
    except RuntimeError:
        return False
    return True


def _called(wanted: Foreign, module: nn.Module, x: Tensor) -> Tensor:
    """The output for two records; LocalError where it is not one tensor of two rows."""
    with packages.others_code(
        f"{wanted.where} with {wanted.takes} does not take two records {list(x.shape)}", wanted.fix
    ):
        y: Any = module(x)
    if not isinstance(y, Tensor) or not y.ndim or len(y) != 2:
        shown = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise LocalError(
            f"{wanted.where} makes {shown} of two records; it has to return one tensor with a row"
            " per record, in training too"
        )
    return y


def _check_outputs(wanted: Foreign, expected: Tensor, features: Tensor, found: Tensor) -> None:
    plain = (2, wanted.outputs)
    dense = (*plain, *wanted.image[1:])
    if tuple(expected.shape) not in (plain, dense):
        raise LocalError(
            f"{wanted.where} makes {list(expected.shape)} of two records, and the job has"
            f" {wanted.outputs} outputs; it has to return {list(plain)}, or for each position"
            f" {list(dense)}"
        )
    if features.ndim != 2 and expected.ndim == 2:
        raise LocalError(
            f"{wanted.where}: what comes before the head is {list(features.shape)} of two records,"
            " and has to be [2, features]; name a later submodule in model.head"
        )
    if not torch.equal(expected, found):
        raise LocalError(
            f"{wanted.where}: its head, {' then '.join(wanted.head)}, after the layers before it"
            " does not give the output of the whole model; name in model.head exactly what runs"
            " last, in order"
        )


def _check_tensors(wanted: Foreign, parts: Mapping[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    for part, module in parts.items():
        if found := strays(module):
            raise LocalError(
                f"{wanted.where}: its {part} has {found[0]!r}, which is a parameter or layer of"
                " the other part; name in model.head all layers that share it, or none"
            )
        kept = module.state_dict().keys()
        for name, tensor in _named(module):
            where = f"{wanted.where}: its {part} has {name!r}"
            if tensor.dtype != torch.float32 and isinstance(tensor, nn.Parameter):
                raise LocalError(f"{where} of {tensor.dtype}; parameters have to be float32")
            # Such a buffer is in no state, and so in no contribution and no file.
            if name not in kept:
                raise LocalError(f"{where}, which is not persistent; register it as persistent")
            if id(tensor) in owners:
                raise LocalError(
                    f"{where}, which is {owners[id(tensor)]!r} too; in two parts, or twice in"
                    " a list of layers, it does not work, so give each place its own"
                )
            owners[id(tensor)] = f"{part}.{name}"


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def traits_of(modules: Mapping[str, nn.Module]) -> Traits:
    """The traits of a model's parts; those of the table do nothing of the kind, but for norms."""
    for module in modules.values():
        found = getattr(module, TRAITS, None)
        if isinstance(found, Traits):
            return found
    return Traits()


def draws_randomly(modules: Mapping[str, nn.Module]) -> bool:
    """True if training one of these parts takes random numbers from torch's generator."""
    return traits_of(modules).draws
