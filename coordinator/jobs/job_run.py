"""One job at the coordinator: its state, its method's state, its files."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from ...algorithms.engines import aggregation
from ...algorithms.exchange.delivery import CoordinatorState, Delivery, Latest
from ...algorithms.exchange.parts import Item, Part, upload_items
from ...algorithms.job.job import Job
from ...errors import RefusedError
from ...security.blind.plan import JobPlan
from ...security.blind.sum import group
from .. import heap
from ..blind.unmask import KeptSum, kept_sum
from ..rounds.events import Event
from ..rounds.machine import JobState
from ..storage.database import FileKey, StoredJob
from ..storage.spool import Spool, SpooledUpload
from ..storage.store import JobStore
from .collector import Collector, HiddenLeft, not_awaited


@dataclass(frozen=True)
class FoldResult:
    """The results of a fold, to be committed.

    ``metrics`` are sums over the members. ``files`` maps each changed place to a file in the job's
    folder, or to None if it is gone.
    """

    metrics: dict[str, int]
    method: CoordinatorState
    files: Mapping[FileKey, str | None]
    digests: Mapping[str, dict[str, bytes]]  # of published tensors, by part
    left: HiddenLeft


@dataclass(frozen=True)
class SiloDelivery:
    """The delivery to one silo: tensors by part, and known digests by (part, name).

    Digests (SHA-256) are known for published values; other tensors are hashed while they are sent.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    digests: Mapping[tuple[str, str], bytes]


Collecting: TypeAlias = Callable[["JobRun", StoredJob], Collector]


def nothing() -> None:
    """Record nothing next to the state."""


class DaemonCalls(Protocol):
    """The calls of a job's collector to the daemon.

    A collector uses no more of the daemon than this; tests bring their own.
    """

    def apply(
        self,
        run: "JobRun",
        event: Event,
        record: Callable[[], None] = nothing,
        committed: Callable[[], None] = nothing,
    ) -> None:
        """One event into one job, in one transaction with what ``record`` writes."""

    def writing(self) -> AbstractContextManager[None]:
        """One transaction.

        The daemon stops if the disk fails.
        """

    def reading(self, run: "JobRun", silo: str) -> AbstractContextManager[None]:
        """Where what goes down is damaged the job ends; RefusedError ROUND_CLOSED for the silo."""

    def let_go(self) -> None:
        """Drop what was held for a round that does not await it any more."""

    def tidy(self) -> None:
        """Let go, and wake all who wait."""

    def in_turn(
        self, run: "JobRun", round_: int, work: Callable[[], bytes]
    ) -> Coroutine[Any, Any, bytes]:
        """Run it where folds run; an exhausted disk is waited for."""

    def start(
        self, work: Coroutine[Any, Any, Any], done: Callable[["asyncio.Task[Any]"], None]
    ) -> None:
        """Run it alongside all else; ``done`` hears how it ended, unless it was cancelled."""

    def later(
        self, seconds: float, work: Callable[..., None], *given: Any
    ) -> "asyncio.TimerHandle":
        """Call it in so many seconds, unless the daemon has stopped by then."""


class JobRun:
    """One job: its state, its method's state, its files, and who collects its rounds."""

    def __init__(self, job: Job, stored: StoredJob, folder: Path, collecting: Collecting) -> None:
        self.job = job
        self.plan = JobPlan(job)
        self.signed = stored.signed
        self.state = stored.state
        self.since = time.monotonic()  # when this process began its present stage
        self.last_sums: Mapping[str, int] = {}  # of the last closed round, over its members
        self.store = JobStore(
            folder, lambda round_: upload_items(job.up(round_)), stored.files, stored.given
        )
        # Deliveries in memory at a time, so that memory does not grow with the number of silos.
        self.reading = asyncio.Semaphore(2)
        self._method = job.method()
        self._method_state: CoordinatorState = stored.method
        self.collector = collecting(self, stored)
        # After the collector is made, which knows the files that the open round may still need.
        self.store.clean(self.collector.kept_files, self.collector.needed)

    def turn_to(self, state: JobState) -> None:
        """Take over a state that is on the disk."""
        before, self.state = self.state, state
        # Each round is a stage of its own.
        if (before.stage, before.round) != (state.stage, state.round):
            self.since = time.monotonic()

    # Uploads.

    def check_open(self, silo: str, round_: int, context: bytes = b"", part: str = "") -> None:
        """RefusedError ROUND_CLOSED unless this upload, bound to this context, is awaited."""
        if self.awaits(silo, round_, context, part):
            return
        # One text for all reasons, plus those about which the silo can do something.
        why = not_awaited(silo, self.job, round_).why
        if part:
            why += f", or has all of part {part[:64]!r}"
        elif missing := self.collector.missing(silo, round_):
            why += f": {', '.join(missing)} come first"
        elif context:
            why += " with these masks"
        raise RefusedError(silo, "ROUND_CLOSED", why)

    def awaits(self, silo: str, round_: int, context: bytes = b"", part: str = "") -> bool:
        """True while this silo's upload of this round, bound to this context, is still to come."""
        return self.opens(silo, round_) and self.collector.awaits(silo, round_, context, part)

    def opens(self, silo: str, round_: int) -> bool:
        """True while a round waits for this silo, which was drawn and has not dropped out."""
        return (
            self.state.stage == "round" and self.state.round == round_ and silo in self.state.open
        )

    async def accept(
        self,
        silo: str,
        round_: int,
        spool: Spool,
        items: Sequence[Item],
        context: bytes = b"",
        part: Part | None = None,
    ) -> str:
        """Check what was spooled, keep it, name it.

        RefusedError for a bad value, or if the round closed meanwhile. Masked and padded words have
        no values of their own; the canaries of a sum are checked when it is opened.
        """
        # In threads: fsync and checking every value would block all other silos.
        path = await asyncio.to_thread(spool.finished)
        await asyncio.to_thread(SpooledUpload(path, items).check_values, silo)
        # Check again: the round may have closed meanwhile.
        self.check_open(silo, round_, context, "" if part is None else part.name)
        return self.collector.keep(silo, round_, path, part)

    # Deliveries.

    async def delivery(self, round_: int, silo: str) -> SiloDelivery:
        """The delivery to this silo at the start of this round.

        LocalError if one of its files is damaged, or gone.
        """
        async with self.reading:
            tensors = await asyncio.to_thread(
                aggregation.deliver,
                self._method,
                self.collector.exchanges,
                self._method_state,
                round_,
                silo,
                self.store,
            )
        return SiloDelivery(tensors, self.store.digests(tensors))

    def deliveries(self, round_: int, silo: str) -> Sequence[Delivery]:
        """The deliveries of the method to a silo at the start of a round.

        In the method's own order, which need not be that of the job's parts.
        """
        return self._method.deliveries(self._method_state, round_, silo)

    def sums(self, round_: int, silo: str) -> list[KeptSum]:
        """The open sums that a silo gets in words, in wire order.

        Parts that were not published yet are left out. LocalError for a file that something else
        wrote.
        """
        down = self.plan.round(round_).sums_down
        if not down:
            return []
        deliveries = self.deliveries(round_, silo)
        latest = {delivery.part for delivery in deliveries if isinstance(delivery, Latest)}
        found = []
        for each in down:
            name = each.part.name
            path = self.store.words(name)
            # Before the first round there is no sum, and a method may deliver another value.
            if path is not None and name in latest:
                found.append(kept_sum(name, path, group(each.part, self.plan.bounds).nbytes))
        return found

    def member_weights(self, silo: str) -> Mapping[str, float]:
        """Weights by which the open round is mixed for one of its members.

        By silo, not normalised; empty if the method mixes nothing for it.
        """
        return self._method.member_weights(self._method_state, silo)

    # The end of a round.

    def make_room(self) -> None:
        """Free memory for the sum or fold that comes next.

        The next delivery reads published values again.
        """
        self.store.forget_loaded()
        if self.collector.largest_upload > heap.WORTH_BYTES:
            heap.trim()

    def fold(self, round_: int, members: tuple[str, ...]) -> FoldResult:
        """Fold the round's uploads; nothing changes before ``commit``.

        It runs in the thread of the folds. It may run again: it reads only what is committed, and
        its files are named after the round. LocalError or DamagedError if the disk changed an
        upload.
        """
        # Deliveries and folds are not in memory together: a round's parts are read again after it.
        self.make_room()
        inputs = self.collector.inputs(round_, members)
        archive = inputs.archive
        method, metrics = aggregation.close_round(
            self._method,
            self.collector.exchanges,
            self._method_state,
            round_,
            members,
            self.plan.round(round_).up,
            inputs.read,
            archive,
        )
        # Before the commit: a crash in between folds the round again, into the same file.
        if round_ + 1 == self.job.length:
            self.store.keep_result(method, self.job.silos)
        # Tables may be large: they are a file of the round, not a row of the database.
        self.store.keep_counts(round_, {name: sum_ for name, sum_ in metrics.items() if sum_.ndim})
        counted = {name: int(sum_) for name, sum_ in metrics.items() if not sum_.ndim}
        return FoldResult(counted, method, archive.changes, archive.digests, inputs.left())

    def commit(self, round_: int, result: FoldResult) -> None:
        """Take over a fold that the database has committed, and remove unused files.

        Call it in the event loop.
        """
        self._method_state = result.method
        self.last_sums = result.metrics
        self.collector.committed(result.left)
        self.store.commit(round_, result.files, result.digests, self.collector.needed)
