"""Either side dies at every durable step or at random, or its disk is full: the job goes on to the
same result.
"""

import json
import signal
import socket

import pytest
import torch

from staddle.algorithms.data.dataset import split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.commands.federation import local_federation
from staddle.commands.ledger.reconcile import compare
from staddle.errors import AbortedError
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.messages import messages
from staddle.silo.job_folder import split_key

SILOS = ("north", "east", "south", "west")
# lost after 30 s: who restarts is not
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def begin(running, document, plans, rounds):
    """A federation in which some daemons die and die.

    Fedsimsup's mail is what a fold may not apply twice.
    """
    options = {"participation": 0.75, "rounds": rounds, "round_timeout": 120}
    running.job(document("sup", SILOS, "fedsimsup", options={"tau_theta": 1}, **options))
    running.address = f"127.0.0.1:{free_port()}"
    names = [job.name for job in running.jobs]
    local_federation.write_coordinator(running.federation, names, TIMING, running.address)
    for silo in SILOS:
        running.write_silo(silo)
    for name in ("coordinator", *SILOS):
        running.start_daemon(name, plans.get(name, "never"))


def same_as_undisturbed(running):
    torch.set_num_threads(1)
    shards = {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25)
        for silo in SILOS
    }
    for job in running.jobs:
        expected = simulate(job, shards)
        for silo in SILOS:
            path = running.federation.state(silo) / "jobs" / job.name / "model.safetensors"
            found = state_from_bytes(path.read_bytes())
            for part, tensors in expected.states[silo].parts.items():
                for name, value in tensors.items():
                    assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)
    roster, state = (
        rosters.load(running.federation.folder / "roster.json"),
        running.federation.state,
    )
    # whoever died when: both ledgers hold, and no record of one contradicts the other
    for silo in SILOS:
        assert (
            compare(state(silo) / "ledger", state("coordinator") / "ledger", roster).differences
            == ()
        )


def deaths(running, victim):
    lines = (
        json.loads(line)
        for line in running.daemons[victim].log.read_text().splitlines()
        if line.startswith("{")
    )
    return [line["at"] for line in lines if line["event"] == "killed"]


def finished(running):
    for job in running.jobs:
        for silo in SILOS:
            while (ended := running.daemons[silo].event(150) or {}).get(
                "event", "job.finished"
            ) != "job.finished":
                running.daemons["coordinator"].check()
            assert (ended.get("job"), ended.get("completed")) == (job.name, True), running.daemons[
                silo
            ].tail()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plans", "rounds", "fewest"),
    [
        ({"coordinator": "every"}, 1, 45),
        ({"north": "every"}, 1, 20),
        ({"coordinator": "full"}, 1, 15),
        ({"north": "full"}, 1, 20),
        ({"coordinator": "seed:1:6", "north": "seed:2:6", "east": "seed:3:6"}, 5, 18),
    ],
    ids=[
        "coordinator at every step",
        "silo at every step",
        "coordinator's disk full at every write",
        "silo's disk full at every write",
        "all at random",
    ],
)
def test_killed_again_and_again(start, document, plans, rounds, fewest):
    running = start(*SILOS)
    begin(running, document, plans, rounds)
    finished(running)
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    died = [death for name in plans for death in deaths(running, name)]
    same_as_undisturbed(running)
    assert len(died) >= fewest
    if "full" in plans.values():  # whoever met it said so, and what to do
        said = [
            line for name in plans for line in running.daemons[name].log.read_text().splitlines()
        ]
        ends = [line for line in said if line.startswith("staddle: ")]
        assert len(ends) == len(died)
        assert all("make room" in line and str(running.federation.folder) in line for line in ends)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["none", "a part"])
def test_what_the_ledger_cannot_take_does_not_leave(start, document, part):
    running = start(*SILOS)
    begin(running, document, {"north": f"full:{part} of seg-00000001.jsonl egress.intent sup 0"}, 1)
    north = running.daemons["north"]
    with pytest.raises(AbortedError, match="ended with code 1"):
        north.wait_for("job.finished", 60)
    ledger = ledger_folder(running.federation.state("north"))
    said = f"staddle: {ledger}: takes no more records: a write failed"
    (line,) = [line for line in north.log.read_text().splitlines() if line.startswith("staddle: ")]
    assert line.startswith(said)
    assert line.endswith("make room, then restart")
    assert messages(ledger) == ()
    received = [
        json.loads(line) for line in running.daemons["coordinator"].log.read_text().splitlines()
    ]
    assert not [
        event
        for event in received
        if event["event"] in ("receipt", "refused") and "north" in str(event)
    ]
    state = running.federation.coordinator_config.parent / "state"
    assert not [path for path in state.rglob("*north*") if path.suffix in (".part", ".upload")]

    running.start_silo("north")  # there is room again
    finished(running)
    running.stop()
    same_as_undisturbed(running)
    assert {message.status for message in messages(ledger)} == {"sent"}
