"""Trainer processes apart from the agent, which alone has keys, policy, ledger and the way out.

The agent writes an order (order.py), runs a command that computes it, and reads what came of it.
The processes have no key, no account and no address of the coordinator, neither in what they are
given nor in their environment. Whoever runs them as another user, or in a container, keeps them
from the agent's files and from the network, too (docs/train-apart.md).

::

    pay      a private round, out of the data set's budget: before anything reads its records
    order    a folder of this round alone
    run      the command; a stop ends it, and it ends with the agent
    check    what it wrote
    remove   the folder, whatever came of it

A process that is killed, or that runs out of memory, costs this silo the round and nothing else.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import log
from ...algorithms.data.lazy import LazyRecords
from ...algorithms.training.accountant import ReservedSteps
from ...algorithms.training.paid_ahead import PaidAhead, pay
from ...algorithms.training.silo_round import RoundOutcome, check_delivered
from ...errors import CancelledError, LocalError, UnwritableError, reason
from ...files.documents import unwritable
from ..config import SiloConfig
from .order import LOG, OUTCOME, DeviceTable, OrderFolder
from .serving import TIED
from .trainer import MAX_TEXT, SiloRound, TrainingDevice, TrainingPlace

LOOK_SECONDS = 0.2  # between two looks whether to stop
# for a launcher to end what it began, before it is killed
GRACE_SECONDS = 10.0
PROGRAM = ("-m", "staddle.silo.training", "{order}", TIED)
PROCESS = (sys.executable, *PROGRAM)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--max-restarts=0"),
    # It meets in a file. By its --standalone it would listen on all addresses of this machine, and
    # run what anybody sends there.
    *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-endpoint={order}/torchrun"),
    *("--rdzv-id=order", "--local-addr=127.0.0.1", "--log-dir={order}"),
)
OF_TORCHRUN = {
    # Nor does it listen for the processes, which meet in a file, too (ranks.py).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # seconds until it kills what a stop does not end; far fewer than it has itself
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
}

# Memory of weights that were gathered goes back at once. Else glibc keeps what is below 32 MiB, in
# pieces that the next weight may not fit into.
OF_SHARDED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

GPUS = "CUDA_VISIBLE_DEVICES"

# What a trainer sees of the agent's environment, by the whole name or its beginning. Anything else
# may be a secret, such as a database's password.
NAMES = frozenset(
    ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
)
FAMILIES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")


def place_of(config: SiloConfig) -> TrainingPlace:
    """Where this silo trains; LocalError for a device that this machine lacks.

    Of trainers apart from the agent it asks for no device: they may be on another machine.
    """
    own = config.training
    if own.launcher == "thread":
        return TrainingDevice(own.device, own.precision, graphs=own.graphs)
    place = processes(config)
    place.check()
    place.clear()
    return place


def processes(config: SiloConfig) -> "TrainerProcesses":
    """The trainer processes of a configuration whose launcher is no thread."""
    own = config.training
    torchrun = (*TORCHRUN, f"--nproc-per-node={own.processes}", *PROGRAM)
    return TrainerProcesses(
        {"process": PROCESS, "torchrun": torchrun}.get(own.launcher, own.command),
        own.orders,
        DeviceTable.model_validate(own, from_attributes=True),
        {name: source.model_dump(mode="json") for name, source in config.sources.items()},
        config.dataset,
        own.environment,
        dealt(own.gpus, own.jobs),
    )


def dealt(gpus: Sequence[str], jobs: int = 1) -> deque[dict[str, str]]:
    """What the environment of each trainer at a time says of GPUs; nothing where none are named."""
    return deque([{GPUS: name} for name in gpus] or [{}] * jobs)


@dataclass(frozen=True)
class TrainerProcesses:
    """Computes each round by a command: a ``TrainingPlace``.

    In ``command``, {order} stands for the order's folder, which is made in ``orders``. ``sources``
    are the tables of the data sets, of which ``dataset`` is that of a job that names none.
    """

    command: tuple[str, ...]
    orders: Path
    on: DeviceTable
    sources: Mapping[str, dict[str, Any]]
    dataset: str
    environment: tuple[str, ...] = ()
    free: deque[dict[str, str]] = field(default_factory=partial(dealt, ()))

    def check(self) -> None:
        """LocalError for a command that is not there."""
        if shutil.which(self.command[0]) is None:
            raise LocalError(
                f"training.command: no program {self.command[0]!r}; install it, or name it by its"
                " whole path"
            )

    def clear(self) -> None:
        """Remove the orders of an agent that was killed: they have records."""
        for folder in self.orders.glob("order-*"):
            _removed(folder)

    def outcome(self, asked: SiloRound) -> RoundOutcome:
        """Have a round computed, and check what came of it."""
        # Before it is paid for: what cannot be trained must cost nothing.
        self.check()
        check_delivered(asked.of.job, asked.round, asked.delivered)
        paid, spending = self._paid(asked)
        with self._folder() as folder, self._gpus() as gpus:
            folder.put(asked, self.on, paid, self._source(asked))
            self._run(folder, asked.cancelled, gpus)
            outcome, taken = folder.outcome(asked)
        # What it did not take is free again, once the round is kept.
        for purpose, steps in taken.items():
            for _ in range(steps):
                _of_private(spending).take(purpose)
        return replace(outcome, spending=spending)

    @staticmethod
    def _paid(asked: SiloRound) -> tuple[PaidAhead | None, ReservedSteps | None]:
        if asked.private is None:
            return None, None
        return pay(asked.of.job, asked.silo, asked.round, asked.of.train, asked.private)

    def _source(self, asked: SiloRound) -> dict[str, Any] | None:
        """The table of the job's data set, where records are read when they are used."""
        if isinstance(asked.of.train.x, LazyRecords):
            return self.sources[asked.of.job.dataset or self.dataset]
        return None

    @contextmanager
    def _folder(self) -> Iterator[OrderFolder]:
        """A folder that ends with the block, of the mode of the folder that it is in."""
        try:
            self.orders.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.orders / f"order-{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            # Who lets another user train opens the folder of orders to that user.
            mode = self.orders.stat().st_mode & 0o2770
            path.chmod(mode)
        except OSError as error:
            raise UnwritableError(f"{self.orders}: cannot make it: {unwritable(error)}") from error
        try:
            yield OrderFolder(path, mode & 0o660)
        finally:
            _removed(path)

    def _run(
        self, folder: OrderFolder, cancelled: Callable[[], bool], gpus: Mapping[str, str]
    ) -> None:
        """Run the command to its end, on these GPUs.

        CancelledError once ``cancelled()`` holds, LocalError where it left no outcome.
        """
        words = [word.replace("{order}", str(folder.path.resolve())) for word in self.command]
        log_file = folder.path / LOG
        with log_file.open("wb") as printed:
            try:
                process = subprocess.Popen(  # noqa: S603 the command of the silo's own people
                    words,
                    # What is tied to it ends with this process, however that ends.
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env={**self._environment(), **gpus},
                    # So that a stop reaches all that the command began.
                    start_new_session=True,
                )
            except OSError as error:
                raise LocalError(f"{words[0]}: cannot be started: {reason(error)}") from error
        try:
            while not _ended(process, LOOK_SECONDS):
                if cancelled():
                    raise CancelledError("the trainer was stopped, as asked")
        finally:
            _stop(process)
        if not (folder.path / OUTCOME).exists():
            raise LocalError(f"the trainer {_why(process.returncode)}{_printed(log_file)}")

    @contextmanager
    def _gpus(self) -> Iterator[dict[str, str]]:
        """GPUs that no other trainer has until the block ends."""
        # There is one for each job that trains at a time (silo/config.py).
        own = self.free.popleft()
        try:
            yield own
        finally:
            self.free.append(own)

    def _environment(self) -> dict[str, str]:
        known = NAMES.union(self.environment)
        seen = {
            name: value
            for name, value in os.environ.items()
            if name in known or name.startswith(FAMILIES)
        }
        if self.on.shard:
            seen |= OF_SHARDED
        return seen | OF_TORCHRUN


def _of_private(spending: ReservedSteps | None) -> ReservedSteps:
    if spending is None:
        raise LocalError("the trainer took steps for which nothing was set aside")
    return spending


def _removed(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.problem("order.left", folder=str(folder), why="cannot be removed; it holds records")


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it began; nothing for one that has ended."""
    if process.stdin is not None:
        process.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        # A launcher may have left processes behind, whose group has its id.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        if _ended(process, GRACE_SECONDS):
            return


def _why(code: int) -> str:
    """How a process ended that left no outcome."""
    if code >= 0:
        return f"ended with code {code} and left no outcome"
    name = signal.Signals(-code).name
    freed = ", as Linux does where memory runs out; lower the batch size, or free memory"
    return f"was ended by {name}{freed if name == 'SIGKILL' else ''}"


def _printed(path: Path) -> str:
    """The end of what a trainer printed, for the silo's own log."""
    text = path.read_bytes()[-MAX_TEXT:].decode(errors="replace").strip()
    return f"; it printed: {text}" if text else ""
