"""One job at the coordinator: its state, its method's state, its files."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..algorithms import aggregation
from ..algorithms.exchange import PLAIN, Exchanges
from ..algorithms.job import Job
from ..algorithms.method import CoordinatorState
from ..errors import RefusedError
from ..proto.secure_told import Told
from ..proto.wire import Item, given_items
from . import heap
from .database import Place, StoredJob
from .opening import OpenedSums, masked_bytes
from .store import JobStore, Spool, Upload, masked_words, opened_sum
from .summing import Summing


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
        self.store.clean(_kept(stored))
        self.exchanges: Exchanges = PLAIN
        self.summing: Summing | None = None  # of the open round of a blind job, once it was begun
        self.summed: Summing | None = None  # of the round before: silos may still ask what came of it
        self._method = job.method()
        self._method_state: CoordinatorState = stored.method
        self._reading = asyncio.Semaphore(2)  # deliveries in memory at a time
        if self.state.blind:
            self.exchanges = OpenedSums(lambda: self.store.sum_file(self.state.round))
        self.largest_upload = max(self.upload_bytes(round_) for round_ in job.phase_starts)

    def upload_bytes(self, round_: int) -> int:
        """How long a silo's upload is in a round."""
        if self.state.blind:
            return masked_bytes(self.job, round_)
        return sum(item.spec.nbytes for item in given_items(self.job.up(round_)))

    def check_open(self, silo: str, round_: int, context: bytes = b"") -> None:
        """RefusedError ROUND_CLOSED unless this silo's upload is awaited in this round, of this attempt of a sum."""
        if not self.awaits(silo, round_, context):
            of = " with these masks" if context else ""
            raise RefusedError(silo, "ROUND_CLOSED", f"job {self.job.name!r}: round {round_} does not await it{of}")

    def awaits(self, silo: str, round_: int, context: bytes = b"") -> bool:
        """Whether this silo's upload of this round, and of the attempt of this context, is still to come."""
        here = self.state.stage == "round" and self.state.round == round_ and silo in self.state.open
        if not self.state.blind:
            return here
        return here and self.summing is not None and self.summing.awaits(silo, context)

    def sum_of(self, silo: str, round_: int) -> Summing:
        """The sum of an open blind round; RefusedError ROUND_CLOSED where there is none."""
        if self.summing is None or self.state.round != round_ or not self.state.cohort:
            raise RefusedError(silo, "ROUND_CLOSED", f"job {self.job.name!r}: round {round_} sums nothing now")
        return self.summing

    def told(self, silo: str, round_: int, had: int) -> Told | None:
        """The next message of a round's sum for a silo that has had so many, None where there is none yet.

        What came of the round that closed last is told too. RefusedError ROUND_CLOSED for any other.
        """
        before = self.summed if self.summed is not None and self.summed.round == round_ else None
        if before is not None and (told := before.told(silo, had)) is not None:
            return told
        return self.sum_of(silo, round_).told(silo, had)

    async def delivery(self, round_: int, silo: str) -> Delivery:
        """What this silo gets at the start of this round."""
        async with self._reading:
            tensors = await asyncio.to_thread(
                aggregation.deliver, self._method, self.exchanges, self._method_state, round_, silo, self.store
            )
        return Delivery(tensors, self.store.digests(tensors))

    async def accept(self, silo: str, round_: int, spool: Spool, items: Sequence[Item], context: bytes = b"") -> str:
        """Check what was spooled, keep it, name it; RefusedError for a bad value, or if the round closed meanwhile.

        Masked words have no values of their own; the round's canaries are checked when its sum is opened.
        """
        path = await asyncio.to_thread(spool.finished)
        if not context:
            await asyncio.to_thread(Upload(path, items).check_values, silo)
        self.check_open(silo, round_, context)
        return self.store.keep(silo, round_, path, masked=bool(context))

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


def _kept(stored: StoredJob) -> list[str]:
    """Names of the files that the open round may need."""
    state = stored.state
    if state.blind:
        return [opened_sum(state.round), *(masked_words(state.round, silo) for silo in state.cohort)]
    return [f"{state.round}.{silo}.upload" for silo in state.given]
