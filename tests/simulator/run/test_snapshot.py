"""Snapshots made by hand: what is written and read, and what a disk or a kill may do between."""

import errno

import pytest
import torch
from faults import disk
from faults.disk import Calls, failing, killed, short
from support.refusals import refused
from support.snapshots import after, begun, story, told

from staddle.algorithms.course import SiloState
from staddle.algorithms.engines.simulation import Snapshot
from staddle.algorithms.leaks.taint import EXACT, PUBLIC
from staddle.errors import UnwritableError
from staddle.simulator.run import snapshot as snapshot_module
from staddle.simulator.run.disk import NOTHING, Prefix
from staddle.simulator.run.snapshot import FinishedRun, Snapshots, read_index

RUN = "a" * 64
KEPT = Prefix(bytes=7, sha256="b" * 64)


def loaded(folder):
    return Snapshots(folder, RUN).load()


def files(folder):
    # run_folder.py tidies
    return sorted(path for path in (folder / "snapshot").iterdir() if path.suffix != ".tmp")


def test_a_new_folder_has_none(tmp_path):
    assert loaded(tmp_path) is None
    assert read_index(tmp_path) is None


def test_all_of_a_snapshot_comes_back(tmp_path):
    private = SiloState(
        {"extractor": {"w": torch.ones(2)}}, {}, {"part/extractor/w": EXACT, "extra/n": PUBLIC}
    )
    last = story()[-1]
    snapshot = Snapshot(
        5, {**last.held, "p": private}, last.trained, last.coordinator, last.shelved
    )
    Snapshots(tmp_path, RUN).write(snapshot, KEPT)
    assert told(loaded(tmp_path)) == told(snapshot)
    index = read_index(tmp_path)
    assert (index.round, index.run, index.history, index.finished) == (5, RUN, KEPT, None)


def test_only_what_changed_is_written(tmp_path):
    snapshots, before = Snapshots(tmp_path, RUN), begun(100)
    snapshots.write(before, KEPT)
    (first,) = files(tmp_path)
    whole = first.stat().st_size
    snapshots.write(after(before, ["s3"], 1), KEPT)
    kept, new = files(tmp_path)
    assert kept == first
    assert new.stat().st_size < whole / 20
    held = read_index(tmp_path).files[1].holds
    wanted = {("state", "s3"), ("coordinator",), ("published", "model")}
    assert set(held) == {*wanted, ("version", "extractor", "s3"), ("mail", "extractor", "s0")}
    assert told(loaded(tmp_path)) == told(after(before, ["s3"], 1))


def test_who_goes_on_from_a_snapshot_writes_only_what_changed(tmp_path):
    Snapshots(tmp_path, RUN).write(begun(100), KEPT)
    again = Snapshots(tmp_path, RUN)
    again.write(after(again.load(), ["s3"], 1), KEPT)
    assert [len(file.holds) for file in read_index(tmp_path).files] == [99, 5]


def test_who_begins_anew_beside_a_snapshot_overwrites_nothing_that_it_names(tmp_path):
    Snapshots(tmp_path, RUN).write(story()[1], KEPT)
    (old,) = files(tmp_path)
    Snapshots(tmp_path, RUN).write(begun(), KEPT)
    assert [path.name for path in files(tmp_path)] == ["00000001.safetensors"] != [old.name]
    assert told(loaded(tmp_path)) == told(begun())


def test_the_files_hold_at_most_twice_what_they_must(tmp_path, quick):
    """Ten silos train in every round, and of thirty others one: no file stays for that one."""
    snapshots, snapshot = Snapshots(tmp_path, RUN), begun(40)
    snapshots.write(snapshot, KEPT)
    one = files(tmp_path)[0].stat().st_size / 41  # a state's, or another's
    written = []
    for number in range(60):
        there = set(files(tmp_path))
        snapshot = after(snapshot, [*(f"s{h}" for h in range(10)), f"s{10 + number % 30}"], number)
        snapshots.write(snapshot, KEPT)
        written.append(sum(path.stat().st_size for path in set(files(tmp_path)) - there) / one)
        live = sum(len(file.holds) for file in read_index(tmp_path).files)
        assert sum(path.stat().st_size for path in files(tmp_path)) < 2.1 * live * one
    # states, versions, and what there is one of
    assert sum(written) / len(written) < 2 * (11 + 11 + 3)
    assert told(loaded(tmp_path)) == told(snapshot)


def test_a_large_snapshot_is_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_module, "PACK_BYTES", 100)
    Snapshots(tmp_path, RUN).write(begun(20), KEPT)
    # 20 bytes a state
    assert [len(file.holds) for file in read_index(tmp_path).files] == [5, 5, 5, 5, 1]
    assert told(loaded(tmp_path)) == told(begun(20))


def test_a_run_is_over_once_and_only_after_a_snapshot(tmp_path):
    snapshots = Snapshots(tmp_path, RUN)
    with refused("a run ends with a snapshot after its last round"):
        snapshots.finish(FinishedRun(history=KEPT, results=()))
    snapshots.write(begun(), NOTHING)
    snapshots.finish(FinishedRun(history=KEPT, results=("rounds.csv",)))
    index = read_index(tmp_path)
    assert index.history == NOTHING
    assert index.finished == FinishedRun(history=KEPT, results=("rounds.csv",))
    snapshots.write(after(begun(), ["s0"], 1), KEPT)
    assert read_index(tmp_path).finished is None  # it goes on


def test_a_process_adds_its_time_to_that_of_earlier_ones(tmp_path):
    now = [100.0]
    first = Snapshots(tmp_path, RUN, lambda: now[0])
    now[0] += 2.5
    first.write(begun(), KEPT)
    now[0] += 60  # killed here: not counted
    second = Snapshots(tmp_path, RUN, lambda: now[0])
    now[0] += 0.25
    second.write(begun(), KEPT)
    assert read_index(tmp_path).milliseconds == 2750
    now[0] += 0.25
    second.finish(FinishedRun(history=KEPT, results=()))
    assert read_index(tmp_path).milliseconds == 3000


# What is not as it was written.
def flip(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


CHANGES = {
    "flipped": flip,
    "cut": lambda data: data[:-3],
    "empty": lambda data: data[:0],
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_is_not_as_it_was_written_is_named(tmp_path, change):
    snapshots = Snapshots(tmp_path, RUN)
    for snapshot in story(2):
        snapshots.write(snapshot, KEPT)
    for path in [*files(tmp_path), tmp_path / "snapshot.json"]:
        data = path.read_bytes()
        path.write_bytes(change(data))
        with refused(rf"{path.name}: .*restore it from a backup, or remove the run's folder"):
            loaded(tmp_path)
        assert path.read_bytes() == change(data)  # for who can mend it
        path.write_bytes(data)
    assert told(loaded(tmp_path)) == told(story(2)[1])


def test_every_byte_of_the_index_counts(tmp_path):
    Snapshots(tmp_path, RUN).write(begun(2), KEPT)
    path = tmp_path / "snapshot.json"
    data = path.read_bytes()
    for place in range(0, len(data) - 1, 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with refused(r"snapshot\.json"):
            read_index(tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path):
    Snapshots(tmp_path, RUN).write(begun(), KEPT)
    files(tmp_path)[0].unlink()
    with refused(r"00000000\.safetensors: cannot read it: No such file or directory; restore"):
        loaded(tmp_path)


def test_the_snapshot_of_another_run_is_refused(tmp_path):
    Snapshots(tmp_path, RUN).write(begun(), KEPT)
    with refused(r"snapshot\.json: is of another run than run\.json next to it"):
        Snapshots(tmp_path, "c" * 64)
    assert len(files(tmp_path)) == 1


def test_what_no_index_names_goes_at_the_next_start_and_other_peoples_files_stay(tmp_path):
    Snapshots(tmp_path, RUN).write(begun(), KEPT)
    (tmp_path / "snapshot" / "00000007.safetensors").write_bytes(b"left")
    (tmp_path / "snapshot" / "notes.txt").write_bytes(b"mine")
    Snapshots(tmp_path, RUN)
    assert [path.name for path in files(tmp_path)] == ["00000000.safetensors", "notes.txt"]


# What may happen at each call that changes the disk.
@pytest.fixture
def calls(monkeypatch, quick):
    """All that the module does to a disk, unlinking included."""
    monkeypatch.setattr(disk, "CALLS", (*disk.CALLS, "unlink"))


def scenario(folder, promise):
    """Write the story down, with every file rewritten sooner or later.

    ``promise`` is told the round that is kept.
    """
    snapshots = Snapshots(folder, RUN)
    for snapshot in story():
        snapshots.write(snapshot, KEPT)
        promise(snapshot.round)


def holds(folder, promised):
    """The snapshot is one of the story, none before the last promised; nothing else lies there.

    And it goes on.
    """
    snapshots = Snapshots(folder, RUN)
    snapshot = snapshots.load()
    if snapshot is None:
        assert promised == 0
        snapshot = begun()
    else:
        assert snapshot.round >= promised
        assert told(snapshot) == told(story()[snapshot.round - 1])
        assert [p.name for p in files(folder)] == sorted(f.name for f in read_index(folder).files)
    following = after(snapshot, ["s0"], 99)
    snapshots.write(following, KEPT)
    assert told(loaded(folder)) == told(following)


@pytest.mark.parametrize("fault", [failing(errno.ENOSPC), short], ids=["full", "short"])
def test_a_fault_at_any_call_is_told_and_loses_nothing(tmp_path, calls, monkeypatch, fault):
    nth, failed = 1, True
    while failed:
        place, promised, failed = tmp_path / str(nth), [0], False
        place.mkdir()
        with monkeypatch.context() as patch:
            Calls(patch, nth, fault)
            try:
                scenario(place, promised.append)
            except UnwritableError:
                failed = True
        holds(place, promised[-1])
        nth += 1
    assert nth > 30


def test_a_kill_before_any_call_leaves_the_old_snapshot_or_the_new(tmp_path, calls):
    nth, promised = 1, 0
    while promised is not None:
        place = tmp_path / str(nth)
        place.mkdir()
        promised = killed(place, nth, "before", scenario)
        holds(place, promised or 0)
        nth += 1
    assert nth > 30


def test_after_a_fault_the_same_process_goes_on(tmp_path, calls, monkeypatch):
    snapshots, told_ = Snapshots(tmp_path, RUN), story()
    snapshots.write(told_[0], KEPT)
    for nth in range(1, 11):  # of a file, then of the index
        with monkeypatch.context() as patch:
            Calls(patch, nth, failing(errno.ENOSPC))
            with pytest.raises(UnwritableError, match="make room"):
                snapshots.write(told_[1], KEPT)
        assert told(loaded(tmp_path)) in (told(told_[0]), told(told_[1]))
    snapshots.write(told_[2], KEPT)
    assert told(loaded(tmp_path)) == told(told_[2])
