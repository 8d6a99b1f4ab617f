"""Blind rounds with real processes and real TLS: the sums that the coordinator opens are those of
the pure core.
"""

import json

import pytest
import torch

from staddle.algorithms.data.dataset import split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.ledger.reconcile import reconcile
from staddle.security.log.head import own_log_key
from staddle.silo.job_folder import split_key

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
JOBS = (
    ("local", "cnn-digits", {}),
    ("fedavg", "cnn-digits", {}),
    ("fedper", "cnn-digits", {}),
    ("fedssa", "cnn-digits", {"t_stable": 3}),
    ("fedaims", "convnet-digits", {"sampling": "balanced"}),
    ("ppfl", "cnn-digits", {"models": 2}),
)


def blind(document, name, method="fedavg", **changes):
    changes = {"rounds": 3, "min_cohort": 3, "security": SECURITY, **changes}
    return document(name, SILOS, method, **changes)


def check_silo(running, job, silo, expected):
    folder = running.federation.state(silo) / "jobs" / job.name
    found = state_from_bytes((folder / "model.safetensors").read_bytes())
    wanted = expected.states[silo]
    for part, tensors in wanted.parts.items():
        for name, value in tensors.items():
            assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)
    report = json.loads((folder / "report.json").read_text())
    last = expected.history[silo][-1]
    assert report["final"]["correct_trained"] == last.correct_trained


def records_of(running, silo):
    path = ledger_folder(running.federation.state(silo))
    return [
        json.loads(line)
        for file in sorted(path.glob("seg-*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def check_ledger(running, silo, rounds):
    """All that left as tensors is masked, each round was summed over all silos, and both ledgers
    agree.
    """
    path = ledger_folder(running.federation.state(silo))
    roster = rosters.load(running.federation.folder / "roster.json")
    assert verify(path, key=own_log_key(running.federation.name, running.federation.keys(silo))).ok
    records = records_of(running, silo)
    intents = [record for record in records if record["type"] == "egress.intent"]
    assert {record["form"] for record in intents} == {"masked"}
    assert all(record["secagg"]["members"] == sorted(SILOS) for record in intents)
    digests = [record for record in records if record["type"] == "egress.digest"]
    assert [record["tensors"] for record in digests] == [[]] * rounds
    sums = [record for record in records if record["type"] == "secagg.sum"]
    assert [record["survivors"] for record in sums] == [sorted(SILOS)] * rounds
    theirs = ledger_folder(running.federation.state("coordinator"))
    assert not reconcile(path, theirs, roster).differences


def check_withheld(running, job, silo, train, _):
    """The silo's own log says once in a counted job, and never in another, what it withholds."""
    events = [json.loads(line) for line in running.daemons[silo].log.read_text().splitlines()]
    told = [
        event for event in events if event["event"] == "job.withheld" and event["job"] == job.name
    ]
    assert len(told) == job.counted
    for each in told:
        assert each["fewest_holders"] == job.fewest_holders
        assert set(each["classes_withheld"]) <= set(train.y.tolist())


@pytest.mark.timeout(300)
def test_blind_jobs_give_the_sums_of_the_quantised_simulation(start, document):
    torch.set_num_threads(1)
    running = start(*SILOS)
    for method, model, options in JOBS:
        running.job(blind(document, f"blind-{method}", method, model=model, options=options))
    coordinator = running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        running.start_silo(silo)
    for job in running.jobs:
        ended = coordinator.wait_for("job.ended", 120)
        assert (ended["job"], ended["outcome"], ended["reason"]) == (job.name, "completed", "")
    running.stop()
    shards = {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25)
        for silo in SILOS
    }
    for job in running.jobs:
        expected = simulate(job, shards, exchanges=Quantised(JobPlan(job).bounds))
        for silo in SILOS:
            check_silo(running, job, silo, expected)
            check_withheld(running, job, silo, *shards[silo])
    for silo in SILOS:
        check_ledger(running, silo, sum(job.length for job in running.jobs))
