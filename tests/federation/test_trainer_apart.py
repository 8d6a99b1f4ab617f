"""A silo that trains in a process apart from its agent; and what a trainer costs that is killed."""

import sys

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job

SILOS = ("north", "east", "south")
# the first is killed as by a system without memory, all others train
SCRIPT = """
if mkdir {died} 2> /dev/null; then kill -9 $$; fi
exec {python} -m staddle.silo.training "$1" --tied
"""
TABLE = """
[training]
launcher = "command"
command = ["sh", "{script}", "{{order}}"]
"""


def test_a_killed_trainer_costs_the_round_and_nothing_else(start, document, monkeypatch):
    running = start(*SILOS)
    job = running.job(document("apart", SILOS, rounds=2, min_cohort=2))
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
    config, state = running.federation.silo_config("north"), running.federation.state("north")
    script = config.parent / "train.sh"
    script.write_text(SCRIPT.format(died=config.parent / "died", python=sys.executable))
    with config.open("a") as file:
        file.write(TABLE.format(script=script))
    for silo in SILOS:
        running.start_silo(silo)
    running.completed()
    running.finished(job.name)
    running.stop()

    (failed,) = running.events("north", "round.failed")
    assert (failed["round"], failed["code"]) == (0, "TRAINING")
    assert "was ended by SIGKILL" in failed["why"]
    assert [event["round"] for event in running.events("north", "round.given")] == [1]
    assert list((state / "orders").iterdir()) == []
    running.check_ledgers()

    # the others' models, and its own of all later rounds, are those of a run in which it was away
    real, lost = Job.cohort, (0, "north")
    away = lambda job, r: tuple(s for s in real(job, r) if (r, s) != lost)
    monkeypatch.setattr(Job, "cohort", away)
    running.check_models(job, simulate(job, running.shards()))
