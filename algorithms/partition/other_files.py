"""Partitions that other programs wrote, each format by its name.

Indices count from 0: official training records first, then the official test records. Each format
says of every client which records are for training, for validation and for tests:

- ``staddle``: ``file``.
- ``json``: ``{"clinic-a": {"train": [0, 4], "validation": [], "test": [5]}, …}``; validation may be
  left out.
- ``csv``: a line of the columns ``record``, ``client`` and ``side``, then one line per record, such
  as ``4,clinic-a,train``. Clients are in the order of their first lines.
- ``npz``: arrays [n] of whole numbers, ``train_NAME``, ``test_NAME`` and maybe ``validation_NAME``,
  as ``numpy.savez`` writes them. Clients are in the order of their first arrays.
- ``ppfl``: the splits published with PPFL. The .npz holds the indices of all clients one after
  another, ``train_idx`` and ``test_idx``, and where each client's begin and end, ``train_ptr`` and
  ``test_ptr``.
- ``fl-bench``: FL-bench's ``partition.pkl``, ``{"data_indices": [{"train": …, "val": …, "test": …},
  …]}``; nothing of the pickle is run (``data/pickled``).

None but the first says which data set it is of, so only indices that do not fit show a wrong one.
"""

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, reason
from ...files.documents import parse_json, read_bytes
from ...files.file_bounds import open_regular
from ..data.arrays import names_in, read_arrays
from ..data.pickled import PickledArray, read_pickled
from . import file
from .file import PartitionFile, partition_file
from .split import Sides

Format = Literal["staddle", "json", "csv", "npz", "ppfl", "fl-bench"]
SIDES = ("train", "validation", "test")
PPFL_ARRAYS = ("train_idx", "train_ptr", "test_idx", "test_ptr")
COLUMNS = {"record", "client", "side"}
WHOLE = re.compile(r"-?[0-9]{1,18}")
NPZ_HEADS = (b"PK", b"\x93NUMPY")
PICKLE_HEAD = b"\x80"

Indices = NDArray[np.int64]
# client → side → indices as they were found; a side may be left out
Found = Mapping[str, Mapping[str, Any]]


def read_partition(
    path: Path, labels: Indices, data: str, form: Format | None = None
) -> PartitionFile:
    """The partition of a file, in ``form`` or else in the format that its content shows.

    ``labels`` [N] are those of all records, which are called ``data``. LocalError for a file that
    does not fit them: it names client and index where an index is out of range or given twice.
    """
    form = form or form_of(path)
    if form == "staddle":
        own = file.read(path)
        own.check_labels(labels)
        return own
    sides = _checked(path, READERS[form](path), len(labels))
    # A partition from elsewhere cannot be drawn again, so it has no seed.
    how = {"kind": "given", "format": form, "file": path.name}
    if form == "ppfl":
        how = {"kind": "published", "by": "PPFL", "file": path.name}
        # The file holds nothing else by which a wrong data set would show.
        dealt = sum(len(own.all()) for own in sides.values())
        if dealt != len(labels):
            raise LocalError(
                f"{path}: deals out {dealt} records, there are {len(labels)}; take the"
                " data set that it is of, official training and test records together"
            )
    return partition_file(sides, labels, data, None, how)


def form_of(path: Path) -> Format:
    """The format that a file's content shows; LocalError where it cannot be read."""
    try:
        with open_regular(path) as opened:
            head = opened.read(64).lstrip()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    if path.suffix == ".npz" or head.startswith(NPZ_HEADS):
        names = names_in(path, ("train_0", "test_0"))
        return "ppfl" if set(PPFL_ARRAYS) <= set(names) else "npz"
    if head.startswith(PICKLE_HEAD):
        return "fl-bench"
    if path.suffix == ".json" or head.startswith(b"{"):
        document = parse_json(read_bytes(path), str(path))
        # In a file of clients alone, ``format`` would be a client, whose value is a table.
        of_ours = isinstance(document, dict) and isinstance(document.get("format"), str)
        return "staddle" if of_ours else "json"
    return "csv"


def _checked(path: Path, found: Found, records: int) -> dict[str, Sides]:
    """Each client's indices, ascending; LocalError unless each is a record of one client's side."""
    if not found:
        raise LocalError(f"{path}: names no client; give each its indices (docs/partitions.md)")
    # Some bytes may name millions, all without a record.
    if len(found) > records:
        raise LocalError(
            f"{path}: names {len(found):,} clients, and there are {records:,} records; leave those"
            " without records out, or take the data set that it is of"
        )
    # Both owners are named where there are two. A small pickle may name one array many times over:
    # it ends at the second.
    owner: dict[int, str] = {}
    parts = {}
    for client, given in found.items():
        arrays = {}
        for side in SIDES:
            own = _whole(path, client, side, given.get(side, ()), records)
            here = f"client {client!r} ({side})"
            for index in own.tolist():
                if index in owner:
                    raise LocalError(
                        f"{path}: record {index} is given to {owner[index]} and to {here}; keep one"
                    )
                owner[index] = here
            arrays[side] = np.sort(own)
        parts[client] = Sides(**arrays)
    return parts


def _whole(path: Path, client: str, side: str, given: Any, records: int) -> Indices:
    """A side's indices as int64 [n], which are those of records."""
    where = f"{path}, client {client!r}, {side}"
    if isinstance(given, list | tuple):
        if set(map(type, given)) - {int}:
            raise LocalError(f"{where}: holds something else than whole numbers; give indices")
        # As objects, since Python's numbers may be larger than numpy's.
        given = np.array(given, object)
    if not isinstance(given, np.ndarray):
        raise LocalError(f"{where}: is no list; give whole numbers")
    _check_list(f"{where}:", given, "iuO")
    # Before it is compared and copied: some bytes may stand for millions.
    if len(given) > records:
        raise LocalError(
            f"{where}: holds {len(given):,} indices, and there are {records:,} records; give each"
            " record once"
        )
    outside = given[(given < 0) | (given >= records)]
    if len(outside):
        raise LocalError(
            f"{where}: index {outside[0]} of {records} records; count from 0, the official training"
            " records before the official test records"
        )
    return given.astype(np.int64)


def _check_list(where: str, array: NDArray[Any], kinds: str = "iu") -> None:
    """LocalError unless an array is [n], of one of numpy's ``kinds``: whole numbers."""
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise LocalError(
            f"{where} is {array.dtype} {list(array.shape)}; a list of whole numbers is needed"
        )


def _read_json(path: Path) -> Found:
    document = parse_json(read_bytes(path), str(path))
    if not isinstance(document, dict):
        raise LocalError(f'{path}: no table of clients; write {{"NAME": {{"train": [0], …}}, …}}')
    for client, given in document.items():
        if not isinstance(given, dict):
            raise LocalError(
                f'{path}, client {client!r}: has no sides; write {{"train": [0, 4], "test": [5]}}'
            )
        _check_sides(f"{path}, client {client!r}", given)
    return document


def _check_sides(where: str, given: Mapping[str, Any]) -> None:
    unknown = sorted(map(str, given.keys() - set(SIDES)))
    if unknown:
        raise LocalError(f"{where}: unknown side {unknown[0]!r}; known: {', '.join(SIDES)}")


def _read_csv(path: Path) -> Found:
    found: dict[str, dict[str, list[int]]] = {}
    try:
        rows = csv.DictReader(read_bytes(path).decode("utf-8-sig").splitlines(), strict=True)
        if set(rows.fieldnames or ()) != COLUMNS:
            raise LocalError(f"{path}: the first line is not record,client,side; write it so")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            _check_row(where, row)
            _check_sides(where, {row["side"]: None})
            own = found.setdefault(row["client"], {})
            own.setdefault(row["side"], []).append(int(row["record"]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LocalError(f"{path}: not a CSV file in UTF-8; save it as one") from error
    return found


def _check_row(where: str, row: Mapping[str | None, Any]) -> None:
    """LocalError unless a line has the three columns, and a whole number for its record."""
    # DictReader has None as the key of cells too many, and as the value of missing ones.
    if row.keys() != COLUMNS or None in row.values():
        raise LocalError(f"{where}: give a record, a client and a side, and nothing else")
    if not WHOLE.fullmatch(row["record"]):
        raise LocalError(f"{where}: record is no whole number; count from 0")


def _read_npz(path: Path) -> Found:
    names = names_in(path, ("train_0", "test_0"))
    found: dict[str, dict[str, Any]] = {}
    places = []
    for name in names:
        side, _, client = name.partition("_")
        if side not in SIDES or not client:
            raise LocalError(
                f"{path}: unknown array {name!r}; save train_NAME and test_NAME of each client, and"
                " maybe validation_NAME"
            )
        places.append((client, side))
    # A file without arrays names no client.
    arrays = read_arrays(path, tuple(names), ()) if names else {}
    for name, (client, side) in zip(names, places, strict=True):
        found.setdefault(client, {})[side] = arrays[name]
    return found


def _read_ppfl(path: Path) -> Found:
    arrays = read_arrays(path, PPFL_ARRAYS, ())
    for name, array in arrays.items():
        _check_list(f"{path}: {name}", array)
    train, test = (
        _by_client(path, side, arrays[f"{side}_idx"], arrays[f"{side}_ptr"])
        for side in ("train", "test")
    )
    if len(train) != len(test):
        raise LocalError(
            f"{path}: {len(train)} clients train and {len(test)} test; fetch the file again"
        )
    pairs = enumerate(zip(train, test, strict=True))
    return {str(number): {"train": own, "test": tested} for number, (own, tested) in pairs}


def _by_client(
    path: Path, side: str, indices: NDArray[Any], pointers: NDArray[Any]
) -> list[NDArray[Any]]:
    starts = pointers.astype(np.int64)
    # Client k has indices[pointers[k]:pointers[k + 1]].
    whole = len(starts) > 1 and (starts[0], starts[-1]) == (0, len(indices))
    if not whole or bool((np.diff(starts) < 0).any()):
        raise LocalError(
            f"{path}: {side}_ptr does not rise from 0 to {len(indices)}; fetch the file again"
        )
    return np.split(indices, starts[1:-1])


def _read_fl_bench(path: Path) -> Found:
    content = read_pickled(read_bytes(path), str(path))
    clients = content.get("data_indices") if isinstance(content, dict) else None
    if not isinstance(clients, list) or set(map(type, clients)) - {dict}:
        raise LocalError(
            f"{path}: not FL-bench's partition.pkl, which has data_indices with train and test for"
            " each client; take the file that its generate_data.py wrote last"
        )
    found = {}
    for number, given in enumerate(clients):
        own = {"validation" if side == "val" else side: each for side, each in given.items()}
        _check_sides(f"{path}, client '{number}'", own)
        found[str(number)] = {side: _unpacked(each) for side, each in own.items()}
    return found


def _unpacked(given: Any) -> Any:
    """The numbers of an array, and anything else as it is."""
    return given.numbers if isinstance(given, PickledArray) else given


READERS: dict[str, Callable[[Path], Found]] = {
    "json": _read_json,
    "csv": _read_csv,
    "npz": _read_npz,
    "ppfl": _read_ppfl,
    "fl-bench": _read_fl_bench,
}
