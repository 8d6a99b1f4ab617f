"""Arrays from a .npz file, read only after what its headers claim was checked.

A .npz file is a zip archive with one .npy file for each array. Both say how large they are, and
either can lie: an .npy header of 128 bytes can claim 400 GB, and a zip member can inflate to a
thousand times its size. Of each array wanted:

(1) the member is stored or deflated, not encrypted, and claims no more than deflate can make of its
bytes;
(2) its .npy header is one that numpy reads, of plain numbers or texts;
(3) the header claims no more than the member holds;
(4) all arrays together fit the memory that is available, what is made of them included.

An array of objects is a pickle. It is refused, or handed out as bytes (``read_object``).
"""

import fnmatch
import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, reason
from ...files.file_bounds import check_fits, open_regular

FIXES = {
    "class_names": "store numpy.array([…], dtype=str), one name a class",
    "ids": "store numpy.array([…]) of texts or whole numbers, one id a record",
    "sources": "store numpy.array([…]) of texts or whole numbers, one source a record",
    "groups": "store numpy.array([…]) of texts or whole numbers, one group a record",
}
# Check (1) knows the largest expansion of these two methods only.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
MOST_INFLATED = 1032  # bytes that deflate makes of one at most: 258 by a code of two bits
SLACK_BYTES = 64  # of an empty deflate stream
NUMBER_BYTES = 8  # made of each number: float32 of all records, and again of each side of the split
TEXT_BYTES = 100  # made of each text: a Python string, and its places in tuples
# numpy reads no longer header; cut here, since it reads a longer one before it refuses it
HEADER_BYTES = 12 + 10_000
LARGEST_SIDE = 2**62
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# numpy's parser raises any of these for bytes that are not a header.
NO_HEADER = (
    *(
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        SyntaxError,
        tokenize.TokenError,
    ),
    *(RecursionError, MemoryError),  # of brackets in brackets: the parser's, not the machine's
)
MOST_SHOWN = 3  # arrays, in an error
NO_ARCHIVE = (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class _NotPlainError(Exception):
    """A member is no array of numbers or texts."""


@dataclass(frozen=True)
class _Claim:
    """The claims of an array's header: stored bytes, and number of values."""

    nbytes: int
    count: int


def read_arrays(
    path: Path,
    needed: tuple[str, ...],
    optional: tuple[str, ...] = tuple(FIXES),
    several: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The needed arrays of a .npz file and the optional ones that are there; never unpickles.

    Those of ``several`` are needed, too; in place of one, such as x, a file may have arrays x.NAME.
    LocalError for what is no such file, or asks for more memory than is available: then nothing of
    it was read.
    """
    whole = (*several, *needed)
    with _opened(path, whole) as (archive, size):
        found = _names(archive)
        needed = (*chain(*(_parts(path, each, found) for each in several)), *needed)
        return _read(path, archive, size, needed, optional)


def names_in(path: Path, needed: tuple[str, ...]) -> list[str]:
    """The names of a .npz file's arrays, in its order; ``needed`` shows in errors what to save.

    LocalError for what is no such file.
    """
    with _opened(path, needed) as (archive, _):
        return _names(archive)


def read_object(path: Path, name: str) -> bytes:
    """The pickle in an array [] of one object, as ``numpy.savez(file, name={…})`` stores it.

    It is not unpickled here (pickled.py). LocalError for another file or array.
    """
    with _opened(path, (name,)) as (archive, size):
        _check_there(path, (name,), _names(archive))
        member = _packed(path, archive, name, size)
        # These bytes, the arrays within, and what is made of them.
        check_fits(path, 3 * member.file_size, f"{name} of what its header claims")
        shape, dtype, start = _header(archive, member)
        if not dtype.hasobject or shape != ():
            raise LocalError(
                f"{path}: {name} is {dtype} {list(shape)}, and one pickled object is needed; take"
                " the file as the program wrote it"
            )
        with archive.open(member) as stream:
            return stream.read()[start:]


@contextmanager
def _opened(path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """The archive and the file's size in bytes; whatever is wrong with either is a LocalError."""
    # A partition has an array for each client and side.
    shown = [f"{name}=…" for name in wanted[:MOST_SHOWN]]
    shown += ["…"] * (len(wanted) > MOST_SHOWN)
    instead = f"write one with numpy.savez(file, {', '.join(shown)})"
    try:
        with open_regular(path) as file:
            if file.read(6) == b"\x93NUMPY":
                raise LocalError(
                    f"{path}: holds one array; save {_listed(wanted)} together with numpy.savez"
                )
            size = file.seek(0, io.SEEK_END)
            check_fits(path, size, "the file itself")  # its table of contents alone may be as large
            with zipfile.ZipFile(file) as archive:
                yield archive, size
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    except (_NotPlainError, *NO_ARCHIVE) as error:
        raise LocalError(f"{path}: not a .npz file of plain arrays; {instead}") from error


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _parts(path: Path, name: str, found: Sequence[str]) -> Sequence[str]:
    """The arrays of a file that a needed one is: itself, or those that stand in place of it."""
    parts = fnmatch.filter(found, f"{name}.*")
    if parts and name in found:
        raise LocalError(
            f"{path}: has {name!r}, and {parts[0]!r} in place of it; leave one of both out"
        )
    return parts or [name]


def _read(
    path: Path,
    archive: zipfile.ZipFile,
    size: int,
    needed: tuple[str, ...],
    optional: tuple[str, ...],
) -> dict[str, NDArray[Any]]:
    found = _names(archive)
    _check_there(path, needed, found)
    # An optional array may be absent.
    wanted = (*needed, *filter(found.__contains__, optional))
    total = sum(_memory(path, archive, name, size) for name in wanted)
    # (4) Nothing is read before all of it is known to fit.
    check_fits(path, total, f"{_listed(wanted)} of what its headers claim")
    return {name: _array(archive, name) for name in wanted}


def _check_there(path: Path, needed: tuple[str, ...], found: Sequence[str]) -> None:
    for name in needed:
        if name not in found:
            raise LocalError(
                f"{path}: has no array {name!r}, only {sorted(found)}; save {_listed(needed)}"
            )


def _memory(path: Path, archive: zipfile.ZipFile, name: str, size: int) -> int:
    """Bytes of memory that one array and what is made of it take; LocalError if it is not plain."""
    if name not in FIXES:
        claim = _claim(path, archive, name, size)
        return claim.nbytes + claim.count * NUMBER_BYTES
    try:
        claim = _claim(path, archive, name, size)
    except _NotPlainError as error:
        raise LocalError(f"{path}: {name} is not a plain array; {FIXES[name]}") from error
    return claim.nbytes + claim.count * TEXT_BYTES


def _packed(path: Path, archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """Check (1): how an array is packed; ``size`` is the file's."""
    member = archive.getinfo(_member(archive, name))
    if member.compress_type not in METHODS or member.flag_bits & 1:
        raise _NotPlainError
    # A member can claim any size, but not hold more than the file.
    packed = most = min(member.compress_size, size)
    if member.compress_type == zipfile.ZIP_DEFLATED:
        most = packed * MOST_INFLATED + SLACK_BYTES
    if member.file_size > most:
        raise LocalError(
            f"{path}, holds {size:,} bytes: array {name!r} claims to unpack {packed:,} bytes to"
            f" {member.file_size:,}, which no zip file can; replace the file"
        )
    return member


def _header(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Check (2): shape and dtype as an array's own header claims them, and the header's bytes."""
    with archive.open(member) as stream:
        # Only as much as a header can be: a member may inflate to gigabytes.
        start = io.BytesIO(stream.read(HEADER_BYTES))
    try:
        shape, _, dtype = READERS[np.lib.format.read_magic(start)](start)
    except NO_HEADER as error:
        raise _NotPlainError from error
    return shape, dtype, start.tell()


def _claim(path: Path, archive: zipfile.ZipFile, name: str, size: int) -> _Claim:
    """Checks (1), (2) and (3) of one array; ``size`` is the file's."""
    member = _packed(path, archive, name, size)
    shape, dtype, start = _header(archive, member)
    # Objects would be unpickled, which runs whatever code the file holds.
    if dtype.hasobject or any(not 0 <= side < LARGEST_SIDE for side in shape):
        raise _NotPlainError
    # (3) That much is there.
    count = math.prod(shape)
    # Python integers, so no shape makes the product overflow.
    claim = _Claim(count * dtype.itemsize, count)
    follow = member.file_size - start
    if claim.nbytes > follow:
        raise LocalError(
            f"{path}, holds {size:,} bytes: the header of array {name!r} claims {dtype}"
            f" {list(shape)}, which are {claim.nbytes:,} bytes, and"
            f" {follow:,} follow; write the file again"
        )
    return claim


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(_member(archive, name)) as stream:
        # (2) has rejected objects already; this is the second lock.
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def _member(archive: zipfile.ZipFile, name: str) -> str:
    return name if name in archive.NameToInfo else f"{name}.npy"


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
