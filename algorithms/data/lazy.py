"""Records that are read when they are used, so that a set may be larger than the memory.

torch's DataLoader reads them: in this process, or by ``workers`` processes that read ahead. Each
process opens the set itself, so that open files and connections never cross between processes.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from ...errors import LocalError
from ...files.file_bounds import check_fits
from ...files.portable import OWN_MEMORY
from ...files.processes import end_with_parent, threadless
from ..exchange.parts import all_finite
from ..numerics.devices import CPU

Indices: TypeAlias = NDArray[np.int64]
# a record's place in its set → the record [...], and maybe what is true of it
Reader: TypeAlias = Callable[[int], tuple[Tensor, ...]]

AT_ONCE = 2**25  # bytes that a worker hands over together, unless a batch was asked for
FEW = 64  # records that it hands over together at most


class _Set(Dataset[tuple[Tensor, ...]]):
    """A set as a worker sees it: opened in each process when its first record is read there.

    A ``forgiving`` one gives NaN for a record that cannot be read.
    """

    def __init__(
        self, opened: Callable[[], Reader], record: tuple[int, ...], where: str, forgiving: bool
    ) -> None:
        self._opened, self._record, self._where = opened, record, where
        self._forgiving = forgiving
        self._read: Reader | None = None

    def __getitems__(self, places: Sequence[int]) -> tuple[Tensor, ...] | LocalError:
        """The records at these places [B, …] and their targets, or what is wrong with one.

        An error is a result: torch would put a worker's traceback into its text.
        """
        try:
            if self._read is None:
                self._read = self._opened()
            one = self._forgiven if self._forgiving else self._checked
            records = map(one, repeat(self._read), places)
            # torch puts a worker's batch where it can hand it over without a copy.
            if get_worker_info() is not None:
                return tuple(default_collate(list(records)))
            return _in_rows(records, len(places))
        # One that any process can read: other errors may be of a package.
        except LocalError as error:
            return LocalError(str(error))

    def _checked(self, read: Reader, place: int) -> tuple[Tensor, ...]:
        """One record; checked wherever it is read, since nobody has seen the whole set."""
        record = read(int(place))
        if not all_finite(record[0]):
            raise LocalError(
                f"{self._where}: record {place} holds NaN or a value beyond float32; clean it first"
            )
        return record

    def _forgiven(self, read: Reader, place: int) -> tuple[Tensor, ...]:
        try:
            return read(int(place))[:1]
        except LocalError:
            return (torch.full(self._record, torch.nan),)


def _in_rows(records: Iterable[tuple[Tensor, ...]], count: int) -> tuple[Tensor, ...]:
    """The records as rows of one tensor each, in memory that returns to the system with them.

    Between a heap's small blocks, large ones of many batches would leave gaps that only grow.
    """
    batch: tuple[Tensor, ...] = ()
    for row, record in enumerate(records):
        batch = batch or tuple(_mapped((count, *own.shape), own.dtype) for own in record)
        for rows, own in zip(batch, record, strict=True):
            rows[row] = own
    return batch


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, max(1, prod(shape)) * dtype.itemsize, **OWN_MEMORY)
    # In large pages, where the system has them: small ones take twice as long to hand out.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # type: ignore[attr-defined,unused-ignore]
    return torch.frombuffer(memory, dtype=dtype)[: prod(shape)].reshape(shape)


class _Batches(Sampler[list[int]]):
    """The batches of one pass; a loader that keeps its workers goes through many."""

    def __init__(self) -> None:
        self.of: Iterable[Indices] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.of)


class _Loading:
    """A set and the processes that read it, which last as long as this object."""

    def __init__(
        self,
        opened: Callable[[], Reader],
        record: tuple[int, ...],
        workers: int,
        where: str,
        forgiving: bool = False,
    ) -> None:
        self._set = _Set(opened, record, where, forgiving)
        self._workers, self.where = workers, where
        self._again = partial(_Loading, opened, record, workers, where, forgiving=True)
        self._batches = _Batches()
        self._passes = 0
        # At most one. In a list, so that ``finalize`` ends its workers before garbage collection
        # ends their queues: else they hear nothing, and torch waits five seconds for each.
        self._loaders: list[DataLoader[Any]] = []
        finalize(self, self._loaders.clear)

    @cached_property
    def forgiving(self) -> "_Loading":
        """The same set, in which a record that cannot be read is NaN."""
        return self._again()

    def read(self, batches: Iterable[Indices], pinned: bool) -> Iterator[tuple[Tensor, ...]]:
        """What was read of each batch in turn; LocalError where a record cannot be read.

        One pass at a time: whoever begins another cannot go on with this one.
        """
        if not self._loaders or self._loaders[0].pin_memory != pinned:
            self._loaders[:] = [self._begun(pinned)]
        self._passes += 1
        this, self._batches.of = self._passes, batches
        with self._watched():
            found = iter(self._loaders[0])
        while True:
            if this != self._passes:
                raise LocalError("a set is read by two at once; this is a bug in Staddle")
            with self._watched():
                batch = next(found, None)
            if batch is None:
                return
            if isinstance(batch, LocalError):
                try:
                    raise batch
                finally:
                    # The traceback has this frame, and this frame the error: the workers would
                    # live until the next collection of garbage.
                    del batch
            yield batch

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        # torch says so in many ways of a worker that was killed.
        except (RuntimeError, OSError, EOFError) as error:
            self._loaders.clear()
            raise LocalError(
                f"{self.where}: records cannot be read: {error or type(error).__name__}; free"
                " memory, or lower data.workers"
            ) from error

    def _begun(self, pinned: bool) -> DataLoader[Any]:
        further: dict[str, Any] = {}
        if self._workers:
            context = threadless(__name__)
            further = {"multiprocessing_context": context, "persistent_workers": True}
        return DataLoader(
            self._set,
            batch_sampler=self._batches,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=pinned,
            worker_init_fn=_begin,
            # Of its own: torch would take a number from the generator that layers draw from.
            generator=torch.Generator(),
            **further,
        )


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(_: int) -> None:
    # torch waits for the server that forked this process, which lives as long as its processes.
    end_with_parent()


@dataclass(frozen=True, eq=False)
class LazyRecords:
    """Records [N, …] float32 of a set that are read when they are used.

    ``identity`` says which set it is, whatever its place on this machine; it may read some records.
    """

    _loading: _Loading
    _rows: Indices
    record: tuple[int, ...]
    identity: Callable[[], str]
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @classmethod
    def of(
        cls,
        opened: Callable[[], Reader],
        count: int,
        record: Sequence[int],
        workers: int,
        where: str,
        identity: Callable[[], str],
    ) -> "LazyRecords":
        """All ``count`` records of a set, each of the shape ``record``.

        ``opened`` is called in each process that reads, so it has to be picklable.
        """
        rows = np.arange(count, dtype=np.int64)
        loading = _Loading(opened, tuple(record), workers, where)
        # Asked for each silo of a simulation, and it reads files.
        return cls(loading, rows, tuple(record), cache(identity))

    @property
    def shape(self) -> torch.Size:
        """[N, …], as of a tensor."""
        return torch.Size((len(self), *self.record))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Tensor) -> "LazyRecords":
        """The records at these indices [B] int64, as of a tensor."""
        return self.take(index.numpy())

    @property
    def rows(self) -> Indices:
        """The places [N] of these records in their set."""
        return self._rows

    def record_bytes(self) -> int:
        """Bytes of one record."""
        return prod(self.record) * self.dtype.itemsize

    def take(self, indices: Indices) -> "LazyRecords":
        """The records at these indices, in their order; nothing is read."""
        return replace(self, _rows=self._rows[indices])

    def forgiving(self) -> "LazyRecords":
        """The same records, but NaN for one that cannot be read: such a record ends no work."""
        return replace(self, _loading=self._loading.forgiving)

    def batches(
        self, batches: Iterable[Indices], device: torch.device = CPU
    ) -> Iterator[tuple[Indices, Tensor]]:
        """Each batch in turn, with its records [B, …] on a device.

        A list of batches is read ahead. From any other iterable the next batch is asked for when it
        is its turn. LocalError where a record cannot be read.
        """
        pinned = device.type == "cuda"
        if isinstance(batches, Sequence):
            self._check_fits(max(map(len, batches), default=0))
            found = self._loading.read([self._rows[batch] for batch in batches], pinned)
            for batch, (x, *_) in zip(batches, found, strict=True):
                yield batch, x.to(device, non_blocking=True)
            return
        for batch in batches:
            yield batch, self.take(batch).whole().to(device)

    def whole(self) -> Tensor:
        """All these records [N, …] in memory, read by all workers.

        LocalError where one cannot be read, or they do not fit.
        """
        self._check_fits(len(self))
        # Written in place: a list of pieces would be a second copy.
        x = torch.empty(self.shape)
        for rows, (piece, *_) in self.pieces():
            x[rows] = piece
        return x

    def pieces(self) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """All that is read of these records, a few at a time, with where they stand among them."""
        few = max(1, min(FEW, AT_ONCE // max(1, self.record_bytes())))
        pieces = [slice(start, start + few) for start in range(0, len(self), few)]
        found = self._loading.read([self._rows[piece] for piece in pieces], False)
        return zip(pieces, found, strict=True)

    def _check_fits(self, records: int) -> None:
        check_fits(
            Path(self._loading.where),
            records * self.record_bytes(),
            f"{records:,} records at once",
            "choose a smaller batch, or free memory",
        )
