"""One job at the coordinator: its state, its method's state, its files."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..algorithms import aggregation
from ..algorithms.exchange import PLAIN
from ..algorithms.job import Job
from ..algorithms.method import CoordinatorState
from ..errors import RefusedError
from ..proto.wire import Item, given_items
from . import heap
from .database import Place, StoredJob
from .store import JobStore, Spool, Upload


@dataclass(frozen=True)
class FoldResult:
    """What a fold gave, to be committed."""

    metrics: dict[str, int]
    method: CoordinatorState
    files: Mapping[Place, str | None]
    digests: Mapping[str, dict[str, bytes]]  # of published tensors, by part


@dataclass(frozen=True)
class Delivery:
    """What one silo gets: tensors by part, and the digests that are known already, by (part, name)."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    digests: Mapping[tuple[str, str], bytes]


class JobRun:
    """One job: its state, its method's state, its files."""

    def __init__(self, job: Job, stored: StoredJob, folder: Path) -> None:
        self.job = job
        self.signed = stored.signed
        self.state = stored.state
        self.store = JobStore(folder, lambda round_: given_items(job.up(round_)), stored.files)
        self.store.clean([f"{self.state.round}.{silo}.upload" for silo in self.state.given])
        self.exchanges = PLAIN
        self._method = job.method()
        self._method_state: CoordinatorState = stored.method
        self._reading = asyncio.Semaphore(2)  # deliveries in memory at a time
        sizes = (sum(i.spec.nbytes for i in given_items(job.up(r))) for r in job.phase_starts)
        self.largest_upload = max(sizes)

    def check_open(self, silo: str, round_: int) -> None:
        """RefusedError ROUND_CLOSED unless this silo is awaited in this round."""
        if not self.awaits(silo, round_):
            raise RefusedError(silo, "ROUND_CLOSED", f"job {self.job.name!r}: round {round_} does not await it")

    def awaits(self, silo: str, round_: int) -> bool:
        """Whether this silo's upload of this round is still to come."""
        return self.state.stage == "round" and self.state.round == round_ and silo in self.state.open

    async def delivery(self, round_: int, silo: str) -> Delivery:
        """What this silo gets at the start of this round."""
        async with self._reading:
            tensors = await asyncio.to_thread(
                aggregation.deliver, self._method, self.exchanges, self._method_state, round_, silo, self.store
            )
        return Delivery(tensors, self.store.digests(tensors))

    async def accept(self, silo: str, round_: int, spool: Spool, items: Sequence[Item]) -> str:
        """Check what was spooled, keep it, name it; RefusedError for a bad value, or if the round closed meanwhile."""
        path = await asyncio.to_thread(spool.finished)
        await asyncio.to_thread(Upload(path, items).check_values, silo)
        self.check_open(silo, round_)
        return self.store.keep(silo, round_, path)

    def fold(self, round_: int, members: tuple[str, ...]) -> FoldResult:
        """Fold the round's uploads; nothing changes before ``commit``."""
        self.store.forget_loaded()
        if self.largest_upload > heap.WORTH_BYTES:
            heap.trim()
        read, archive = self.store.reader(members, round_), self.store.folding(round_)
        method, metrics = aggregation.close_round(
            self._method, self.exchanges, self._method_state, round_, members, self.job.up(round_), read, archive
        )
        if round_ + 1 == self.job.length:
            self.store.keep_result(method, self.job.silos)
        counted = {name: int(value) for name, value in metrics.items()}
        return FoldResult(counted, method, archive.changes, archive.digests)

    def commit(self, round_: int, result: FoldResult) -> None:
        """Turn to what the database has committed."""
        self._method_state = result.method
        self.store.commit(round_, result.files, result.digests)
