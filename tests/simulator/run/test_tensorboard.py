import sys

import pytest
from support.counted import of_counts
from support.refusals import refused

from staddle.simulator.run.tensorboard import Board, check_installed


def measured(rounds, correct):
    return of_counts(rounds, "all/trained", {"a": correct, "b": 0}, {"a": 10, "b": 30})


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for wanting in (check_installed, lambda: Board(tmp_path, ())):
        with refused(r"pip install 'staddle\[tensorboard\]'"):
            wanting()
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_stands_there_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = Board(tmp_path, ())
    first.add([measured(1, 2), measured(2, 4)])
    first.add([measured(3, 9)])  # after the last snapshot
    second = Board(tmp_path, [measured(1, 2), measured(2, 4)])  # the first was killed
    second.add([measured(3, 6)])
    second.close()
    events = reader.EventAccumulator(
        str(tmp_path / "tensorboard"), purge_orphaned_data=False
    ).Reload()
    assert events.Tags()["scalars"] == ["all/trained/macro", "all/trained/micro"]
    read = {
        tag: [(one.step, round(one.value, 4)) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert read["all/trained/macro"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert read["all/trained/micro"] == [(1, 0.05), (2, 0.1), (3, 0.15)]
    first.close()
