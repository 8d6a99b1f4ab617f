"""Uploads on their way to the disk: written while they arrive, complete once their digest fits."""

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ...algorithms.exchange.codec import INDICES, rising
from ...algorithms.exchange.parts import REGION, WEIGHT, Item, all_finite, bounds_fault
from ...errors import RefusedError, reason
from ...proto.channel import CHUNK_BYTES
from ...proto.stream import Digester
from ...proto.wire import tensor_from

# Kept free on the disk for the database and the ledger, whatever silos upload.
MARGIN_BYTES = 256 * 1024 * 1024


@contextmanager
def disk_errors(silo: str) -> Iterator[None]:
    """RefusedError STORAGE where the coordinator's disk fails during an upload of this silo."""
    try:
        yield
    except OSError as error:
        raise RefusedError(silo, "STORAGE", f"the coordinator's disk: {reason(error)}") from error


class Spool:
    """One upload in flight: bytes go to a file of their own until they are checked.

    One stream at a time uses it. Only this user can read the file.
    """

    def __init__(self, path: Path, silo: str, *, going_on: bool = False) -> None:
        """``going_on``: behind what an interrupted upload left there."""
        self._path = path
        self._silo = silo
        # Cut off earlier bytes, unless this upload resumes after them.
        how = os.O_APPEND if going_on else os.O_CREAT | os.O_TRUNC
        # Unbuffered: a full disk is met by write, not by close.
        self._file = os.fdopen(os.open(path, os.O_WRONLY | how, 0o600), "wb", buffering=0)

    def write(self, chunk: memoryview) -> None:
        """Append bytes; RefusedError STORAGE when the disk does not take them.

        The whole chunk is written when it returns, but not durable.
        """
        with disk_errors(self._silo):
            # An unbuffered file may take less than it is handed.
            while chunk:
                chunk = chunk[self._file.write(chunk) :]

    def held(self) -> Iterator[bytes]:
        """The bytes in the file, piece by piece.

        For hashing before the upload resumes. RefusedError STORAGE if the disk fails.
        """
        with disk_errors(self._silo), self._path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def suspend(self) -> int:
        """Close the file, leave it for the rest of its upload, and return its size in bytes.

        It does not survive a restart of the coordinator.
        """
        size = os.fstat(self._file.fileno()).st_size
        self._file.close()
        return size

    def finished(self) -> Path:
        """Make the bytes durable; returns their path.

        RefusedError STORAGE if the disk fails. Run it in a thread: fsync may take long.
        """
        # Before the upload has a name and a receipt: a silo with a receipt does not send it again.
        with disk_errors(self._silo):
            os.fsync(self._file.fileno())
        return self._path

    def discard(self) -> None:
        """Close, and remove what is still there under the temporary name.

        The next upload writes over it else.
        """
        self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class SpooledUpload:
    """The tensors of one upload, mapped from its file only while somebody holds them.

    Tensors lie back to back in the order of ``items``, without a header.
    """

    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        self._path = path
        self._places: dict[tuple[str, str], tuple[Item, int]] = {}
        offset = 0
        for item in items:
            self._places[item.part, item.spec.name] = (item, offset)
            offset += item.spec.nbytes

    def read(self, part: str, name: str) -> Tensor:
        """One tensor, in the shape and dtype of its spec.

        KeyError for a tensor that is not in the upload.
        """
        item, offset = self._places[part, name]
        size = item.spec.nbytes
        # Nothing can be mapped of no bytes.
        if not size:
            return tensor_from(b"", item.spec)
        # A map has to begin at a page boundary.
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with self._path.open("rb") as file:
            # A private writable map: the tensor shares its memory, and what is written to it stays
            # in this process.
            pages = mmap.mmap(
                file.fileno(), offset - start + size, access=mmap.ACCESS_COPY, offset=start
            )
        return tensor_from(memoryview(pages), item.spec, offset - start)

    def digest(self) -> str:
        """Digest of the whole file as it is now, in hex, as END and a receipt have it.

        Empty where the file is cut, or gone.
        """
        sizes = [item.spec.nbytes for item, _ in self._places.values()]
        digester = Digester(sizes)
        # Compare the length first: no digest covers bytes beyond the tensors.
        if not self._path.exists() or self._path.stat().st_size != sum(sizes):
            return ""
        with self._path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                digester.update(piece)
        return digester.digests().total.hex()

    def check_values(self, silo: str) -> None:
        """Refuse values that no silo may upload.

        RefusedError NOT_FINITE, WEIGHT or BOUNDS names the first tensor that has one.
        """
        for (part, name), (item, _) in self._places.items():
            if name.endswith(INDICES) and not rising(self.read(part, name)):
                raise RefusedError(silo, "BOUNDS", f"tensor {part}/{name} does not rise")
            # Each region is mapped on its own: no more than one is in memory.
            for start in range(0, item.spec.elements, REGION):
                values = self.read(part, name).reshape(-1)[start : start + REGION]
                if not all_finite(values):
                    raise RefusedError(
                        silo, "NOT_FINITE", f"tensor {part}/{name} holds NaN or infinity"
                    )
                # An invalid weight has a code of its own.
                if (fault := bounds_fault(item.spec, values)) and name == WEIGHT:
                    raise RefusedError(silo, "WEIGHT", f"tensor {part}/{name} {fault}")
                if fault:
                    raise RefusedError(silo, "BOUNDS", f"tensor {part}/{name} {fault}")
