"""Code of other projects that a job names: which package it is of, and a digest of its files.

A job only names code. Whoever installed the package decided that it may be there; the policy of a
silo, and the configuration of a coordinator, say whether jobs may run it. Name, version and a
digest over the files stand in the signed job, so every machine runs the same code.

Nothing here imports a package but ``load``.
"""

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path, PurePosixPath
from traceback import TracebackException
from typing import Any, NamedTuple

from ..errors import LocalError, StaddleError, reason
from .documents import canonical_json
from .program_code import entry_of, is_program, source_of

# Part of the interface with other packages: their pyproject.toml names them.
METHODS, MODELS, TASKS = "staddle.methods", "staddle.models", "staddle.tasks"  # entry points
DATASETS = "staddle.datasets"
# packages that name nothing as an entry point
MONAI = "monai:"  # a job names its networks as monai:UNet
METRICS = "metrics"  # stands for a group; names are those of the packages
COMPILED = "__pycache__"  # made from the source, and different on each machine
LONGEST_WHY = 200  # characters of what another project's error says


class Catalogue(NamedTuple):
    """A package whose module has what jobs name, though it names nothing as an entry point."""

    owner: str
    module: str
    install: str  # the command


# by group, and by name or by prefix of the names
CATALOGUES = {
    (MODELS, MONAI): Catalogue("monai", "monai.networks.nets", "pip install 'staddle[monai]'"),
    (METRICS, "torchmetrics"): Catalogue(
        "torchmetrics", "torchmetrics", "pip install 'staddle[torchmetrics]'"
    ),
}

# by package: its digest when it was first asked for
_FIRST: dict[str, str] = {}


@dataclass(frozen=True)
class Package:
    """An installed package whose code a job runs; ``sha256`` (hex) is over its files."""

    name: str
    version: str
    sha256: str


def normal(name: str) -> str:
    """A package's name in the one spelling that all of its spellings share (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(group: str) -> list[str]:
    """Names of all entry points of a group."""
    return sorted({entry.name for entry in entry_points(group=group)})


def owners(group: str, name: str) -> list[str]:
    """The names of all packages with this entry point, in order; "" for one without metadata."""
    return sorted(_owner(entry)[0] for entry in _entries(group, name))


def package(group: str, name: str, where: str) -> Package:
    """The package that has this entry point.

    LocalError, which begins with ``where``, unless there is exactly one, with metadata and files
    that can be read.
    """
    entry = _only(group, name, where)
    owner, version = _owner(entry)
    return Package(owner, version, digest(entry))


def load(group: str, name: str, where: str) -> tuple[Any, str]:
    """What an entry point names, and a text on whose it is; this imports the package.

    LocalError, which begins with ``where``, unless exactly one package has it and can be imported.
    """
    entry = _only(group, name, where)
    whose = f"{where}, which is {entry.value!r} of package {_shown(entry)}"
    with others_code(f"{whose}, cannot be imported", "reinstall that package"):
        return entry.load(), whose


@contextmanager
def others_code(what: str, fix: str) -> Iterator[None]:
    """LocalError for whatever another project's code raises: ``what: why; fix``."""
    try:
        yield
    except (StaddleError, KeyboardInterrupt):
        raise
    # Nobody can list what other people's code raises, and a daemon must not end by it.
    except BaseException as error:
        why = _said(error) or type(error).__name__
        raise LocalError(f"{what}: {why[:LONGEST_WHY]}; {fix}") from error


def _said(error: BaseException) -> str:
    """The first line of an error; its further ones are for that project's developers."""
    # Its code makes the text too, and that may fail.
    text = str(TracebackException.from_exception(error, limit=0))
    return text.partition("\n")[0].rstrip(".")


def digest(entry: EntryPoint) -> str:
    """SHA-256 (hex) over the files of the package that an entry point is of.

    Over canonical JSON of [path, SHA-256 of the file], in the order of the paths. They are all
    files that the package installed, and all files of the package that Python finds under the entry
    point's name. Left out are metadata, scripts, and what is below ``__pycache__``. So an editable
    installation of a package with one top-level name has the digest of its wheel. The code of
    other projects that it imports is not covered.

    LocalError for a package without files, or whose files changed since this process first asked.
    """
    if is_program(entry.name):
        return source_of(entry)
    # Whoever edits metadata by hand makes importlib raise anything.
    with others_code(f"the files of {entry.value!r} cannot be listed", "reinstall its package"):
        found, unit = dict(_installed(entry)), _found(entry.module)
    found |= unit.files
    if not unit.files:
        raise LocalError(
            f"package {unit.name!r} has no files that can be read, such as in a zip; install it as"
            " files"
        )
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(canonical_json([name, _sha256(found[name])]))
    now, key = whole.hexdigest(), f"{_owner(entry)[0]} {unit.name}"

    # Python keeps what it has imported: the files of today are not the code that runs.
    if _FIRST.setdefault(key, now) != now:
        if unit.name in sys.modules:
            raise LocalError(
                f"the files of package {unit.name!r} changed after this process had read them;"
                " restart it"
            )
        _FIRST[key] = now
    return now


def _entries(group: str, name: str) -> list[EntryPoint]:
    if is_program(name):
        return [entry_of(group, name)]
    if known := _catalogue(group, name):
        return _declared(group, name, known)
    return [entry for entry in entry_points(group=group) if entry.name == name]


def _catalogue(group: str, name: str) -> Catalogue | None:
    prefix, colon, _ = name.partition(":")
    return CATALOGUES.get((group, prefix + colon))


def _declared(group: str, name: str, known: Catalogue) -> list[EntryPoint]:
    """The entry point that a package would have; none where the package is not installed."""
    try:
        owner = distribution(known.owner)
    except PackageNotFoundError:
        return []
    entry = EntryPoint(name, known.module, group)
    vars(entry)["dist"] = owner  # as importlib sets it; the type refuses to be written to
    return [entry]


def _owner(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of an entry point's package; empty where its metadata are missing."""
    # What was removed by half may have entry points and nothing else.
    found: dict[str, Any] = {}
    what = f"the metadata of {entry.value!r} cannot be read"
    # Where the distribution importlib_metadata is imported, missing metadata are an error.
    with others_code(what, "reinstall its package"), suppress(FileNotFoundError):
        found = entry.dist.metadata.json if entry.dist else {}
    return str(found.get("name") or ""), str(found.get("version") or "")


def _shown(entry: EntryPoint) -> str:
    return " ".join(filter(None, _owner(entry))) or "without a name"


def _only(group: str, name: str, where: str) -> EntryPoint:
    found = _entries(group, name)
    if not found:
        how = getattr(_catalogue(group, name), "install", "install the one that does")
        raise LocalError(f"{where}: no installed package has it; {how}")
    if len(found) > 1:
        several = " and ".join(sorted(map(_shown, found)))
        raise LocalError(
            f"{where} is in {several}, which are installed here; uninstall all but one"
        )
    if not all(_owner(found[0])):
        raise LocalError(
            f"{where}, which is {found[0].value!r}, is of a package without name or version;"
            " reinstall it"
        )
    return found[0]


@dataclass(frozen=True)
class _Unit:
    """The outermost package or module of a dotted name that holds code, and its files by path."""

    name: str
    files: dict[str, Path]


def _found(module: str) -> _Unit:
    outer, *inner = module.split(".")
    spec = _spec(outer)
    # A namespace package holds no code of its own, and may be shared by several projects.
    while spec is not None and spec.origin is None and inner:
        outer = f"{outer}.{inner.pop(0)}"
        spec = _spec(outer)
    if spec is None:
        raise LocalError(f"package {outer!r} cannot be found; reinstall it")
    path = outer.replace(".", "/")
    if spec.submodule_search_locations is None:
        origin = Path(spec.origin or "")
        parent = PurePosixPath(path).parent
        files = {str(parent / origin.name): origin} if origin.is_file() else {}
        return _Unit(outer, files)
    files = {}
    # Of two files with one name, Python takes that of the first folder.
    for folder in map(Path, spec.submodule_search_locations):
        for name, file in _walked(folder):
            files.setdefault(f"{path}/{name}", file)
    return _Unit(outer, files)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise LocalError(f"package {name!r} cannot be found: {error}; reinstall it") from error


def _walked(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder, by path with "/" between."""
    for place, folders, files in os.walk(folder):
        if COMPILED in folders:
            folders.remove(COMPILED)
        for name in folders:
            # Python follows it; whether a walk should is not to be guessed.
            if (Path(place) / name).is_symlink():
                raise LocalError(
                    f"{Path(place) / name}: a symbolic link to a folder, in a package that a job"
                    " names; install the package as files"
                )
        for name in files:
            yield (Path(place) / name).relative_to(folder).as_posix(), Path(place) / name


def _installed(entry: EntryPoint) -> Iterator[tuple[str, Path]]:
    """The files that an entry point's package says it installed, by path, but for metadata."""
    # Other lists of files, such as those of a checkout, are not of what was installed.
    if entry.dist is None or entry.dist.read_text("RECORD") is None:
        return
    for file in entry.dist.files or ():
        outer = file.parts[0]
        # Scripts name this machine's Python, and editable installations its folders.
        if outer in {"..", "/"} or outer.endswith((".dist-info", ".egg-info", ".pth", "-link")):
            continue
        if outer.startswith("__editable__") or COMPILED in file.parts:
            continue
        yield file.as_posix(), Path(str(file.locate()))


def _sha256(path: Path) -> str:
    # To open a pipe is to wait for who writes into it.
    if path.exists() and not path.is_file():
        raise LocalError(f"{path}: is not a file, in a package that a job names; remove it")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
