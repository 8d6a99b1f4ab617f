"""Rounds that mix and compare, in which silos die at every durable step of what they hide and of
what they open.
"""

import pytest
from federation.test_blind_kill import SILOS, begin
from support.key_watch import keys_watched

from staddle.algorithms.engines.simulation import simulate
from staddle.security.blind.plan import simulated


def check_one_word_a_round(running, silo):
    """Many versions may have been begun in a round, one was signed.

    Vectors were rotated in one way.
    """
    words, used = {}, {}
    for record in running.records(silo, "egress.protocol"):
        if record["kind"] == "padded":
            words.setdefault(record["round"], set()).add(record["ctx"])
    intents = running.records(silo, "egress.intent")
    for record in intents:
        if record["form"] == "rotated":
            used.setdefault(record["round"], set()).add(record["hidden"]["ctx"])
    rounds = set(range(running.jobs[0].length))
    assert set(words) == set(used) == rounds
    assert {len(found) for found in (*words.values(), *used.values())} == {1}
    begun = [each["hidden"]["number"] for each in intents if each["form"] == "padded"]
    assert begun == sorted(begun)
    assert max(begun) >= len(rounds) - 1


def play(start, document, plans, rounds):
    """A job of pFedSim to its end; where each daemon died."""
    running = start(*SILOS)
    with keys_watched(running.federation, SILOS) as seen:
        begin(running, document, plans, method="pfedsim", options={"rho": 0}, rounds=rounds)
        running.finished("blind")
    running.stop()
    (job,) = running.jobs
    (key,) = {kept[32:64] for silo in SILOS for kept in seen[job.name, silo]}
    running.check_models(job, simulate(job, running.shards(), exchanges=simulated(job, key)))
    for silo in SILOS:
        check_one_word_a_round(running, silo)
    running.check_ledgers()
    return {name: [at[0] if at else "" for at in running.killed(name)] for name in plans}


@pytest.mark.timeout(300)
def test_silos_that_die_at_every_step_of_what_they_hide_end_with_the_same_models(start, document):
    died = play(start, document, {"north": "every:mix-", "east": "every:gram-"}, 3)
    for name in ("versions.json", "signed", "rows.json"):
        steps = {f"rename mix-extractor.{name}", f"sync mix-extractor.{name}.*.tmp"}
        assert steps <= set(died["north"]), died
    assert {"rename gram-rows.json"} <= set(died["east"]), died


@pytest.mark.timeout(300)
def test_killed_again_and_again_all_end_with_the_same_models(start, document):
    """At each step of their own they die in test_keyed_kill.py."""
    died = play(start, document, {"coordinator": "seed:3:6", "north": "seed:4:6"}, 2)
    assert sum(map(len, died.values())) == 12
