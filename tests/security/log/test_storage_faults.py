"""A disk fault or a kill at each system call of a ledger: nothing promised is ever lost."""

import errno
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from faults.disk import Calls, failing, killed, short
from faults.log_writer import SMALL, recover, small_segments, write
from support.ledgers import open_log, public

from staddle.errors import LocalError
from staddle.security.log import append_log, head
from staddle.security.log.segments import Reading, segments


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """For a log of small segments."""
    for name, value in SMALL.items():
        monkeypatch.setattr(append_log, name, value)
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def killed_alone():
    """``killed`` in a process that has imported nothing else: a fork of ours, with torch, takes
    ten times as long.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), small_segments) as small:
        yield lambda *case: small.submit(killed, *case).result()


def calls_of(run, folder, monkeypatch):
    """The calls of a write or a recovery, none of them at fault."""
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        run(folder, lambda _: None)
    assert {"open", "write", "fsync", "fdatasync", "replace"} <= set(calls.made)
    return calls.made


def deaths(made, how):
    """The calls that a process dies at; what is no write cannot be torn, and dies before."""
    return [nth for nth, name in enumerate(made, 1) if how != "torn" or name == "write"]


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
    total, failed = len(calls_of(write, folder, monkeypatch)), 0
    assert len(segments(folder)) == 3
    for nth in range(1, total + 1):
        place, promised = tmp_path / str(nth), [0]
        with monkeypatch.context() as patch:
            Calls(patch, nth, fault)
            try:
                write(place, promised.append)
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
def test_kill_9_at_any_call_loses_nothing_that_was_promised(
    tmp_path, folder, monkeypatch, killed_alone, how
):
    made = calls_of(write, folder, monkeypatch)
    for nth in deaths(made, how):
        place = tmp_path / str(nth)
        promised = killed_alone(place, nth, how, write)
        assert promised is not None, f"call {nth} of {len(made)} was never made"
        holds(place, promised)
    assert killed_alone(tmp_path / "whole", len(made) + 1, how, write) is None


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_kill_9_at_any_call_of_a_recovery_loses_nothing_either(
    tmp_path, folder, monkeypatch, killed_alone, how
):
    """The torn tail is recorded once, with at least its bytes, wherever the repair broke off."""
    with open_log(folder) as log:
        log.append({"type": "note", "n": 0})
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"half')
    whole = shutil.copytree(folder, tmp_path / "whole")
    made = calls_of(recover, folder, monkeypatch)
    for nth in [*deaths(made, how), len(made) + 1]:
        place = shutil.copytree(whole, tmp_path / str(nth))
        assert (killed_alone(place, nth, how, recover) is None) == (nth > len(made))
        open_log(place).close()
        found = [line.record for line in Reading(place) if line.record["type"] == "recovery"]
        assert found, f"call {nth}: nothing says what was cut"
        assert found[0]["dropped_bytes"] >= 6
        assert b'{"half' in segments(place)[0].with_suffix(".torn").read_bytes()
    assert len(made) > 10
