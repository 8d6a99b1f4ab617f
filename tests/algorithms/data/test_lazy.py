"""Records that are read when they are used: which, in which order, by whom, and what goes wrong."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.numbered import N, lazily, numbered
from support.refusals import refused

from staddle.algorithms.data.dataset import (
    Dataset,
    batches_of,
    calls_of,
    chunks_of,
    in_calls,
    split,
)
from staddle.algorithms.data.lazy import LazyRecords
from staddle.algorithms.data.sources.installed import Installed
from staddle.algorithms.numerics.devices import CPU
from staddle.errors import LocalError
from staddle.files.processes import Flag


@pytest.fixture(params=[0, 2])
def both(request):
    """The same records, lazy and in memory."""
    y = torch.arange(N) % 3
    x = torch.arange(N)[:, None] + torch.tensor([0, 0.5])
    yield Dataset(numbered(workers=request.param), y), Dataset(x, y)
    gc.collect()


def same(found, expected):
    for own, others in zip(found, expected, strict=True):
        for one, other in zip(own, others, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)
                assert one.dtype == other.dtype
            else:
                assert one == other


def test_lazy_records_are_those_in_memory(both):
    own, held = both
    assert (own.x.shape, len(own), own.x.dtype) == (held.x.shape, N, torch.float32)
    rng = np.random.default_rng(0)
    batches = [rng.permutation(N)[:7] for _ in range(5)]
    same(batches_of(own, batches, CPU), batches_of(held, batches, CPU))
    same(batches_of(own, iter(batches), CPU), batches_of(held, iter(batches), CPU))
    same(chunks_of(own, 8), chunks_of(held, 8))
    same(calls_of(own, 8), in_calls(held.x, held.y, 8))
    for piece, whole in zip(split(own, b"k", 0.3), split(held, b"k", 0.3), strict=True):
        assert torch.equal(piece.x.whole(), whole.x)
        same(chunks_of(piece, 4), chunks_of(whole, 4))


def test_no_record_and_no_batch(both):
    own, _ = both
    ((x, y),) = batches_of(own, iter([np.empty(0, np.int64)]), CPU)
    assert (x.shape, y.shape) == ((0, 2), (0,))
    assert list(batches_of(own, [], CPU)) == []
    assert list(chunks_of(own.take(np.empty(0, np.int64)), 4)) == []


def test_records_are_read_when_they_are_used_and_no_others():
    read = []
    own = numbered(read).take(np.arange(10, 20))
    assert read == []
    drawn = []

    def draws():
        for batch in ([1, 2], [0], [9]):
            drawn.append(batch)
            yield np.array(batch)

    found = own.batches(draws())
    for count, places in enumerate(([11, 12], [10], [19]), 1):
        batch, x = next(found)
        # A private step's records are drawn when it is taken, not before.
        assert len(drawn) == count
        assert batch.tolist() == drawn[-1]
        assert x[:, 0].tolist() == places
    assert read == [11, 12, 10, 19]


def test_a_pass_that_is_left_does_not_spoil_the_next(both):
    own, held = both
    batches = [np.arange(start, start + 5) for start in range(0, N, 5)]
    first = batches_of(own, batches, CPU)
    next(first)
    same(batches_of(own, batches[3:], CPU), batches_of(held, batches[3:], CPU))
    with refused("a set is read by two at once"):
        next(first)


def test_torchs_generator_is_left_alone(both):
    own, _ = both
    before = torch.random.get_rng_state()
    for _ in chunks_of(own, 8):
        pass
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_batch_that_does_not_fit_the_memory_is_not_read(monkeypatch):
    own = numbered()
    monkeypatch.setattr("staddle.files.file_bounds.available_memory", lambda: 100)
    with refused("the set: 13 records at once would take 104 bytes of memory, 100 are available"):
        list(own.batches([np.arange(13)]))
    assert len(list(own.batches([np.arange(12)]))) == 1
    with refused("13 records at once"):
        list(own.batches(iter([np.arange(13)])))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_is_no_number_is_named_when_it_is_read(workers):
    data = Installed(kind="package", name="spoilt", lazy=True, workers=workers)
    with refused("record 7 holds NaN or a value beyond float32; clean it first"):
        data.read()


def test_a_worker_that_is_killed_is_told_and_the_next_pass_has_others():
    options = {"main": os.getpid()}
    data = Installed(kind="package", name="dying", options=options, workers=1)
    with refused(r"records cannot be read: .*; free memory, or lower data\.workers"):
        data.read()
    records = numbered(workers=1)
    next(records.batches([np.arange(4)] * 9))
    reading = records._loading._loaders[0]._iterator
    (worker,) = reading._workers
    # Of an event it could hold the lock, for ever once it is killed.
    assert isinstance(reading._workers_done_event, Flag)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with refused("the set: records cannot be read: "):
        records.whole()
    assert torch.equal(records.whole()[:, 0], torch.arange(50.0))


def test_workers_of_a_set_that_is_garbage_end_by_themselves():
    """Collected with its queues, a loader would wait for each in vain and then terminate it."""
    records = numbered(workers=2)
    next(records.batches([np.arange(4)] * 9))
    workers = records._loading._loaders[0]._iterator._workers
    cycle = [records]
    cycle.append(cycle)
    del records, cycle
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_set_with_an_error_lasts_no_longer_than_its_caller_has_it():
    data = Dataset(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64))
    records = lazily(data, 1, {3}).x
    gc.disable()
    try:
        with contextlib.suppress(LocalError):
            records.whole()
        loader = weakref.ref(records._loading._loaders[0])
        del records
        assert loader() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 1])
def test_forgiving_records_are_nan_where_they_cannot_be_read(workers):
    """In a private round, which no record may end."""
    for name in ("spoilt", "unequal"):
        table = Installed(kind="package", name=name, options={"listed": True}, lazy=True,
            workers=workers)  # fmt: skip
        x = table.read().x.forgiving().whole()
        assert x.shape == (40, 1, 1, 6)
        bad = x.isnan().flatten(1).any(1)
        assert bad.nonzero().flatten().tolist() == list(range(7, 12))


def test_an_error_of_a_kind_that_no_other_process_knows_is_told():
    with refused("record 7 is odd"):
        Installed(kind="package", name="odd", lazy=True, workers=1).read()


def test_a_set_is_identified_once_however_many_silos_share_it():
    asked = []
    x = LazyRecords.of(list, 9, (2,), 0, "the set", lambda: asked.append(1) or "it")
    assert [x.take(np.arange(n)).identity() for n in range(4)] == ["it"] * 4
    assert asked == [1]


def test_records_without_a_value():
    x = LazyRecords.of(partial(nothing, 3), 4, (0, 3), 0, "the set", str).whole()
    assert x.shape == (4, 0, 3)


def nothing(width):
    return lambda _: (torch.zeros(0, width),)


def test_workers_end_with_the_process_that_they_read_for(tmp_path):
    """However that ends; the server that forked them ends with them."""
    program = (
        "import numpy, sys, time\n"
        "from support.numbered import numbered\n"
        "x = numbered(workers=2)\n"
        "found = x.batches([numpy.arange(4)] * 9)\n"
        "next(found)\n"
        "workers = x._loading._loaders[0]._iterator._workers\n"
        "print(*[worker.pid for worker in workers], flush=True)\n"
        "sys.stdin.read()\n"
    )
    tests = str(Path(__file__).parents[2])
    path = os.pathsep.join((tests, os.environ["PYTHONPATH"]))
    reading = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ended = [os.pidfd_open(int(pid)) for pid in reading.stdout.readline().split()]
    assert len(ended) == 2
    reading.kill()
    reading.wait()
    for fd in ended:
        # Readable once the process has ended; it waits for that, not for time.
        found, _, _ = select.select([fd], [], [], 60)
        assert found
        os.close(fd)


def test_what_needs_all_records_in_memory_refuses():
    data = Dataset(numbered(), torch.zeros(N, dtype=torch.int64))
    with refused(r"read when they are used \(data.lazy\) cannot be taken whole here"):
        data.held  # noqa: B018
    assert data.to(torch.device("meta")) is data
