"""The engine of a machine with several cores, or several GPUs: silos train side by side.

A ``Crew`` is the worker processes, which begin once with the records of all silos. ``Workers`` is
the engine of one job on them. On cores a worker gets a silo whenever it has none. The costliest
silo comes first, so that no long one begins last. The worker trains it with the engine ``Serial``
at one thread, so all results are those of ``Serial`` at one thread, bit for bit. On GPUs each
worker gets its share of the silos, and trains them stacked: as one GPU would, up to the last bits
of floating-point sums, which may depend on the silos that go at once.

A worker process carries out one order after another, and ends with its parent. An order carries a
job only where its job is not that of the order before. The worker says when each silo of an order
is done, and answers with the results of its engine, or the LocalError that it raises. Any other
error is a mistake in the program, and ends the process.
"""

import copyreg
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, Self, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.engines.engine import Engine, Records, SiloWork
from ...algorithms.job.job import Job
from ...algorithms.numerics.devices import CPU
from ...algorithms.training.silo_round import Evaluation, RoundOutcome
from ...errors import LocalError, StaddleError, reason
from ...files.processes import end_with_parent, threadless
from .deal import Costs, Task, shares
from .shared_memory import SHARED, Descriptor, mapped, written

Outcome: TypeAlias = RoundOutcome | Evaluation
Answer: TypeAlias = Mapping[str, Outcome] | LocalError
Line: TypeAlias = "Connection[Any, Any]"
# makes the engine of a job from the records, where silos train
Maker: TypeAlias = Callable[[Job, Mapping[str, Records]], Engine]

SILO_DONE = "silo done"


@dataclass(frozen=True, eq=False)
class Order:
    """Silos to train or evaluate; without a job, the previous order's counts."""

    job: Job | None
    task: Task
    round: int
    work: Sequence[SiloWork]


class JobTrainer:
    """The engine of one job after another, in a worker process or a Ray actor."""

    def __init__(self, make: Maker, records: Mapping[str, Records]) -> None:
        self._make, self._records = make, records
        self._job: Job | None = None
        self._engine: Engine | None = None

    def begin(self, job: Job) -> None:
        """From now on train this job."""
        # The next engine takes a device's memory, so the one before must have given it back.
        if self._engine is not None:
            self._engine.close()
        self._job, self._engine = job, None

    def carry_out(
        self, task: Task, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Answer:
        """The outcomes of some silos by name, or the LocalError of one."""
        if self._job is None:
            return LocalError("a worker has an order and no job; this is a bug in Staddle")
        try:
            if self._engine is None:
                self._engine = self._make(self._job, self._records)
            call = self._engine.train if task == "train" else self._engine.look
            return call(round_, work, done)
        # Its class may take more than a text, which is all that crosses.
        except StaddleError as error:
            return LocalError(str(error))


def serve(line: Line, make: Maker, records: int, table: int) -> None:
    """Carry out orders until the parent is gone.

    ``records`` and ``table`` are the arguments of ``mapped``.

    It runs in a worker process, and returns once the pipe is closed.
    """
    end_with_parent()
    # One order of every sum: all results are those of ``Serial`` at one thread, bit for bit.
    torch.set_num_threads(1)
    trainer, done = JobTrainer(make, mapped(records, table)), partial(send, line, SILO_DONE)
    try:
        while True:
            order: Order = receive(line)
            # Each job has its own engine.
            if order.job is not None:
                trainer.begin(order.job)
            send(line, trainer.carry_out(order.task, order.round, order.work, done))
    except (EOFError, ConnectionError):
        return


def send(line: Line, message: Order | Answer | str) -> None:
    """Put a message on the pipe.

    ConnectionError if the other end is gone. Tensors are copied into the message.
    """
    line.send_bytes(packed(message))


def packed(message: Any) -> memoryview:
    """A message as bytes, its tensors by value; ``ForkingPickler.loads`` reads it."""
    buffer = io.BytesIO()
    _ByValue(buffer).dump(message)
    return buffer.getbuffer()


def receive(line: Line) -> Any:
    """The next message; EOFError or ConnectionError where the other end is gone.

    It blocks. Both ends are processes of one command, so unpickling is safe here.
    """
    return ForkingPickler.loads(line.recv_bytes())


class _ByValue(ForkingPickler):
    """Tensors cross as values: torch would put each into its own file of shared memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}


def _reduced(tensor: Tensor) -> tuple[Any, tuple[NDArray[Any]]]:
    return _made, (tensor.detach().contiguous().numpy(),)


def _made(values: NDArray[Any]) -> Tensor:
    # clone: aligned as torch's own
    return torch.from_numpy(np.atleast_1d(values)).reshape(values.shape).clone()


def usable_cores() -> int:
    """The number of cores that worker processes may run on.

    A container or a batch system may allow fewer than the machine has. On Windows it is 1, since
    processes there cannot share the records.
    """
    if not SHARED:
        return 1
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def alone(_: Job) -> bool:
    """No job's silos train stacked."""
    return False


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    line: Line
    job: Job | None = None  # of the order before
    silos: Sequence[str] = ()  # that it has now


class Crew:
    """Worker processes that hold the records of all silos.

    End them with ``close``, or use it as a context manager.
    """

    def __init__(
        self,
        records: Mapping[str, Records],
        makers: Sequence[Maker],
        stacks: Callable[[Job], bool] = alone,
        have: str = "workers",
    ) -> None:
        """Begin a process per maker, at most one per silo.

        ``makers`` make their engines. Jobs for which ``stacks`` holds train in shares, one per
        process; in all others an order is one silo. ``have`` says to people what there may be fewer
        of.
        """
        self._costs, self._stacks, self._have = Costs(records), stacks, have
        self._workers: list[_Worker] = []
        # torch is loaded once, and no lock of it is held
        self._context = threadless(serve.__module__)
        # Once for all processes: records may take most of the memory.
        file, table = written(records)
        # Closed once the workers have descriptors of their own.
        with file:
            for make in makers[: len(records)]:
                self._begin(make, Descriptor(file.fileno()), table)

    def _begin(self, *arguments: Any) -> None:
        # One pipe per worker: a closed one shows which worker ended.
        ours, theirs = self._context.Pipe()
        # daemon: multiprocessing ends it with this process even without ``close``.
        process = self._context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        try:
            process.start()
        except OSError as error:
            begun = len(self._workers)
            self.close()
            raise LocalError(
                f"worker process {begun + 1} cannot be started: {reason(error)}; use"
                f" {begun or 1} {self._have}"
            ) from error
        theirs.close()  # the worker alone has it now: the line ends when the worker does
        self._workers.append(_Worker(process, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that run."""
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def close(self) -> None:
        """End all processes at once, whatever they are doing.

        Work in progress is lost. A second call does nothing.
        """
        for worker in self._workers:
            # Kill all before joining any, so that none continues to train meanwhile.
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.line.close()
        self._workers = []

    def engine(self, job: Job) -> "Workers":
        """The engine of a job, one of several that may take turns.

        Its ``close`` leaves the processes as they are.
        """
        if job.privacy is not None:
            raise LocalError(
                f"job {job.name!r} has a [privacy] table, and its silos train in one process; use"
                " one worker"
            )
        return Workers(self, job)

    def run(
        self, job: Job, task: Task, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, Outcome]:
        """The outcomes of all silos, in the order of ``work``.

        LocalError of the first of them that has one: no other silo is begun then. Where anything
        else ends the call, an interrupt or a worker that died, it ends all processes too.
        """
        if not self._workers:
            raise LocalError("the worker processes have ended; start the run again")

        waiting = self._batches(job, task, work)
        answers: dict[str, Outcome] = {}
        faults: dict[str, LocalError] = {}
        complete = False
        try:
            idle = list(self._workers)
            # Until every worker is idle: after a fault, orders in progress still end.
            while waiting or len(idle) < len(self._workers):
                while waiting and idle:
                    # Any idle worker will do, since all hold all records.
                    self._order(idle.pop(), job, task, round_, waiting.pop())
                for worker in self._answering():
                    silos, answer = self._taken(worker)
                    if answer == SILO_DONE:
                        done()
                        continue
                    idle.append(worker)
                    if isinstance(answer, LocalError):
                        faults |= dict.fromkeys(silos, answer)
                        # The round cannot succeed any more, so begin no further silo.
                        waiting.clear()
                    else:
                        answers |= answer
            complete = True
        finally:
            # a worker that was interrupted would take the next order for the answer to this one
            if not complete:
                self.close()

        # several may have failed at once: the same run names the same one each time
        for one in work:
            if one.silo in faults:
                raise faults[one.silo]
        return {one.silo: answers[one.silo] for one in work}

    def _batches(self, job: Job, task: Task, work: Sequence[SiloWork]) -> list[list[SiloWork]]:
        """What one order takes, the costliest last: the last is taken first."""
        cost = partial(self._costs.of, job, task)
        if self._stacks(job):
            return shares(work, cost, len(self._workers))
        # The costliest silo, begun last, would keep all others waiting.
        return [[one] for one in sorted(work, key=cost)]

    def _order(
        self, worker: _Worker, job: Job, task: Task, round_: int, batch: Sequence[SiloWork]
    ) -> None:
        sent = None
        # Send a job to each worker once, not with every silo.
        if worker.job is not job:
            # a fresh one: what a job has cached does not cross
            sent = replace(job)
        worker.job, worker.silos = job, [one.silo for one in batch]
        # States are in memory only while they are sent.
        loaded = [one.loaded() for one in batch]
        try:
            send(worker.line, Order(sent, task, round_, loaded))
        except ConnectionError as error:
            raise self._dead(worker) from error

    def _answering(self) -> list[_Worker]:
        """Wait for the workers that have something to say, or have ended."""
        # Only busy workers answer; an idle one that died is found with its next order.
        busy = [worker for worker in self._workers if worker.silos]
        lines = wait([worker.line for worker in busy])
        return [worker for worker in busy if worker.line in lines]

    def _taken(self, worker: _Worker) -> tuple[Sequence[str], Any]:
        """The silos that a worker has, and what it says: an answer ends the order."""
        try:
            said = receive(worker.line)
        except (EOFError, OSError) as error:
            raise self._dead(worker) from error
        silos = worker.silos
        if said != SILO_DONE:
            worker.silos = ()
        return silos, said

    def _dead(self, worker: _Worker) -> LocalError:
        # The exit code is known only after this.
        worker.process.join()
        code = worker.process.exitcode or 0
        # a negative code is the signal that ended it
        if code >= 0:
            why = f"ended with code {code}; what it printed before says why"
        else:
            name = signal.Signals(-code).name
            why = f"was ended by {name}"
            if name == "SIGKILL":
                why += ", as Linux does where memory runs out; free memory, or use fewer"
                why += f" {self._have}"
        first, *others = worker.silos
        more = f" and {len(others)} more" if others else ""
        return LocalError(f"silo {first!r}{more}: the worker process that had it {why}")


class RunsJobs(Protocol):
    """What carries out the orders of ``Workers``: a crew of processes, or one of Ray actors."""

    def run(
        self, job: Job, task: Task, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, Outcome]:
        """The outcomes of all silos, in the order of ``work``."""
        ...


class Workers:
    """An engine that trains the silos of a job on a crew.

    Several jobs may share a crew, one call at a time. The coordinator half computes on this
    machine's processor, whatever trains.
    """

    def __init__(self, crew: RunsJobs, job: Job) -> None:
        self._crew, self._job = crew, job

    @property
    def device(self) -> torch.device:
        """The processor."""
        return CPU

    def train(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, RoundOutcome]:
        """Train each silo, as many at a time as there are workers.

        ``done`` is called once per finished silo. LocalError as from the crew's ``run``.
        """
        return cast(
            Mapping[str, RoundOutcome], self._crew.run(self._job, "train", round_, work, done)
        )

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, Evaluation]:
        """Look at each silo, as many at a time as there are workers."""
        return cast(Mapping[str, Evaluation], self._crew.run(self._job, "look", round_, work, done))

    def close(self) -> None:
        """Nothing to end: the processes are the crew's."""
