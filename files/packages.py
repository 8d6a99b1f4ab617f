"""Code that a job names and that is not Staddle's: which package it comes from, and its digest.

A job only names code. Whoever installed the package decided that it may be there; a silo's policy
says whether jobs may run it. Name, version and a digest over the files stand in the signed job, so
every machine runs the same code.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ..errors import LocalError
from .documents import canonical_json

# Part of the interface with other packages: their pyproject.toml names them.
METHODS, MODELS = "staddle.methods", "staddle.models"  # groups of entry points
LEFT_OUT = (".pyc", ".pyo")  # made from the source, and different on each machine


@dataclass(frozen=True)
class Package:
    """An installed package whose code a job runs; ``sha256`` (hex) is over its files."""

    name: str
    version: str
    sha256: str


def normal(name: str) -> str:
    """A package's name in the one spelling that all of its spellings share (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(group: str, name: str) -> list[EntryPoint]:
    """The entry points of this name; nothing is imported."""
    return [entry for entry in entry_points(group=group) if entry.name == name]


def shown(entry: EntryPoint) -> str:
    """The package of an entry point, with its version, for an error."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"


def named(group: str, name: str) -> str:
    """The name of the package that has this entry point; empty where none has.

    Nothing is imported, so a job can be judged by it before any of its code runs.
    """
    return next((entry.dist.name for entry in entries(group, name) if entry.dist), "")


def package(group: str, name: str) -> Package | None:
    """The package that has this entry point; None where none has.

    LocalError where its files cannot be read.
    """
    for entry in entries(group, name):
        if entry.dist:
            return Package(entry.dist.name, entry.dist.version, digest(entry.module))
    return None


def digest(module: str) -> str:
    """SHA-256 (hex) of a module's top-level package, or of its one file.

    Over canonical JSON of [path, SHA-256 of the file], for all files but compiled ones, in the
    order of their paths. The package is found, and not imported. An editable installation has the
    same digest as a wheel of the same files.
    """
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        raise LocalError(f"package {top!r} cannot be found: {error}; reinstall it") from error
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise LocalError(f"package {top!r} has no files that can be read; reinstall it")
    whole = hashlib.sha256()
    for name, path in sorted(_files(top, spec.origin, spec.submodule_search_locations)):
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise LocalError(f"{path}: cannot read it: {error.strerror or error}") from error
        whole.update(canonical_json([name, found]))
    return whole.hexdigest()


def _files(top: str, origin: str | None, folders: list[str] | None) -> Iterator[tuple[str, Path]]:
    """Paths below the package with "/" between, and where each file lies."""
    if not folders:
        if origin is not None:
            yield Path(origin).name, Path(origin)
        return
    for folder in map(Path, folders):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in LEFT_OUT:
                yield f"{top}/{path.relative_to(folder).as_posix()}", path
