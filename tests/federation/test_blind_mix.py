"""Blind jobs that mix and compare, over real processes and TLS: the bits of a simulation under the silos' own key."""

import json

import pytest
import torch

from staddle.algorithms.data import split
from staddle.algorithms.local_round import state_from_bytes
from staddle.algorithms.simulation import simulate
from staddle.proto.blind import simulated
from staddle.security import roster as rosters
from staddle.security.head import own_log_key
from staddle.security.ledger_audit import ledger_folder, verify
from staddle.security.reconcile import reconcile
from staddle.silo.group_keys import KEY, PIECE
from staddle.silo.state import split_key

FIVE = ("north", "east", "south", "west", "centre")
PRIVATE = {"secure_aggregation": "required", "weight_most": 2000}


def records_of(running):
    """What each silo trains and tests on; the key of its split is made if there is none yet."""
    found = {}
    for silo in FIVE:
        state = running.federation.state(silo)
        state.mkdir(exist_ok=True)
        found[silo] = split(running.data[silo], split_key(state), 0.25)
    return found


def group_key(running, job):
    """The key that all of a job's silos hold."""
    held = {(running.federation.state(s) / "jobs" / job.name / KEY).read_bytes() for s in FIVE}
    assert len(held) == 1
    return held.pop()[PIECE:]


@pytest.mark.timeout(300)
def test_blind_jobs_give_the_bits_of_the_simulation(start, document):
    torch.set_num_threads(1)
    running = start(*FIVE)
    shards = records_of(running)
    by_class = {silo: torch.bincount(train.y, minlength=10).tolist() for silo, (train, _) in shards.items()}
    counts = {silo: sum(own) for silo, own in by_class.items()}
    public = {**PRIVATE, "weights": "public", "counts": counts, "class_counts": by_class}
    del public["weight_most"]
    some = {"participation": 0.8, "security": public, "options": {"supervisor": "cnn", "tau_theta": 1}}
    jobs = (
        ("pfedsim", {"options": {"rho": 0.4, "similarity": "per_class"}, "security": PRIVATE}),
        ("fedaims", {"options": {"sampling": "algorithm2"}, "security": PRIVATE, "model": "convnet-digits"}),
        ("fedsimsup", some),
    )
    for method, own in jobs:
        running.job(document(f"blind-{method}", FIVE, method, rounds=4, min_cohort=3, **own))
    coordinator = running.start_coordinator()
    for silo in FIVE:
        running.write_silo(silo)
        running.start_silo(silo)
    for job in running.jobs:
        ended = coordinator.wait_for("job.ended", 120)
        assert (ended["job"], ended["outcome"], ended["reason"]) == (job.name, "completed", "")
    running.stop()
    for job in running.jobs:
        assert job.keyed
        exchanges = simulated(job, group_key(running, job))
        rows = []
        mix = exchanges.mix
        exchanges.mix = lambda *asked, mix=mix, rows=rows: rows.append(mix(*asked)) or rows[-1]
        expected = simulate(job, shards, exchanges=exchanges)
        assert [row is not None for row in rows].count(True) > 2 or job.method_name == "fedaims"
        for silo in FIVE:
            folder = running.federation.state(silo) / "jobs" / job.name
            found = state_from_bytes((folder / "model.safetensors").read_bytes())
            for part, tensors in expected.states[silo].parts.items():
                for name, value in tensors.items():
                    assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)
            report = json.loads((folder / "report.json").read_text())
            assert report["final"]["correct_trained"] == expected.history[silo][-1].correct_trained
    roster, theirs = rosters.load(running.federation.folder / "roster.json"), running.federation.state("coordinator")
    for silo in FIVE:
        path = ledger_folder(running.federation.state(silo))
        assert verify(path, key=own_log_key(running.federation.name, running.federation.keys(silo))).ok
        assert not reconcile(path, ledger_folder(theirs), roster).differences
