import gc

import pytest
import torch
from support.op_tape import Recorder
from support.refusals import refused

from staddle.algorithms.engines import cuda_graphs as replay
from staddle.algorithms.engines.cuda_graphs import STREAMS, AsItIs, Graphs, Replayed


@pytest.mark.parametrize("recorder", [Recorder(), AsItIs()])
def test_what_stays_is_worked_on_and_what_is_given_changes(recorder):
    total, calls = torch.zeros(3), []

    def add(x, y):
        calls.append(None)
        total.add_(x * y)
        return total.sum()

    run = Replayed(add, recorder)
    sums = [float(run(torch.full((3,), float(n)), torch.ones(3))) for n in range(1, 7)]
    assert sums == [3, 9, 18, 30, 45, 63]
    assert total.tolist() == [21.0] * 3
    if isinstance(recorder, Recorder):
        assert (recorder.warmed, recorder.recorded, recorder.replayed, len(calls)) == (2, 1, 4, 3)


def fail():
    raise RuntimeError("the capture is invalid")


class Cuda:
    """CUDA's part, without a GPU: what a graph is told, and by whom."""

    def __init__(self, monkeypatch):
        self.said, self.on, self.waits, cuda = [], [], [], self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                cuda.said.append(f"begin in {pool} {capture_error_mode}, garbage {gc.isenabled()}")

            def capture_end(self):
                cuda.said.append("end")
                if "fault" in cuda.said:
                    raise RuntimeError("the capture is invalid")

            def replay(self):
                cuda.said.append("replay")

        class Stream:
            made = 0

            def __init__(self, *_):
                self.number, Stream.made = Stream.made, Stream.made + 1

            def __enter__(self):
                cuda.said.append("stream")
                cuda.on.append(self.number)

            def __exit__(self, *_):
                cuda.said.append("no stream")
                cuda.on.pop()

            def wait_stream(self, other):
                cuda.waits.append((self.number, other.number))

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: self.said.append(f"wait for {device}")
        )
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.said.append("caches emptied"))
        for name in ("endAllocateToPool", "releasePool"):
            said = lambda *given, name=name: self.said.append(f"{name} {given}")
            monkeypatch.setattr(torch._C, f"_cuda_{name}", said, raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


BEGUN = ["wait for cuda:0", "stream", "begin in pool thread_local, garbage False"]


def test_runs_in_parallel_branch_off_and_join_again_even_if_one_fails(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = Graphs("cuda:0")  # its own stream is number 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: graphs._stream)
    for count, streams in ((2, 2), (STREAMS, STREAMS), (2 * STREAMS + 1, STREAMS)):
        cuda.waits.clear()
        found = graphs.parallel([lambda n=n: (n, cuda.on[-1]) for n in range(count)])
        assert found == [(n, 1 + n % STREAMS) for n in range(count)]
        beside = range(1, 1 + streams)
        assert cuda.waits == [*((s, 0) for s in beside), *((0, s) for s in beside)]

    cuda.waits.clear()
    with pytest.raises(ValueError, match="no such record"):
        graphs.parallel([list, lambda: int("no such record"), list])
    assert cuda.waits[3:] == [(0, 1), (0, 2), (0, 3)]
    # an invalid recording cannot be joined: the error that made it so is the one to tell
    monkeypatch.setattr(graphs, "_join", lambda *_: fail())
    with pytest.raises(ValueError, match="no such record"):
        graphs.parallel([lambda: int("no such record")])
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        graphs.parallel([list])


def test_a_graph_is_recorded_on_its_stream_with_nothing_else_going_on(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = Graphs("cuda:0")
    assert cuda.said == [*BEGUN, "end", "no stream"]  # an empty one, which keeps the pool
    cuda.said.clear()
    replay = graphs.record(lambda: cuda.said.append("run"))
    assert cuda.said == [*BEGUN, "run", "end", "no stream"]
    assert gc.isenabled()
    replay()
    assert cuda.said[-1] == "replay"


def test_what_cannot_be_recorded_is_said(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = Graphs("cuda:0")

    def waits():
        cuda.said.append("fault")
        raise RuntimeError("operation not permitted when stream is capturing")

    with refused(r"cannot be recorded as a CUDA graph: operation not permitted.*--no-graphs"):
        graphs.record(waits)
    given_back = ["endAllocateToPool (0, 'pool')", "releasePool (0, 'pool')"]
    assert cuda.said[-5:] == ["fault", "end", *given_back, "no stream"]
    assert gc.isenabled()


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_is_only_cached_is_given_back_before_it_is_too_little(monkeypatch, times):
    cuda, tries = Cuda(monkeypatch), []
    graphs = Graphs("cuda:0")

    def greedy():
        tries.append(None)
        if len(tries) <= times:
            raise torch.OutOfMemoryError("no memory")

    if times == 1:
        graphs.record(greedy)()
        assert cuda.said[-1] == "replay"
    else:
        said = "a step cannot be recorded, cuda:0 has too little memory left"
        with pytest.raises(torch.OutOfMemoryError, match=said):
            graphs.record(greedy)
    assert cuda.said.count("caches emptied") == 1
    assert len(tries) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_gpu_replays(monkeypatch):
    total = torch.zeros(3, device="cuda")
    run = Replayed(lambda x: total.add_(x).sum().clone(), Graphs("cuda:0"))
    sums = [float(run(torch.full((3,), float(n), device="cuda"))) for n in range(1, 7)]
    assert sums == [3, 9, 18, 30, 45, 63]
    assert run._replay is not None
    assert replay.WARM_CALLS < 6
