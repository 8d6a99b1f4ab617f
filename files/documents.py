"""Files at the edges: strict TOML and JSON in, canonical JSON and atomic writes out."""

import contextlib
import difflib
import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import pydantic

from ..errors import LocalError, UnwritableError, reason
from .portable import OPENS_FOLDERS
from .toml_document import parse_document

# no configuration, roster or job comes near; a larger one is a mistake
MAX_FILE_BYTES = 16 * 1024 * 1024
# of one document that are explained: each takes a search for the key that was meant
MOST_FAULTS = 50
LONGEST_VALUE = 300  # characters of a wrong value that an error repeats
# of canonical JSON: far above any format here, far below the interpreter's own limit
MAX_DEPTH = 64
WANTED = {  # pydantic's type of a fault → what to write instead
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text in quotes",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_short": "a text of {min_length} characters or more",
    "string_too_long": "a text of {max_length} characters or fewer",
    "path_type": "a path in quotes",
    "list_type": "a list in brackets",
    "tuple_type": "a list in brackets",
    "dict_type": "a table",
    "model_type": "a table",
    "too_short": "a list of {min_length} or more, not of {actual_length}",
    "too_long": "a list of {max_length} or fewer, not of {actual_length}",
    "greater_than": "a value above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a value below {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
}
# RFC 8785 section 3.2.2.3: beyond it JSON numbers lose bits in other readers
MAX_SAFE_INTEGER = 2**53 - 1
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
WRITE_FIXES: dict[int | None, str] = {  # why the disk did not take something → what to do
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "make room",
    errno.EROFS: "mount it writable, or name a folder on another file system",
    errno.EIO: "check the disk",
}

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)
# A place in a document: the place that holds it and its key or index there; the top is (). It is
# written out for errors alone.
Where: TypeAlias = tuple["Where", str | int] | tuple[()]
_LISTS = (list, tuple)


class Strict(pydantic.BaseModel):
    """Base of every file model: frozen, unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


def no_bool(value: object) -> object:
    """Reject true and false, of which pydantic would make a number."""
    if isinstance(value, bool):
        raise ValueError("give a number, not true or false")  # noqa: TRY004 - pydantic reports ValueError only
    return value


# texts count, too
Real = Annotated[float, pydantic.BeforeValidator(no_bool), pydantic.Field(allow_inf_nan=False)]


def canonical_json(value: Any) -> bytes:
    """Encode as the RFC 8785 subset that Staddle signs and hashes.

    Strings, integers below 2^53, booleans, null, lists and mappings with ASCII keys; no floats
    (write decimals as strings). Raises LocalError for anything else.
    """
    # Checked before it is encoded: Python would write NaN, floats and keys of other types.
    _check_canonical(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _check_canonical(value: Any, where: Where = (), depth: int = 0) -> None:
    # A document from a peer must not end in the interpreter's own limit.
    if depth > MAX_DEPTH:
        raise LocalError(f"canonical JSON: nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                _check_key(key, where)
            # What most values are first: every record of a ledger passes through here.
            if type(item) is not str or not item.isascii() or depth == MAX_DEPTH:
                _check_canonical(item, (where, key), depth + 1)
    elif isinstance(value, _LISTS):
        for i, item in enumerate(value):
            _check_canonical(item, (where, i), depth + 1)
    else:
        _check_scalar(value, where)


def _check_key(key: Any, where: Where) -> None:
    # RFC 8785 sorts keys by UTF-16 units, Python by code points: they agree on ASCII
    if not isinstance(key, str) or not key.isascii():
        raise LocalError(f"canonical JSON: key {key!r} in {_path(where)} is not an ASCII string")


def _check_scalar(value: Any, where: Where) -> None:
    # Before the integers: in Python, bool is a subclass of int.
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) > MAX_SAFE_INTEGER:
            raise LocalError(
                f"canonical JSON: {_path(where)} is {value}, beyond 2^53; write it as a string"
            )
    elif isinstance(value, str):
        if LONE_SURROGATE.search(value):
            raise LocalError(
                f"canonical JSON: {_path(where)} holds a lone surrogate, which UTF-8 cannot encode"
            )
    else:
        raise LocalError(
            f"canonical JSON: {_path(where)} is a {type(value).__name__}; write decimals as strings"
        )


def _path(where: Where) -> str:
    """A place as a person reads it, such as $.silos[3]."""
    steps = []
    while where:
        where, step = where
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(["$", *reversed(steps)])


def parse_json(data: bytes, origin: str) -> Any:
    """Parse UTF-8 JSON, refusing duplicate keys, NaN, Infinity and 1e999.

    ``origin`` names them in errors.
    """

    # Readers take the first or the last of two values of one key: one would be checked, the other
    # used.
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for key, value in pairs:
            if key in parsed:
                raise LocalError(f"{origin}: key {key!r} appears twice; keep one")
            parsed[key] = value
        return parsed

    def no_constant(text: str) -> NoReturn:
        raise LocalError(f"{origin}: {text} is not a JSON number")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            no_constant(text)
        return number

    # decoded here: json.loads would guess UTF-16 and UTF-32 from bytes, and other readers would not
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=no_duplicates,
            parse_constant=no_constant,
            parse_float=finite,
        )
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{origin}: not valid JSON: {error}") from error


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of bounded size.

    LocalError names what is missing, unreadable or too large.
    """
    # One byte more than allowed tells a file that is too large without reading all of it.
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    if len(data) > most:
        raise LocalError(f"{path}: larger than {most} bytes; is this the right file?")
    return data


def read_toml(path: Path, model: type[ModelT]) -> ModelT:
    """Read a TOML file into a strict model.

    Errors name file, key, value and the nearest known key.
    """
    return parse_toml(read_bytes(path), model, str(path))


def parse_toml(data: bytes, model: type[ModelT], origin: str) -> ModelT:
    """Parse TOML bytes into a strict model, for callers that need a digest of the same bytes."""
    return validate(parse_document(data, origin), model, origin)


def validate(document: Any, model: type[ModelT], origin: str) -> ModelT:
    """Check a parsed document against a strict model.

    The faults found are named in one LocalError.
    """
    try:
        return model.model_validate(document)
    except pydantic.ValidationError as error:
        faults = _independent(error.errors(include_url=False))
        lines = [_explain(fault, model) for fault in faults[:MOST_FAULTS]]
        if (unshown := len(faults) - MOST_FAULTS) > 0:
            lines.append(f"and {unshown} more faults")
        raise LocalError(f"{origin}: " + "; ".join(lines)) from None


def _independent(faults: Sequence[Any]) -> list[Any]:
    """Faults without those that follow from another: a list with a wrong item is not too short."""
    following = {("too_short", fault["loc"][:-1]) for fault in faults}
    return [fault for fault in faults if (fault["type"], fault["loc"]) not in following]


def parse_canonical(data: bytes, model: type[ModelT], origin: str) -> ModelT:
    """Check canonical JSON, a final newline allowed, against a strict model.

    What is signed has one spelling, so any other one was edited.
    """
    # Signatures are over the canonical bytes, so a file in another spelling would verify although
    # it is not what was signed.
    document = parse_json(data, origin)
    if canonical_json(document) != data.removesuffix(b"\n"):
        raise LocalError(
            f"{origin}: is not canonical JSON, so it was edited by hand; take the file as it was"
            " made"
        )
    return validate(document, model, origin)


def _explain(fault: Any, model: type[pydantic.BaseModel]) -> str:
    key = ".".join(_written(fault["loc"], model)) or "the file"
    if fault["type"] == "missing":
        return f"missing key {key!r}; add it"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_hint(fault['loc'], model)}"
    if wanted := WANTED.get(fault["type"]):
        why = f"give {wanted.format_map(fault.get('ctx', {}))}"
    else:
        why = fault["msg"].removeprefix("Value error, ")

    # A rule over several keys names them itself, so the value, a whole table, is not repeated.
    if not isinstance(fault["input"], dict | list | tuple | pydantic.BaseModel):
        given = repr(fault["input"])
        if len(given) > LONGEST_VALUE:
            given = f"{given[:LONGEST_VALUE]}…"
        return f"{key} = {given}: {why}"
    return why if key == "the file" else f"{key}: {why}"


def _written(loc: tuple[int | str, ...], model: type[pydantic.BaseModel]) -> list[str]:
    """The steps of a location that stand in the file.

    Pydantic adds a step for each model of a union that it tried.
    """
    steps: list[str] = []
    tables = [model]
    for number, part in enumerate(loc, 1):
        step = str(part)
        if number == len(loc) or _is_in_file(step, tables):
            steps.append(step)
            # Below a key without models, such as one of a plain table, all steps are in the file.
            tables = _below(tables, step) if _is_key(step, tables) else tables
        else:
            tables = tables[:1]  # the tag of a union: what follows is one model's own
    return steps


def _is_in_file(step: str, tables: Sequence[type[pydantic.BaseModel]]) -> bool:
    """True if a step is a key or a number of a list, not the tag of a union."""
    is_union = len(tables) > 1
    if not is_union or step.isdecimal():
        return True
    return _is_key(step, tables)


def _is_key(step: str, tables: Sequence[type[pydantic.BaseModel]]) -> bool:
    return any(step in _fields(table) for table in tables)


def _hint(loc: tuple[int | str, ...], model: type[pydantic.BaseModel]) -> str:
    """A hint at what to write instead of an unknown key.

    It is the nearest key of the same table, or the table to which the key belongs.
    """
    name = str(loc[-1])
    keys = sorted(set().union(*map(_fields, _tables_at(model, loc[:-1]))))
    homes = _homes(model)
    hints = []
    longer = [key for key in keys if key.startswith(name)]
    near = min(longer, key=len, default="") or closest(name, keys)
    if near:
        hints.append(f"did you mean {near!r}?")
    if name in homes:
        hints.append(f"{name!r} belongs {homes[name]}")
    elif not near and (far := closest(name, homes)):
        hints.append(f"did you mean {far!r}, which belongs {homes[far]}?")
    return " ".join(hints) or f"known keys: {', '.join(keys) or 'none'}"


def closest(name: str, keys: Iterable[str]) -> str:
    """The key that looks most like a name, or an empty text."""
    # difflib would read megabytes that a peer sent before it finds that no short key is like them
    near = [key for key in keys if 7 * len(key) >= 3 * len(name)]
    return next(iter(difflib.get_close_matches(name, near, n=1)), "") if near else ""


def _fields(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Annotations of a model's fields by the names that a file has for them."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _tables(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models that an annotation holds: itself, those of a union, that of a list."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    inner = getattr(annotation, "__args__", ())
    return list(chain.from_iterable(map(_tables, inner)))


def _below(tables: Sequence[type[pydantic.BaseModel]], key: str) -> list[type[pydantic.BaseModel]]:
    """The models that a key of these tables holds."""
    found = []
    for table in tables:
        found += _tables(_fields(table).get(key))
    return found


def _tables_at(
    model: type[pydantic.BaseModel], loc: tuple[int | str, ...]
) -> list[type[pydantic.BaseModel]]:
    """The models at a location; numbers of a list and tags of a union lead no deeper."""
    tables = [model]
    for step in loc:
        tables = _below(tables, str(step)) or tables
    return tables


def _homes(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Where in the file each key belongs, tables in tables included."""
    homes: dict[str, list[str]] = {}
    pending: list[tuple[tuple[str, ...], str, type[pydantic.BaseModel]]] = [
        ((), "at the top of the file", model)
    ]
    visited = set()
    while pending:
        # Breadth first: the hint names the outermost table that has the key first.
        path, home, table = pending.pop(0)
        # A model that contains itself would be walked for ever.
        if table in visited:
            continue
        visited.add(table)
        for key, annotation in _fields(table).items():
            homes.setdefault(key, []).append(home)
            inner = (*path, key)
            dotted = ".".join(inner)
            listed = getattr(annotation, "__origin__", None) in (list, tuple)
            shown = f"in [[{dotted}]]" if listed else f"in [{dotted}]"
            pending += [(inner, shown, below) for below in _tables(annotation)]

    # one key may belong to several tables, and twice to one table of a union
    return {key: " or ".join(dict.fromkeys(found)) for key, found in homes.items()}


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file so that a crash leaves the old or the new one.

    The order is: temporary name, fsync, rename, fsync of the folder.
    """
    _replace(path, data, mode)
    _sync(path)


def _sync(path: Path) -> None:
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    # threads may write one path at once
    # In the same folder: a rename cannot cross file systems.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        _write_exclusive(temporary, data, mode)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a disk that has turned read-only keeps it
            temporary.unlink(missing_ok=True)
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error


def write_all(files: Iterable[tuple[Path, bytes]], mode: int = 0o644) -> None:
    """Replace many files, each as ``write_atomic`` does; their folders are synced once, at the end.

    A crash leaves the old or the new one of each.
    """
    last: dict[Path, Path] = {}  # by folder
    for path, data in files:
        _replace(path, data, mode)
        last[path.parent] = path
    for path in last.values():
        _sync(path)


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Create a file that must not exist yet (keys), with its mode from the first byte on.

    LocalError if the file exists, UnwritableError if the disk does not take it. A crash may leave
    a part of it, unlike with ``write_atomic``.
    """
    try:
        _write_exclusive(path, data, mode)
        sync_directory(path.parent)
    except FileExistsError as error:
        raise LocalError(
            f"{path}: exists already; move it away or choose another folder"
        ) from error
    except OSError as error:
        raise UnwritableError(f"{path}: cannot create it: {unwritable(error)}") from error


def remove(path: Path) -> None:
    """Remove a file if it is there; UnwritableError where the disk does not let it go.

    The removal is not durable before the folder is synced.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot remove it: {unwritable(error)}") from error


def unwritable(error: OSError) -> str:
    """Why something could not be written, and what to do."""
    fix = WRITE_FIXES.get(error.errno, "check the folder and its owner")
    return f"{reason(error)}; {fix}"


def _write_exclusive(path: Path, data: bytes, mode: int) -> None:
    """Create, write and fsync; a file that could not be written whole is removed again."""
    # The mode is set as the file is made: between a creation and a chmod anybody could open a key.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable.

    Until then a power cut may undo a rename, or lose a new file. OSError if the disk fails.
    """
    if not OPENS_FOLDERS:
        return  # Windows cannot sync a folder; NTFS keeps a journal of names
    # A file that was fsynced under a name that was not is gone after a power cut.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Disk:
    """Bytes that a folder takes, and bytes that its disk has left."""

    used: int
    free: int


def disk(folder: Path) -> Disk:
    """The disk of a folder; files may come and go meanwhile."""
    used = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                # ``st_blocks`` counts units of 512 bytes whatever the file system's block size;
                # a sparse file has only the blocks that it fills.
                used += os.lstat(os.path.join(base, name)).st_blocks * 512  # noqa: PTH118 cheaper than a Path a file
    return Disk(used, shutil.disk_usage(folder).free)
