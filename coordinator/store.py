"""The coordinator's disk: uploads in flight, uploads of the round, published results, Mix versions, what is left.

::

    <directory>/spool/<silo>.part                a stream that is still coming; removed when it fails
    <directory>/jobs/<job>/round/<silo>.upload   checked uploads of the open round, removed after the fold
    <directory>/jobs/<job>/latest/<part>.safetensors
    <directory>/jobs/<job>/versions/<part>/<silo>.safetensors
    <directory>/jobs/<job>/mail/<part>/<silo>.safetensors    for silos that were away
    <directory>/jobs/<job>/result.safetensors    what the method's coordinator half knows once the job is complete

Files appear under their name complete: written aside, fsynced, renamed. Tensors are mapped, not read, so a fold holds
one tensor of one silo at a time.
"""

import errno
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import safetensors
import safetensors.torch
from torch import Tensor

from ..algorithms.exchange import WEIGHT, all_finite, weight_fault
from ..algorithms.method import CoordinatorState
from ..errors import RefusedError
from ..files import sync_directory
from ..proto.wire import Item, tensor_from

MARGIN_BYTES = 256 * 1024 * 1024  # kept free on the disk
SILOS = "silos"  # in the header of a result: the job's silos as a JSON list, in the order of its rows


class Spool:
    """One upload in flight: bytes go to a file of their own until they are checked."""

    def __init__(self, path: Path, silo: str) -> None:
        self._path = path
        self._silo = silo
        # Unbuffered: a full disk is met by write, not by close.
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append bytes; RefusedError STORAGE when the disk does not take them."""
        try:
            view = memoryview(chunk)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise RefusedError(self._silo, "STORAGE", f"the coordinator's disk: {error.strerror or error}") from error

    def finished(self) -> Path:
        """Make the bytes durable; where they lie."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RefusedError(self._silo, "STORAGE", f"the coordinator's disk: {error.strerror or error}") from error
        return self._path

    def discard(self) -> None:
        """Close, and remove what is still there under the temporary name."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class Upload:
    """The tensors of one upload, mapped from its file when they are read and unmapped when they are let go."""

    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        self._path = path
        self._places: dict[tuple[str, str], tuple[Item, int]] = {}
        offset = 0
        for item in items:
            self._places[item.part, item.spec.name] = (item, offset)
            offset += item.spec.nbytes

    def read(self, part: str, name: str) -> Tensor:
        """One tensor, in the shape and dtype of its spec."""
        item, offset = self._places[part, name]
        size = item.spec.nbytes
        if not size:
            return tensor_from(b"", item.spec)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with self._path.open("rb") as file:
            # A private writable map: the tensor shares its memory, and what is written to it stays in this process.
            pages = mmap.mmap(file.fileno(), offset - start + size, access=mmap.ACCESS_COPY, offset=start)
        return tensor_from(memoryview(pages), item.spec, offset - start)

    def check_values(self, silo: str) -> None:
        """RefusedError NOT_FINITE or WEIGHT names the first tensor with a value that no silo may give."""
        for part, name in self._places:
            value = self.read(part, name)
            if not all_finite(value):
                raise RefusedError(silo, "NOT_FINITE", f"tensor {part}/{name} holds NaN or infinity")
            if name == WEIGHT and (fault := weight_fault(value)):
                raise RefusedError(silo, "WEIGHT", f"tensor {part}/{name}: {fault}")


class JobStore:
    """One job's files; what ``algorithms.aggregation.Archive`` asks for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loading = threading.Lock()
        self._loaded: dict[str, dict[str, Tensor]] = {}  # published values, once a silo has asked; shared by all
        shutil.rmtree(folder / "round", ignore_errors=True)
        for name in ("round", "latest", "versions", "mail"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def check_space(self, silo: str, size: int) -> None:
        """RefusedError STORAGE where an upload of this size would fill the disk."""
        free = shutil.disk_usage(self._folder).free
        if free < size + MARGIN_BYTES:
            raise RefusedError(silo, "STORAGE", f"the coordinator has {free} bytes free, the upload needs {size}")

    # Uploads of the open round.

    def keep(self, silo: str, spooled: Path) -> None:
        """Give a checked upload its name."""
        spooled.replace(self._folder / "round" / f"{silo}.upload")
        sync_directory(self._folder / "round")

    def reader(self, members: Sequence[str], items: Sequence[Item]) -> Callable[[str, str, str], Tensor]:
        """``read(part, silo, name)`` over the uploads of these silos."""
        uploads = {silo: Upload(self._folder / "round" / f"{silo}.upload", items) for silo in members}
        return lambda part, silo, name: uploads[silo].read(part, name)

    def clear_round(self) -> None:
        """Remove the uploads of the round."""
        for path in (self._folder / "round").iterdir():
            path.unlink()

    # Archive: published results and Mix versions.

    def publish(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace the published value of a part."""
        with self._loading:
            self._write(self._folder / "latest" / f"{part}.safetensors", tensors)
            self._loaded.pop(part, None)

    def latest(self, part: str) -> dict[str, Tensor] | None:
        """The published value of a part, or None; the same tensors for everybody who asks."""
        path = self._folder / "latest" / f"{part}.safetensors"
        with self._loading:
            if part not in self._loaded and path.exists():
                self._loaded[part] = safetensors.torch.load_file(path)
            return self._loaded.get(part)

    def forget_loaded(self) -> None:
        """Let the memory of published values go."""
        with self._loading:
            self._loaded.clear()

    def store(self, part: str, silo: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a silo's version of a Mix part."""
        self._version(part, silo).parent.mkdir(exist_ok=True)
        self._write(self._version(part, silo), tensors)

    def has(self, part: str, silo: str) -> bool:
        """Whether a silo has given a version."""
        return self._version(part, silo).exists()

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version; the others are not read."""
        with safetensors.safe_open(self._version(part, silo), "pt") as file:
            return cast("Tensor", file.get_tensor(name))

    def mail(self, part: str, silo: str) -> dict[str, Tensor] | None:
        """What was put aside for a silo, with ``@keep``; None where nothing is."""
        path = self._mail(part, silo)
        return safetensors.torch.load_file(path) if path.exists() else None

    def put_mail(self, part: str, silo: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is put aside for a silo."""
        self._mail(part, silo).parent.mkdir(exist_ok=True)
        self._write(self._mail(part, silo), tensors)

    def clear_mail(self, silo: str) -> None:
        """Remove all that is put aside for a silo."""
        for path in (self._folder / "mail").glob(f"*/{silo}.safetensors"):
            path.unlink()

    # The end of the job.

    def keep_result(self, state: CoordinatorState, silos: Sequence[str]) -> None:
        """Keep what the method's coordinator half knows, and whose rows they are; no file where it knows nothing."""
        if state:
            own = {name: tensor.clone() for name, tensor in state.items()}  # the format takes no shared memory
            self._write(self._folder / "result.safetensors", own, {SILOS: json.dumps(list(silos))})

    def _mail(self, part: str, silo: str) -> Path:
        return self._folder / "mail" / part / f"{silo}.safetensors"

    def _version(self, part: str, silo: str) -> Path:
        return self._folder / "versions" / part / f"{silo}.safetensors"

    def _write(self, path: Path, tensors: Mapping[str, Tensor], header: dict[str, str] | None = None) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, header)
        except safetensors.SafetensorError as error:  # what it raises for a full disk
            raise OSError(errno.EIO, f"cannot write {temporary.name}: {error}") from error
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_directory(path.parent)
