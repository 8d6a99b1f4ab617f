"""The key that a job's silos share, where either side dies at every durable step: all silos have the same one."""

import json
import socket
import sqlite3

import pytest

from staddle.commands import local_federation
from staddle.proto import secure_pb2 as secure
from staddle.security import group_key as g
from staddle.security import roster as rosters
from staddle.silo.group_keys import KEY

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def events(running, name):
    lines = running.daemons[name].log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def records(folder):
    lines = (line for path in sorted(folder.glob("seg-*.jsonl")) for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines]


STEPS = {
    "north": (
        "sync group.secret.*.tmp",
        "rename group.secret",
        "sync group.key.*.tmp",
        "rename group.key",
        "remove group.secret",
    ),
    "east": ("sync seg-00000001.jsonl egress.protocol job 0 contribution",),
    "coordinator": ("before COMMIT of job contribution", "after COMMIT of job contribution"),
}
PLANS = {"north": "every:group", "east": "every:contribution", "coordinator": "every:contribution"}


@pytest.mark.timeout(120)
def test_killed_around_every_durable_step_all_have_one_key(start, document):
    running = start(*SILOS)
    made = document(
        "job", SILOS, "pfedsim", options={"rho": 0.0}, min_cohort=3, rounds=1, round_timeout=120, security=SECURITY
    )
    job = running.job(made)
    running.address = f"127.0.0.1:{free_port()}"
    local_federation.write_coordinator(running.federation, ["job"], TIMING, running.address)
    for silo in SILOS:
        running.write_silo(silo)
    for name in ("coordinator", *SILOS):
        running.start_impatient(name, PLANS.get(name, "never"))
    for silo in SILOS:
        assert running.daemons[silo].wait_for("job.finished", 150)["completed"]
    running.stop()

    for name, steps in STEPS.items():
        died = [at for line in events(running, name) if line["event"] == "killed" for at in line["at"]]
        assert set(steps) <= set(died), died
    files = {}
    for silo in SILOS:
        folder = running.federation.state(silo) / "jobs" / "job"
        files[silo] = (folder / KEY).read_bytes()
        assert [path.name for path in folder.glob("*group*")] == [KEY]
    epoch = g.Epoch.of(rosters.load(running.federation.folder / "roster.json"), SILOS, job.digest)
    (file,) = set(files.values())
    assert (file[:32], len(file)) == (epoch.context(), 64)
    assert not [path for path in running.federation.folder.rglob("*.log") if file[32:].hex() in path.read_text()]
    with sqlite3.connect(running.federation.coordinator_config.parent / "state" / "coordinator.sqlite") as rows:
        kept = dict(rows.execute("SELECT silo, body FROM contributions").fetchall())
    assert set(kept) == set(SILOS)
    assert all(secure.Contributed.FromString(body).session == b"" for body in kept.values())
    refused = [line for line in events(running, "coordinator") if line["event"] == "refused"]
    assert [line for line in refused if line["code"] == "SECURE"] == []  # a silo that starts anew gives the very same
    for silo in SILOS:
        given = [r for r in records(running.federation.state(silo) / "ledger") if r.get("kind") == "contribution"]
        assert {record["ctx"] for record in given} == {epoch.context().hex()}
        assert len({record["message"]["bytes"] for record in given}) == 1
