"""Steps that a device replays: a step's kernels are recorded once and then replayed without Python.

A step of a small network is many short kernels, and launching them one by one takes longer than
they do. A recorded step works on tensors at fixed addresses: inputs have to be copied there, and
nothing in the step may wait for the device, or bring anything to it from the host.

``Replaying`` trains one silo so, for small models; a large model trains as with ``PlainStepper``.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Size, Tensor, device

from ...errors import LocalError
from ..course import Stage
from ..numerics.devices import CPU, Precision
from ..training.loop import Modules, PlainStepper, Step, Stepper

WARM_CALLS = 2  # before it is recorded: libraries set up their workspaces in the first
STREAMS = 5  # on which a graph computes in parallel; measured (docs/performance.md)

T = TypeVar("T")
Run: TypeAlias = Callable[..., Tensor]


class Recorder(Protocol):
    """Records runs on a device.

    Call ``warm`` a few times before ``record``. Tensors that a recorded run reads or writes must
    stay at their addresses.
    """

    def warm(self, run: Callable[[], Tensor]) -> Tensor:
        """Run without recording, on the stream on which the run will be recorded.

        The caller's stream may use the result.
        """
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a run; the result repeats it on the same tensors.

        Recording need not compute anything.
        """
        ...

    def parallel(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of runs that do not depend on each other.

        The device may compute them at the same time; whatever follows waits for all.
        """
        ...


class Graphs:
    """CUDA graphs, all in one pool of memory: one is replayed at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._index = self._device.index or 0
        self._stream, *self._beside = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in range(1 + STREAMS)
        )
        self._pool = torch.cuda.graph_pool_handle()
        # An empty graph keeps the pool: a pool ends with its last graph, and cannot begin again.
        self._anchor = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with (
            warnings.catch_warnings(action="ignore", category=UserWarning),
            self._recording(self._anchor),
        ):
            pass

    def warm(self, run: Callable[[], Tensor]) -> Tensor:
        """Run on the stream that records.

        The caller's stream waits for it, even if the run fails.
        """
        current = torch.cuda.current_stream(self._device)
        # The run may read what the caller's stream is still writing.
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                result = run()
        finally:
            current.wait_stream(self._stream)
        # The result's memory must not be reused before the caller's stream has read it.
        result.record_stream(current)
        return result

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a run without computing it; LocalError where it cannot be recorded.

        OutOfMemoryError if memory runs out even with an empty cache.
        """
        graph = self._recorded(run)
        # While a stream records, memory that is cached on others cannot be reused: free it first.
        if graph is None:
            torch.cuda.empty_cache()
            graph = self._recorded(run)
        if graph is None:
            raise torch.OutOfMemoryError(
                f"a step cannot be recorded, {self._device} has too little memory left"
            )
        return graph.replay

    def parallel(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """Run on a few streams that branch off the current one, in turn, and join it again.

        A graph that is recorded meanwhile has a branch per stream.
        """
        current = torch.cuda.current_stream(self._device)
        streams = self._beside[: len(runs)]
        for stream in streams:
            stream.wait_stream(current)
        try:
            results: list[T] = []
            for run, stream in zip(runs, cycle(streams), strict=False):
                with torch.cuda.stream(stream):
                    results.append(run())
        except BaseException:
            # Memory is given back now, which the streams may still read. An invalid recording
            # cannot be joined; the error that made it so is the one to tell.
            with suppress(RuntimeError):
                self._join(current, streams)
            raise
        self._join(current, streams)
        return results

    def _join(self, current: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> None:
        for stream in streams:
            current.wait_stream(stream)

    def _recorded(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph of a run; None where memory ran out."""
        # As torch.cuda.graph does it; and what failed before is not the recording's fault.
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._recording(graph):
                run()
        # The caller frees cached memory and tries again.
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            raise LocalError(
                f"a step cannot be recorded as a CUDA graph: {error}; turn graphs off (--no-graphs,"
                " or at a silo training.graphs = false)"
            ) from error
        return graph

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record on the stream, as ``torch.cuda.graph`` does."""
        # torch.cuda.graph also frees all cached memory, which is too slow for each stage. Garbage
        # is not collected meanwhile: a graph among it would end in the middle of this one.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    # it is not whole, and may end before its pool does
                    with suppress(RuntimeError):
                        graph.capture_end()
                    with suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(self._index, self._pool)  # noqa: SLF001 torch.cuda.graph lacks it
                        torch._C._cuda_releasePool(self._index, self._pool)  # noqa: SLF001
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()


class AsItIs:
    """Records nothing: every call launches its kernels one by one, with the same results.

    It is for CPUs, and for GPUs with --no-graphs.
    """

    def warm(self, run: Callable[[], Tensor]) -> Tensor:
        """Run it."""
        return run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """The run itself."""
        return run

    def parallel(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """One run after another."""
        return [run() for run in runs]


class Replayed:
    """A function of tensors of fixed shapes that returns one tensor.

    It may also read and write other tensors, which stay at their addresses. The first
    ``WARM_CALLS`` calls run it, the next one records it, and from then on it is replayed.
    """

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self._run, self._recorder, self._calls = run, recorder, 0
        self._given: list[Tensor] = []
        self._result = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def __call__(self, *given: Tensor) -> Tensor:
        """The function's result, which the next call may overwrite.

        All calls must have arguments of the same shapes and dtypes.
        """
        if self._calls < WARM_CALLS:
            self._calls += 1
            return self._recorder.warm(lambda: self._run(*given))
        if self._replay is None:
            # A recording always reads from the addresses that it was recorded with.
            self._given = [tensor.clone() for tensor in given]
            self._replay = self._recorder.record(self._again)
        _copy(self._given, given)
        self._replay()
        return self._result

    def forget(self) -> None:
        """Drop the recording, which may refer to this object; no call follows."""
        self._given, self._result, self._replay = [], torch.empty(0), None

    def _again(self) -> None:
        self._result = self._run(*self._given)


def _copy(there: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    for one, other in zip(there, here, strict=True):
        one.copy_(other)


SMALL_BYTES = 64 * 2**20  # of parameters; ResNet-18 takes 45 MB


class Replaying(PlainStepper):
    """Like ``PlainStepper``, with the same bits: from the third step on, steps are replayed.

    Models with more than ``SMALL_BYTES`` of parameters are not replayed.
    """

    def __init__(
        self, recorder: Recorder, precision: Precision = "float32", hidden: bool = False
    ) -> None:
        super().__init__(precision, hidden)
        self._recorder = recorder

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on one batch."""
        step = super().begin(modules, stage)
        if sum(p.nbytes for module in modules.values() for p in module.parameters()) > SMALL_BYTES:
            return step
        # A recording has one shape, and an epoch's last batch may be smaller.
        known: dict[Size, Replayed] = {}  # by the shape of x

        def replayed(x: Tensor, y: Tensor) -> Tensor:
            if x.shape not in known:
                known[x.shape] = Replayed(step, self._recorder)
            # Cloned, since the next replay overwrites the loss before it is read.
            return known[x.shape](x, y).clone()

        return replayed


def way_on(
    device: device,
    precision: Precision = "float32",
    *,
    graphs: bool = True,
    hidden: bool = False,
) -> Stepper:
    """The stepper for silos one by one on a device, in a precision that the device has.

    What is drawn at random is ``hidden`` from whoever knows the job.
    """
    if device == CPU:
        # Graphs save launches of kernels, which a CPU does not have.
        return PlainStepper(hidden=hidden)
    if not graphs:
        return PlainStepper(precision, hidden)
    return Replaying(Graphs(str(device)), precision, hidden)
