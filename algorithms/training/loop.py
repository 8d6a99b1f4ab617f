"""The one local loop: epochs, batches, optimiser and evaluation of one silo.

Which records a step takes, and what it does with them, is an argument: ``PLAIN`` here, dp_sgd.py
for differentially private training. A step is begun once per stage, so optimiser state never
outlives a stage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import ceil, isfinite, prod
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import CancelledError, LocalError
from ..course import LastBatch, Measurement, Optimiser, Stage, records_taken
from ..data.dataset import Dataset, batches_of, calls_of, chunks_of
from ..method import Method
from ..models.foreign import draws_randomly, traits_of
from ..numerics.devices import Precision, casting, channels_last, device_of, multiplying
from ..numerics.streams import permutation, secret_stream
from ..numerics.torch_draws import drawing
from ..tasks.counting import Counting, Marks, Tally, gathered
from .optimisers import clipped, move

EVALUATION_CHUNK = 512  # records of a call in evaluation mode
DENSE_FEATURES = 64  # of a position, about
EVALUATION_BYTES = 2**26  # of such a call's records: a volume may have millions of values

Modules: TypeAlias = Mapping[str, nn.Module]
# is told of an evaluation: the counts, and the marks that they were counted from
Note: TypeAlias = Callable[[Tally, Mapping[str, Sequence[Marks]]], None]
T = TypeVar("T")


# trains one batch (x [B, …], y [B]) in place and returns its loss []
Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Stepper(Protocol):
    """A way to train a stage.

    ``begin`` is called once per stage, then ``draws`` where it draws at random, ``batches`` once
    per epoch, and the step for each batch.
    """

    def batches(
        self, stage: Stage, records: int, batch_size: int, rng: np.random.Generator, wrap: bool
    ) -> Iterable[NDArray[np.int64]]:
        """Indices of the records of each step of one epoch, in turn.

        Each is [B] int64. ``wrap`` asks for a last batch that is as long as the others, where the
        stage does not say what becomes of it: batch norm gives another result on shorter ones.
        """
        ...

    def steps(self, stage: Stage, records: int, batch_size: int) -> int:
        """Steps of one epoch.

        It is known without drawing a batch.
        """
        ...

    def draws(self, of_job: np.random.Generator) -> np.random.Generator:
        """What random layers and augmentation of a stage draw by; ``of_job`` is the job's."""
        ...

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """Begin the stage with fresh optimiser state.

        The step trains the modules in place. In plain training it returns the batch's mean loss [],
        penalty included.
        """
        ...


def never() -> bool:
    """The default of ``cancelled``: no request to stop."""
    return False


def silent(done: int, total: int) -> None:
    """No progress shown.

    It is the default of ``progress``, and takes the number of batches done and their total.
    """


def unnoted(tally: Tally, marks: Mapping[str, Sequence[Marks]]) -> None:
    """The default of ``note``: nobody needs the marks."""


def batches(
    n: int,
    batch_size: int,
    rng: np.random.Generator,
    wrap: bool,
    last: LastBatch | None = None,
    shuffle: bool = True,
) -> list[NDArray[np.int64]]:
    """Indices of one epoch's batches [B] int64: in a drawn order, or without ``shuffle`` from 0 on.

    The last batch is as ``records_taken`` says. It is filled up with records from the start of the
    same order.
    """
    # Not NumPy's shuffle, which may change between releases (``numerics.streams``).
    order = permutation(rng, n) if shuffle else np.arange(n)
    # np.resize repeats the order from its start; ndarray.resize would fill up with zeros
    order = np.resize(order, records_taken(n, batch_size, last, wrap))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def at_least_float32(losses: Tensor) -> Tensor:
    """Losses of records in a type in which many of them can be added up.

    bfloat16 becomes float32; float32 and float64 stay.
    """
    return losses.to(torch.promote_types(losses.dtype, torch.float32))


def batch_coupled(modules: Modules) -> bool:
    """True if a record's output depends on the other records of its batch.

    That is so with batch norm: in training it uses the statistics of the batch.
    """
    return next(batch_norms(modules), None) is not None


def batch_norms(modules: Modules) -> Iterator[_BatchNorm]:
    """All layers of batch norm.

    Layers inside other layers are included.
    """
    for leaf in chain.from_iterable(module.modules() for module in modules.values()):
        if isinstance(leaf, _BatchNorm):
            yield leaf


class PlainStepper:
    """Training without differential privacy, on all records in batches.

    It moves by the stage's optimiser on the mean of the losses plus the stage's penalty. A
    ``precision`` other than float32 is for GPUs, and keeps convolutions channels last. What is
    drawn at random is ``hidden`` from whoever knows the job. It has no state, so one object can
    serve all silos.
    """

    def __init__(self, precision: Precision = "float32", hidden: bool = False) -> None:
        self._precision, self._hidden = precision, hidden

    def batches(
        self, stage: Stage, records: int, batch_size: int, rng: np.random.Generator, wrap: bool
    ) -> Iterable[NDArray[np.int64]]:
        """Indices of one epoch's batches; one batch of all records where the stage wants that."""
        # One batch of all records needs no shuffle.
        if stage.full_batch:
            return [np.arange(records)]
        return batches(records, batch_size, rng, wrap, stage.last, stage.shuffle)

    def steps(self, stage: Stage, records: int, batch_size: int) -> int:
        """Steps of one epoch: one per batch."""
        taken = records_taken(records, batch_size, stage.last)
        return 1 if stage.full_batch else ceil(taken / batch_size)

    def draws(self, of_job: np.random.Generator) -> np.random.Generator:
        """The job's stream, by which simulations and federations draw the same, or a secret one."""
        return secret_stream() if self._hidden else of_job

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on one batch, with fresh optimiser state."""
        device, precision = device_of(modules.values()), self._precision
        # ``Module.to`` takes one layout, and fails where images and volumes meet.
        for parameter in nn.ModuleList(modules.values()).parameters():
            parameter.data = channels_last(parameter.data, precision)
        # Only the parts that the stage trains.
        parameters = [p for part in stage.trains for p in modules[part].parameters()]
        memory: list[Tensor] = []

        def whole(x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            with casting(device, precision):
                losses = stage.loss(modules, x, y, stage.context)  # [B]
            # bfloat16 is too coarse for a sum of many losses.
            loss = at_least_float32(losses).mean()
            if stage.penalty is not None:
                loss = loss + stage.penalty(parameters_of(modules), stage.context)
            # Parameters that the loss does not reach, such as an unused head's, get gradient 0.
            return loss, torch.autograd.grad(loss, parameters, materialize_grads=True)

        def in_pieces(x: Tensor, y: Tensor, rows: int) -> tuple[Tensor, Sequence[Tensor]]:
            total, sums = torch.zeros((), device=device), list(map(torch.zeros_like, parameters))
            for xs, ys in zip(torch.split(x, rows), torch.split(y, rows), strict=True):
                with casting(device, precision):
                    losses = stage.loss(modules, xs, ys, stage.context)
                loss = at_least_float32(losses).sum() / len(x)
                found = torch.autograd.grad(loss, parameters, materialize_grads=True)
                torch._foreach_add_(sums, found)
                total = total + loss.detach()
            # It depends on no record, so it is added once.
            if stage.penalty is not None:
                penalty = stage.penalty(parameters_of(modules), stage.context)
                found = torch.autograd.grad(penalty, parameters, materialize_grads=True)
                torch._foreach_add_(sums, found)
                total = total + penalty.detach()
            return total, sums

        def step(x: Tensor, y: Tensor) -> Tensor:
            with multiplying(precision):
                if stage.rows is None or len(x) <= stage.rows:
                    loss, gradients = whole(x, y)
                else:
                    loss, gradients = in_pieces(x, y, stage.rows)
                loss, gradients = self._joined(loss, gradients)
                updates = clipped(gradients, stage.optimiser.clip)
                move(parameters, updates, memory, stage.optimiser)
            return loss.detach()

        return step

    def _joined(self, loss: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Loss and gradients of the whole batch, where this process computed a share of it."""
        return loss, gradients


PLAIN = PlainStepper()


def parameters_of(modules: Modules) -> dict[str, dict[str, nn.Parameter]]:
    """The modules' own parameters by part, for a stage's penalty."""
    return {part: dict(module.named_parameters()) for part, module in modules.items()}


def placed(stage: Stage, device: torch.device) -> Stage:
    """The stage with its context on a device.

    The stage itself is not changed.
    """
    return replace(
        stage, context={name: tensor.to(device) for name, tensor in stage.context.items()}
    )


def check_trains(modules: Modules, stage: Stage) -> None:
    """LocalError unless the stage trains parts of the model.

    It must name at least one part, and none that the model lacks.
    """
    if set(stage.trains) - set(modules) or not stage.trains:
        raise LocalError(
            f"a stage trains {list(stage.trains)}, the model has parts {list(modules)}"
        )
    if stage.coupled and stage.rows is not None:
        raise LocalError(
            "the method's loss depends on all records of a batch at once; take"
            " training.physical_batch out, or choose another method"
        )


def check_loss(loss: float, optimiser: Optimiser) -> None:
    """LocalError where a batch's loss is not finite.

    The text says which options to lower.
    """
    if not isfinite(loss):
        raise LocalError(
            f"the training loss is {loss}; lower training.lr ({optimiser.lr}) or momentum, or clip"
            " gradients (training.clip)"
        )


def train(
    modules: Modules,
    stage: Stage,
    data: Dataset,
    batch_size: int,
    rng: np.random.Generator,
    way: Stepper = PLAIN,
    cancelled: Callable[[], bool] = never,
    progress: Callable[[], None] = lambda: None,
    draws: np.random.Generator | None = None,
) -> float:
    """Run one stage in place and return the mean training loss of its last epoch.

    ``draws`` is the job's stream for modules and augmentation that take random numbers. Raises
    CancelledError between two batches once ``cancelled()`` holds, LocalError where the loss is not
    finite.
    """
    check_trains(modules, stage)

    # A part that is only read must not change: in training mode its batch norm would take up the
    # records' statistics, and its dropout would drop.
    for part, module in modules.items():
        module.train(part in stage.trains)
        # Parts that are only read need no gradients.
        module.requires_grad_(part in stage.trains)
    wrap = batch_coupled(modules)
    device, mean = device_of(modules.values()), 0.0
    step = way.begin(modules, placed(stage, device))
    drawn, augment = _draws(modules, stage, draws, way), stage.augment or _as_it_is
    for _ in range(stage.epochs):
        # Each epoch draws its own order from the same generator, if the stage shuffles.
        step_losses: list[Tensor] = []
        batches = way.batches(stage, len(data), batch_size, rng, wrap)
        for x, y in stoppable(batches_of(data, batches, device), cancelled):
            with drawn():
                step_losses.append(step(*augment(x, y)))
            progress()

        # Reading a loss waits for the GPU, so all losses of an epoch are read at once.
        losses: list[float] = torch.stack(step_losses).tolist()
        for loss in losses:
            check_loss(loss, stage.optimiser)
        mean = sum(losses) / len(losses)
    for module in modules.values():
        module.eval()
    return mean


def stoppable(pieces: Iterable[T], cancelled: Callable[[], bool]) -> Iterator[T]:
    """The pieces of some work in turn; CancelledError between two once ``cancelled()`` holds."""
    for piece in pieces:
        if cancelled():
            raise CancelledError("stopped between two batches, as asked")
        yield piece


def _as_it_is(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def _draws(
    modules: Modules, stage: Stage, draws: np.random.Generator | None, way: Stepper
) -> Callable[[], AbstractContextManager[None]]:
    """The context of each step, in which layers and augmentation take random numbers."""
    if stage.augment is None and not draws_randomly(modules):
        return nullcontext
    if draws is None:
        raise LocalError("what draws needs a stream to draw by; this is a bug in Staddle")
    return partial(drawing, way.draws(draws))


@torch.no_grad()
def measure(
    measurement: Measurement,
    modules: Modules,
    data: Dataset,
    rows: bool = False,
    cancelled: Callable[[], bool] = never,
) -> dict[str, Tensor]:
    """A measurement's sums over the records, or its ``rows``, in float64 on the host.

    The modules are put in evaluation mode. CancelledError between two calls once ``cancelled()``
    holds.
    """
    # In training mode batch norm would take these records into its statistics.
    for module in modules.values():
        module.eval()
    found: dict[str, list[Tensor]] = {}
    device = device_of(modules.values())
    chunks = chunks_of(data, evaluation_chunk(data.x.shape, modules), device)
    for chunk in stoppable(chunks, cancelled):
        for name, value in measurement(modules, *chunk).items():
            found.setdefault(name, []).append(value.double())

    measured: dict[str, Tensor] = {}
    for name, values in found.items():
        # One chunk after another, as the stacked engine adds them up too.
        whole = torch.cat(values) if rows else sum(values[1:], values[0])
        measured[name] = whole.cpu()
    return measured


def evaluation_chunk(shape: Sequence[int], modules: Modules) -> int:
    """How many records, of a set of this shape [N, …], are evaluated per call."""
    # With outputs for each position, all layers have numbers for each.
    features = (1, DENSE_FEATURES)[traits_of(modules).dense]
    own = prod(shape[1:]) * torch.float32.itemsize * features
    return min(EVALUATION_CHUNK, max(1, EVALUATION_BYTES // max(1, own)))


def evaluate(
    method: Method,
    modules: Modules,
    data: Dataset,
    counting: Counting,
    rows: int | None = None,
    cancelled: Callable[[], bool] = never,
    note: Note = unnoted,
) -> Tally:
    """The counts of the silo's model on its records, in evaluation mode.

    CancelledError between two calls once ``cancelled()`` holds. ``rows`` as in ``marked``.
    """
    marks = marked(method.predict, modules, data, counting, rows, cancelled)
    tally = counting.count(marks, [data.y.cpu().numpy()])
    note(tally, marks)
    return tally


@torch.no_grad()
def marked(
    predict: Callable[[Modules, Tensor], Tensor],
    modules: Modules,
    data: Dataset,
    counting: Counting,
    rows: int | None = None,
    cancelled: Callable[[], bool] = never,
) -> dict[str, list[Marks]]:
    """What is counted of each record, piece by piece, of a model in evaluation mode.

    With ``rows`` every call has that size, so that no record's outputs depend on the number of
    records: matrix products round otherwise in calls of other sizes (clipped_sum.py).
    """
    for module in modules.values():
        module.eval()
    device = device_of(modules.values())
    calls: Iterable[tuple[Tensor, Tensor, int]]
    if rows is None:
        chunks = chunks_of(data, evaluation_chunk(data.x.shape, modules), device)
        calls = ((x, y, len(x)) for x, y in chunks)
    else:
        # Calls of one size: rows that fill up the last one are not counted.
        calls = calls_of(data, rows)
    marks = [
        (counting.marks(predict(modules, x), y), records)
        for x, y, records in stoppable(calls, cancelled)
    ]
    found = gathered(counting)
    # Only now, since reading marks waits for the GPU.
    for own, records in marks:
        for name, mark in own.items():
            found[name].append(mark[:records].cpu().numpy())
    return found
