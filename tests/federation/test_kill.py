"""Either side dies at every durable step or at random, or its disk is full: the job goes on to the
same result.
"""

import signal

import pytest
from federation.keyed import TIMING

from staddle.algorithms.engines.simulation import simulate
from staddle.errors import AbortedError
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.messages import messages

SILOS = ("north", "east", "south", "west")


def begin(running, document, plans, rounds):
    """A federation in which some daemons die and die.

    Fedsimsup's mail is what a fold may not apply twice.
    """
    options = {"participation": 0.75, "rounds": rounds, "round_timeout": 120}
    if rounds > 1:  # what a codec left out goes on to the next round
        options["transport"] = {"codec": "int8"}
    running.job(
        document(
            "sup", SILOS, "fedsimsup", options={"tau_theta": 1, "supervisor": "cnn"}, **options
        )
    )
    running.start_all(TIMING, plans)


def same_as_undisturbed(running):
    """Both ledgers hold, whoever died when, and no record of one contradicts the other."""
    for job in running.jobs:
        running.check_models(job, simulate(job, running.shards()))
    running.check_ledgers()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plans", "rounds", "fewest"),
    [
        ({"coordinator": "every"}, 1, 35),
        ({"north": "every"}, 1, 20),
        ({"coordinator": "full"}, 1, 14),
        ({"north": "full"}, 1, 18),
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
    running.finished("sup")
    running.ended()
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    died = [death for name in plans for death in running.killed(name)]
    same_as_undisturbed(running)
    assert len(died) >= fewest
    if "full" in plans.values():  # whoever met it said so, and what to do
        logs = [running.daemons[name].log.read_text() for name in plans]
        said = [line for log in logs for line in log.splitlines()]
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
    received = running.events("coordinator", "receipt", "refused")
    assert not [event for event in received if "north" in str(event)]
    kept = running.kept.rglob("*north*")
    assert not [path for path in kept if path.suffix in (".part", ".upload")]

    running.start_silo("north")  # there is room again
    running.finished("sup")
    running.stop()
    same_as_undisturbed(running)
    assert {message.status for message in messages(ledger)} == {"sent"}
