"""A file that says which silo holds which records on which side, for other runs and frameworks.

``other_files`` reads the files of other programs. This format is JSON, because every language reads
it and a person can look; 60,000 indices take 0.4 MB, and 2 million fit what ``files.read_bytes``
takes. One line per silo::

    {"format": "staddle-partition/1", "data": "cifar10", "records": 60000, "labels_sha256": "5e1f…",
        "seed": 1,
     "how": {"kind": "dirichlet", "alpha": 0.1, "minimum": 10}, "file_sha256": "77ab…", "clients": [
    {"name": "0", "train": [3, 17], "validation": [], "test": [5]},
    …
    ]}

Indices count from 0, the official training records first, then the official test records.
``labels_sha256`` is that of all labels in this order, as 8 bytes each, little-endian; in tasks
without classes, of what ``Task.strata`` has in their place. Whoever reads the file can check the
order of the records by it. ``file_sha256`` is that of the document without it, as
JSON with sorted keys and Python's separators: it shows what a disk changed, and other programs may
leave it out.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ...errors import LocalError, check_local
from ...files.documents import (
    MAX_FILE_BYTES,
    Strict,
    parse_json,
    read_bytes,
    validate,
    write_atomic,
)
from .split import Sides

FORMAT = "staddle-partition/1"

Indices = NDArray[np.int64]
Index = Annotated[int, Field(strict=True, ge=0)]


class SiloIndices(Strict):
    """One silo's records.

    Indices start at 0, and count the official training records before the official test records.
    """

    name: Annotated[str, Field(min_length=1)]
    train: tuple[Index, ...]
    validation: tuple[Index, ...]
    test: tuple[Index, ...]

    def sides(self) -> Sides:
        """The silo's indices as ascending int64 arrays."""
        sides = (self.train, self.validation, self.test)
        return Sides(*(np.array(sorted(side), np.int64) for side in sides))


class PartitionFile(Strict):
    """The file; a record that no client names is left over.

    ValueError names the first record that is on two sides or at two silos.
    """

    format: Literal["staddle-partition/1"]
    data: Annotated[str, Field(min_length=1)]
    records: Annotated[int, Field(strict=True, ge=1)]
    labels_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    seed: Annotated[int, Field(strict=True, ge=0)] | None
    how: dict[str, Any]
    file_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    clients: Annotated[tuple[SiloIndices, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_record_once(self) -> "PartitionFile":
        # Clients become the silos of a simulation, so their names must differ.
        named = Counter(client.name for client in self.clients)
        twice = sorted(named - Counter(set(named)))
        if twice:
            raise ValueError(f"clients: the names {twice} appear twice; name each once")
        # The first owner of each index is kept, so that the error can name both.
        owner: dict[int, str] = {}
        for client in self.clients:
            for index in (*client.train, *client.validation, *client.test):
                if index >= self.records:
                    raise ValueError(
                        f"client {client.name!r}: index {index} of {self.records} records; count"
                        " from 0"
                    )
                if index in owner:
                    raise ValueError(
                        f"record {index} is given to {owner[index]!r} and {client.name!r}; keep one"
                    )
                owner[index] = client.name
        return self

    def sides(self) -> dict[str, Sides]:
        """Each silo's records by side, in the file's order."""
        return {client.name: client.sides() for client in self.clients}

    def check_labels(self, labels: Indices) -> None:
        """LocalError unless the partition was made for records with these labels, in this order.

        ``labels`` [records] are those of all records, training before test.
        """
        check_local(
            len(labels) == self.records,
            f"partition of {self.data}: made for {self.records} records, there are {len(labels)}",
        )
        check_local(
            labels_sha256(labels) == self.labels_sha256,
            f"partition of {self.data}: made for records with other labels or in another order;"
            " give the official training records, then the official test records, in their"
            " official order",
        )


def labels_sha256(labels: Indices) -> str:
    """SHA-256 of a data set's labels, which ties a partition to it.

    Labels are hashed as 8 bytes each, little-endian, whatever their dtype.
    """
    return hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes()).hexdigest()


def partition_file(
    sides: Mapping[str, Sides], labels: Indices, data: str, seed: int | None, how: Mapping[str, Any]
) -> PartitionFile:
    """The content of a file; ``how`` is for people and for making it again, nothing reads it.

    LocalError if a record is on two sides or at two silos, or a name appears twice.
    """
    clients = [
        {
            "name": name,
            "train": own.train.tolist(),
            "validation": own.validation.tolist(),
            "test": own.test.tolist(),
        }
        for name, own in sides.items()
    ]
    header = {
        "format": FORMAT,
        "data": data,
        "records": len(labels),
        "labels_sha256": labels_sha256(labels),
    }
    return validate(
        {**header, "seed": seed, "how": dict(how), "clients": clients}, PartitionFile, "partition"
    )


def save(path: Path, partition: PartitionFile) -> None:
    """Write the file so that ``read`` reads it back."""
    # The digest covers the document without itself, so it is added last.
    sealed = partition.model_copy(update={"file_sha256": _digest(partition)})
    # One line per silo, for people who look at the file.
    head = json.dumps(sealed.model_dump(exclude={"clients"}), allow_nan=False)
    rows = ",\n".join(json.dumps(client.model_dump()) for client in partition.clients)
    content = f'{head[:-1]}, "clients": [\n{rows}\n]}}\n'.encode()
    check_local(
        len(content) <= MAX_FILE_BYTES,
        f"{path}: the partition of {partition.records} records takes {len(content)} bytes, at"
        f" most {MAX_FILE_BYTES} are read back; partition fewer records",
    )
    write_atomic(path, content, 0o644)


def read(path: Path) -> PartitionFile:
    """Read a file of this format; LocalError where it is not as it was saved.

    Other programs' files have no digest.
    """
    return checked(parse_json(read_bytes(path), str(path)), path)


def checked(document: Any, path: Path) -> PartitionFile:
    """The file whose text is this document."""
    found = validate(document, PartitionFile, str(path))
    if found.file_sha256 is not None and found.file_sha256 != _digest(found):
        raise LocalError(
            f"{path}: changed since it was saved, on the disk or by hand; make it again, or restore"
            " it. If you edited it on purpose, remove its file_sha256"
        )
    # Without the digest, so that a file that was read equals what was saved.
    return found.model_copy(update={"file_sha256": None})


def _digest(partition: PartitionFile) -> str:
    """SHA-256 of everything but the digest itself."""
    document = partition.model_dump(mode="json", exclude={"file_sha256"})
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
