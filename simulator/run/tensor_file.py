r"""Many silos' tensors in one safetensors file, bit for bit, whatever their names.

The tensors are numbered; the file's metadata says in JSON what they are, entry by entry::

    {"staddle.pack":
        "[[[\"state\",\"a\"],{\"part/classifier\":{\"weight\":0,\"bias\":1},\"extra\":{}},\"\"]]"}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from ...algorithms.exchange.parts import Tensors, nbytes_of
from ...errors import LocalError
from ...files.tensor_file import metadata_of

TABLE = "staddle.pack"

Key: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """Tensors by room and name, and a text; a room may be empty."""

    rooms: Mapping[str, Tensors]
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0
        for tensors in self.rooms.values():
            total += nbytes_of(tensors.values())
        return total


_TABLE = msgspec.json.Decoder(list[tuple[Key, dict[str, dict[str, int]], str]])


def pack(entries: Mapping[Key, TensorEntry]) -> bytes:
    """One file of these entries; tensors may share memory, and lie on any device.

    It is a safetensors file. Values and dtypes are kept bit for bit.
    """
    tensors: dict[str, Tensor] = {}

    def number(tensor: Tensor) -> int:
        position = len(tensors)
        # Cloned, since safetensors does not accept tensors that share memory.
        tensors[str(position)] = tensor.detach().cpu().clone().contiguous()
        return position

    def numbered(held: Tensors) -> dict[str, int]:
        return {name: number(tensor) for name, tensor in held.items()}

    # names of silos and parameters stand in the table, since safetensors rejects some of them
    table = []
    for key, entry in entries.items():
        rooms = {}
        for room, held in entry.rooms.items():
            rooms[room] = numbered(held)
        table.append((key, rooms, entry.note))
    return bytes(save(tensors, {TABLE: msgspec.json.encode(table).decode()}))


def unpack(data: bytes, origin: str) -> dict[Key, TensorEntry]:
    """The entries of what ``pack`` made, on the CPU; ``origin`` names it in errors.

    LocalError for bytes that ``pack`` did not make.
    """
    try:
        # cloned into torch's own memory: how fast and in which order a kernel adds up may depend on
        # where values lie
        tensors = {number: tensor.clone() for number, tensor in load(data).items()}
        table = _TABLE.decode(metadata_of(data)[TABLE])
        return {key: TensorEntry(_named(rooms, tensors), note) for key, rooms, note in table}
    except (SafetensorError, ValueError, KeyError) as error:
        raise LocalError(
            f"{origin}: not a file of a snapshot: {error}; remove the run's folder to begin from"
            " scratch"
        ) from error


def unpack_one(path: Path, key: Key) -> TensorEntry:
    """One entry of a file that ``pack`` made; no other is read. LocalError as from ``unpack``."""
    try:
        with safe_open(path, framework="pt") as file:
            table = _TABLE.decode(file.metadata()[TABLE])
            (rooms, note), *_ = [entry[1:] for entry in table if entry[0] == key]
            numbers = chain.from_iterable(names.values() for names in rooms.values())
            # cloned, as in ``unpack``
            tensors = {str(each): file.get_tensor(str(each)).clone() for each in numbers}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise LocalError(
            f"{path}: not a file of a snapshot: {error}; remove the run's folder to begin from"
            " scratch"
        ) from error
    return TensorEntry(_named(rooms, tensors), note)


def _named(rooms: Mapping[str, Mapping[str, int]], tensors: Tensors) -> dict[str, Tensors]:
    """The tensors by room and name, from their numbers."""
    named: dict[str, Tensors] = {}
    for room, numbers in rooms.items():
        named[room] = {name: tensors[str(number)] for name, number in numbers.items()}
    return named
