import pytest
from support.refusals import refused

from staddle.simulator.run.disk import NOTHING
from staddle.simulator.run.work_file import (
    RoundWork,
    Stopwatch,
    WorkFile,
    read_seconds,
    read_work,
)

LACKING = RoundWork(1, 1, 300, 20, {"a": (0.5, 3, 40, 900)}, ("b",), ("c", "d"), 2.5)
CENSUS = RoundWork(0, 0, 80, 0, {})
FIRST = RoundWork(1, 1, 300, 20, {"a": (0.5, 3, 40, 900), "b": (1.5, 2, 20, 100)})
UNKNOWN = RoundWork(2, 2, 300, 20, {"a": (0.5, 3, 40, None), "b": (1.5, 2, 20, 100)})


def test_the_work_of_all_silos():
    assert (FIRST.loss, FIRST.steps, FIRST.records, FIRST.flops) == (1.0, 5, 60, 1000)
    assert UNKNOWN.flops != UNKNOWN.flops  # NaN
    assert CENSUS.loss != CENSUS.loss
    assert (CENSUS.steps, CENSUS.flops) == (0, 0)


def test_it_resumes_after_what_a_snapshot_covers(tmp_path):
    path = tmp_path / "work.jsonl"
    file = WorkFile(path, NOTHING)
    file.append(CENSUS)
    file.append(FIRST)
    # As written by releases in which everyone was there.
    assert b"absent" not in path.read_bytes()
    kept = file.sync()
    file.append(UNKNOWN)
    file.close()
    again = WorkFile(path, kept)
    again.append(UNKNOWN)
    again.append(LACKING)
    whole = again.sync()
    again.close()
    assert again.lines == (CENSUS, FIRST)
    assert read_work(path, whole) == (CENSUS, FIRST, UNKNOWN, LACKING)


@pytest.mark.parametrize("line", [b"{}\n", b"half", b'{"round":-1}\n'])
def test_a_line_that_is_no_rounds_work_is_named(tmp_path, line):
    path = tmp_path / "work.jsonl"
    file = WorkFile(path, NOTHING)
    file.append(FIRST)
    file.add(line)
    kept = file.sync()
    file.close()
    with refused(r"work\.jsonl, line 2: not the work of a round: .*restore it from a backup"):
        read_work(path, kept)


def test_a_changed_line_is_refused(tmp_path):
    path = tmp_path / "work.jsonl"
    file = WorkFile(path, NOTHING)
    file.append(FIRST)
    kept = file.sync()
    file.close()
    path.write_bytes(path.read_bytes().replace(b"300", b"301"))
    with refused("are not those that its snapshot was written with"):
        WorkFile(path, kept)


def test_seconds_of_rounds_that_run_again_are_taken_again(tmp_path):
    path = tmp_path / "seconds.csv"
    assert read_seconds(path) == {}
    watch = Stopwatch(path, 0)
    for round_ in range(3):
        watch.add(round_, 1.25)
    path.write_text(path.read_text() + "3,0.")  # a kill
    assert read_seconds(path) == dict.fromkeys(range(3), 1.25)
    Stopwatch(path, 2).add(2, 0.5)
    assert read_seconds(path) == {0: 1.25, 1: 1.25, 2: 0.5}
    assert path.read_text().startswith("round,seconds\n0,1.250\n")
    path.write_text("round,seconds\n0,soon\n")
    with refused(r"seconds\.csv: '0,soon' is not a round and its seconds; remove the file"):
        read_seconds(path)
