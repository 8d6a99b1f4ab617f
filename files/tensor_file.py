"""A safetensors file that shows whether a disk changed it: its own SHA-256 stands in its metadata.

::

    <length of the header> {"__metadata__":{"sha256":"9f86…",…},"w":{"dtype":"F32",…},…}   <tensors>

The digest is of all bytes of the file, with 64 zeros in its own place. Anything that reads
safetensors reads it. It finds accidents: whoever can write to the disk can write another digest,
too.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from ..errors import LocalError, reason

DIGEST = "sha256"
_UNSIGNED = "0" * 64
_MARK = f'"{DIGEST}":"'.encode()  # no string of JSON has it inside, where quotes are escaped
_PIECE = 1 << 20  # bytes that are hashed at a time


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file; the same bytes for the same tensors and metadata."""
    data = bytearray(save(_apart(tensors), _with_digest(metadata)))
    # The library writes metadata in any order, so the same file would have several digests.
    start = _ordered(data)
    data[start : start + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file that is there already, and make it durable.

    Raises OSError or SafetensorError where the disk does not take it.
    """
    # The digest is over the file with 64 zeros in its place, so it can stand in the header; written
    # last, since it is known when all has been read.
    save_file(_apart(tensors), path, _with_digest(metadata))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        head = bytearray(length.to_bytes(8, "little") + file.read(length))
        start = _ordered(head)
        digest = hashlib.sha256(head)
        while piece := file.read(_PIECE):
            digest.update(piece)
        head[start : start + 64] = digest.hexdigest().encode()
        file.seek(0)
        file.write(head)
        file.flush()
        os.fsync(file.fileno())


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No two of them in the same memory, which the library refuses."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in taken else tensor
        taken.add(memory)
    return found


def from_bytes(data: bytes, origin: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file's bytes.

    Raises LocalError, which names ``origin``, for another file or one that was changed since.
    """
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    _check(head, [memoryview(data)[len(head) :]], origin)
    try:
        return load(data), _metadata(head)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(origin, str(error)) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Like ``from_bytes``, for a file on the disk, which is mapped."""
    head = check(path)
    try:
        return load_file(path), _metadata(head)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _unreadable(str(path), str(error)) from error


def check(path: Path) -> bytes:
    """The header of a file; LocalError unless the file is as it was written."""
    try:
        with path.open("rb") as file:
            head = _head(file, path.stat().st_size)
            _check(head, iter(lambda: file.read(_PIECE), b""), str(path))
    except OSError as error:
        raise _unreadable(str(path), reason(error)) from error
    return head


def check_ours(path: Path) -> None:
    """Raise LocalError where the disk changed a file that Staddle wrote.

    Files of other programs have no digest and are not checked.
    """
    with path.open("rb") as file:
        # Only the header is read: a large file of another program costs nothing.
        ours = is_ours(_head(file, path.stat().st_size))
    if ours:
        check(path)


def is_ours(head: bytes) -> bool:
    """True if a safetensors file has a digest: only Staddle's have.

    ``head`` is its header, or more of the file.
    """
    return _MARK in head[: 8 + int.from_bytes(head[:8], "little")]


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata of any safetensors file that was read.

    It begins with 8 bytes, the length of its header, and the header in JSON.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _with_digest(metadata: Mapping[str, str] | None) -> dict[str, str]:
    return {**(metadata or {}), DIGEST: _UNSIGNED}


def _ordered(data: bytearray) -> int:
    """Sort the header's metadata, which the library writes in any order.

    Returns the position of the digest.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    # The format allows spaces after a header, so its length and all tensor offsets stay as they
    # are.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
    if len(text) != length:
        raise LocalError(
            f"a header of {length} bytes has {len(text)} in order; this is a bug in Staddle"
        )
    data[8 : 8 + length] = text
    return data.index(_MARK, 0, 8 + length) + len(_MARK)


def _head(file: BinaryIO, size: int) -> bytes:
    """The header with its length; the length alone where it is beyond the file."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    # A flipped bit in the length may claim more than any memory has.
    return head + file.read(length) if length < size else head


def _check(head: bytes, rest: Iterable[bytes | memoryview], origin: str) -> None:
    start = head.find(_MARK) + len(_MARK)
    if start < len(_MARK):
        raise _unreadable(origin, "its header has no digest")
    # The digest was computed with 64 zeros in its own place.
    digest = hashlib.sha256(head[:start] + _UNSIGNED.encode() + head[start + 64 :])
    for piece in rest:
        digest.update(piece)
    if digest.hexdigest().encode() != head[start : start + 64]:
        raise LocalError(
            f"{origin}: is not as it was written: the disk changed it; restore it from a backup"
        )


def _metadata(head: bytes) -> dict[str, str]:
    found = metadata_of(head)
    # ``to_bytes`` added the digest; it was not in the caller's metadata.
    found.pop(DIGEST, None)
    return found


def _unreadable(origin: str, why: str) -> LocalError:
    return LocalError(
        f"{origin}: not a file of tensors as Staddle writes them: {why}; restore it from a backup"
    )
