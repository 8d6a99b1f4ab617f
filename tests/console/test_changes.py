"""What is read again, and when a page hears of it."""

import asyncio
import os
import threading

import pytest

from staddle.console import changes
from staddle.console.changes import SlowReading, StampedValue, stamp_of


def test_a_stamp_differs_after_each_change_and_only_then(tmp_path):
    path = tmp_path / "a"
    seen = [stamp_of([path])]
    path.write_bytes(b"x")
    seen.append(stamp_of([path]))
    assert stamp_of([path]) == seen[-1]
    before = path.stat()
    path.write_bytes(b"y")  # as long, and its time put back
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.append(stamp_of([path]))
    path.unlink()
    assert stamp_of([path]) == seen[0]
    assert len(set(seen)) == 3


def test_a_value_is_read_once_per_stamp_and_errors_are_not_kept():
    stamp, reads = [0], []

    def read():
        reads.append(stamp[0])
        if stamp[0] == 1:
            raise ValueError
        return stamp[0]

    value = StampedValue(lambda: (stamp[0],), read)
    assert [value.get(), value.get()] == [0, 0]
    stamp[0] = 1
    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 ours, above
            value.get()
    stamp[0] = 2
    assert value.get() == 2
    assert reads == [0, 1, 1, 2]


def test_a_slow_reading_runs_once_at_a_time_and_rests():
    async def run():
        stamp, go, reads = [0], threading.Event(), []

        def read():
            go.wait()
            reads.append(stamp[0])
            return stamp[0]

        reading = SlowReading(lambda: (stamp[0],), read)
        reading.refresh()
        first = reading._task
        stamp[0] = 1
        reading.refresh()
        assert (reading.is_running, reading._task, reading.found) == (True, first, None)
        go.set()
        await first
        assert (reading.found, reading.count) == (1, 1)
        # It changed while it was read, and is read again once it has rested.
        reading._rests_until = float("inf")
        reading.refresh()
        assert not reading.is_running
        reading._rests_until = 0.0
        reading.refresh()
        await reading._task
        assert reading.count == 2
        reading.refresh()
        assert not reading.is_running
        reading.forget()
        reading.refresh()
        await reading._task
        assert (reads, reading.count) == ([1, 1, 1], 3)

    asyncio.run(run())


def test_a_reading_that_failed_for_a_file_that_went_is_repeated():
    async def run():
        outcomes = [FileNotFoundError("a segment"), 7]

        def read():
            found = outcomes.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        reading = SlowReading(lambda: (0,), read)
        for _ in range(2):
            reading._rests_until = 0.0
            reading.refresh()
            await reading._task
        assert reading.found == 7

    asyncio.run(run())


def test_each_change_is_one_event(monkeypatch):
    monkeypatch.setattr(changes, "SECONDS", 0.0)
    looks, refreshed = iter([1, 1, 1, 2, 2, 3]), []

    async def run():
        stream = changes.changes(lambda: refreshed.append(1), lambda: (next(looks),))
        return [await anext(stream) for _ in range(3)]

    assert asyncio.run(run()) == [b"event: changed\ndata: -\n\n"] * 3
    assert len(refreshed) == 6
