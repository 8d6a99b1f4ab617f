"""Local training in a worker, so that heartbeats never stall.

One thread: torch lets go of the interpreter lock inside its kernels, and the event loop needs
little of it. A stop reaches the training between two batches. Whatever error ends the work, memory
that ran out or a mistake in a method, becomes a LocalError: the round is lost for this silo, not
its agent.

Where and how this silo trains: on the processor, or on a GPU that holds the records of the job at
hand.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import torch

from ... import log
from ...algorithms.course import SiloState
from ...algorithms.data.dataset import Dataset
from ...algorithms.engines.cuda_graphs import way_on
from ...algorithms.exchange.delivery import Results
from ...algorithms.job.job import Job
from ...algorithms.leaks.traps import Caution
from ...algorithms.models.build import draws_randomly
from ...algorithms.numerics.devices import CPU, Precision, check_precision, find
from ...algorithms.numerics.ranks import ALONE, Ranks
from ...algorithms.training.accountant import PrivateSilo
from ...algorithms.training.data_parallel import DataParallel
from ...algorithms.training.loop import Note, Stepper, never, unnoted
from ...algorithms.training.silo_round import RoundOutcome, final_round, local_round
from ...errors import LocalError, StaddleError

MAX_TEXT = 500  # characters of an error's text

P = ParamSpec("P")
T = TypeVar("T")


def _described(error: Exception) -> str:
    """Type and text of an error, cut short, and the line of ours or of torch's that raised it.

    The text stays in this silo's log. It is the method's, so it may be of any length, or fail to be
    made.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = traceback.TracebackException.from_exception(error, limit=0).format_exception_only()
    return f"{' '.join(map(str.strip, lines))[:MAX_TEXT]}{place}"


def pool_of(threads: int) -> ThreadPoolExecutor:
    """Threads for so many pieces of work at a time."""
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="training")


class Trainer:
    """Runs one piece of work at a time, in a thread of its pool next to the event loop."""

    def __init__(self, pool: ThreadPoolExecutor | None = None) -> None:
        """Without a ``pool`` it has one thread of its own."""
        self._pool = pool or pool_of(1)
        self._cancel = threading.Event()
        self._running = asyncio.Lock()  # the pool may have threads for more

    def cancelled(self) -> bool:
        """True if the work should stop; the training loop asks between batches."""
        return self._cancel.is_set()

    def cancel(self) -> None:
        """Stop the work in hand at its next batch; it ends with CancelledError.

        It does not affect work that begins later.
        """
        self._cancel.set()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work in the thread; cancelling the caller cancels the work and waits for its end.

        Raises the errors of errors.py as they are, any other as LocalError with the place where it
        rose.
        """
        # Earlier work that was cancelled may still be on its way to its next batch.
        async with self._running:
            # An earlier ``cancel`` was meant for earlier work.
            self._cancel.clear()
            future = asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))
            try:
                # ``wait`` does not cancel the work with the caller: it must end on its own.
                await asyncio.wait([future])
            except asyncio.CancelledError:
                self.cancel()
                await asyncio.wait([future])
                # how the work ended is of no interest any more; asking keeps asyncio quiet
                future.exception()
                raise
        error = future.exception()
        # Others, such as SystemExit, are raised unchanged by ``result``.
        if isinstance(error, Exception) and not isinstance(error, StaddleError):
            raise LocalError(
                f"{_described(error)}; lower the batch size if memory ran out, else report it"
            ) from error
        return future.result()

    def close(self) -> None:
        """Cancel running work and end the thread; returns once the work has ended."""
        self.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


class JobRecords(Protocol):
    """A job and this silo's records for it, such as an admitted job."""

    @property
    def job(self) -> Job:
        """The job."""
        ...

    @property
    def train(self) -> Dataset:
        """The records that it trains on."""
        ...

    @property
    def test(self) -> Dataset:
        """The records that it is tested on."""
        ...


@dataclass(frozen=True, eq=False)
class SiloRound:
    """All that a round of a silo is computed from, wherever that is.

    Round ``job.length`` is the final one, which trains nothing; ``trained`` says whether the silo
    has ever taken part in a round. ``note`` is told of each evaluation.
    """

    of: JobRecords
    silo: str
    round: int
    state: SiloState
    delivered: Results
    threads: int = 1
    trained: bool = True
    private: PrivateSilo | None = None
    caution: Caution = field(default_factory=Caution)
    cancelled: Callable[[], bool] = never
    note: Note = unnoted


class TrainingPlace(Protocol):
    """Where rounds are computed: in this process, or in others that it starts."""

    def outcome(self, asked: SiloRound) -> RoundOutcome:
        """What comes of a round; CancelledError if it was stopped."""
        ...


@dataclass(frozen=True, eq=False)
class TrainingInput:
    """The means of one round of one job: training device, precision and the records."""

    device: torch.device
    way: Stepper
    train: Dataset
    test: Dataset


class TrainingDevice:
    """A device, and on it the records of one job; LocalError where this machine has no such device.

    Records that do not fit stay on the host, and are brought batch by batch. A private job is
    trained on the host, where its noise is drawn. On a GPU ``precision`` is that of training steps,
    which are replayed where there are to be ``graphs``.
    """

    def __init__(
        self,
        device: str = "cpu",
        precision: Precision = "float32",
        *,
        graphs: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        """``ranks`` are the processes of which this one is, each with a device of its own."""
        self._ranks = ranks
        self._device, self._precision, self._graphs = find(device), precision, graphs
        check_precision(self._device, precision)
        self._held: tuple[JobRecords, TrainingInput] | None = None

    def outcome(self, asked: SiloRound) -> RoundOutcome:
        """Compute a round here, on the device."""
        torch.set_num_threads(asked.threads)
        job, here = asked.of.job, self.of(asked.of)
        compute: Callable[..., RoundOutcome] = partial(final_round, trained=asked.trained)
        if asked.round < job.length:
            compute = partial(local_round, round_=asked.round, way=here.way, caution=asked.caution)
        return compute(
            method=job.method(),
            job=job,
            state=asked.state,
            delivered=asked.delivered,
            train_data=here.train,
            test_data=here.test,
            client=asked.silo,
            private=asked.private,
            device=here.device,
            cancelled=asked.cancelled,
            note=asked.note,
        )

    def of(self, admitted: JobRecords) -> TrainingInput:
        """The means for a round of the job.

        On a GPU, they are kept until another job comes.
        """
        # Whoever reads a sum, and knew by what each record was changed, could take the sum apart
        # by record.
        hidden = admitted.job.security.required
        if self._device == CPU or admitted.job.privacy is not None:
            return TrainingInput(CPU, self._way(CPU, hidden), admitted.train, admitted.test)
        # a job that is read again may have other records
        if self._held is None or self._held[0] is not admitted:
            self._held = None  # first: it makes room
            # a new one: its memory is that of one job
            # A recorded step would draw the same random numbers each time it is replayed.
            graphs = self._graphs and not draws_randomly(admitted.job.model)
            way = self._way(self._device, hidden, graphs)
            self._held = admitted, TrainingInput(self._device, way, *self._taken(admitted))
        return self._held[1]

    def _way(self, device: torch.device, hidden: bool, graphs: bool = False) -> Stepper:
        # Precisions are for GPUs. Nothing that processes tell one another is recorded in a graph.
        precision: Precision = "float32" if device == CPU else self._precision
        if self._ranks.size > 1:
            return DataParallel(self._ranks, precision, hidden)
        return way_on(device, precision, graphs=graphs, hidden=hidden)

    def _taken(self, admitted: JobRecords) -> tuple[Dataset, Dataset]:
        try:
            return admitted.train.to(self._device), admitted.test.to(self._device)
        except torch.OutOfMemoryError as error:
            log.problem(
                "records.host", job=admitted.job.name, device=str(self._device), why=str(error)
            )
            # Slower, since batches are copied one by one, but no round is lost.
            return admitted.train, admitted.test
