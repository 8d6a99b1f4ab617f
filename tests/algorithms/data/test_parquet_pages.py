"""Parquet files of some bytes that would unpack to gigabytes are refused before they do."""

from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.refusals import refused

from staddle.algorithms.data import parquet_pages
from staddle.algorithms.data.compact_structs import Struct
from staddle.algorithms.data.parquet_pages import (
    CODEC,
    COUNT,
    DATA_PAGES,
    LENGTH,
    column_chunks,
    records_at_once,
)
from staddle.algorithms.data.rows import parquet_rows, texts_of
from staddle.algorithms.data.sources.formats.parquet import Parquet
from staddle.errors import LocalError
from staddle.files import file_bounds

MANY = 10_000
POOLS = []
MEGABYTE = "x" * 2**20
KEYS = {"kind": "parquet", "features": ["v"], "label": "y", "id": "patient"}
WRITTEN = {"write_statistics": False, "store_schema": False, "compression": "zstd"}


@contextmanager
def below(most):
    """Arrow takes at most so many bytes while the block runs."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    # Arrays give their memory back to it, after this block too.
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() <= most


@pytest.fixture
def little(monkeypatch):
    """100 MB are available."""
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 10**8)


@pytest.fixture
def written(tmp_path):
    def call(patients, **options):
        path, count = tmp_path / "bomb.parquet", len(patients)
        columns = {"patient": patients, "v": [1.0] * count, "y": [0] * count}
        parquet.write_table(pa.table(columns), path, **{**WRITTEN, **options})
        return path

    return call


def repeated(value, kind=None, count=MANY):
    places = pa.array([0] * count, pa.int32())
    return pa.DictionaryArray.from_arrays(places, pa.array([value], kind))


def read(path, **keys):
    return Parquet(file=path, **KEYS | keys).read()


def test_a_text_that_all_records_repeat_takes_fewer_records_at_once(written, little):
    path = written(repeated(MEGABYTE))
    assert path.stat().st_size < 2000
    with below(90e6), refused(r"record 1, column 'patient': is longer than 4,096 characters"):
        read(path)
    # As a column that nobody uses it is not even read.
    with below(1e6):
        assert len(read(path, id=None).y) == MANY
    with parquet_rows(path, ["v"]) as found:
        assert [row for _, row in islice(found, 2)] == [
            ["patient", "v", "y"],
            ["(string)", "1", "(int64)"],
        ]


def test_the_longest_text_of_a_dictionary_counts(written, monkeypatch):
    monkeypatch.setattr(parquet_pages, "BATCH_BYTES", 40_000)
    path = written(["short", "n" * 1000, "short", ""], compression="none")
    with path.open("rb") as file:
        chunks, schema = column_chunks(path, file), parquet.ParquetFile(path).metadata.schema
        plan = partial(records_at_once, path, file, chunks, schema)
        assert plan({0: False}, 4096) == 10
        assert plan({0: True}, 4096) == plan({1: False}, 4096) == 4096


def test_values_of_a_fixed_width_take_fewer_records_at_once(written, little):
    path = written(repeated(MEGABYTE.encode(), pa.binary(2**20), 20).dictionary_decode())
    with below(90e6), refused(r"record 1, column 'patient': is longer than 4,096 characters"):
        read(path)


def test_pages_that_unpack_to_more_than_the_memory(written, little):
    path = written([MEGABYTE] * 40, use_dictionary=False, data_page_size=1, write_batch_size=1)
    assert path.stat().st_size < 20_000
    with below(0), refused("4,096 of its records would take 171,968,472 bytes of memory, 100,000,"):
        read(path)
    # As many bytes, but nobody holds all of them at once.
    names = [f"{number:1000}" for number in range(4 * MANY)]
    many = written(names, use_dictionary=False, data_page_size=2**16, write_batch_size=16)
    with below(20e6), parquet_rows(many) as found:
        assert sum(1 for _ in found) == 4 * MANY + 1


def test_what_pyarrow_keeps_as_a_dictionary_counts_as_a_whole(written, little):
    names = pa.array([f"{number:1000}" for number in range(4 * MANY)]).dictionary_encode()
    path = written(names, use_dictionary=False, store_schema=True)
    with below(0), refused("4,096 of its records would take 171,4"):
        read(path)


def test_cells_of_a_dictionary_share_their_text():
    texts = texts_of(Path("some.arrow"), "patient", repeated("a text"))
    assert texts == ["a text"] * MANY
    assert len(set(map(id, texts))) == 1


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_encodings_that_unpack_to_any_size(written, encoding):
    how = {"use_dictionary": False, "column_encoding": {"patient": encoding}}
    path = written(["a", "b"], **how)
    with refused(f"column 'patient': is written in encoding {encoding}, which can unpack to any"):
        read(path)
    assert len(read(path, id=None).y) == 2


def test_a_list_of_millions_is_not_read(written):
    path = written(["a", "b"])
    table = parquet.read_table(path).append_column("l", pa.array([[0.0] * 2**20, []]))
    parquet.write_table(table, path, **WRITTEN)
    with below(1e6), parquet_rows(path) as found:
        cells = [row for _, row in found]
    assert cells[1:] == [[name, "1", "0", "(list<element: double>)"] for name in "ab"]


def test_records_without_a_value_are_not_counted(tmp_path):
    """The file's metadata may claim any number of them."""
    path = tmp_path / "lists.parquet"
    parquet.write_table(pa.table({"l": [[1.0], []]}), path, **WRITTEN)
    with parquet_rows(path) as found:
        assert next(found) == (0, ["l"])
        with refused(r"lists\.parquet: no column that is read has one value per record; give"):
            next(found)


def test_a_name_that_means_a_list_too_is_not_read(written):
    """pyarrow takes a name for all that is below it, too."""
    path = written(["a"])
    columns = {"s.x": [1.0, 2.0], "s": [{"x": [0.0] * 2**20}, {"x": []}], "v": [1.0, 2.0]}
    parquet.write_table(pa.table(columns), path, **WRITTEN)
    with below(1e6), parquet_rows(path) as found:
        cells = [row for _, row in found]
    assert [row[0] for row in cells] == ["s.x", "(double)", "(double)"]


def test_metadata_larger_than_the_memory(written, monkeypatch):
    path = written(["a"])
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 10**4)
    with refused("its metadata would take .* bytes of memory, 10,000 are available; free memory"):
        read(path)
    with path.open("rb") as file, refused("its metadata would take"):
        column_chunks(path, file)


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("names", [[], [""], [None]])
def test_files_of_next_to_nothing(written, compression, names):
    path = written(pa.array(names, pa.string()), compression=compression)
    with parquet_rows(path) as found:
        assert [row[0] for _, row in found] == ["patient", *([""] * len(names))]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_files_as_others_write_them(written, version, compression, dictionary):
    how = {"use_dictionary": dictionary, "write_statistics": True, "row_group_size": 300}
    more = {"data_page_version": version, "compression": compression, "write_page_index": True}
    names = [f"patient {number}" for number in range(1000)]
    path = written(names, **how, **more, data_page_size=100, write_page_checksum=True)
    assert read(path).ids == tuple(names)


def test_a_place_of_the_dictionary_that_pyarrow_passes_over(written):
    """Pages there would be counted, and others be unpacked."""
    path = written(["a", "b"])
    assert read(path).ids == ("a", "b")
    # The field after that of the first page, of 64 bits, and then one of 32.
    data = path.read_bytes()
    assert data.count(b"\x26\x08\x29") == 1
    path.write_bytes(data.replace(b"\x26\x08\x29", b"\x25\x08\x29"))
    with refused("cannot read it as Parquet: it has headers with fields of other types"):
        read(path)


# Headers that no program writes.

ONE_VALUE = b"\x15\x00\x15\x00\x15\x00\x2c\x15\x02\x00\x00"  # a page of no bytes
SIZES = b"\x15\x00\x15\x0a\x15\x0a"  # a data page of five bytes


def needs(header, start=0, length=None, kind="BYTE_ARRAY", codec=0):
    """What is refused of a column whose first page has this header; five bytes follow."""
    data = header + bytes(5) + ONE_VALUE
    size = len(data) if length is None else length
    own = {DATA_PAGES: start, LENGTH: size, COUNT: 1, CODEC: codec}
    fields = {number: (kind, value) for (number, kind), value in own.items()}
    leaf = SimpleNamespace(name="v", physical_type=kind, length=0)
    schema = SimpleNamespace(column=lambda _: leaf)
    file, chunks = BytesIO(data), [[Struct(Path("bomb"), fields)]]
    with pytest.raises(LocalError) as caught:
        records_at_once(Path("bomb"), file, chunks, schema, {0: False}, 4096)
    return str(caught.value)


def test_entries_of_a_dictionary_are_counted(little):
    # Two billion entries in five bytes.
    entries = b"\x4c\x15\xfe\xff\xff\xff\x0f\x15\x00\x00\x00"
    assert "bomb: a dictionary of column 'v' would take 137,438,953,4" in needs(
        b"\x15\x04\x15\x0a\x15\x0a" + entries
    )


def test_a_dictionary_that_is_packed_otherwise_counts_as_one_text(little):
    """LZ4 in Hadoop's form."""
    header = b"\x15\x04\x15\x80\xc8\xd0\x07\x15\x0a\x00"  # eight megabytes
    assert "bomb: 2 of its records would take 128,000,0" in needs(header, codec=5)


def test_a_page_of_numbers_claims_what_it_may(little):
    # Two gigabytes in five bytes.
    assert "would take 17,179,869,1" in needs(
        b"\x15\x00\x15\xfe\xff\xff\xff\x0f\x15\x0a\x00", kind="INT64"
    )


@pytest.mark.parametrize(
    ("header", "where", "said"),
    [
        (b"\x15\x00\x15\x09\x15\x0a\x00", {}, "it has a size that is none in its headers; write"),
        (b"\x15\x00\x1c\x00\x15\x0a\x00", {}, "it has headers with fields of other types"),
        (SIZES + b"\x25\x0a\x00", {}, "it has headers with fields of other types"),
        (SIZES, {"start": -1}, "it has a size that is none"),
        # Its values may lie beyond the end, where pyarrow looks for them in files of old writers.
        (SIZES + b"\x00", {"length": 12}, "it has pages of fewer values than it says"),
        (SIZES, {"start": 99}, "it names pages beyond its end"),
        (SIZES, {"length": 10**12}, "it names pages beyond its end"),
    ],
)  # fmt: skip
def test_damaged_headers(header, where, said):
    assert f"bomb: cannot read it as Parquet: {said}" in needs(header, **where)
