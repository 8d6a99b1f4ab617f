"""Bits that a disk changes in what daemons keep."""

import sqlite3
from contextlib import closing

import torch
from faults.table import flip, refused, row
from support.ledgers import FEDERATION, KEY, open_ledger, open_log, write_start, write_stop

from staddle.algorithms.course import SiloState
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.errors import LocalError
from staddle.files import tensor_file
from staddle.security.dp.budget import Budget
from staddle.silo.job_folder import JobFolder
from staddle.silo.parts.contributions import Contributions


def tensors(draw):
    """Some, of drawn shapes and values."""
    generator = torch.Generator().manual_seed(draw.getrandbits(62))
    count = range(draw.randrange(1, 5))
    shapes = [[draw.randrange(5) for _ in range(draw.randrange(3))] for _ in count]
    return {f"w{n}": torch.rand(shape, generator=generator) for n, shape in enumerate(shapes)}


@row("one bit of a file of tensors", "the file is refused by its name")
def bit_of_a_tensor_file(folder, draw):
    path = folder / "some.safetensors"
    path.touch()
    tensor_file.write(path, tensors(draw), {"note": "x" * draw.randrange(9)})
    made = flip(path, draw)
    why = refused(lambda: tensor_file.read(path), path, LocalError, made)
    assert "disk changed" in why or "not a" in why


@row(
    "one bit of a silo's state or outbox of a job",
    "the job's folder gives neither, and names the file",
)
def bit_of_a_silos_job(folder, draw):
    job = JobFolder(folder / "jobs" / "j")
    job.accept(b'{"signed":1}', "data")
    for round_ in range(rounds := draw.randrange(1, 4)):
        state = SiloState({"extractor": tensors(draw)}, {"momentum": torch.ones(2)})
        job.save_round(round_, round_, state, Contributions({"model": tensors(draw)}))
    path = draw.choice(sorted(job.path.glob("*.safetensors")))
    made = flip(path, draw)

    def read():
        job.state(rounds - 1)
        job.outbox(rounds - 1)
        job.state(rounds)

    refused(read, path, LocalError, made)


@row("one bit of what a method knows, in the coordinator's database", "it is named with its job")
def bit_of_a_methods_state(folder, draw):
    path = folder / "coordinator.sqlite"
    database = Database(path)
    with database.transaction():
        database.add_job(b"{}", JobState("good", ("a", "b", "c"), 3, 2), {})
        database.add_job(b"{}", JobState("bad", ("a", "b", "c"), 3, 2), tensors(draw))
    database.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        ((stored,),) = connection.execute("SELECT method FROM jobs WHERE name = 'bad'").fetchall()
        changed, at = bytearray(stored), draw.randrange(len(stored))
        changed[at] ^= 1 << draw.randrange(8)
        connection.execute("UPDATE jobs SET method = ? WHERE name = 'bad'", (bytes(changed),))
    connection.close()
    found, named = Database(path), f"{path}: what the method of job 'bad' knows"
    try:
        refused(found.jobs, named, LocalError, f"a bit of byte {at}")
    finally:
        found.close()


@row(
    "one bit of a ledger that was closed in good order, or of its checkpoint",
    "it is not opened, nor changed",
    6,
)
def bit_of_a_ledger(folder, draw):
    path = folder / "ledger"
    with open_log(path) as log:
        for number in range(draw.randrange(1, 30)):
            log.append({"type": "note", "n": number, "text": "x" * draw.randrange(50)})
    made = flip(draw.choice([path / "checkpoint", *path.glob("seg-*.jsonl")]), draw)
    before = {each.name: each.read_bytes() for each in path.iterdir()}

    refused(lambda: open_log(path).close(), path, LocalError, made)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before


@row("one bit of a data set's privacy budget", "it is not opened, and nothing counts as unspent")
def bit_of_a_budget(folder, draw):
    path = folder / "privacy"
    with Budget.open(path, "cxr", FEDERATION, "a", KEY, known=False) as budget:
        budget.set_limit("8", "0.00001", "e3" * 32)
    made = flip(draw.choice([*path.rglob("checkpoint"), *path.rglob("seg-*.jsonl")]), draw)
    again = lambda: Budget.open(path, "cxr", FEDERATION, "a", KEY, known=True).close()
    refused(again, path, LocalError, made)


@row("one bit of a silo's ledger", "the agent does not start with it", fell=(642541467, 4122710408))
def bit_of_a_silos_ledger(folder, draw):
    path = folder / "ledger"
    with open_ledger(path) as ledger:
        write_start(ledger, "staddle", "ab" * 32, "cd" * 32)
        write_stop(ledger, "asked to stop")
    made = flip(draw.choice([path / "checkpoint", *path.glob("seg-*.jsonl")]), draw)
    refused(lambda: open_ledger(path).close(), path, LocalError, made)
