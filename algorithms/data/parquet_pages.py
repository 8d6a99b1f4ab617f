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
from .compact_structs import LIST, LONG, STRUCT, WHOLE, Struct, damaged, read_struct

# From the file's metadata to a column chunk, and what that says.
ROW_GROUPS, COLUMNS, CHUNK = (4, LIST), (1, LIST), (3, STRUCT)
CODEC, COUNT, LENGTH, DATA_PAGES, DICTIONARY_PAGE = (
    *((4, WHOLE), (5, LONG), (7, LONG), (9, LONG), (11, LONG)),
)
# Kinds of pages, and the fields of PageHeader that have more of each.
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
KIND, SIZE, STORED = (1, WHOLE), (2, WHOLE), (3, WHOLE)
NO_MORE = (0, STRUCT)
MORE = {DATA: (5, STRUCT), DICTIONARY: (7, STRUCT), DATA_V2: (8, STRUCT)}
VALUES = (1, WHOLE)
ENCODING = {DATA: (2, WHOLE), DICTIONARY: (2, WHOLE), DATA_V2: (4, WHOLE)}
# Lengths in these are packed: few bytes may say billions of values, or repeat one without end.
UNBOUNDED = {6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}
# Those that pyarrow unpacks by itself, too.
CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}

GROWS = 4  # bytes per byte of a page: unpacked, copied as an array, and as texts of Python
ENTRY_BYTES = 64  # per entry of a dictionary
BATCH_BYTES = 2**26  # of the longest entries of dictionaries, one per record that is read at once
FOOTER_GROWS = 256  # bytes per byte of the file's metadata, at most
TAIL = 8  # bytes at a file's end: the length of the metadata before them, and PAR1
FIX = "free memory, write it again with smaller pages and row groups, or ask where it comes from"

Chunks: TypeAlias = list[list[Struct]]  # by row group and column


@dataclass(frozen=True)
class ParquetPage:
    """What a header says of its page, which has ``size`` bytes once it is unpacked.

    ``stored`` bytes begin at ``place``, packed by the ``codec`` of its chunk.
    """

    kind: int
    size: int
    values: int
    encoding: int
    codec: int
    place: int
    stored: int

    @property
    def bytes(self) -> int:
        """Memory for it: where it is not packed, for the stored bytes."""
        return max(self.size, self.stored)


@dataclass(frozen=True)
class _ColumnNeed:
    """Bytes that a column takes: of its pages, and of the longest value of a record."""

    pages: int
    value: int


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


def records_at_once(
    path: Path,
    file: BinaryIO,
    chunks: Chunks,
    schema: Any,
    columns: Mapping[int, bool],
    most: int,
) -> int:
    """How many records of these columns can be read at once; ``most`` or fewer.

    ``columns`` are places in pyarrow's ``schema`` of the file, none of which repeats within a
    record; True for one that pyarrow keeps as a dictionary, for the whole file. LocalError where
    their pages would not fit the memory, for damaged headers, and for encodings whose size nothing
    says.
    """
    needs = [
        _need(path, file, schema.column(place), _pages(path, file, chunks, place), most, kept=kept)
        for place, kept in columns.items()
    ]
    value = sum(need.value for need in needs)
    records = max(1, min(most, BATCH_BYTES // max(1, value)))
    needed = sum(need.pages for need in needs) + records * value
    check_fits(path, needed, f"{records:,} of its records", FIX)
    return records


def _need(
    path: Path, file: BinaryIO, leaf: Any, pages: Iterable[ParquetPage], most: int, *, kept: bool
) -> _ColumnNeed:
    """What a column takes while ``most`` of its records are read at once."""
    begun: Counter[int] = Counter()
    largest = longest = row = 0
    texts = leaf.physical_type == "BYTE_ARRAY"
    for page in pages:
        if page.encoding in UNBOUNDED:
            raise LocalError(
                f"{path}, column {leaf.name!r}: is written in encoding {UNBOUNDED[page.encoding]},"
                " which can unpack to any size; write the file again with dictionaries or PLAIN,"
                " as pandas does"
            )
        own = page.bytes * GROWS
        if page.kind == DICTIONARY:
            # Room for all entries that it claims is taken before the first is read.
            own += page.values * ENTRY_BYTES
            check_fits(path, own, f"a dictionary of column {leaf.name!r}", FIX)
            longest = max(longest, _longest(file, page) if texts and not kept else 0)
        largest = max(largest, own)
        begun[row // most] += own
        row += page.values * (page.kind != DICTIONARY)

    # A page of numbers and its dictionary: single values are small, or of a declared width.
    if not texts:
        fixed = leaf.physical_type == "FIXED_LEN_BYTE_ARRAY"
        return _ColumnNeed(2 * largest, int(leaf.length) * GROWS * fixed)
    if kept:
        return _ColumnNeed(begun.total() + largest, 0)
    # The pages that begin in a batch, wherever that begins, and the one that began before it.
    begins = max((begun[place] + begun[place + 1] for place in list(begun)), default=0)
    return _ColumnNeed(begins + largest, longest * GROWS)


def _longest(file: BinaryIO, page: ParquetPage) -> int:
    """Bytes of a dictionary's longest text, which every record may repeat; at most all of it."""
    import pyarrow as pa  # noqa: PLC0415 - installed for those who have such files

    file.seek(page.place)
    data = file.read(page.stored)
    if page.codec in CODECS:
        data = pa.decompress(data, page.size, CODECS[page.codec], asbytes=True)
    elif page.codec:
        return page.bytes
    # Each text comes after its length.
    at = longest = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return min(longest, page.bytes)


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
        # As pyarrow: there may be no page of no values.
        count = left = group[place].number(COUNT)
        while start < end and count:
            file.seek(start)
            page = _page(path, file, group[place].number(CODEC))
            start = page.place + page.stored
            left -= page.values * (page.kind != DICTIONARY)
            yield page
        # pyarrow looks for them a little beyond the end, where old writers may have left them.
        if left > 0:
            raise damaged(path, "has pages of fewer values than it says")


def _page(path: Path, file: BinaryIO, codec: int) -> ParquetPage:
    """The page whose header begins here."""
    header = read_struct(path, file)
    kind, size, stored = map(header.number, (KIND, SIZE, STORED))
    more = header.struct(MORE.get(kind, NO_MORE))
    values, encoding = more.number(VALUES), more.number(ENCODING.get(kind, VALUES))
    return ParquetPage(kind, size, values, encoding, codec, file.tell(), stored)
