"""Data sets of Hugging Face's ``datasets``, in the folders that ``save_to_disk`` writes.

::

    <folder>/state.json                     {"_data_files": [{"filename": …}, …], "_fingerprint": …}
    <folder>/dataset_info.json              {"features": {"ill": {"_type": "ClassLabel", …}, …}, …}
    <folder>/data-00000-of-00001.arrow      records, as an Arrow stream

A ``DatasetDict`` has one such folder per split, next to ``dataset_dict.json`` with their names.

pyarrow alone reads them. The library itself takes seconds to import, brings a client for the
network, and opens whatever path or address a record names. Here nothing in a folder is run, fetched
or written, and its Arrow files are mapped, not copied. Errors name columns and records, never
values: they reach the silo's log and its ledger.
"""

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import BeforeValidator, Field

from ...errors import LocalError, check_local, reason
from ...files.documents import Strict, parse_json, read_bytes, validate
from ...files.file_bounds import check_regular, open_regular
from .rows import AT_ONCE, Rows, texts_of

Form: TypeAlias = Literal["cell", "image", "array", "other"]
FileT = TypeVar("FileT", bound=Strict)

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
LONGEST_LIST = 400  # characters of names, in an error
HEADER, COMPRESSION, DATA = 2, 3, 1  # fields of Message, RecordBatch and DictionaryBatch
NO_CLASS = -1  # how datasets writes that a record has no class
FIX = "write it again, by save_to_disk of datasets"


class _SavedFile(Strict):
    """A JSON file of the library, of which most keys do not matter here."""

    model_config = pydantic.ConfigDict(extra="ignore")


class _Splits(_SavedFile):
    """``dataset_dict.json``."""

    splits: tuple[str, ...]


class _DataFile(_SavedFile):
    """A file of records."""

    filename: str


class _State(_SavedFile):
    """``state.json``."""

    files: Annotated[tuple[_DataFile, ...], Field(alias="_data_files", min_length=1)]
    fingerprint: Annotated[Any, Field(alias="_fingerprint")] = None
    # Before version 1.6 of the library, which records there are stood in further files.
    indices: Annotated[Any, Field(alias="_indices_data_files")] = None


def _described(own: Any) -> Any:
    # A column of lists, or of further columns, may have a list here, or their table.
    return own if isinstance(own, dict) and isinstance(own.get("_type"), str) else {}


class _Column(_SavedFile):
    """What the library says of a column."""

    kind: Annotated[str, Field(alias="_type")] = ""
    names: Any = ()


class _Info(_SavedFile):
    """``dataset_info.json``."""

    features: dict[str, Annotated[_Column, BeforeValidator(_described)]] | None = None


class _ClassLabel(Strict):
    """A column of class numbers."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]

    @pydantic.field_validator("names")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        stripped = tuple(map(str.strip, names))
        if len(set(stripped)) != len(stripped):
            raise ValueError("a class is named twice; name each once")
        return stripped


def saved_folder(folder: Path, split: str | None) -> Path:
    """The folder that holds a data set, or one split of several.

    LocalError where there is none; it says which splits there are.
    """
    check_local(folder.is_dir(), f"{folder}: no such folder; name the one that save_to_disk wrote")
    known = _splits(folder)
    if split not in (known or (None,)):
        say = f"name one of its splits, as split: {listed(known)}"
        raise LocalError(f"{folder}: {say if known else 'has no splits; leave split out'}")
    chosen = Path(folder, *filter(None, (split,)))
    check_local(
        (chosen / STATE).is_file(), f"{chosen}: has no {STATE}, so it is no saved data set; {FIX}"
    )
    return chosen


def _splits(folder: Path) -> tuple[str, ...]:
    path = folder / SPLITS
    return _read(path, _Splits).splits if path.is_file() else ()


def listed(names: Collection[str]) -> str:
    """Names in a line of bounded length."""
    return shorten(", ".join(names), LONGEST_LIST, placeholder=" …")


@dataclass(frozen=True, eq=False)
class SavedSet:
    """A saved data set; its records stay in their files until they are used."""

    folder: Path
    kinds: Mapping[str, str]  # the library's own, by column, such as "Image"
    class_names: Mapping[str, tuple[str, ...]]  # of ClassLabel columns
    identity: str  # which set it is, whatever its place on this machine
    _table: Any  # of pyarrow, which has no types

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def names(self) -> list[str]:
        """Of all columns, in their order."""
        return list(self._table.column_names)

    def place(self, name: str) -> str:
        """A column, as errors name it."""
        return f"{self.folder}, column {name!r}"

    def held(self, name: str) -> str:
        """The type of a column's values, in words of the library and of Arrow."""
        return ", ".join(filter(None, (self.kinds.get(name), str(self._stored(name)))))

    def form(self, name: str) -> Form:
        """What a column can be used for.

        A cell of a table is a number, a text, a date or a class. An image is its bytes, alone or
        next to a path. An array is a list, of one length or not.
        """
        import pyarrow as pa  # noqa: PLC0415
        from pyarrow import types  # noqa: PLC0415

        kind = self._stored(name)
        is_list = types.is_list(kind) | types.is_large_list(kind) | types.is_fixed_size_list(kind)
        is_bytes = types.is_binary(kind) | types.is_large_binary(kind)
        is_image = is_bytes | (kind == pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        other = types.is_nested(kind) | types.is_fixed_size_binary(kind)
        forms: tuple[tuple[bool, Form], ...] = (
            (is_list, "array"),
            (is_image, "image"),
            (other, "other"),
            (True, "cell"),
        )
        return next(form for found, form in forms if found)

    def _stored(self, name: str) -> Any:
        """A column's Arrow type, without the library's own where that is registered."""
        kind = self._table.schema.field(name).type
        return getattr(kind, "storage_type", kind)

    def pieces(self, name: str) -> list[Any]:
        """A column's Arrow arrays, checked to lie within their file; LocalError for no column."""
        if self.names.count(name) != 1:
            raise LocalError(
                f"{self.folder}: has no column {name!r}; its columns: {listed(self.names)}"
            )
        with reading(self.folder):
            column = self._table.column(name)
            # A damaged offset would be followed out of the file.
            column.validate(full=True)
            return list(map(_storage, column.chunks))

    def rows(self, used: Collection[str], numbered: Collection[str] = ()) -> Rows:
        """The records from 1 on, after the names of all columns as record 0.

        Cells of columns that are not ``used`` are empty. Classes are written as their names, but
        those of ``numbered`` columns as numbers. LocalError for values that no cell can hold.
        """
        yield 0, self.names
        for name in used:
            self._check_cells(name)
        lines = partial(self._lines, used, self.class_names.keys() - {*numbered})
        records = chain.from_iterable(map(lines, self._table.to_batches(AT_ONCE)))
        yield from enumerate(map(list, records), 1)

    def _check_cells(self, name: str) -> None:
        self.pieces(name)
        if self.form(name) != "cell":
            raise LocalError(
                f"{self.place(name)}: holds {self.held(name)}, and a cell can only be a number, a"
                " text, a date or a class; name another column, or write a new one with datasets"
            )

    def _lines(
        self, used: Collection[str], named: Collection[str], batch: Any
    ) -> Iterator[tuple[str, ...]]:
        """The cells of some records; ``named`` columns have the names of their classes."""
        columns = dict.fromkeys(self.names, [""] * batch.num_rows)
        for name in used:
            reads = self._classes if name in named else partial(texts_of, self.folder)
            columns[name] = reads(name, _storage(batch.column(name)))
        return zip(*columns.values(), strict=True)

    def _classes(self, name: str, column: Any) -> list[str]:
        names = self.class_names[name]
        known = dict(enumerate(names)) | dict.fromkeys((None, NO_CLASS), "")
        found = column.to_pylist()
        if not known.keys() >= set(found):
            raise LocalError(
                f"{self.place(name)}: has class numbers beyond its {len(names)} class names; {FIX}"
            )
        return list(map(known.__getitem__, found))


def open_saved(folder: Path) -> SavedSet:
    """A data set that ``save_to_disk`` wrote; no record is read yet.

    LocalError for a folder that is none, or whose files are damaged or lie elsewhere.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - installed for those who have such data sets
    except ModuleNotFoundError as error:
        raise LocalError(
            f"{folder}: data sets of Hugging Face are read by pyarrow; pip install"
            " 'staddle[huggingface]'"
        ) from error

    # What the library's texts say.
    state, columns = _read(folder / STATE, _State), _read(folder / INFO, _Info).features or {}
    if state.indices:
        raise LocalError(
            f"{folder / STATE}: its records are chosen by indices, as old versions of datasets"
            f" wrote them; {FIX}"
        )
    kinds = {name: own.kind for name, own in columns.items()}
    classes = {
        name: validate({"names": own.names}, _ClassLabel, f"{folder / INFO}, column {name!r}").names
        for name, own in columns.items()
        if own.kind == "ClassLabel"
    }

    # Its records, mapped from files of one schema.
    paths = [_data_file(folder, own.filename) for own in state.files]
    with reading(folder):
        tables = list(map(_mapped, paths))
        for path, table in zip(paths, tables, strict=True):
            _check_alike(path, table.schema, tables[0].schema)
        whole = pa.concat_tables(tables)
    # Paths differ from machine to machine, so sizes stand for the files.
    sizes = [(path.name, path.stat().st_size) for path in paths]
    return SavedSet(folder, kinds, classes, f"{state.fingerprint} {sizes}", whole)


def inside(folder: Path, text: str) -> Path | None:
    """The regular file of a path in a folder; None where there is none, or it lies elsewhere."""
    # A text may be no path at all, or too long for one.
    with suppress(OSError, ValueError):
        path = (folder / text).resolve()
        if path.is_file() & (folder.resolve() in path.parents):
            return path
    return None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """LocalError, which names the folder, in place of what pyarrow and the system raise."""
    from pyarrow import lib  # noqa: PLC0415

    # All but ArrowMemoryError, which is no fault of the files.
    damaged = (
        *(lib.ArrowInvalid, lib.ArrowKeyError, lib.ArrowTypeError, lib.ArrowIndexError),
        *(lib.ArrowNotImplementedError, lib.ArrowSerializationError, lib.ArrowCapacityError),
    )
    try:
        yield
    except OSError as error:
        raise LocalError(f"{folder}: cannot read it: {reason(error)}; {FIX}") from error
    # Without its text, which may have a value.
    except damaged as error:
        what = type(error).__name__
        raise LocalError(f"{folder}: its Arrow files are damaged: {what}; {FIX}") from None


def _read(path: Path, model: type[FileT]) -> FileT:
    try:
        check_regular(path)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}; {FIX}") from error
    return validate(parse_json(read_bytes(path), str(path)), model, str(path))


def _data_file(folder: Path, name: str) -> Path:
    if inside(folder, name) is None:
        shown = shorten(name, LONGEST_LIST)
        raise LocalError(f"{folder / STATE}: names {shown!r}, no file in the folder; {FIX}")
    return folder / name


def _check_alike(path: Path, schema: Any, first: Any) -> None:
    if not schema.equals(first):
        raise LocalError(f"{path}: has other columns than the data set's first file; {FIX}")


def _mapped(path: Path) -> Any:
    """All record batches of an Arrow stream, whose values stay in the file."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import ipc  # noqa: PLC0415

    with open_regular(path) as file:
        # Python cannot map an empty file.
        size = file.seek(0, 2)
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    whole = pa.py_buffer(held)
    if any(map(_is_compressed, ipc.MessageReader.open_stream(pa.BufferReader(whole)))):
        raise LocalError(f"{path}: its records are compressed, and would take any memory; {FIX}")
    with ipc.open_stream(pa.BufferReader(whole)) as stream:
        return stream.read_all()


def _is_compressed(message: Any) -> bool:
    """True for a batch of records, or a dictionary, whose buffers have to be unpacked.

    pyarrow unpacks them as it reads them: 60 kB may become gigabytes. It has checked the message's
    tables, which are FlatBuffers (Arrow's format/Message.fbs).
    """
    data = bytes(message.metadata)
    header = _field(data, _pointed(data, 0), HEADER)
    batch = {
        "record batch": lambda: _pointed(data, header),
        "dictionary": lambda: _pointed(data, _field(data, _pointed(data, header), DATA)),
    }.get(message.type)
    return batch is not None and _field(data, batch(), COMPRESSION) > 0


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 for one that it has not."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    size, place = struct.unpack_from("<H", data, fields)[0], 4 + 2 * number
    offset = struct.unpack_from("<H", data, fields + place)[0] if place < size else 0
    return table + offset if offset else 0


def _pointed(data: bytes, place: int) -> int:
    return place + int.from_bytes(data[place : place + 4], "little")


def _storage(array: Any) -> Any:
    return getattr(array, "storage", array)
