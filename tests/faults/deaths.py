"""Processes that are killed at any change of what they keep."""

import pytest
from faults.disk import killed
from faults.table import row
from support.ledgers import open_log, stored

from staddle.security.log import append_log
from staddle.security.log.tree_head import TreeHead
from staddle.silo.job_folder import JobFolder

HOW = ("before", "torn", "after")
LONGEST_SECONDS = 50.0  # of a job with deaths; a row has a minute


@row(
    "kill -9 at any change of a ledger",
    "every record and checkpoint that was promised is there again",
    6,
)
def death_of_a_log_writer(folder, draw):
    path, count = folder / "ledger", draw.randrange(1, 12)
    ends = draw.randrange(count)

    def work(place, promise):
        with open_log(place) as log:
            for number in range(count):
                promise(log.append({"type": "note", "n": number}).seq + 1)
                if number == ends:
                    promise(TreeHead.parse(log.checkpoint().text).size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_log, "EVERY", draw.randrange(1, 5))
        patch.setattr(append_log, "SEGMENT_BYTES", draw.randrange(300, 2000))
        promised = killed(path, draw.randrange(1, 80), draw.choice(HOW), work)
        with open_log(path) as log:
            log.append({"type": "after"})
    notes = [record["n"] for record in stored(path) if record["type"] == "note"]
    assert notes == list(range(len(notes)))
    assert len(notes) >= (count if promised is None else promised)
    assert not list(path.glob(".*.tmp"))


@row(
    "kill -9 while a torn tail is repaired", "some record says what was cut, and its bytes are kept"
)
def death_of_a_repair(folder, draw):
    path = folder / "ledger"
    with open_log(path) as log:
        for number in range(draw.randrange(1, 4)):
            log.append({"type": "note", "n": number})
    torn = b'{"half' + b"x" * draw.randrange(200)
    with (path / "seg-00000001.jsonl").open("ab") as file:
        file.write(torn)
    repair = lambda place, _: open_log(place).close()
    for _ in range(draw.randrange(1, 4)):  # again and again
        killed(path, draw.randrange(1, 14), draw.choice(HOW), repair)
    open_log(path).close()
    dropped = [record["dropped_bytes"] for record in stored(path) if record["type"] == "recovery"]
    assert sum(dropped) >= len(torn)
    assert torn in (path / "seg-00000001.torn").read_bytes()


@row(
    "kill -9 at any change of a job's folder", "the job is there as it was accepted, or not at all"
)
def death_of_a_silos_job(folder, draw):
    job = JobFolder(folder / "jobs" / "j")

    def work(place, promise):
        JobFolder(place).accept(b'{"signed":1}', "data")
        promise(1)
        JobFolder(place).fail()
        promise(2)

    promised = killed(job.path, draw.randrange(1, 20), draw.choice(HOW), work)
    kept = 2 if promised is None else promised
    assert job.signed() in ((b'{"signed":1}',) if kept else (None, b'{"signed":1}'))
    assert job.failed or kept < 2
    work(job.path, lambda _: None)
    assert job.failed


@row(
    "kill -9 of daemons while a blind job goes on",
    "all of its rounds close, and nobody is blamed",
    seeds=0,
)
def death_of_daemons_in_a_blind_job(folder, draw):
    import storm  # noqa: PLC0415 it is there in a checkout only, beside soak.py

    job = storm.document(draw.choice(("pfedsim", "fedavg")), storm.SILOS, 2)
    seed, mean = draw.randrange(2**32), draw.uniform(2.0, 6.0)
    report = storm.storm(folder, job, seed=seed, mean_seconds=mean, longest_seconds=LONGEST_SECONDS)
    assert report.sound, "\n".join(report.lines())
