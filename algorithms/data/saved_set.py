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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import LocalError, reason
from ...files.documents import parse_json, read_bytes
from ...files.file_bounds import check_regular, open_regular
from .rows import AT_ONCE, Rows, texts_of

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MOST_SPLITS = 20  # named in an error
NO_CLASS = -1  # how datasets writes that a record has no class
FIX = "write it again, by save_to_disk of datasets"


def saved_folder(folder: Path, split: str | None) -> Path:
    """The folder that holds a data set, or one split of several.

    LocalError where there is none; it says which splits there are.
    """
    if not folder.is_dir():
        raise LocalError(f"{folder}: no such folder; name the one that save_to_disk wrote")
    found = _splits(folder)
    if split is None:
        if found:
            raise LocalError(f"{folder}: holds splits; name one as split: {_listed(found)}")
        chosen = folder
    elif split not in found:
        known = f"its splits: {_listed(found)}" if found else "it has no splits; leave split out"
        raise LocalError(f"{folder}: has no split {split!r}; {known}")
    else:
        chosen = folder / split
    if not (chosen / STATE).is_file():
        raise LocalError(f"{chosen}: has no {STATE}, so it is no saved data set; {FIX}")
    return chosen


def is_saved(folder: Path) -> bool:
    """True for the folder of a data set, or of one in splits."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def _splits(folder: Path) -> list[str]:
    path = folder / SPLITS
    if not path.is_file():
        return []
    found = _document(path).get("splits")
    if not _are_texts(found):
        raise LocalError(f"{path}: has no list of splits; {FIX}")
    return list(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MOST_SPLITS]) + (" …" if len(names) > MOST_SPLITS else "")


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
        kind = self.kinds.get(name, "")
        own = str(_stored(self._table.schema.field(name).type))
        return own if kind in ("", "Value") else f"{kind}, {own}"

    def is_plain(self, name: str) -> bool:
        """True for numbers, texts, dates and classes, which a cell of a table can hold."""
        return _is_plain(_stored(self._table.schema.field(name).type))

    def is_image(self, name: str) -> bool:
        """True for images: their bytes, alone or next to a path."""
        return _is_image(_stored(self._table.schema.field(name).type))

    def is_list(self, name: str) -> bool:
        """True for lists, of one shape or not."""
        from pyarrow import types  # noqa: PLC0415

        kind = _stored(self._table.schema.field(name).type)
        asked = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return any(known(kind) for known in asked)

    def pieces(self, name: str) -> list[Any]:
        """A column's Arrow arrays, checked to lie within their file; LocalError for no column."""
        if self.names.count(name) != 1:
            raise LocalError(
                f"{self.folder}: has no column {name!r}; its columns: {_listed(self.names)}"
            )
        with reading(self.folder):
            found: list[Any] = list(map(_storage, self._table.column(name).chunks))
            for piece in found:
                # A damaged offset would be followed out of the file.
                piece.validate(full=True)
        return found

    def rows(self, used: Collection[str], numbered: Collection[str] = ()) -> Rows:
        """The records from 1 on, after the names of all columns as record 0.

        Cells of columns that are not ``used`` are empty. Classes are written as their names, but
        those of ``numbered`` columns as numbers. LocalError for values that no cell can hold.
        """
        yield 0, self.names
        for name in used:
            if not self.is_plain(name):
                raise LocalError(
                    f"{self.place(name)}: holds {self.held(name)}, and a cell can only be a number,"
                    " a text, a date or a class; name another column, or write a new one with"
                    " datasets"
                )
            self.pieces(name)
        number = 0
        for batch in self._table.to_batches(AT_ONCE):
            empty = [""] * batch.num_rows
            columns = [
                self._cells(name, column, name in numbered) if name in used else empty
                for name, column in zip(self.names, batch.columns, strict=True)
            ]
            for row in zip(*columns, strict=True):
                number += 1
                yield number, list(row)

    def _cells(self, name: str, column: Any, numbered: bool) -> list[str]:
        known = self.class_names.get(name)
        column = _storage(column)
        if known is None or numbered:
            return texts_of(self.folder, name, column)
        classes = dict(enumerate(known)) | dict.fromkeys((None, NO_CLASS), "")
        found = column.to_pylist()
        if not classes.keys() >= set(found):
            raise LocalError(
                f"{self.place(name)}: has class numbers beyond its {len(known)} class names; {FIX}"
            )
        return list(map(classes.__getitem__, found))


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
    state, info = _document(folder / STATE), _document(folder / INFO)
    paths = _data_files(folder, state)
    features = _features(folder, info)
    with reading(folder):
        tables = [_mapped(path) for path in paths]
        for path, table in zip(paths, tables, strict=True):
            if not table.schema.equals(tables[0].schema):
                raise LocalError(f"{path}: has other columns than {paths[0].name}; {FIX}")
        whole = pa.concat_tables(tables)
    identity = [state.get("_fingerprint"), *((path.name, path.stat().st_size) for path in paths)]
    kinds = {name: str(own.get("_type", "")) for name, own in features.items()}
    labels = {name: own for name, own in features.items() if kinds[name] == "ClassLabel"}
    classes = {name: _class_names(folder, name, own) for name, own in labels.items()}
    return SavedSet(folder, kinds, classes, repr(identity), whole)


def inside(folder: Path, text: str) -> Path | None:
    """The regular file of a path in a folder; None where there is none, or it lies elsewhere."""
    # A text may be no path at all, or too long for one.
    try:
        path = (folder / text).resolve()
        found = folder.resolve() in path.parents and path.is_file()
    except (OSError, ValueError):
        return None
    return path if found else None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """LocalError, which names the folder, in place of what pyarrow and the system raise."""
    from pyarrow import ArrowException  # noqa: PLC0415

    try:
        yield
    # First, since pyarrow has an own one.
    except MemoryError:
        raise
    except OSError as error:
        raise LocalError(f"{folder}: cannot read it: {reason(error)}") from error
    # Without its text, which may have a value.
    except ArrowException as error:
        what = type(error).__name__
        raise LocalError(f"{folder}: its Arrow files are damaged: {what}; {FIX}") from None


def _document(path: Path) -> dict[str, Any]:
    with _present(path):
        check_regular(path)
    found = parse_json(read_bytes(path), str(path))
    if not isinstance(found, dict):
        raise LocalError(f"{path}: holds no table; {FIX}")
    return found


@contextmanager
def _present(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}; {FIX}") from error


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _data_files(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    """The data set's Arrow files in their order."""
    entries = state.get("_data_files")
    known = [own for own in entries if isinstance(own, dict)] if isinstance(entries, list) else []
    named = [own.get("filename") for own in known]
    if not named or len(named) != len(entries or ()) or not _are_texts(named):
        raise LocalError(f"{folder / STATE}: names no data files; {FIX}")
    # Before version 1.6 of the library, which records there are stood in further files.
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        raise LocalError(
            f"{folder / STATE}: its records are chosen by indices, as old versions of datasets"
            f" wrote them; {FIX}"
        )
    for name in named:
        if inside(folder, name) is None:
            raise LocalError(f"{folder / STATE}: names {name!r}, no file in the folder; {FIX}")
    return [folder / name for name in named]


def _features(folder: Path, info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The library's description of each column; without one, only its Arrow type is known."""
    found = info.get("features") or {}
    if not isinstance(found, dict):
        raise LocalError(f"{folder / INFO}: its features are no table; {FIX}")
    return {name: own for name, own in found.items() if isinstance(own, dict)}


def _class_names(folder: Path, column: str, own: Mapping[str, Any]) -> tuple[str, ...]:
    names = own.get("names")
    if not names or not _are_texts(names) or len(set(names)) != len(names):
        raise LocalError(
            f"{folder / INFO}: ClassLabel {column!r} has no names, or one of them twice; {FIX}"
        )
    return tuple(map(str.strip, names))


def _mapped(path: Path) -> Any:
    """All record batches of an Arrow stream, whose values stay in the file."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import ipc  # noqa: PLC0415

    with open_regular(path) as file:
        # Python cannot map an empty file.
        size = file.seek(0, 2)
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    with ipc.open_stream(pa.BufferReader(pa.py_buffer(held))) as stream:
        return stream.read_all()


def _stored(kind: Any) -> Any:
    """The Arrow type that values are stored as, also where the library's own is registered."""
    return getattr(kind, "storage_type", kind)


def _storage(array: Any) -> Any:
    return getattr(array, "storage", array)


def _is_plain(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415

    return not (types.is_nested(kind) or _is_bytes(kind))


def _is_bytes(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415

    asked = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(known(kind) for known in asked)


def _is_image(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415

    if not types.is_struct(kind):
        return _is_bytes(kind)
    fields = {kind.field(place).name: kind.field(place).type for place in range(kind.num_fields)}
    return "bytes" in fields and _is_bytes(fields["bytes"])
