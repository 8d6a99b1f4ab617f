"""Rounds that mix and compare, in which silos die at every durable step of what they hide and of
what they open.
"""

import pytest
import torch
from federation.test_blind_kill import SILOS, begin, check_ledgers, events, finished, records_of
from support.key_watch import keys_watched

from staddle.algorithms.data.dataset import split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.security.blind.plan import simulated
from staddle.silo.job_folder import split_key

SECURITY = {"secure_aggregation": "required", "weight_most": 2000}


def check_models(running, seen):
    """The model of the oracle at every silo, bit for bit."""
    torch.set_num_threads(1)
    (job,) = running.jobs
    states = {silo: running.federation.state(silo) for silo in SILOS}
    shards = {silo: split(running.data[silo], split_key(states[silo]), 0.25) for silo in SILOS}
    (key,) = {kept[32:64] for silo in SILOS for kept in seen[job.name, silo]}
    expected = simulate(job, shards, exchanges=simulated(job, key))
    for silo in SILOS:
        found = state_from_bytes(
            (states[silo] / "jobs" / job.name / "model.safetensors").read_bytes()
        )
        for part, tensors in expected.states[silo].parts.items():
            for name, value in tensors.items():
                assert torch.equal(found.parts[part][name], value), (silo, part, name)


def check_one_word_a_round(running, silo):
    """Many versions may have been begun in a round, one was signed.

    Vectors were rotated in one way.
    """
    records = records_of(running, silo)
    words, used = {}, {}
    for record in records:
        if record["type"] == "egress.protocol" and record["kind"] == "padded":
            words.setdefault(record["round"], set()).add(record["ctx"])
        if record["type"] == "egress.intent" and record["form"] == "rotated":
            used.setdefault(record["round"], set()).add(record["hidden"]["ctx"])
    rounds = set(range(running.jobs[0].length))
    assert set(words) == set(used) == rounds
    assert {len(found) for found in (*words.values(), *used.values())} == {1}
    begun = [
        r["hidden"]["number"]
        for r in records
        if r["type"] == "egress.intent" and r["form"] == "padded"
    ]
    assert begun == sorted(begun)
    assert max(begun) >= len(rounds) - 1


@pytest.mark.timeout(300)
def test_silos_that_die_at_every_step_of_what_they_hide_and_open_end_with_the_same_models(
    start, document
):
    running = start(*SILOS)
    plans = {"north": "every:mix-", "east": "every:gram-"}
    with keys_watched(running.federation, SILOS) as seen:
        begin(
            running,
            document,
            plans,
            method="pfedsim",
            options={"rho": 0},
            rounds=3,
            security=SECURITY,
        )
        finished(running)
    died = check_all(running, plans, seen)
    for name in ("versions.json", "signed", "rows.json"):
        assert {f"rename mix-extractor.{name}", f"sync mix-extractor.{name}.*.tmp"} <= set(
            died["north"]
        ), died
    assert {"rename gram-rows.json"} <= set(died["east"]), died


@pytest.mark.timeout(300)
def test_killed_again_and_again_all_end_with_the_same_models(start, document):
    """At each step of their own they die in test_keyed_kill.py."""
    running, plans = start(*SILOS), {"coordinator": "seed:3:6", "north": "seed:4:6"}
    with keys_watched(running.federation, SILOS) as seen:
        begin(
            running,
            document,
            plans,
            method="pfedsim",
            options={"rho": 0},
            rounds=2,
            security=SECURITY,
        )
        finished(running)
    died = check_all(running, plans, seen)
    assert sum(map(len, died.values())) == 12


def check_all(running, plans, seen):
    """Where each daemon died."""
    running.stop()
    check_models(running, seen)
    for silo in SILOS:
        check_one_word_a_round(running, silo)
    check_ledgers(running)
    killed = {
        name: [line["at"] for line in events(running, name) if line["event"] == "killed"]
        for name in plans
    }
    return {name: [at[0] if at else "" for at in found] for name, found in killed.items()}
