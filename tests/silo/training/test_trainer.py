import asyncio
import gc
import threading
import time

import pytest
import torch

from staddle.errors import CancelledError, LocalError, PeerError
from staddle.silo.training.trainer import Trainer, pool_of


class Work:
    """Training that asks between its batches whether to stop."""

    def __init__(self, trainer, batches=10_000):
        self.trainer = trainer
        self.batches = batches
        self.started = threading.Event()
        self.ended = False
        self.done = 0

    def __call__(self):
        self.started.set()
        try:
            for _ in range(self.batches):
                if self.trainer.cancelled():
                    raise CancelledError("stopped between two batches")
                time.sleep(0.001)
                self.done += 1
            return self.done
        finally:
            self.ended = True


@pytest.fixture
def trainer():
    made = Trainer()
    yield made
    made.close()


async def begun(trainer, work):
    task = asyncio.create_task(trainer.run(work))
    await asyncio.to_thread(work.started.wait, 60)
    return task


def test_work_is_done_in_a_thread_beside_the_loop(trainer):
    async def scenario():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        done = await trainer.run(Work(trainer, 300))
        ticking.cancel()
        return done, ticks

    done, ticks = asyncio.run(scenario())
    assert done == 300
    assert ticks > 2


def test_arguments_and_our_own_errors_pass_through(trainer):
    error = PeerError("coordinator", "b is 0")

    def work(a, *, b):
        if b == 0:
            raise error
        return threading.current_thread().name, a + b

    name, total = asyncio.run(trainer.run(work, 1, b=2))
    assert (name.startswith("training"), total) == (True, 3)
    with pytest.raises(PeerError) as caught:
        asyncio.run(trainer.run(work, 1, b=0))
    assert caught.value is error


def raising(error):
    def work():
        raise error

    return work


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


def shapes():
    return torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        (lambda: 1 // 0, r"ZeroDivisionError: .* \(test_trainer\.py:\d+\)"),
        (shapes, r"RuntimeError: mat1 and mat2 .* \(test_trainer\.py:\d+\)"),
        (lambda: torch.empty(1 << 50),
            "RuntimeError: .*memory.*lower the batch size if memory ran out"),
        ({}.popitem, "KeyError"),
        (raising(UnprintableError()), "UnprintableError"),
    ],
)  # fmt: skip
def test_any_other_error_becomes_one_of_ours_that_names_it_and_its_place(trainer, work, complaint):
    with pytest.raises(LocalError, match=complaint) as caught:
        asyncio.run(trainer.run(work))
    assert isinstance(caught.value.__cause__, Exception)
    assert asyncio.run(trainer.run(lambda: 3)) == 3


def test_a_long_text_is_cut_and_an_exit_stays_an_exit(trainer):
    with pytest.raises(LocalError, match="ValueError: xxx") as caught:
        asyncio.run(trainer.run(raising(ValueError("x" * 100_000))))
    assert len(str(caught.value)) < 700

    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        asyncio.run(trainer.run(leave))


def test_a_cancel_ends_the_work_between_two_batches(trainer):
    async def scenario():
        work = Work(trainer)
        task = await begun(trainer, work)
        trainer.cancel()
        with pytest.raises(CancelledError):
            await task
        return work

    work = asyncio.run(scenario())
    assert work.ended
    assert work.done < work.batches


def test_work_after_a_cancel_runs_to_its_end(trainer):
    async def scenario():
        trainer.cancel()
        assert trainer.cancelled()
        return await trainer.run(Work(trainer, 3))

    assert asyncio.run(scenario()) == 3
    assert not trainer.cancelled()


def test_cancelling_the_caller_cancels_the_work_and_waits_for_its_end(trainer):
    async def scenario():
        work = Work(trainer)
        task = await begun(trainer, work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended, "the caller was let go while the work still ran"
        assert work.done < work.batches
        return await trainer.run(Work(trainer, 2))

    assert asyncio.run(scenario()) == 2


def test_work_that_does_not_ask_is_waited_for(trainer):
    async def scenario():
        started, ended = threading.Event(), threading.Event()

        def deaf():
            started.set()
            time.sleep(0.2)
            ended.set()

        task = asyncio.create_task(trainer.run(deaf))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(scenario())


def test_one_piece_of_work_at_a_time(trainer):
    running, most = 0, 0

    def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    async def scenario():
        await asyncio.gather(*(trainer.run(work) for _ in range(4)))

    asyncio.run(scenario())
    assert most == 1


def test_work_that_was_cancelled_has_ended_before_the_next_begins():
    """Also where its pool has another thread: else the next would take back the cancelling."""
    pool = pool_of(2)
    trainer, found, stuck = Trainer(pool), [], threading.Event()

    def first():
        begun.set()
        stuck.wait(60)
        found.append(trainer.cancelled())

    async def scenario():
        cancelled = asyncio.create_task(trainer.run(first))
        await asyncio.to_thread(begun.wait, 60)
        cancelled.cancel()
        following = asyncio.create_task(trainer.run(found.append, "second"))
        for _ in range(100):  # whoever could run has run
            await asyncio.sleep(0)
        stuck.set()
        await asyncio.wait({cancelled, following})

    begun = threading.Event()
    asyncio.run(scenario())
    trainer.close()
    assert found == [True, "second"]


def test_closing_ends_the_work_in_hand():
    trainer = Trainer()

    async def scenario():
        work = Work(trainer)
        task = await begun(trainer, work)
        await asyncio.to_thread(trainer.close)
        with pytest.raises(CancelledError):
            await task
        assert work.ended

    asyncio.run(scenario())


def test_a_cancelled_caller_leaves_no_complaint_in_the_log(trainer):
    seen = []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: seen.append(context["message"])
        )
        task = await begun(trainer, Work(trainer))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(scenario())
    assert seen == []
