"""A worker process: it trains the silos that it is told to, one after another at one thread, and ends with its parent.

Orders and answers take turns on one pipe. An order comes with a job where it is of another job than the order before.
The answer is what the engine in this process gives, or the LocalError that it raises; any other error is a mistake in
the program, and ends the process.
"""

import copyreg
import io
import os
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.engines.engine import Serial, Work
from ...algorithms.engines.simulation import nothing
from ...algorithms.job.job import Job
from ...algorithms.training.silo_round import Look, Outcome
from ...errors import LocalError, StaddleError
from .shared_memory import mapped

Task: TypeAlias = Literal["train", "look"]
Answer: TypeAlias = Outcome | Look | LocalError
Line: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True, eq=False)
class Order:
    """One silo to train or to look at; without a job it is of the one before."""

    job: Job | None
    task: Task
    round: int
    work: Work


def serve(line: Line, records: int, table: int) -> None:
    """Carry out orders until the parent is gone; ``records`` and ``table`` are as ``mapped`` takes them."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    held = mapped(records, table)
    engine: Serial | None = None
    try:
        while True:
            order: Order = receive(line)
            if order.job is not None:
                engine = Serial(order.job, held)
            if engine is None:
                raise LocalError("a worker process has an order and no job; this is a bug in Staddle")
            send(line, _answer(engine, order))
    except (EOFError, ConnectionError):
        return


def _answer(engine: Serial, order: Order) -> Answer:
    try:
        if order.task == "train":
            return engine.train(order.round, (order.work,), nothing)[order.work.silo]
        return engine.look(order.round, (order.work,), nothing)[order.work.silo]
    except LocalError as error:
        return error
    except StaddleError as error:  # its class may take more than a text, which is all that crosses
        return LocalError(str(error))


def _end_with_parent() -> None:
    """A parent that was killed leaves no word, and the training at hand may take long."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def send(line: Line, message: Order | Answer) -> None:
    """Put a message on the pipe."""
    buffer = io.BytesIO()
    _ByValue(buffer).dump(message)
    line.send_bytes(buffer.getbuffer())


def receive(line: Line) -> Any:
    """The next message; EOFError or ConnectionError where the other end is gone."""
    return ForkingPickler.loads(line.recv_bytes())


class _ByValue(ForkingPickler):
    """Tensors cross as their values: torch would put each into a file of shared memory of its own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}


def _reduced(tensor: Tensor) -> tuple[Any, tuple[NDArray[Any]]]:
    return _made, (tensor.detach().contiguous().numpy(),)


def _made(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.atleast_1d(values)).reshape(values.shape).clone()  # clone: aligned as torch's own
