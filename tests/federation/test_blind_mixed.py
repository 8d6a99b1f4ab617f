"""Blind jobs that mix and compare, with real processes and real TLS: what silos get is what the
oracle computes.
"""

import json

import pytest
import torch
from support.key_watch import keys_watched

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.partition.draw import dirichlet
from staddle.security.blind.plan import JobPlan, simulated
from staddle.silo.blind.group_keys import ENDED
from staddle.silo.ingress.keyed_job import OWN
from staddle.silo.ingress.mix_rows import expected_rows

SILOS = ("north", "east", "south", "west", "middle")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}


def records(running):
    """Training records of each silo, as it will split them, and class by class."""
    for silo in SILOS:
        running.fix_split(silo)
    shards = running.shards(SILOS)
    counts = {silo: len(train) for silo, (train, _) in shards.items()}
    by_class = {
        silo: torch.bincount(train.y, minlength=10).tolist() for silo, (train, _) in shards.items()
    }
    return shards, counts, by_class


def documents(document, counts, by_class):
    declared = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    declared["counts"] = counts
    mixing = {"rounds": 4, "min_cohort": 3, "security": SECURITY, "model": "cnn-digits"}
    convolving = {**mixing, "model": "convnet-digits"}
    away = {**mixing, "participation": 0.8, "security": declared}
    labels = {**away, "security": {**declared, "class_counts": by_class}}
    tagged = {**away, "security": {**declared, "tags": True}}
    directed = {**labels, "security": {**labels["security"], "mix": "directed"}}
    per_class = {"rho": 0.25, "similarity": "per_class"}
    return [
        document("tagged", SILOS, "fedavg", **tagged),
        document("mixed", SILOS, "pfedsim", options={"rho": 0.5}, **mixing),
        document("by-class", SILOS, "pfedsim", options=per_class, **mixing),
        document("in-part", SILOS, "pfedsim", options={"rho": 0.25}, **away),
        document("compared", SILOS, "fedaims", options={"sampling": "algorithm2"}, **convolving),
        document("by-samples", SILOS, "fedsimsup", options={"similarity": "samples"}, **away),
        document("by-labels", SILOS, "fedsimsup", options={"similarity": "labels"}, **labels),
        document("directed", SILOS, "fedsimsup", **directed),
    ]


def opened_rows(running, job):
    """Of which silos there is a memory of rows that were opened."""
    found = []
    for silo in SILOS:
        for path in running.job_folder(job, silo).glob("mix-*.[rd]*.json"):
            kept = json.loads(path.read_bytes())
            if kept.get("memory", {}).get("last") or kept.get("delivered"):
                found.append(silo)
    return found


@pytest.mark.timeout(300)
def test_blind_jobs_that_mix_and_compare_give_what_the_oracle_computes(start, document):
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
        running.start_silos()
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
        running.check_models(job, expected)
        for silo in SILOS if alone else ():  # nearly what it is in the clear
            found = running.model(job, silo).parts["extractor"]
            for name, value in alone.states[silo].parts["extractor"].items():
                assert torch.allclose(found[name], value, atol=1e-2), name
        if any(expected_rows(JobPlan(job).round(round_)) for round_ in range(job.length)):
            assert opened_rows(running, job), f"{job.name}: no silo had a row"
        check_sums(running, job)
    running.check_ledgers()
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


def check_sums(running, job):
    """What is published as it was summed has come down in words, in every round that had it."""
    seen = [line for line in running.events("coordinator", "delivered") if "sums" in line]
    told = {line["round"] for line in seen if line["job"] == job.name}
    due = {round_ for round_ in range(job.length + 1) if JobPlan(job).round(round_).sums_down}
    if job.method_name == "pfedsim":  # afterwards only to silos that have given no extractor
        assert told >= {round_ for round_ in due if job.up(round_ - 1)[0].name == "model"}
    else:
        assert told == due
    assert job.name != "tagged" or told == {1, 2, 3, 4}


def check_ledger(running, silo):
    """Nothing left in the clear, and each form has its readers."""
    intents = running.records(silo, "egress.intent")
    readers = {"masked": ["sum"], "padded": ["mix"], "rotated": ["gram"]}
    assert {record["form"] for record in intents} == set(readers)
    jobs = {job.name: job for job in running.jobs}
    for record in intents:
        job, round_ = jobs[record["job"]], record["round"]
        rows = [*job.away(round_)] if job.security.mix == "directed" and round_ else []
        assert record["readers"] == [*readers[record["form"]], *rows]
