"""Files at the edges: strict TOML and JSON in, canonical JSON and atomic writes out."""

import contextlib
import difflib
import errno
import json
import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from ..errors import LocalError, UnwritableError
from .toml_document import parse_document

# no configuration, roster or job comes near; a larger one is a mistake
MAX_FILE_BYTES = 16 * 1024 * 1024
# of one document that are explained: each takes a search for the key that was meant
MOST_FAULTS = 50
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

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class Strict(pydantic.BaseModel):
    """Base of every file model: frozen, unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


def no_bool(value: object) -> object:
    """A field's value, of which pydantic would make a number were it true or false."""
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
    _check_canonical(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _check_canonical(value: Any, where: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise LocalError(f"canonical JSON: nested deeper than {MAX_DEPTH} levels; flatten it")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) > MAX_SAFE_INTEGER:
            raise LocalError(
                f"canonical JSON: {where} is {value}, beyond 2^53; write it as a string"
            )
    elif isinstance(value, str):
        if not value.isascii() and any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise LocalError(
                f"canonical JSON: {where} holds a lone surrogate, which UTF-8 cannot encode"
            )
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_canonical(item, f"{where}[{i}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise LocalError(f"canonical JSON: key {key!r} in {where} is not an ASCII string")
            _check_canonical(item, f"{where}.{key}", depth + 1)
    else:
        raise LocalError(
            f"canonical JSON: {where} is a {type(value).__name__}; write decimals as strings"
        )


def parse_json(data: bytes, origin: str) -> Any:
    """Parse UTF-8 JSON, refusing duplicate keys, NaN, Infinity and 1e999.

    ``origin`` names them in errors.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for key, value in pairs:
            if key in parsed:
                raise LocalError(f"{origin}: key {key!r} appears twice; keep one")
            parsed[key] = value
        return parsed

    def no_constant(text: str) -> Any:
        raise LocalError(f"{origin}: {text} is not a JSON number")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else no_constant(text)

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
    """Read a file of at most so many bytes.

    LocalError names what is missing, unreadable or too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {error.strerror or error}") from error
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
        faults = error.errors(include_url=False)
        # a list with a wrong item is not too short as well
        deep = {fault["loc"][:-1] for fault in faults}
        told = [
            fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in deep
        ]
        lines = [_explain(fault, model) for fault in told[:MOST_FAULTS]]
        lines += [f"and {len(told) - MOST_FAULTS} more faults"] if len(told) > MOST_FAULTS else []
        raise LocalError(f"{origin}: " + "; ".join(lines)) from None


def parse_canonical(data: bytes, model: type[ModelT], origin: str) -> ModelT:
    """Check canonical JSON, a final newline allowed, against a strict model: what is signed has one
    spelling.
    """
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
    wanted = WANTED.get(fault["type"])
    why = (
        f"give {wanted.format_map(fault.get('ctx', {}))}"
        if wanted
        else fault["msg"].removeprefix("Value error, ")
    )
    if isinstance(
        fault["input"], dict | list | tuple | pydantic.BaseModel
    ):  # a rule over several keys: the text names them itself
        return why if key == "the file" else f"{key}: {why}"
    return f"{key} = {fault['input']!r}: {why}"


def _written(loc: tuple[int | str, ...], model: type[pydantic.BaseModel]) -> list[str]:
    """The steps of a place that stand in the file: pydantic puts in which model of a union it
    tried.
    """
    steps: list[str] = []
    current = [model]
    for last, step in ((number == len(loc), str(part)) for number, part in enumerate(loc, 1)):
        if (
            last
            or len(current) == 1
            or step.isdecimal()
            or any(step in _fields(table) for table in current)
        ):
            steps.append(step)
            current = [t for m in current for t in _tables(_fields(m).get(step))] or current
        else:
            current = current[:1]  # the tag; what follows is one model's own
    return steps


def _hint(loc: tuple[int | str, ...], model: type[pydantic.BaseModel]) -> str:
    """What to write instead of an unknown key: the nearest key of its own table, or the table that
    it belongs to.
    """
    name = str(loc[-1])
    here = sorted({key for table in _tables_at(model, loc[:-1]) for key in _fields(table)})
    homes = _homes(model)
    longer = sorted((key for key in here if key.startswith(name)), key=len)
    near = longer or difflib.get_close_matches(name, here, n=1)
    hints = [f"did you mean {near[0]!r}?"] if near else []
    if name in homes:
        hints.append(f"{name!r} belongs {homes[name]}")
    elif not near and (far := difflib.get_close_matches(name, homes, n=1)):
        hints.append(f"did you mean {far[0]!r}, which belongs {homes[far[0]]}?")
    return " ".join(hints) or f"known keys: {', '.join(here) or 'none'}"


def _fields(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Annotations of a model's fields by the names that a file has for them."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _tables(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models that an annotation holds: itself, those of a union, that of a list."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _tables(inner)]


def _tables_at(
    model: type[pydantic.BaseModel], loc: tuple[int | str, ...]
) -> list[type[pydantic.BaseModel]]:
    """The models at a place; numbers of a list and tags of a union lead no deeper."""
    current = [model]
    for step in loc:
        current = [t for m in current for t in _tables(_fields(m).get(str(step)))] or current
    return current


def _homes(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Where in the file each key belongs, tables in tables included."""
    homes: dict[str, list[str]] = {}
    pending: list[tuple[tuple[str, ...], str, type[pydantic.BaseModel]]] = [
        ((), "at the top of the file", model)
    ]
    seen = set()
    while pending:
        path, place, table = pending.pop(0)
        if table in seen:
            continue
        seen.add(table)
        for key, annotation in _fields(table).items():
            homes.setdefault(key, []).append(place)
            inner = (*path, key)
            dotted = ".".join(inner)
            listed = getattr(annotation, "__origin__", None) in (list, tuple)
            shown = f"in [[{dotted}]]" if listed else f"in [{dotted}]"
            pending += [(inner, shown, below) for below in _tables(annotation)]
    return {key: " or ".join(dict.fromkeys(places)) for key, places in homes.items()}


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file so that a crash leaves the old or the new one: temporary name, fsync, rename,
    fsync.
    """
    # threads may write one path at once
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        _write_exclusive(temporary, data, mode)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a disk that has turned read-only keeps it
            temporary.unlink(missing_ok=True)
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Create a file that must not exist yet (keys), with its mode from the first byte on."""
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
    """Remove a file if it is there; UnwritableError where the disk does not let it go."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot remove it: {unwritable(error)}") from error


def unwritable(error: OSError) -> str:
    """Why something could not be written, and what to do."""
    fix = "check the folder and its owner"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "make room"
    elif error.errno == errno.EROFS:
        fix = "mount it writable, or name a folder on another file system"
    elif error.errno == errno.EIO:
        fix = "check the disk"
    return f"{error.strerror or error}; {fix}"


def _write_exclusive(path: Path, data: bytes, mode: int) -> None:
    """Create, write and fsync; a file that could not be written whole is removed again."""
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
    """Make the names in a folder durable."""
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
    """Of a folder in which files may come and go meanwhile."""
    used = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                used += os.lstat(os.path.join(base, name)).st_blocks * 512  # noqa: PTH118 cheaper than a Path a file
    return Disk(used, shutil.disk_usage(folder).free)
