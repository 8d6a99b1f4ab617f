import torch
from support.op_tape import Recorder

from staddle.algorithms.engines import vmap_training


def test_a_step_is_traced_once_compiled_and_then_replayed(program, monkeypatch):
    """The call that is traced counts, as all others do."""
    monkeypatch.setattr(program, "BACKEND", "eager")
    total, calls, recorder = torch.zeros(3), [], Recorder()

    def add(x, y):
        calls.append(None)
        total.add_(x * y)
        return total.sum()

    own = vmap_training.Replayed
    with program.compiled():
        run = vmap_training.Replayed(add, recorder)
    assert vmap_training.Replayed is own
    sums = [float(run(torch.full((3,), float(n)), torch.ones(3))) for n in range(1, 7)]
    assert sums == [3, 9, 18, 30, 45, 63]
    assert (len(calls), recorder.warmed, recorder.recorded, recorder.replayed) == (1, 2, 1, 3)
    run.forget()
