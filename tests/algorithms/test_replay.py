import pytest
import torch
from op_tape import Recorder

from staddle.algorithms import replay
from staddle.algorithms.replay import AsItIs, Graphs, Replayed
from staddle.errors import LocalError


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


def test_what_cannot_be_recorded_is_said(monkeypatch):
    """CUDA's part, without a GPU: a graph that refuses."""

    class Refusing:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    monkeypatch.setattr(torch.cuda, "Stream", Refusing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refusing)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    def greedy():
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(
        LocalError, match=r"cannot be recorded as a CUDA graph: operation not permitted.*turn graphs off"
    ):
        Graphs("cuda:0").record(waits)
    with pytest.raises(torch.OutOfMemoryError):
        Graphs("cuda:0").record(greedy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_gpu_replays(monkeypatch):
    total = torch.zeros(3, device="cuda")
    run = Replayed(lambda x: total.add_(x).sum().clone(), Graphs("cuda:0"))
    sums = [float(run(torch.full((3,), float(n), device="cuda"))) for n in range(1, 7)]
    assert sums == [3, 9, 18, 30, 45, 63]
    assert run._replay is not None
    assert replay.WARM_CALLS < 6
