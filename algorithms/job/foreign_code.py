"""The code of other projects that a job names, judged before any of it is imported."""

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ...errors import LocalError
from ...files import packages
from ...files.packages import Package
from ...files.program_code import is_program
from ..catalog import OWN_METHODS
from ..models.foreign import TORCHVISION
from ..models.registry import NETWORKS
from ..tasks.registry import TASKS

# Names of packages whose code may run; None for all, where whoever runs a job wrote it.
Allowed: TypeAlias = Collection[str] | None
# Keys of [metrics] that name metrics of a package, each with that package's name.
LIBRARIES = ("torchmetrics",)
LONGEST = 200  # characters of a name in a document, in an error


def packages_of(
    method: str, model: str, task: str, libraries: Collection[str] = ()
) -> tuple[Package, ...]:
    """The packages of a job's method, model, task and metrics; none where all are Staddle's own.

    torchvision is none, since Staddle brings it. LocalError where a package is not as it should be.
    """
    named = [*_named(method, model, task), *_libraries(libraries)]
    found = (packages.package(group, name, where) for group, name, where in named)
    return tuple(sorted(dict.fromkeys(found), key=_triple))


def runs_others_code(document: Mapping[str, Any]) -> bool:
    """True if a document names a method, model, task or metric that is not Staddle's own."""
    method, model, task = _names(document)
    ours = method in OWN_METHODS and model in NETWORKS and task in TASKS
    return not ours or bool(libraries_of(document.get("metrics")))


def libraries_of(metrics: object) -> tuple[str, ...]:
    """The packages whose metrics a document's [metrics] table names."""
    names = metrics if isinstance(metrics, Mapping) else {}
    return tuple(filter(names.get, LIBRARIES))


def unlisted(document: Mapping[str, Any], allowed: Allowed) -> tuple[str, ...]:
    """Packages whose code a job's document names and that are not among the allowed ones.

    All that have an entry point of that name count, whichever would be taken. One without metadata
    is never allowed, since nobody can list it.
    """
    if allowed is None:
        return ()
    known = {packages.normal(name) for name in allowed}
    found: set[str] = set()
    for group, name, _ in _of(document):
        found.update(packages.owners(group, name))
    return tuple(sorted(name or "unnamed" for name in found if packages.normal(name) not in known))


def not_listed(names: Collection[str]) -> str:
    """Why a job with the code of these packages does not run, and what to do."""
    return (
        f"the job runs code of the installed package {' and '.join(names)}, which may not run here;"
        " read it, then list the package under packages in the policy or the coordinator's"
        " configuration, or name it with --package"
    )


def check_code(document: Mapping[str, Any], allowed: Allowed, origin: str) -> None:
    """LocalError unless the packages that a document names may run and are those that it has."""
    if names := unlisted(document, allowed):
        raise LocalError(f"{origin}: {not_listed(names)}")
    if allowed is not None and any(map(is_program, _names(document))):
        raise LocalError(f"{origin}: its code is of a program, for simulations alone")
    named = _of(document)
    found = {packages.package(group, name, where) for group, name, where in named}
    ours, theirs = set(map(_triple, found)), set(map(_triple, _written(document)))
    differing = [
        f"{name}: {_listed(name, ours)} here, {_listed(name, theirs)} in the job"
        for name in sorted({name for name, *_ in ours ^ theirs})
    ]
    if differing:
        raise LocalError(
            f"{origin}: key packages, the code that the job runs, differs"
            f" ({'; '.join(differing)}); install the packages that the job was signed"
            " with"
        )


def _named(method: str, model: str, task: str) -> list[tuple[str, str, str]]:
    """Group and name of each entry point of a job, and its name in errors."""
    found = []
    # A name of a table is never that of a package, and torchvision's models have a prefix.
    if method not in OWN_METHODS:
        found.append((packages.METHODS, method, f"method {method!r}"))
    if model not in NETWORKS and not model.startswith(TORCHVISION):
        found.append((packages.MODELS, model, f"model {model!r}"))
    if task not in TASKS:
        found.append((packages.TASKS, task, f"task {task!r}"))
    return found


def _libraries(names: Collection[str]) -> list[tuple[str, str, str]]:
    return [(packages.METRICS, name, f"metrics.{name}") for name in names]


def _of(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The same of a document, with which anything may be wrong; what names nothing is left out."""
    tables: tuple[Mapping[str, object], ...] = (OWN_METHODS, NETWORKS, TASKS)
    ours = zip(_names(document), tables, strict=True)
    named = _named(*(name or next(iter(table)) for name, table in ours))
    named += _libraries(libraries_of(document.get("metrics")))
    return [entry for entry in named if packages.owners(entry[0], entry[1])]


def _names(document: Mapping[str, Any]) -> tuple[str, str, str]:
    """Method, model and task; each empty where the document names none."""
    method, model = (_text(document.get(key), "name") for key in ("method", "model"))
    # Documents of earlier releases have no task.
    return method, model, _text(document.get("task", {"kind": "classification"}), "kind")


def _text(table: object, key: str) -> str:
    text = table.get(key) if isinstance(table, Mapping) else None
    return text if isinstance(text, str) else ""


def _triple(package: Package) -> tuple[str, str, str]:
    return package.name, package.version, package.sha256


def _listed(name: str, packages: Collection[tuple[str, str, str]]) -> str:
    """Version and digest of the packages of this name; a project may have several parts."""
    found = sorted(entry for entry in packages if entry[0] == name)
    return " and ".join(f"{version}, SHA-256 {sha256}" for _, version, sha256 in found) or "none"


def _written(document: Mapping[str, Any]) -> list[Package]:
    """The packages of a document that are written as they should be."""
    read = []
    packages_ = document.get("packages")
    for each in packages_ if isinstance(packages_, list) else ():
        match each:
            case {"name": str(name), "version": str(version), "sha256": str(digest)}:
                read.append(Package(name[:LONGEST], version[:LONGEST], digest[:64]))
    return read
