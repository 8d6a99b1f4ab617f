"""Small files of state that show whether a disk changed them: each has its own SHA-256.

::

    JSON   {"file_sha256":"9f86…","memory":{"last":"9f86…"},…}  canonical; of the document without
                                                                this member
    bytes  <bytes> <SHA-256 of these, 32 bytes>                 keys and messages

Like tensor_file.py it finds accidents: whoever can write to the disk can write another digest, too.
JSON of an earlier release has no such member and is read as it is: no flipped bit and no cut makes
a member vanish from canonical JSON.
"""

import hashlib
from pathlib import Path
from typing import TypeVar

import pydantic

from ..errors import LocalError
from . import documents
from .documents import canonical_json, parse_canonical, parse_json, validate, write_atomic

DIGEST = "file_sha256"
DIGEST_BYTES = 32

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


def to_json(model: pydantic.BaseModel) -> bytes:
    """A document with its digest; LocalError for a model that has a field of that name."""
    document = model.model_dump(mode="json")
    # The digest would overwrite that field, and ``from_json`` would remove it.
    if DIGEST in document:
        raise LocalError(f"{type(model).__name__} has a field {DIGEST!r}; this is a bug in Staddle")
    return canonical_json({**document, DIGEST: _sha256(canonical_json(document))})


def from_json(data: bytes, model: type[ModelT], origin: str) -> ModelT:
    """The model that ``to_json`` wrote; LocalError, which names ``origin``, for anything else."""
    try:
        document = parse_json(data, origin)
        if not isinstance(document, dict) or DIGEST not in document:
            return parse_canonical(data, model, origin)
        stated = document.pop(DIGEST)
        # A flipped bit can change the spelling and no value, for example inside an escape sequence.
        spelling = canonical_json({**document, DIGEST: stated})
        digest = _sha256(canonical_json(document))
        read = validate(document, model, origin)
    except LocalError as error:
        raise LocalError(
            f"{error}; if nobody edited it the disk changed it: restore it from a backup"
        ) from error
    if (spelling, digest) != (data, stated):
        raise _changed(origin)
    return read


def write_json(path: Path, model: pydantic.BaseModel) -> None:
    """Replace a file, durably; UnwritableError where the disk does not take it."""
    write_atomic(path, to_json(model))


def read_json(path: Path, model: type[ModelT]) -> ModelT:
    """The model that ``write_json`` wrote; LocalError names the file and says what to do."""
    return from_json(documents.read_bytes(path), model, str(path))


def to_bytes(data: bytes) -> bytes:
    """Bytes with their digest behind them."""
    return data + hashlib.sha256(data).digest()


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file, durably; UnwritableError where the disk does not take it."""
    write_atomic(path, to_bytes(data))


def read_bytes(path: Path) -> bytes:
    """The bytes that ``write_bytes`` wrote.

    A LocalError names the file and says nothing of its contents.
    """
    kept = documents.read_bytes(path)
    # A file shorter than a digest leaves no data, and is itself too short to be a digest.
    data, digest = kept[:-DIGEST_BYTES], kept[-DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise _changed(str(path))
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _changed(origin: str) -> LocalError:
    return LocalError(
        f"{origin}: is not as it was written: the disk changed it; restore it from a backup"
    )
