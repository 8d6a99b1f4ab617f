"""Functions of a program or notebook, which a simulation names as ``python:module:function``.

No package has them: they are for the machine on which they were written, so no federated job may
name one.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

from ..errors import LocalError

PYTHON = "python:"
MAIN = "__main__"


def is_program(name: str) -> bool:
    """True if a job names a function of a program."""
    return name.startswith(PYTHON)


def entry_of(group: str, name: str) -> EntryPoint:
    """The entry point that the function would have in a package."""
    value = name.removeprefix(PYTHON)
    entry = EntryPoint(name, value, group)
    if not (entry.pattern.match(value) and entry.attr):
        raise LocalError(f"{name!r}: name a function as python:module:function")
    # As importlib sets it; the type refuses to be written to.
    known = {"name": "python", "version": entry.module}
    vars(entry)["dist"] = SimpleNamespace(metadata=SimpleNamespace(json=known))
    return entry


def names_program(document: object) -> bool:
    """True if a value anywhere in a document names a function of a program."""
    return any(True for _ in _programs(document))


def is_imported(document: object) -> bool:
    """True if all programs that a document names are imported already.

    Whoever reads a folder of somebody else's asks: importing what it names would run its code.
    """
    names = map(str.removeprefix, _programs(document), repeat(PYTHON))
    return all(name.partition(":")[0] in sys.modules for name in names)


def _programs(document: object) -> Iterator[str]:
    match document:
        case str():
            yield from filter(is_program, [document])
        case dict():
            yield from chain.from_iterable(map(_programs, document.values()))
        case list():
            yield from chain.from_iterable(map(_programs, document))


def find_in(folder: Path) -> None:
    """Let modules in a folder be imported, as those next to a program are.

    Installed ones come first: a file such as ``random.py`` there replaces none of them.
    """
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def source_of(entry: EntryPoint) -> str:
    """SHA-256 in hex of the code: the module's file, or in the main program the function's source.

    A notebook is no file, and a program that changes elsewhere still has the same model.

    LocalError where there is no module, or no source.
    """
    try:
        found = import_module(entry.module)
        if entry.module == MAIN:
            return _sha256(inspect.getsource(entry.load()).encode())
        return _sha256(Path(str(found.__file__)).read_bytes())
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise LocalError(
            f"{entry.name!r}: its source cannot be read: {error}; define it in a file or a cell of"
            " its own"
        ) from error


def name_of(function: object) -> str:
    """The name by which a simulation finds a function or class again.

    LocalError for one that has no name of its own, such as a lambda or an inner function.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not (module and name) or "<" in name:
        raise LocalError(
            f"{function!r} cannot be found by its name; define it by def or class at the top of a"
            " module, or of a notebook's cell"
        )
    return f"{PYTHON}{module}:{name}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
