import sys

import pytest
from support.refusals import refused
from support.tracked_points import SCORE, point

from staddle.simulator.tracking.tensorboard import Board, check_installed


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for wanting in (check_installed, lambda: Board(tmp_path, ())):
        with refused(r"pip install 'staddle\[tracking\]'"):
            wanting()
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_stands_there_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = Board(tmp_path, ())
    first.add([point(1, 0.1), point(2, 0.2)])
    first.add([point(3, 0.9)])  # after the last snapshot
    second = Board(tmp_path, [point(1, 0.1), point(2, 0.2)])  # the first was killed
    second.add([point(3, 0.3)])
    second.close()
    events = reader.EventAccumulator(
        str(tmp_path / "tensorboard"), purge_orphaned_data=False
    ).Reload()
    assert events.Tags()["scalars"] == [SCORE, "loss"]
    read = [(one.step, round(one.value, 4)) for one in events.Scalars(SCORE)]
    assert read == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [one.step for one in events.Scalars("loss")] == [1, 2, 3]
    first.close()
