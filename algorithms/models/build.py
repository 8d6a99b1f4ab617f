"""The model of a job: two parts, ``extractor`` and ``classifier``.

They are equal at every silo before the first round.

Initial values are not torch's: Linear and Conv weights and biases are U(-1/sqrt(fan_in),
1/sqrt(fan_in)) from the job's own streams, so neither the torch release nor its global generator
changes them, nor are they changed by us. A job's ``[model.weights]`` replaces them by a file's
(pretrained.py). Models from outside the table (foreign.py) may have other
layers: these begin by their own ``reset_parameters``, or as the model's code made them, under a
generator that the job's streams seed. Releases can change these values, so the signed job has a
digest of them (``start_digest``).
"""

import copy
import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ...errors import LocalError
from ...files.documents import Strict, canonical_json, closest, validate
from ...files.options import MOST_OPTIONS, Option, OptionName, read_options, written_options
from ...files.packages import MODELS, MONAI, others_code
from ...files.program_code import PYTHON, entry_of, is_program, source_of
from ..numerics.frozen import running_statistics
from ..numerics.streams import Seed, stream, uniform
from ..numerics.torch_draws import drawing
from . import foreign
from .class_names import names_fault
from .foreign import DEFAULT_INPUT, LARGEST_MODEL, TORCHVISION, Foreign
from .inputs import Input, InputName, Inputs, Size, image_of, ordered, packed_shape, pieces
from .lora import LoraOptions, adapt, adapters, check_adapters
from .networks.text import TextTransformerOptions
from .pretrained import StartValues, StartWeights, start_values
from .registry import NETWORKS, Norm, Shape

# raised when a model of this file, or what it begins with, changes: it enters the job's model
# digest
MODEL_VERSION = 3

SubmoduleName = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$", max_length=255)]
MOST_INPUTS = 16
NAMING = ("model.class_names", "model.classes")  # of which each has an entry per class
# layers whose parameters ``_draw`` draws
Drawn: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding
LARGEST_RECORD = 2**36  # numbers: sizes of layers on it are still whole numbers of 63 bits


class ModelOptions(Strict):
    """The [model] table of a job file.

    The model's digest is made of these fields and the tensors. ValueError if the network does not
    take the input or norm, or has too many parameters.
    """

    name: str
    """Of the table, ``torchvision:…``, ``monai:…``, or of an installed package (foreign.py)."""
    head: Annotated[tuple[SubmoduleName, ...], Field(max_length=64)] | None = None
    """Submodules of a model from outside the table that become the part ``classifier``."""
    options: Annotated[
        dict[OptionName, Option] | None, Field(max_length=MOST_OPTIONS, validate_default=True)
    ] = None
    """Further arguments of such a model's builder, or of a configurable network of the table.

    In a document a decimal is ``{"decimal": "0.5"}``, which no text can be taken for.
    """
    classes: Annotated[int, Field(strict=True, ge=2, le=100_000)] | None = None
    outputs: Annotated[int | None, Field(strict=True, ge=1, le=100_000, validate_default=True)] = (
        None
    )
    """Numbers that the model gives for a record, where these are no classes; default: 1."""
    norm: Norm = "none"
    buffers: Literal["local", "global"] = "local"
    """Batch norm's running statistics never leave a silo, or cross with the parameters."""
    input: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)] | None = None
    """One record's shape; left out, the architecture's own, such as [3, 32, 32] for lenet5.

    Of an image channels, height, width; of a series channels, length.
    """
    inputs: dict[InputName, Input] = Field(default_factory=dict, max_length=MOST_INPUTS)
    """In place of ``input``: several tensors of a record, by name (inputs.py)."""
    weights: StartWeights | None = None
    """A file whose values the model begins with."""
    lora: LoraOptions | None = None
    """Train low-rank adapters of the extractor in place of its parameters (lora.py)."""

    @pydantic.field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in NETWORKS or name.startswith((TORCHVISION, MONAI, PYTHON)):
            return name
        known = [*NETWORKS, *foreign.names()]
        if name not in known:
            near = closest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueError(
                f"no such model; {hint}known: {', '.join(known)}, torchvision:NAME of"
                " torchvision.models and monai:NAME of monai.networks.nets"
            )
        return name

    @pydantic.field_validator("outputs")
    @classmethod
    def _classes_or_outputs(cls, outputs: int | None, info: pydantic.ValidationInfo) -> int | None:
        # A fault of classes is told as its own.
        if info.data.get("classes", 0) is None:
            return outputs or 1
        if outputs is not None:
            raise ValueError("a model with classes has one output for each; leave outputs out")
        return None

    @pydantic.field_validator("head", mode="before")
    @classmethod
    def _one_or_several(cls, head: object) -> object:
        return (head,) if isinstance(head, str) else head

    @pydantic.field_validator("input")
    @classmethod
    def _holdable(cls, shape: Shape | None) -> Shape | None:
        if shape is not None and prod(shape) > LARGEST_RECORD:
            raise ValueError(f"a record of over {LARGEST_RECORD:,} numbers; lower it")
        return shape

    @pydantic.field_validator("inputs")
    @classmethod
    def _one_tensor_or_several(
        cls, inputs: dict[str, Input], info: pydantic.ValidationInfo
    ) -> dict[str, Input]:
        if inputs and info.data.get("input"):
            raise ValueError("a record is one tensor, input, or several; leave one of both out")
        if inputs and info.data.get("name", "").startswith((TORCHVISION, MONAI)):
            raise ValueError(
                "networks of torchvision and MONAI take one tensor; leave inputs out, or put one"
                " into a model of your own"
            )
        return inputs

    @pydantic.field_validator("head")
    @classmethod
    def _apart(cls, head: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = head or ()
        for name in names:
            others = [other for other in names if f"{other}.".startswith(f"{name}.")]
            if len(others) > 1:
                raise ValueError(f"{name!r} is named twice, or has another of the names within it")
        # As names of one module's layers they have no dots.
        if len({name.replace(".", "_") for name in names}) < len(names):
            raise ValueError("two names differ only in dots and underscores")
        return head

    @pydantic.field_validator("options", mode="before")
    @classmethod
    def _numbers(cls, options: object) -> object:
        if not isinstance(options, Mapping):
            return options
        # One spelling of none.
        return read_options(options) or None

    @pydantic.field_validator("options")
    @classmethod
    def _of_network(
        cls, options: dict[str, Option] | None, info: pydantic.ValidationInfo
    ) -> dict[str, Option] | None:
        """With all defaults, so that each network has one spelling."""
        name = info.data.get("name", "")
        known = NETWORKS[name].options if name in NETWORKS else None
        if known is None:
            return options
        try:
            return validate(options or {}, known, f"of {name}").model_dump()
        except LocalError as error:
            raise ValueError(str(error)) from error

    @pydantic.model_serializer(mode="wrap")
    def _written(self, serialise: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys that the model has not."""
        written: dict[str, Any] = serialise(self)
        network = NETWORKS.get(self.name)
        configurable = network is None or network.options is not None
        lacks = {
            "classes": self.outputs_key != "classes",
            "outputs": self.outputs_key != "outputs",
            "head": network is not None,
            "weights": self.weights is None,
            "lora": self.lora is None,
            "inputs": not self.inputs,
            "options": not configurable,
        }
        for key in filter(lacks.get, lacks):
            written.pop(key, None)
        # A signed job has no path, and a job file need not have a digest.
        if weights := written.get("weights"):
            written["weights"] = {key: value for key, value in weights.items() if value is not None}
        if "options" in written:
            written["options"] = written_options(self.options or {})
        return written

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "ModelOptions":
        # Size comes last: a network can be sketched only with an input and a norm that fit.
        if self.name in NETWORKS:
            self._fits_table()
        elif self.norm != "none":
            raise ValueError(f"model {self.name!r} has the norm of its own code; leave norm out")
        # A job names the size, and a silo must not run out of memory by building the model.
        # A sketch has all shapes, and takes no memory.
        try:
            modules = _sketched(self).values()
        except LocalError as error:
            raise ValueError(str(error)) from error
        size = sum(tensor.numel() for module in modules for tensor in module.state_dict().values())
        if size > LARGEST_MODEL:
            raise ValueError(
                f"model {self.name!r} with this input and {self.width} outputs has {size:,}"
                f" parameters; lower input, classes or outputs, {LARGEST_MODEL:,} are the most"
            )
        if self.buffers == "global" and not any(map(running_statistics, modules)):
            raise ValueError(
                f'buffers = "global", but model {self.name!r} with norm {self.norm!r} keeps no'
                " running statistics; leave buffers out, or choose a model and norm that do"
            )
        return self

    @property
    def named_inputs(self) -> Inputs:
        """The inputs in the order in which a record holds them; empty for one tensor."""
        return ordered(self.inputs)

    def _fits_table(self) -> None:
        network = NETWORKS[self.name]
        optional = bool(self.options) & (network.options is None)
        misfit = network.fault(input_shape(self))
        norms = " or ".join(network.norms)
        faults: tuple[tuple[object, str], ...] = (
            (
                self.inputs,
                "takes one tensor; leave inputs out, or name a model of an installed package",
            ),
            (self.head, "is of Staddle's own table, whose head is known; leave model.head out"),
            (optional, "has no options; leave model.options out"),
            (misfit, f"{misfit}; choose another model or model.input"),
            (self.norm not in network.norms, f"has norm {norms}, not {self.norm!r}"),
        )
        for wrong, why in faults:
            if wrong:
                raise ValueError(f"model {self.name!r} {why}")

    @property
    def width(self) -> int:
        """Numbers that the model gives for a record: one per class, or ``outputs``."""
        return getattr(self, self.outputs_key) or 1

    @property
    def outputs_key(self) -> Literal["classes", "outputs"]:
        """The key that says how many these are."""
        return "outputs" if self.classes is None else "classes"

    class_names: tuple[str, ...] | None = None
    """Meanings of the labels 0, 1, …; a silo whose data file says otherwise declines the job."""

    @pydantic.model_validator(mode="after")
    def _named(self) -> "ModelOptions":
        if self.class_names is None:
            return self
        if self.classes is None:
            raise ValueError("class_names of a model without classes; leave them out")
        if fault := names_fault(self.class_names, self.classes, *NAMING):
            raise ValueError(fault)
        return self


def input_shape(options: ModelOptions) -> Shape:
    """Channels, height and width of one record.

    It is the job's, or else the architecture's default. Several inputs are packed into one row.
    """
    if options.inputs:
        return packed_shape(options.named_inputs)
    if options.input is not None:
        return options.input
    # Models of installed packages have no default: theirs is that of torchvision's classifiers.
    return NETWORKS[options.name].default_input if options.name in NETWORKS else DEFAULT_INPUT


def image_shape(options: ModelOptions) -> Shape:
    """The shape of what augmentation changes and a mask is of: a record, or one of its inputs."""
    image = image_of(options.named_inputs)
    return input_shape(options) if image is None else image.shape


def vocabularies(options: ModelOptions) -> tuple[tuple[slice, int], ...]:
    """Where a record's numbers are tokens, and how many different ones: often nowhere."""
    network = NETWORKS.get(options.name)
    if network is None or network.options is not TextTransformerOptions:
        own = pieces(options.named_inputs)
        return tuple((piece.place, piece.tokens) for piece in own if piece.tokens)
    # ``_of_network`` has written all options of such a network.
    return ((slice(None), options.options["tokens"]),)  # type: ignore[index]


def wanted(options: ModelOptions) -> Foreign | None:
    """The model from outside the table that a job asks for; None for one of the table."""
    if options.name in NETWORKS:
        return None
    further = dict(sorted((options.options or {}).items()))
    spelt = ", ".join(f"{name} = {value!r}" for name, value in further.items()) or "none"
    # A notebook's function may be another by now, and what was made of it is kept.
    if is_program(options.name):
        spelt = f"{spelt}; source {source_of(entry_of(MODELS, options.name))}"
    shape, head = input_shape(options), options.head or ()
    image, inputs = image_shape(options), options.named_inputs
    return Foreign(options.name, shape, image, options.width, head, spelt, further, inputs)


def sketch(options: ModelOptions) -> dict[str, nn.Module]:
    """The model's modules by part, without values.

    They are on torch's device "meta", and have only names, shapes and dtypes.
    """
    copied = _twin if options.name in NETWORKS else copy.deepcopy
    return {part: copied(module) for part, module in _sketched(options).items()}


def _sketched(options: ModelOptions, *, plain: bool = False) -> dict[str, nn.Module]:
    """The kept modules, which nobody may change; ``plain``: without adapters."""
    outside, lora = wanted(options), None if plain else options.lora
    if outside is not None:
        return _checked(outside, lora, torch.get_default_dtype())
    asked = options.name, input_shape(options), options.width, options.norm
    further = tuple(sorted((options.options or {}).items()))
    return _laid_out(*asked, further, lora, torch.get_default_dtype())


@lru_cache(maxsize=64)
def _laid_out(
    name: str,
    shape: Shape,
    classes: int,
    norm: Norm,
    further: tuple[tuple[str, Option], ...],
    lora: LoraOptions | None,
    _: torch.dtype,
) -> dict[str, nn.Module]:
    """A network's modules, kept: each silo of a simulation asks for them in each round.

    Layers are of torch's default dtype, so what is kept is told apart by it too.
    """
    with torch.device("meta"):  # construction draws nothing from torch's generator
        made = NETWORKS[name].build(shape, classes, norm, **dict(further))
    draws = any(isinstance(layer, _DropoutNd) for part in made.values() for layer in part.modules())
    for module in made.values():
        traits = foreign.Traits(draws=draws, dense=NETWORKS[name].dense)
        setattr(module, foreign.TRAITS, traits)
    if lora is not None:
        adapt(made["extractor"], lora, name)
    return made


@lru_cache(maxsize=16)
def _checked(
    outside: Foreign, lora: LoraOptions | None, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """Like ``_laid_out``, for a model from outside the table; LocalError where it does not fit."""
    if lora is None:
        return foreign.check(outside)
    made = copy.deepcopy(_checked(outside, None, dtype))
    adapt(made["extractor"], lora, outside.name)
    # Only with values can its code run.
    plain = foreign.split(foreign.construct(outside, 0), outside.name, outside.head)["extractor"]
    with others_code(f"{outside.where} does not work with adapters", "leave model.lora out"):
        check_adapters(plain, lora, foreign.two_records(outside), outside.name)
    return made


def has_batch_norm(options: ModelOptions) -> bool:
    """True if a record's output depends, in training, on the other records of its batch."""
    layers = (layer for module in _sketched(options).values() for layer in module.modules())
    return any(isinstance(layer, _BatchNorm) for layer in layers)


def draws_randomly(options: ModelOptions) -> bool:
    """True if training the model takes random numbers, as dropout does."""
    return foreign.traits_of(_sketched(options)).draws


def dense(options: ModelOptions) -> bool:
    """True if the model gives its outputs for each position of a record."""
    return foreign.traits_of(_sketched(options)).dense


def couples_records(options: ModelOptions) -> bool:
    """True if a record's training depends on the others of its batch, or moves a buffer.

    Batch norm is such a layer. No clip bounds what such a record changes.
    """
    return has_batch_norm(options) or foreign.traits_of(_sketched(options)).couples


def maps(options: ModelOptions) -> bool:
    """True if ``torch.vmap`` can run the model, as stacked silos and gradients per record need."""
    return foreign.traits_of(_sketched(options)).maps


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


def build(
    options: ModelOptions, seed: Seed, prefix: str = "", weights: Path | None = None
) -> dict[str, nn.Module]:
    """A freshly initialised model by part.

    Streams are named by ``prefix`` and the part, so another prefix gives other values. Without one,
    parts of a job with ``model.weights`` begin with the values of that file, which lies at
    ``weights``; LocalError where it does not.

    The same options and seed give the same bits everywhere; for a model from outside the table,
    everywhere where ``start_digest`` is the same. Values are float32.
    """
    outside = wanted(options)
    copied = _twin if outside is None else copy.deepcopy
    parts = {part: copied(own) for part, own in _sketched(options, plain=True).items()}
    on_meta = torch.get_default_device().type == "meta"
    if outside is None or on_meta:
        for part, module in parts.items():
            fill(module, seed, prefix + part)
        made = parts
    else:
        whole = foreign.construct(outside, seed, prefix)
        made = foreign.split(whole, outside.name, outside.head)
        for part, module in made.items():
            setattr(module, foreign.TRAITS, foreign.traits_of(parts))
            initialise(module, seed, prefix + part, made=True)
    if options.lora is not None:
        adapt(made["extractor"], options.lora, options.name)
        _begin_adapters(made["extractor"], seed, f"{prefix}extractor")

    # A prefix is of a model that is to differ from the job's.
    if not prefix and not on_meta:
        for part, values in values_from_file(options, weights).parts.items():
            made[part].load_state_dict(values, strict=False)
    return made


def values_from_file(options: ModelOptions, weights: Path | None) -> StartValues:
    """What the file of ``model.weights`` brings; nothing for a model without.

    LocalError where the file is missing or does not fit.
    """
    if options.weights is None:
        return StartValues({})
    if weights is None:
        raise LocalError(
            f"model {options.name!r} begins with the file {options.weights.name}, and nobody says"
            " where it lies"
        )
    return start_values(weights, options.weights, _sketched(options), options.head or ())


@lru_cache(maxsize=16)
def _start(options: str, seed: Seed) -> str:
    parts = build(ModelOptions.model_validate_json(options), seed)
    digest = hashlib.sha256()
    for part, module in sorted(parts.items()):
        for name, tensor in sorted(module.state_dict().items()):
            header = [part, name, str(tensor.dtype), list(tensor.shape)]
            digest.update(canonical_json(header))
            digest.update(tensor.contiguous().reshape(-1).numpy().data)
    return digest.hexdigest()


def start_digest(options: ModelOptions, seed: Seed) -> str:
    """SHA-256 in hex of a model's initial values; empty for one of the table.

    For each tensor of ``state_dict``, by part and name in order: canonical JSON of part, name,
    dtype and shape, then its bytes. Values of the table follow from the definition of the job's
    streams, and need none. Neither do those of ``model.weights``, whose file has its own digest.
    """
    if wanted(options) is None:
        return ""
    options = options.model_copy(update={"weights": None})
    with torch.device("cpu"):
        return _start(options.model_dump_json(), seed)


def started(options: ModelOptions, seed: Seed) -> dict[str, Any]:
    """A job document's entry on initial values: their digest, and the releases that made them.

    Empty for a model of the table.
    """
    if not (digest := start_digest(options, seed)):
        return {}
    return {"sha256": digest, "made_with": foreign.releases_of(options.name)}


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
def initialise(module: nn.Module, seed: Seed, prefix: str, *, made: bool = False) -> None:
    """Fill a module's parameters and buffers from the streams ``init/<prefix>.<name>``.

    Norms start as identities. Other layers begin by their own ``reset_parameters`` under a
    generator seeded from these streams. Tensors that no layer can reset keep the values that the
    model's code ``made``; LocalError where it made none.
    """
    # The order does not matter, since each tensor has its own stream.
    for name, leaf in module.named_modules():
        own = (*leaf.parameters(recurse=False), *leaf.buffers(recurse=False))
        if not own:
            continue
        path = ".".join(filter(None, (prefix, name)))
        resets = getattr(leaf, "reset_parameters", None)
        # ``_draw`` takes an embedding's width as its fan_in.
        if isinstance(leaf, Drawn):
            _draw(leaf, seed, path)
        elif isinstance(leaf, _BatchNorm | nn.GroupNorm | nn.LayerNorm):
            # weight 1, bias 0, running mean 0, running variance 1: nothing random
            leaf.reset_parameters()
        elif callable(resets):
            failed = f"model: {type(leaf).__name__} {name!r} cannot be reset"
            with drawing(stream(seed, "", 0, f"init/{path}")), others_code(failed, foreign.FIX):
                resets()
        elif not made:
            raise LocalError(
                f"model: {type(leaf).__name__} {name!r} holds tensors that no rule initialises;"
                " put them into layers with reset_parameters"
            )


@torch.no_grad()
def _begin_adapters(extractor: nn.Module, seed: Seed, prefix: str) -> None:
    """A is drawn as a layer's weight, and B stays 0: the model begins as without adapters."""
    for name, layer in adapters(extractor):
        if layer.lora_a.weight.device.type != "meta":
            _draw(layer.lora_a, seed, f"{prefix}.{name}.lora_a")


def _draw(layer: Drawn, seed: Seed, path: str) -> None:
    """Draw each parameter uniformly in ±fan_in^(-1/2), from the stream of its own name."""
    # All weights of one unit, so a convolution's fan_in includes its kernel.
    bound = layer.weight[0].numel() ** -0.5  # fan_in = inputs of one unit
    for name, tensor in layer.named_parameters():
        full_name = ".".join(filter(None, (path, name)))
        rng = stream(seed, "", 0, f"init/{full_name}")
        values = uniform(rng, tensor.shape, -bound, bound)
        tensor.copy_(torch.from_numpy(values))
    # Padding stands for nothing: its row is zero, and torch never moves it.
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        layer.weight[layer.padding_idx] = 0
