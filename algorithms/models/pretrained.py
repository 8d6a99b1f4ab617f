"""Initial values from a safetensors file, in place of those that a job's streams draw.

Two files can bring them. A job's ``[model.weights]`` is for parts that cross: every silo begins
with the same values, so the signed job has the file's SHA-256 and size, and the file goes from the
operator through the coordinator to the silos. A silo's own file (``[[weights]]`` in silo.toml) is
for parts that never cross, which a method declares ``loadable``.
"""

import hashlib
import io
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, cast

from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from ...errors import LocalError, reason
from ...files import tensor_file
from ...files.documents import Strict, read_bytes
from ...files.file_bounds import check_fits, check_regular, open_regular
from ..exchange.parts import Tensors, all_finite, nbytes_of
from ..method import Method
from ..numerics.frozen import frozen_names
from .lora import adapter_names

HEADER_BYTES = 1 << 20  # bound on names and metadata next to the tensors
LONGEST_HEADER = 4 << 20  # bytes of names and metadata in a job's file
SPARE_BYTES = 64 << 20  # of tensors in a job's file that the model does not take
LOADING = Lock()  # held while a job's file is read: each may take gigabytes
# bytes of a job's file, which is read whole: twice the largest model, since it may hold more
LARGEST_FILE = 2**31
MOST_NAMES = 5  # of tensors, in an error
WEIGHTS_FOLDER = "weights"  # in the folder of a silo or the coordinator: files by their digest

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LoadedPart = Literal["extractor", "classifier"]


class StartWeights(Strict):
    """The [model.weights] table.

    A job file names ``file``, from the folder where it lies. The signed job has digest and size in
    its place.
    """

    file: str | None = Field(default=None, min_length=1, max_length=4096)
    sha256: Sha256 | None = None
    size: Annotated[int, Field(strict=True, ge=1, le=LARGEST_FILE)] | None = None  # bytes
    parts: Annotated[tuple[LoadedPart, ...], Field(min_length=1)] = ("extractor",)
    """Parts of the model that begin with the file's values; the others begin as drawn."""

    @field_validator("parts")
    @classmethod
    def _once(cls, parts: tuple[LoadedPart, ...]) -> tuple[LoadedPart, ...]:
        if len(set(parts)) < len(parts):
            raise ValueError("name each part once")
        # One order, since the signed job has it.
        return tuple(sorted(parts, reverse=True))

    @model_validator(mode="after")
    def _named(self) -> "StartWeights":
        if self.file is None and None in (self.sha256, self.size):
            raise ValueError(
                "name the file: file = 'weights.safetensors', also where the table replaces another"
                " one; to begin without a file, leave the table out"
            )
        return self

    @property
    def name(self) -> str:
        """The file's name in a folder of files by digest."""
        return f"{self.sha256}.safetensors"

    def is_at(self, path: Path) -> bool:
        """True if the signed job's file lies there, whole."""
        try:
            stat = path.stat()
            found = stat.st_size, _digest(path, stat.st_size, stat.st_mtime_ns)
        except (OSError, LocalError):
            return False
        return found == (self.size, self.sha256)

    @property
    def expected(self) -> tuple[str, int]:
        """SHA-256 in hex and bytes of the file, as the signed job has them."""
        return cast("tuple[str, int]", (self.sha256, self.size))

    def found(self, folder: Path) -> tuple["StartWeights", Path]:
        """Digest and size of a job file's ``file`` below ``folder``, and its path.

        LocalError where it cannot be read, or has another digest or size than the table says.
        """
        path = folder / (self.file or "")
        _check_regular(path)
        stat = path.stat()
        if not stat.st_size:
            raise LocalError(f"{path}: is empty; fetch it again")
        digest, size = _digest(path, stat.st_size, stat.st_mtime_ns), stat.st_size
        _compare(path, (self.sha256 or digest, self.size or size), (digest, size))
        return StartWeights(sha256=digest, size=size, parts=self.parts), path


def _check_regular(path: Path) -> None:
    """LocalError unless a file is there to read."""
    try:
        check_regular(path)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


@lru_cache(maxsize=8)
def _digest(path: Path, size: int, _: int) -> str:
    """SHA-256 of a file in hex, kept until its time of change differs."""
    if size > LARGEST_FILE:
        raise LocalError(f"{path}: {size} bytes; a file of weights has at most {LARGEST_FILE}")
    try:
        with open_regular(path) as file:
            # A file's type has no ``readinto`` in the stubs.
            return hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


def _compare(path: Path, wanted: tuple[str, int], found: tuple[str, int]) -> None:
    if wanted != found:
        raise LocalError(
            f"{path}: it has {found[1]} bytes with SHA-256 {found[0]}, expected {wanted[1]} with"
            f" {wanted[0]}; fetch the file again or correct the digest"
        )


@dataclass(frozen=True)
class StartValues:
    """What a job's file brings: values by part, and the names that did not match."""

    parts: Mapping[str, Tensors]
    drawn: tuple[str, ...] = ()  # buffers that the file lacks, which begin as drawn
    unused: tuple[str, ...] = ()  # the file's tensors that no part takes


def start_values(
    path: Path, weights: StartWeights, modules: Mapping[str, nn.Module], head: Collection[str]
) -> StartValues:
    """The values of the job's file for the parts that it names.

    ``modules`` by part say which tensors these are; they may be on torch's device "meta". A tensor
    has the name that it has in the whole module's ``state_dict``, or the part's name before it, as
    in the files that Staddle writes; ``head`` are the submodules that became the classifier.
    Running statistics may be missing, since they do not always cross, and so may adapters.
    LocalError unless the file is the signed job's and holds all other parameters by name, dtype and
    shape, all finite.
    """
    tensors = chain.from_iterable(module.state_dict().values() for module in modules.values())
    most = 2 * nbytes_of(tensors) + SPARE_BYTES
    if weights.expected[1] > most:
        raise LocalError(
            f"{path}: {weights.expected[1]} bytes, at most {most} for this model; take a file that"
            " holds the model alone"
        )
    with LOADING:
        held = _loaded(path, *weights.expected)
    values: dict[str, Tensors] = {}
    drawn: list[str] = []
    used: set[str] = set()
    # Part by part, since a file may name each in its own way.
    for part in weights.parts:
        wanted = modules[part].state_dict()
        names = _names(path, part, wanted, tuple(head), held)
        present = {name: held[own] for name, own in names.items() if own in held}
        parameters = dict(modules[part].named_parameters()).keys() - adapter_names(modules[part])
        needed = parameters | frozen_names(modules[part])
        if missing := [own for name, own in names.items() if name in needed - present.keys()]:
            raise LocalError(_lacking(path, part, missing, held, some=bool(present)))
        _check(path, part, present, wanted, names)
        values[part] = present
        drawn += [f"{part}.{name}" for name in wanted if name not in present]
        used.update(names.values())
    return StartValues(values, tuple(drawn), tuple(sorted(held.keys() - used)))


def _lacking(
    path: Path, part: str, missing: Collection[str], held: Collection[str], *, some: bool
) -> str:
    has = f"it has {listed(sorted(held))}"
    if some:
        return (
            f"{path}: lacks {listed(missing)}, which the job's {part} has; {has}; take a file of"
            " the same architecture"
        )
    return (
        f"{path}: has no tensor of the job's {part}, such as {listed(missing)}; {has}; rename them"
        f" so, or with '{part}.' before, or leave {part} out of model.weights.parts"
    )


def _names(
    path: Path, part: str, wanted: Collection[str], head: tuple[str, ...], held: Tensors
) -> dict[str, str]:
    """The file's name of each tensor: of the ways to name them, the one that fits most.

    LocalError where two fit alike.
    """
    ways: tuple[Callable[[str], str], ...] = (
        lambda name: _in_whole(part, name, head),
        lambda name: f"part/{part}/{name}",  # a silo's model.safetensors
        lambda name: f"{part}.{name}",  # a job's results at the coordinator
    )
    fitting = [held.keys() & set(map(way, wanted)) for way in ways]
    best = max(fitting, key=len)
    if best and fitting.count(best) < sum(len(each) == len(best) for each in fitting):
        twice = [min(each) for each in fitting if len(each) == len(best)]
        raise LocalError(
            f"{path}: names the tensors of {part} in two ways, such as {listed(twice)}; keep one"
        )
    way = ways[fitting.index(best)]
    return dict(zip(wanted, map(way, wanted), strict=True))


def _in_whole(part: str, name: str, head: tuple[str, ...]) -> str:
    """A tensor's name in the whole module, before its head was taken out (foreign.split)."""
    if part == "extractor" or not head:
        return name
    if len(head) == 1:
        return f"{head[0]}.{name}"
    first, _, rest = name.partition(".")
    before = {own.replace(".", "_"): own for own in head}
    return f"{before[first]}.{rest}"


@lru_cache(maxsize=1)
def _loaded(path: Path, sha256: str, size: int) -> Tensors:
    """The tensors of a job's file, kept for the next silo; nobody may write to them."""
    _check_regular(path)
    check_fits(path, 2 * size, "loading it", "free memory")
    # Not mapped: somebody may write to the file while a simulation runs.
    data = read_bytes(path, size)
    # The digest covers the whole file, and is checked before anything is parsed.
    _compare(path, (sha256, size), (hashlib.sha256(data).hexdigest(), len(data)))
    if data.startswith(b"PK"):
        raise LocalError(
            f"{path}: not a safetensors file but one of torch.save; load it with torch.load and"
            " write its tensors with safetensors.torch.save_file"
        )
    if int.from_bytes(data[:8], "little") > LONGEST_HEADER:
        raise LocalError(
            f"{path}: not a safetensors file, or one whose header has over {LONGEST_HEADER} bytes"
        )
    try:
        # safetensors, never pickle: a file from elsewhere must not run code.
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise LocalError(f"{path}: not a safetensors file: {error}") from error


def load_weights(
    path: Path, method: Method, silo: str, part: str, digest: str | None = None
) -> tuple[Tensors, str]:
    """The tensors of a safetensors file for a personal part, and the file's SHA-256 in hex.

    LocalError unless the method lets the part be loaded, the file's SHA-256 is ``digest`` (if that
    is not None) and its own (if Staddle wrote the file), and the file holds exactly the part's
    tensors by name, dtype and shape, all finite.
    """
    # Only parts that never cross: a part that crosses starts equal at all silos.
    if part not in method.loadable:
        able = "it takes none"
        if method.loadable:
            able = f"it takes weights for {', '.join(method.loadable)}"
        raise LocalError(
            f"{path}: method {method.name!r} takes no weights for part {part!r}, {able}"
        )
    _check_regular(path)
    # The size that the part needs bounds what is read: a wrong path must not fill the memory.
    module = method.modules(silo)[part]
    needed = nbytes_of(module.state_dict().values())
    data = read_bytes(path, needed + HEADER_BYTES)
    # The digest covers the whole file, and is checked before anything is parsed.
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and found != digest.lower():
        raise LocalError(
            f"{path}: its SHA-256 is {found}, expected {digest}; fetch the file again or correct"
            " the digest"
        )

    # safetensors, never pickle: a file from the internet must not run code.
    # Files that Staddle wrote contain a digest, which ``from_bytes`` checks.
    try:
        if tensor_file.is_ours(data):
            tensors, _ = tensor_file.from_bytes(data, str(path))
        else:
            tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise LocalError(f"{path}: not a safetensors file: {error}") from error
    # Buffers are needed as well, such as running statistics.
    wanted = module.state_dict()
    # The file may be of the model without adapters: these begin as drawn.
    drawn = {name: wanted[name] for name in adapter_names(module) - tensors.keys()}
    tensors = {**drawn, **tensors}
    if set(tensors) != set(wanted):
        missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        raise LocalError(f"{path}: is for another {part}: lacks {missing}, has {extra} too many")
    _check(path, part, tensors, wanted)
    return tensors, found


def _check(
    path: Path, part: str, tensors: Tensors, wanted: Tensors, names: Mapping[str, str] | None = None
) -> None:
    """LocalError unless each tensor is as the part's; ``names`` are the file's own."""
    for name, tensor in tensors.items():
        shown, own = (names or {}).get(name, name), wanted[name]
        # The dtype must match exactly, since ``load_values`` converts none.
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            raise LocalError(
                f"{path}: {shown!r} is {tensor.dtype} {list(tensor.shape)}, this job's {part} takes"
                f" {own.dtype} {list(own.shape)}; take a file of the same architecture, save it"
                f" with this dtype, or do not load {part}"
            )
        if not all_finite(tensor):
            raise LocalError(f"{path}: {shown!r} holds NaN or infinity; take an earlier checkpoint")


def listed(names: Collection[str]) -> str:
    """The first names in quotes, and how many more there are."""
    shown = ", ".join(map(repr, islice(names, MOST_NAMES)))
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
