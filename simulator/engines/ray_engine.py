"""The engine for a Ray cluster: silos train side by side in actors, on as many machines as it has.

A ``RayCrew`` is the connection, the records, once a machine in Ray's object store, and the actors:
one a core, or one a GPU. ``Workers`` is the engine of one job on them. On cores an idle actor gets
the silo with the most records, and trains it with ``Serial`` at one thread, so the bits are those
of one process; on GPUs each actor gets its share of the silos, and trains them stacked. An actor
keeps nothing but records and a job: what it, or its machine, had when it died is trained again on
another, to the same bits.
"""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from ...algorithms.engines.engine import Records, SiloWork
from ...algorithms.engines.simulation import nothing
from ...algorithms.job.job import Job
from ...errors import LocalError
from .deal import Costs, Task, shares
from .pool import JobTrainer, Maker, Outcome, Workers, packed
from .shared_memory import laid_out, written

# Ray's own types say nothing to a strict check.
Actor: TypeAlias = Any
Ref: TypeAlias = Any
T = TypeVar("T")

MOST_DEATHS = 3  # of actors that had the same
STARTING_SECONDS = 600.0  # within which a first actor begins, where none runs
REACHED_SECONDS = 10.0
SOFTWARE = ("staddle", "torch", "numpy")  # of other versions the bits may differ
LATE = "node timed out during startup"  # Ray's words for one that it has begun itself
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RayWorker:
    """What an actor runs: it holds the records of all silos, and trains those that it is given."""

    def __init__(self, memory: Any, table: int, make: Maker) -> None:
        """``memory`` and ``table`` are what ``written`` wrote, as uint8 [bytes]."""
        # One order of every sum: all results are those of ``Serial`` at one thread, bit for bit.
        torch.set_num_threads(1)
        self._trainer = JobTrainer(make, laid_out(memory, memory[table:].tobytes()))

    def software(self) -> dict[str, str]:
        """The versions of packages here."""
        return _software()

    def begin(self, job: bytes) -> None:
        """From now on train this job."""
        self._trainer.begin(ForkingPickler.loads(job))

    def carry_out(self, task: Task, round_: int, work: bytes) -> bytes:
        """The outcomes of some silos by name, or the LocalError of one."""
        answer = self._trainer.carry_out(task, round_, ForkingPickler.loads(work), nothing)
        return bytes(packed(answer))


@dataclass(eq=False)
class _Member:
    actor: Actor
    job: Job | None = None  # that was begun last


class RayCrew:
    """Actors that hold the records of all silos.

    End them with ``close``.
    """

    def __init__(
        self,
        records: Mapping[str, Records],
        make: Maker,
        resource: Literal["CPU", "GPU"] = "CPU",
        address: str | None = None,
        count: int | None = None,
    ) -> None:
        """Connect to the cluster at ``address``; None begins one on this machine.

        ``count`` actors with one core or GPU each; None: as many as the cluster has. At most one a
        silo. LocalError where Ray is not installed, or the cluster cannot be used.
        """
        self._ray = _connected(address)
        self._silos, self._costs = len(records), Costs(records)
        self._resource, self._count = resource, count
        self._needs = {"num_cpus": 1} if resource == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        self._worker = self._ray.remote(**self._needs)(RayWorker)
        file, table = written(records)
        with file:
            memory = np.asarray(np.memmap(file, np.uint8, "r"))
            self._arguments = (self._ray.put(memory), table, make)
        self._idle: list[_Member] = []
        # by what it answers first: actors that wait for a core
        self._starting: dict[Ref, _Member] = {}
        # of actors in one call, by what they had: it may be what ends them
        self._deaths: Counter[str] = Counter()

    @property
    def wanted(self) -> int:
        """How many actors there should be, in the cluster as it is now."""
        most = int(self._ray.cluster_resources().get(self._resource, 0))
        return min(self._count or most, most, self._silos)

    def ask(self, question: Callable[[], T]) -> T:
        """What a function says where an actor could be; LocalError as it raises it."""
        own = self._ray.remote(**self._needs)(question)
        try:
            answer: T = self._ray.get(own.remote())
        except self._ray.exceptions.RayTaskError as error:
            raise LocalError(f"a machine of the Ray cluster: {error.cause}") from error
        return answer

    def close(self) -> None:
        """End the actors, whatever they are doing, and the connection.

        Work in progress is lost. A second call does nothing.
        """
        self._ray.shutdown()
        self._idle, self._starting = [], {}

    def engine(self, job: Job) -> Workers:
        """The engine of a job, one of several that may take turns."""
        if job.privacy is not None:
            raise LocalError(
                f"job {job.name!r} has a [privacy] table, and its silos train in one process; use"
                " --engine local with one worker"
            )
        return Workers(self, job)

    def run(
        self, job: Job, task: Task, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, Outcome]:
        """The outcomes of all silos, in the order of ``work``.

        LocalError of the first of them that has one: no other silo is begun then. Where anything
        else ends the call, such as an interrupt, it ends the actors and the connection, too.
        """
        if not self._ray.is_initialized():
            raise LocalError("the Ray actors have ended; start the run again")
        self._deaths.clear()
        self._top_up()
        waiting = self._batches(job, task, work)
        running: dict[Ref, tuple[_Member, list[SiloWork]]] = {}
        found: dict[str, Outcome] = {}
        faults: list[LocalError] = []
        complete = False
        try:
            while waiting or running:
                while waiting and self._idle:
                    member, batch = self._idle.pop(), waiting.pop()
                    running[self._ordered(member, job, task, round_, batch)] = member, batch
                for ref in self._ready(running):
                    member, batch = running.pop(ref)
                    answer = self._answer(ref)
                    if isinstance(answer, _Gone):
                        self._lose(member, f"silo {batch[-1].silo!r}", answer)
                        waiting.append(batch)
                    else:
                        self._idle.append(member)
                        _sort(answer, found, faults, done)
                # A round that cannot succeed begins no further silo.
                if faults:
                    waiting.clear()
            complete = True
        finally:
            # an actor that was interrupted would keep its core
            if not complete:
                self.close()
        # Several may have failed at once: the same run names the same one each time.
        for fault in sorted(faults, key=str):
            raise fault
        return {one.silo: found[one.silo] for one in work}

    def _batches(self, job: Job, task: Task, work: Sequence[SiloWork]) -> list[list[SiloWork]]:
        """What one order takes, the costliest last: the last is taken first.

        On a core that is one silo, on GPUs a share that takes about as long as others.
        """
        cost = partial(self._costs.of, job, task)
        if self._resource == "GPU":
            return shares(work, cost, max(1, self.wanted))
        return [[one] for one in sorted(work, key=cost)]

    def _top_up(self) -> None:
        """Start actors for cores that are new, or whose actors died."""
        for _ in range(self.wanted - len(self._idle) - len(self._starting)):
            member = _Member(self._worker.remote(*self._arguments))
            self._starting[member.actor.software.remote()] = member

    def _ordered(
        self, member: _Member, job: Job, task: Task, round_: int, batch: list[SiloWork]
    ) -> Ref:
        # Each actor gets a job once, not with every silo; what it has cached does not cross.
        if member.job is not job:
            member.actor.begin.remote(bytes(packed(replace(job))))
            member.job = job
        # States are in memory only while they are sent.
        loaded = [one.loaded() for one in batch]
        return member.actor.carry_out.remote(task, round_, bytes(packed(loaded)))

    def _ready(self, running: Mapping[Ref, object]) -> list[Ref]:
        """Wait for something: the orders that are done; actors that have started become idle."""
        if not running and not self._starting:
            self._top_up()
        asked = [*running, *self._starting]
        limit = None if running else STARTING_SECONDS
        ready, _ = self._ray.wait(asked, timeout=limit) if asked else ([], [])
        if not ready:
            raise LocalError(
                f"the Ray cluster has no {self._resource} that is free: {self.wanted} were wanted,"
                f" and none was to be had in {STARTING_SECONDS:g} s; wait until other work on it"
                " ends, or add a machine"
            )
        for ref in [ref for ref in ready if ref in self._starting]:
            member, there = self._starting.pop(ref), self._answer(ref)
            if isinstance(there, _Gone):
                self._lose(member, "no silo yet", there)
            else:
                _check_alike(there)
                self._idle.append(member)
        return [ref for ref in ready if ref in running]

    def _answer(self, ref: Ref) -> Any:
        """What an actor answered, or that it is gone, or its machine."""
        gone = self._ray.exceptions
        try:
            answer = self._ray.get(ref)
        except (gone.RayActorError, gone.ObjectLostError) as error:
            return _Gone(str(error).strip())
        return ForkingPickler.loads(answer) if isinstance(answer, bytes) else answer

    def _lose(self, member: _Member, had: str, gone: "_Gone") -> None:
        """Give up an actor; LocalError where what it had has cost several of them already."""
        # It may only be out of reach; it must not keep a core.
        self._ray.kill(member.actor)
        self._deaths[had] += 1
        if self._deaths[had] >= MOST_DEATHS:
            raise LocalError(
                f"{MOST_DEATHS} Ray actors died that had {had}, as they do where memory runs out,"
                f" or Staddle is not installed on each machine. The last one: {gone.why}"
            )


def _sort(
    answer: Mapping[str, Outcome] | LocalError,
    found: dict[str, Outcome],
    faults: list[LocalError],
    done: Callable[[], None],
) -> None:
    if isinstance(answer, LocalError):
        faults.append(answer)
        return
    found.update(answer)
    for _ in answer:
        done()


@dataclass(frozen=True)
class _Gone:
    why: str


def _software() -> dict[str, str]:
    return {name: version(name) for name in SOFTWARE}


def _check_alike(there: Mapping[str, str]) -> None:
    for name, own in _software().items():
        if there[name] != own:
            raise LocalError(
                f"a machine of the Ray cluster has {name} {there[name]}, and this one {own}: the"
                " bits may differ; install the same versions everywhere"
            )


def _connected(address: str | None) -> Any:
    """Ray, connected; LocalError where that fails."""
    # Nothing is sent to Ray's makers, and whoever has no token runs no code on the cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # On a busy machine workers would wait for all that is not as nice as Ray makes them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise LocalError(
            "--engine ray needs Ray, which is not installed: pip install 'staddle[ray]'"
        ) from error
    try:
        if address is not None:
            # Ray would ask for many minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), REACHED_SECONDS).close()
        with _own_signals():
            ray.init(
                address or "local",
                include_dashboard=False if address is None else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise LocalError(
            f"no Ray cluster {where}: {error}; docs/simulate.md says how one is begun"
        ) from error
    except Exception as error:
        # Ray has no class of its own for this. What else it raises is a mistake, and not hidden.
        if LATE not in str(error):
            raise
        raise LocalError(
            "no Ray cluster on this machine: its processes did not start within Ray's 30 s, as"
            " where the machine is busy or short of memory; run the same command when it has less"
            " to do, or without --engine ray"
        ) from error
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; afterwards it is ours again, so that a run is saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
