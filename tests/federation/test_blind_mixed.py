"""Blind jobs that mix and compare, with real processes and real TLS: what silos get is what the
oracle computes.
"""

import json

import pytest
import torch
from support.key_watch import keys_watched

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.security.blind.plan import JobPlan, simulated
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.ledger.reconcile import reconcile
from staddle.security.log.head import own_log_key
from staddle.silo.blind.group_keys import ENDED
from staddle.silo.ingress.keyed_job import OWN
from staddle.silo.ingress.mix_rows import expected_rows
from staddle.silo.job_folder import split_key

SILOS = ("north", "east", "south", "west", "middle")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}


def records(running):
    """Training records of each silo, as it will split them, and class by class."""
    for silo in SILOS:
        running.fix_split(silo)
    shards = {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25)
        for silo in SILOS
    }
    counts = {silo: len(train) for silo, (train, _) in shards.items()}
    by_class = {
        silo: torch.bincount(train.y, minlength=10).tolist() for silo, (train, _) in shards.items()
    }
    return shards, counts, by_class


def documents(document, counts, by_class):
    declared = {
        "secure_aggregation": "required",
        "weights": "public",
        "dropouts": "any",
        "counts": counts,
    }
    mixing = {"rounds": 4, "min_cohort": 3, "security": SECURITY, "model": "cnn-digits"}
    convolving = {**mixing, "model": "convnet-digits"}
    away = {**mixing, "participation": 0.8, "security": declared}
    labels = {**away, "security": {**declared, "class_counts": by_class}}
    return [
        document("tagged", SILOS, "fedavg", **{**away, "security": {**declared, "tags": True}}),
        document("mixed", SILOS, "pfedsim", options={"rho": 0.5}, **mixing),
        document(
            "by-class", SILOS, "pfedsim", options={"rho": 0.25, "similarity": "per_class"}, **mixing
        ),
        document("in-part", SILOS, "pfedsim", options={"rho": 0.25}, **away),
        document("compared", SILOS, "fedaims", options={"sampling": "algorithm2"}, **convolving),
        document("by-samples", SILOS, "fedsimsup", options={"similarity": "samples"}, **away),
        document("by-labels", SILOS, "fedsimsup", options={"similarity": "labels"}, **labels),
        document(
            "directed",
            SILOS,
            "fedsimsup",
            **{**labels, "security": {**labels["security"], "mix": "directed"}},
        ),
    ]


def kept(running, job, silo):
    return state_from_bytes(
        (running.federation.state(silo) / "jobs" / job.name / "model.safetensors").read_bytes()
    )


def opened_rows(running, job):
    """Of which silos there is a memory of rows that were opened."""
    return [
        silo
        for silo in SILOS
        for path in (running.federation.state(silo) / "jobs" / job.name).glob("mix-*.[rd]*.json")
        if json.loads(path.read_bytes()).get("memory", {}).get("last")
        or json.loads(path.read_bytes()).get("delivered")
    ]


def check_silo(running, job, silo, expected):
    for part, tensors in expected.states[silo].parts.items():
        for name, value in tensors.items():
            assert torch.equal(kept(running, job, silo).parts[part][name], value), (
                job.name,
                silo,
                part,
                name,
            )


@pytest.mark.timeout(300)
def test_blind_jobs_that_mix_and_compare_give_what_the_oracle_computes(start, document):
    torch.set_num_threads(1)
    running = start(*SILOS)
    # none outweighs the others
    parts = dirichlet(digits().y.numpy(), len(SILOS), 3.0, 3, minimum=250)
    # a third of each share: weights stay as unequal, and no silo has to learn much
    running.data = {
        silo: digits().take(part[: len(part) // 3]) for silo, part in zip(SILOS, parts, strict=True)
    }
    shards, counts, by_class = records(running)
    for each in documents(document, counts, by_class):
        running.job(each)
    coordinator = running.start_coordinator()
    watched = keys_watched(running.federation, SILOS), keys_watched(running.federation, SILOS, OWN)
    with watched[0] as seen, watched[1] as owned:
        for silo in SILOS:
            running.write_silo(silo)
            running.start_silo(silo)
        for job in running.jobs:
            ended = coordinator.wait_for("job.ended", 120)
            assert (ended["job"], ended["outcome"], ended["reason"]) == (job.name, "completed", "")
            for silo in SILOS:  # whoever seizes a silo now finds no key of the job
                folder = running.federation.state(silo) / "jobs" / job.name
                assert [path.name for path in folder.glob("*group*")] == [ENDED]
    running.stop()
    for job in running.jobs:
        # behind the context of its epoch
        (key,) = {kept[32:64] for silo in SILOS for kept in seen[job.name, silo]}
        expected = simulate(job, shards, exchanges=simulated(job, key))
        alone = simulate(job, shards, exchanges=PLAIN) if job.name == "mixed" else None
        for silo in SILOS:
            check_silo(running, job, silo, expected)
            if alone:  # nearly what it is in the clear
                for name, value in alone.states[silo].parts["extractor"].items():
                    assert torch.allclose(
                        kept(running, job, silo).parts["extractor"][name], value, atol=1e-2
                    ), name
        if any(expected_rows(JobPlan(job).round(round_)) for round_ in range(job.length)):
            assert opened_rows(running, job), f"{job.name}: no silo had a row"
        check_sums(coordinator, job)
    for silo in SILOS:
        check_ledger(running, silo)
        check_prekeys(owned["by-class", silo])


def check_prekeys(contents):
    """Of three rounds in which everybody gave: each has a prekey of its own, and the first is gone
    before the last.
    """
    kept = [
        {int.from_bytes(file[at : at + 8]) for at in range(32, len(file), 40)} for file in contents
    ]
    assert {generation for each in kept for generation in each} == {0, 1, 2, 3}
    assert {1, 2, 3} in kept


def check_sums(coordinator, job):
    """What is published as it was summed has come down in words, in every round that had it."""
    seen = [
        json.loads(line)
        for line in coordinator.log.read_text().splitlines()
        if line.startswith("{")
    ]
    told = {
        line["round"]
        for line in seen
        if line["event"] == "delivered" and line["job"] == job.name and "sums" in line
    }
    due = {round_ for round_ in range(job.length + 1) if JobPlan(job).round(round_).sums_down}
    if job.method_name == "pfedsim":  # afterwards only to silos that have given no extractor
        assert told >= {round_ for round_ in due if job.up(round_ - 1)[0].name == "model"}
    else:
        assert told == due
    assert job.name != "tagged" or told == {1, 2, 3, 4}


def check_ledger(running, silo):
    """Nothing left in the clear, each form has its readers, and both ledgers agree."""
    path = ledger_folder(running.federation.state(silo))
    roster = rosters.load(running.federation.folder / "roster.json")
    assert verify(path, key=own_log_key(running.federation.name, running.federation.keys(silo))).ok
    lines = [
        line for file in sorted(path.glob("seg-*.jsonl")) for line in file.read_text().splitlines()
    ]
    intents = [record for record in map(json.loads, lines) if record["type"] == "egress.intent"]
    readers = {"masked": ["sum"], "padded": ["mix"], "rotated": ["gram"]}
    assert {record["form"] for record in intents} == set(readers)
    jobs = {job.name: job for job in running.jobs}
    for record in intents:
        job = jobs[record["job"]]
        rows = (
            [*job.away(record["round"])]
            if job.security.mix == "directed" and record["round"]
            else []
        )
        assert record["readers"] == [*readers[record["form"]], *rows]
    theirs = ledger_folder(running.federation.state("coordinator"))
    assert not reconcile(path, theirs, roster).differences
