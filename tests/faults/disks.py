"""Disks that turn read-only, are full, or fail, at any change of what is kept."""

import errno

import pytest
import torch
from faults.disk import Turned
from faults.table import row
from support.ledgers import FEDERATION, KEY, open_ledger, open_log, stored, write_start, write_stop

from staddle.algorithms.course import SiloState
from staddle.coordinator.storage.spool import Spool
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import read_bytes, write_atomic
from staddle.security.dp.budget import Budget
from staddle.security.dp.budget_records import MechanismSteps
from staddle.security.log import append_log
from staddle.silo.job_folder import JobFolder
from staddle.silo.parts.contributions import Contributions

NUMBERS = (errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT)


def interrupted(draw, folder, most, work):
    """How much of ``work`` was acknowledged before a disk took nothing any more.

    It fails with the folder's name.

    ``work`` acknowledges by adding to the list that it is given.
    """
    nth, number, acknowledged = draw.randrange(1, most), draw.choice(NUMBERS), []
    with pytest.MonkeyPatch.context() as patch:
        Turned(patch, nth, number)
        try:
            work(acknowledged)
        except LocalError as error:
            assert str(folder) in str(error), f"{errno.errorcode[number]} at change {nth}: {error}"  # noqa: PT017
    return acknowledged


@row(
    "a disk takes nothing from any change on, under a ledger",
    "every record that was acknowledged is there again",
    6,
)
def disk_of_a_log(folder, draw):
    path = folder / "ledger"
    every, size = draw.randrange(1, 5), draw.randrange(300, 2000)

    def work(acknowledged):
        with open_log(path) as log:
            for number in range(9):
                log.append({"type": "note", "n": number})
                acknowledged.append(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_log, "EVERY", every)
        patch.setattr(append_log, "SEGMENT_BYTES", size)
        kept = interrupted(draw, path, 60, work)
        with open_log(path) as log:
            log.append({"type": "after"})
    notes = [record["n"] for record in stored(path) if record["type"] == "note"]
    assert notes[: len(kept)] == kept
    assert notes == list(range(len(notes)))


@row(
    "a disk takes nothing from any change on, under a silo's ledger",
    "the ledger opens again and goes on",
)
def disk_of_a_silos_ledger(folder, draw):
    path = folder / "ledger"

    def work(acknowledged):
        with open_ledger(path) as ledger:
            write_start(ledger, "staddle", "ab" * 32, "cd" * 32)
            acknowledged.append("start")
            write_stop(ledger, "asked to stop")
            acknowledged.append("stop")

    kept = interrupted(draw, path, 24, work)
    with open_ledger(path) as ledger:
        write_start(ledger, "staddle", "ab" * 32, "cd" * 32)
    assert [record["type"] for record in stored(path) if record["type"] in ("start", "stop")][
        : len(kept)
    ] == kept


@row(
    "a disk takes nothing from any change on, under a job's folder",
    "the last round that was kept is there again",
    fell=(1001, 1010),
)
def disk_of_a_silos_job(folder, draw):
    job = JobFolder(folder / "jobs" / "j")

    def work(acknowledged):
        job.accept(b'{"signed":1}', "data")
        for round_ in range(4):
            state = SiloState({"extractor": {"w": torch.tensor([float(round_)])}}, {})
            given = Contributions({"model": {"w": torch.tensor([float(round_)])}})
            job.save_round(round_, round_, state, given)
            acknowledged.append(round_)

    kept = interrupted(draw, folder, 80, work)
    if kept:
        assert job.signed() == b'{"signed":1}'
        assert job.rounds_done in (len(kept), len(kept) + 1)
        assert job.state(len(kept)).parts["extractor"]["w"].item() == kept[-1]
    work([])  # once the disk is well again
    assert job.rounds_done == 4


@row(
    "a disk takes nothing from any change on, under a privacy budget",
    "nothing that was reserved is forgotten",
    fell=(1324028985,),
)
def disk_of_a_budget(folder, draw):
    path = folder / "privacy"
    steps = MechanismSteps(sigma="1.1", q="0.02", steps=100)

    def opened(**known):
        return Budget.open(path, "cxr", FEDERATION, "a", KEY, **known)

    def work(acknowledged):
        with opened(known=False) as budget:
            budget.set_limit("8", "0.00001", "e3" * 32)
            acknowledged.append("limit")
            for round_ in range(3):
                one = budget.reserve("lung-3", "ab" * 32, round_, "training", [steps])
                acknowledged.append(round_)
                budget.commit(one, [90])

    kept = interrupted(draw, path, 60, work)
    with opened(known=bool(kept)) as budget:
        spent = sum(job.steps["1.1", "0.02", False] for job in budget._jobs.values())
    assert 90 * (len(kept) - 1) <= spent <= 300


@row(
    "a disk takes nothing from any change on, while a file is replaced",
    "the old file or the new one is there",
    fell=(1000,),
)
def disk_of_a_file(folder, draw):
    path, old = folder / "file", b"old" * draw.randrange(1, 9999)
    new = b"new" * draw.randrange(1, 9999)
    write_atomic(path, old)

    def work(acknowledged):
        write_atomic(path, new)
        acknowledged.append(new)

    kept = interrupted(draw, path, 8, work)
    assert read_bytes(path) in ((new,) if kept else (old, new))


@row(
    "a disk takes nothing from any change on, under an upload",
    "it is refused with STORAGE, and nothing else is raised",
)
def disk_of_an_upload(folder, draw):
    spool = Spool(folder / "north.part", "north")
    with pytest.MonkeyPatch.context() as patch:
        Turned(patch, nth := draw.randrange(1, 3), draw.choice(NUMBERS))  # the sync, or the removal
        try:
            spool.write(memoryview(b"x" * draw.randrange(1, 9999)))
            spool.finished()
        except RefusedError as error:
            assert (error.code, nth) == ("STORAGE", 1)  # noqa: PT017 - only where the sync fails
        spool.discard()
