"""The memory that a Parquet file's pages claim, from their headers, before any is unpacked.

pyarrow takes the word of a page for its size, so that a file of 50 kB may become gigabytes. The
sizes in the file's footer need not be those of the pages, so each header is read::

    column chunk:  [header] dictionary page   [header] data page   [header] data page …

Fields have the numbers of parquet.thrift, in Apache Parquet's format.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ...errors import LocalError
from ...files.file_bounds import check_fits
from .compact_structs import Struct, damaged, read_struct

# From the file's metadata to a column chunk, and where that is.
ROW_GROUPS, COLUMNS, CHUNK = 4, 1, 3
LENGTH, DATA_PAGES, DICTIONARY_PAGE = 7, 9, 11
# Kinds of pages, and the fields of PageHeader that have more of each.
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
KIND, SIZE, STORED = 1, 2, 3
MORE = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
VALUES, ENCODING = 1, {DATA: 2, DICTIONARY: 2, DATA_V2: 4}
# Lengths in these are packed: few bytes may say billions of values, or repeat one without end.
UNBOUNDED = {6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}

GROWS = 4  # bytes per byte of a page: unpacked, copied as an array, and as texts of Python
ENTRY_BYTES = 64  # per entry of a dictionary
FOOTER_GROWS = 256  # bytes per byte of the file's metadata, at most
TAIL = 8  # bytes at a file's end: the length of the metadata before them, and PAR1
FIX = "free memory, write it again with smaller pages and row groups, or ask where it comes from"

Chunks: TypeAlias = list[list[Struct]]  # by row group and column


@dataclass(frozen=True)
class ParquetPage:
    """What a header says of its page; ``size`` is in bytes, once it is unpacked."""

    kind: int
    size: int
    values: int
    encoding: int


def column_chunks(path: Path, file: BinaryIO) -> Chunks:
    """Where a file's metadata says that its columns are.

    LocalError where the metadata would not fit the memory, or is damaged.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))
    length = int.from_bytes(file.read(4), "little")
    if length > size - TAIL:
        raise damaged(path, "has no metadata")
    check_fits(path, length * FOOTER_GROWS, "its metadata", FIX)
    file.seek(size - TAIL - length)
    groups = read_struct(path, file).structs(ROW_GROUPS)
    return [[own.struct(CHUNK) for own in group.structs(COLUMNS)] for group in groups]


def check_pages(
    path: Path,
    file: BinaryIO,
    chunks: Chunks,
    schema: Any,
    columns: Mapping[int, bool],
    at_once: int,
) -> None:
    """LocalError where ``at_once`` records of these columns would not fit the memory.

    ``columns`` are places in pyarrow's ``schema`` of the file, none of which repeats within a
    record; True for one that is read as a dictionary, so that records share their texts. LocalError
    also for damaged headers, and for encodings whose size nothing says.
    """
    needed = 0
    for place, shared in columns.items():
        pages = _pages(path, file, chunks, place)
        needed += _column_bytes(path, schema.column(place), pages, at_once, shared=shared)
    check_fits(path, needed, f"{at_once:,} of its records", FIX)


def _column_bytes(
    path: Path, leaf: Any, pages: Iterable[ParquetPage], at_once: int, *, shared: bool
) -> int:
    """Bytes that so many records of a column take while they are read."""
    begun: Counter[int] = Counter()
    largest = dictionary = row = 0
    for page in pages:
        if page.encoding in UNBOUNDED:
            raise LocalError(
                f"{path}, column {leaf.name!r}: is written in encoding {UNBOUNDED[page.encoding]},"
                " which can unpack to any size; write the file again with dictionaries or PLAIN,"
                " as pandas does"
            )
        own = page.size * GROWS
        if page.kind == DICTIONARY:
            # Room for all entries that it claims is taken before the first is read.
            own += page.values * ENTRY_BYTES
            dictionary = max(dictionary, page.size)
        largest = max(largest, own)
        begun[row // at_once] += own
        row += page.values * (page.kind != DICTIONARY)

    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return 2 * largest + at_once * int(leaf.length) * GROWS
    # A page of numbers and its dictionary: single values are small.
    if leaf.physical_type != "BYTE_ARRAY":
        return 2 * largest
    # The pages that begin in a batch, wherever that begins, and the one that began before it.
    begins = max((begun[place] + begun[place + 1] for place in list(begun)), default=0)
    # Without sharing, each record may be the longest entry.
    return begins + largest + at_once * dictionary * GROWS * (not shared)


def _pages(path: Path, file: BinaryIO, chunks: Chunks, place: int) -> Iterator[ParquetPage]:
    """The pages of a column, those of all row groups in order."""
    whole = file.seek(0, os.SEEK_END)
    for group in chunks:
        if place >= len(group):
            raise damaged(path, "has row groups without some columns")
        start, dictionary = map(group[place].number, (DATA_PAGES, DICTIONARY_PAGE))
        # As pyarrow does.
        if 0 < dictionary < start:
            start = dictionary
        end = start + group[place].number(LENGTH)
        if end > whole:
            raise damaged(path, "names pages beyond its end")
        file.seek(start)
        while file.tell() < end:
            yield _page(path, file)


def _page(path: Path, file: BinaryIO) -> ParquetPage:
    """The next page; the file stands behind it afterwards."""
    header = read_struct(path, file)
    kind, size, stored = map(header.number, (KIND, SIZE, STORED))
    more = header.struct(MORE.get(kind, 0))
    file.seek(stored, os.SEEK_CUR)
    # Of pages that are not compressed, the stored bytes are read.
    return ParquetPage(
        kind, max(size, stored), more.number(VALUES), more.number(ENCODING.get(kind, 0))
    )
