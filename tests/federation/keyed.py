"""What tests of blind jobs that mix and compare share: a federation, its oracle, and what its silos
keep.
"""

import json
import socket
import sqlite3
from unittest.mock import patch

import torch
from support.key_watch import keys_watched

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.commands.federation import local_federation
from staddle.commands.ledger.reconcile import compare
from staddle.security.blind.plan import simulated
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.log.head import own_log_key
from staddle.silo.job_folder import split_key

SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
# lost after 30 s: who restarts is not
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}


def seeded(document, holds):
    """The document with the first seed for which its job ``holds``: what is drawn follows from all
    of it.
    """
    jobs = (
        Job.from_file(
            JobFile.model_validate({**document, "seed": seed}), "job.toml"
        ).for_federation()
        for seed in range(2000)
    )
    return {**document, "seed": next(job.seed for job in jobs if holds(job))}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def even(running, silos):
    """Give each silo about as many records, so that none outweighs the others in a row."""
    parts = dirichlet(digits().y.numpy(), len(silos), 3.0, 3, minimum=200)
    running.data = {silo: digits().take(part) for silo, part in zip(silos, parts, strict=True)}
    for silo in silos:
        running.fix_split(silo)
    running.watch = keys_watched(running.federation, silos)
    running.keys = running.watch.__enter__()


def counts(running, silos):
    """Training records of each silo, as it will split them."""
    return {silo: len(train) for silo, (train, _) in shards(running, silos).items()}


def shards(running, silos):
    return {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25)
        for silo in silos
    }


def configure(running, silos, timing=TIMING, jobs=None):
    """All configurations, for an address that stays."""
    running.address = f"127.0.0.1:{free_port()}"
    names = [job.name for job in running.jobs] if jobs is None else jobs
    local_federation.write_coordinator(running.federation, names, timing, running.address)
    for silo in silos:
        running.write_silo(silo)


def finished(running, silos, name):
    """Wait until these silos have the end of a job."""
    for silo in silos:
        while (ended := running.daemons[silo].event(150) or {}).get(
            "event", "job.finished"
        ) != "job.finished":
            running.daemons["coordinator"].check()
        assert (ended.get("job"), ended.get("completed")) == (name, True), running.daemons[
            silo
        ].tail()


def events(running, name):
    """What a daemon has logged, and ``crashing.py`` of its deaths."""
    lines = running.daemons[name].log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def records_of(running, silo):
    path = ledger_folder(running.federation.state(silo))
    return [
        json.loads(line)
        for file in sorted(path.glob("seg-*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def job_folder(running, job, silo):
    return running.federation.state(silo) / "jobs" / job.name


def group_key(running, job, silos):
    """The one that all had while the job ran, behind the context of its epoch."""
    (key,) = {kept[32:64] for silo in silos for kept in running.keys[job.name, silo]}
    return key


def check_result(running, job, silos):
    """Bit for bit what the oracle computes under the job's own key, with those who took part to the
    end of each round.

    Which silos these are is what the coordinator says; it is returned, round by round.
    """
    torch.set_num_threads(1)
    running.watch.__exit__(None, None, None)
    key = group_key(running, job, silos)
    closed = stored(running, f"rounds WHERE job = '{job.name}'", "round, members")
    members = {round_: tuple(json.loads(names)) for round_, names in closed}
    with patch.object(Job, "cohort", lambda _, round_: members[round_]):
        expected = simulate(job, shards(running, job.silos), exchanges=simulated(job, key))
    for silo in silos:
        found = state_from_bytes(
            (job_folder(running, job, silo) / "model.safetensors").read_bytes()
        )
        for part, tensors in expected.states[silo].parts.items():
            for name, value in tensors.items():
                assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)
    return members


def check_ledgers(running, silos):
    """They verify, their own and with the coordinator's.

    Nothing left in the clear, and no two words on a version.
    """
    roster, state = (
        rosters.load(running.federation.folder / "roster.json"),
        running.federation.state,
    )
    for silo in silos:
        path = ledger_folder(state(silo))
        assert verify(
            path, key=own_log_key(running.federation.name, running.federation.keys(silo))
        ).ok
        assert compare(path, state("coordinator") / "ledger", roster).differences == ()
        records = records_of(running, silo)
        forms = {record["form"] for record in records if record["type"] == "egress.intent"}
        assert forms <= {"masked", "padded", "rotated"}
        # nobody broke a rule
        assert {record["blame"] for record in records if record["type"] == "secagg.end"} <= {""}


def stored(running, table, columns):
    path = running.federation.coordinator_config.parent / "state" / "coordinator.sqlite"
    with sqlite3.connect(path) as database:
        return database.execute(f"SELECT {columns} FROM {table}").fetchall()


def check_left_over(running):
    """The coordinator keeps no words of what silos gave once the job has ended, and no row
    of them.
    """
    folder = running.federation.coordinator_config.parent / "state"
    kinds = (".part", ".upload", ".masked", ".rotated", ".padded", ".rows")
    left = [path.name for path in folder.rglob("*") if path.suffix in kinds or "@sum" in path.name]
    assert not left, left
    silos = {silo for job in running.jobs for silo in job.silos}
    rows = [
        path.name
        for path in folder.rglob("*.words")
        if any(f".{silo}." in path.name for silo in silos)
    ]
    assert not rows, rows  # of a directed mix
    assert stored(running, "hidden", "file") == []
    assert {room for (room,) in stored(running, "files", "room")} <= {"result", "words"}
