"""A disk fault or a kill at each system call of a ledger: nothing promised is ever lost."""

import errno
import os
from pathlib import Path

import pytest
from faults.disk import Calls, failing, killed, short
from support.ledgers import open_log, public

from staddle.errors import LocalError
from staddle.security.log import append_log, head
from staddle.security.log.segments import Reading, segments
from staddle.security.log.tree_head import TreeHead

RECORDS = 9


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """For segments of three records and a checkpoint every three."""
    monkeypatch.setattr(append_log, "SEGMENT_BYTES", 700)
    monkeypatch.setattr(append_log, "EVERY", 3)
    return tmp_path / "ledger"


def scenario(folder, promise):
    """Open, write three segments with checkpoints, close; ``promise`` hears what is durable."""
    with open_log(folder) as log:
        for n in range(RECORDS):
            promise(log.append({"type": "note", "n": n}).seq + 1)
            if n == 4:
                promise(TreeHead.parse(log.checkpoint().text).size)


def count(folder, monkeypatch):
    """How many calls the scenario makes, none of them at fault."""
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        scenario(folder, lambda _: None)
    assert {"open", "write", "fsync", "fdatasync", "replace"} <= set(calls.made)
    assert len(segments(folder)) == 3
    return len(calls.made)


def holds(folder, promised):
    """It opens again with all that was promised, in order and whole, and goes on."""
    with open_log(folder) as log:
        log.append({"type": "after"})
    lines = [line.record for line in Reading(folder)]
    notes = [record["n"] for record in lines if record["type"] == "note"]
    assert len(notes) >= promised
    assert notes == list(range(len(notes)))
    assert {record["type"] for record in lines} <= {"note", "recovery", "after"}
    assert head.stored_by(folder, public()).size == len(lines)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    "fault", [failing(errno.EIO), failing(errno.ENOSPC), short], ids=["EIO", "ENOSPC", "short"]
)
def test_a_fault_at_any_call_closes_the_log_and_loses_nothing(tmp_path, folder, monkeypatch, fault):
    total = count(folder, monkeypatch)
    failed = 0
    for nth in range(1, total + 1):
        place, promised = tmp_path / str(nth), [0]
        with monkeypatch.context() as patch:
            Calls(patch, nth, fault)
            try:
                scenario(place, promised.append)
            except LocalError:
                failed += 1
        holds(place, promised[-1])
    assert failed == total


def test_after_a_fault_nothing_is_taken_even_when_the_disk_is_well_again(folder, monkeypatch):
    log = open_log(folder)
    with monkeypatch.context() as patch:
        Calls(patch, 1, failing(errno.ENOSPC))
        why = "a write failed: No space left on device; make room, then restart"
        with pytest.raises(LocalError, match=why):
            log.append({"type": "note", "n": 0})
    for call in (lambda: log.append({"type": "note", "n": 0}), log.checkpoint):
        with pytest.raises(LocalError, match="takes no more records"):
            call()
    log.close()


def test_a_checkpoint_that_cannot_be_written_closes_the_log(folder, monkeypatch):
    log = open_log(folder)
    log.append({"type": "note", "n": 0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: failing(errno.EIO)("replace", None, (), {}))
        why = r"a write failed: .*Input/output error; check the disk, then restart"
        with pytest.raises(LocalError, match=why):
            log.checkpoint()
    with pytest.raises(LocalError, match="takes no more records"):
        log.append({"type": "note", "n": 1})
    log.close()
    holds(folder, 1)


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_kill_9_at_any_call_loses_nothing_that_was_promised(tmp_path, folder, monkeypatch, how):
    total = count(folder, monkeypatch)
    for nth in range(1, total + 1):
        place = tmp_path / str(nth)
        promised = killed(place, nth, how, scenario)
        assert promised is not None, f"call {nth} of {total} was never made"
        holds(place, promised)
    assert killed(tmp_path / "whole", total + 1, how, scenario) is None


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_kill_9_at_any_call_of_a_recovery_loses_nothing_either(tmp_path, folder, monkeypatch, how):
    """The torn tail is recorded once, with at least its bytes, wherever the repair broke off."""
    with open_log(folder) as log:
        log.append({"type": "note", "n": 0})
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"half')
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    nth = 0
    while True:
        nth += 1
        place = tmp_path / str(nth)
        place.mkdir()
        for name, data in whole.items():
            (place / name).write_bytes(data)
        died = killed(place, nth, how, lambda folder, _: open_log(folder).close()) is not None
        open_log(place).close()
        dropped = [
            line.record["dropped_bytes"]
            for line in Reading(place)
            if line.record["type"] == "recovery"
        ]
        assert dropped, f"call {nth}: nothing says what was cut"
        assert dropped[0] >= 6
        assert b'{"half' in Path(segments(place)[0].with_suffix(".torn")).read_bytes()
        if not died:
            break
    assert nth > 10
