"""Private jobs with real processes and real TLS: paid for before, spent for ever, and nothing else
leaves.
"""

import numpy as np
import pytest
import torch
from federation.keyed import TIMING, even
from support.ledgers import stored
from support.private_jobs import dataset, undrafted

from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.coordinator.storage.results import read
from staddle.security.dp.budget_records import MechanismSteps
from staddle.security.dp.rdp import cost
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.log.head import own_log_key

SILOS = ("north", "east", "south", "west")
ROUNDS = 4
SIGMA = "1.2"
HISTOGRAM, ROUND = (
    MechanismSteps(sigma="10.0", q="1", steps=1),
    MechanismSteps(sigma=SIGMA, q="0.2", steps=5),
)
COVERED = 6  # rounds that the job's target covers: it plans ROUNDS and one more
# in the names of writes
DEADLY = ("counts.json", "privacy.head", "budget.commit", "rename outbox-3", "rename state-3")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}


def private(document, name, method, epsilon, metrics_sigma=None, **changes):
    table = {"epsilon": epsilon, "delta": 1e-5, "sample_rate": 0.2, "sigma": SIGMA}
    if metrics_sigma is not None:
        table["metrics_sigma"] = metrics_sigma
    return document(
        name, SILOS, method, **{"min_cohort": 2, "rounds": 2, "privacy": table, **changes}
    )


def budget_of(running, silo):
    """Records of the budget, with their reservations by seq."""
    found = stored(running.federation.state(silo) / "privacy" / "data")
    return found, {record["seq"]: record for record in found if record["type"] == "budget.reserve"}


def intents_of(running, silo, job):
    return [each for each in running.records(silo, "egress.intent") if each["job"] == job.name]


def check_silo(running, silo):
    """The ledger holds; what left is public or was paid for, by reservations of its job, before it
    left.
    """
    path = ledger_folder(running.federation.state(silo))
    assert verify(path, key=own_log_key(running.federation.name, running.federation.keys(silo))).ok
    records, reservations = budget_of(running, silo)
    for job in running.jobs:
        for intent in intents_of(running, silo, job):
            taints = {tensor["taint"] for tensor in intent["tensors"]}
            assert taints <= {"noised", "public"}, (silo, job.name, taints)
            assert "noised" in taints
            assert intent["dp"]["dataset"] == "data"
            paid = [reservations[seq] for seq in intent["dp"]["ids"]]
            assert {each["job_digest"] for each in paid} == {job.digest}
            assert max(each["round"] for each in paid) == intent["round"]
    heads = [record["size"] for record in stored(path, "privacy.head")]
    assert heads == sorted(set(heads))
    # died between the two
    assert not set(reservations) - {size - 1 for size in heads} or silo in ("south", "west")
    for commit in (record for record in records if record["type"] == "budget.commit"):
        events = reservations[commit["ref"]]["events"]
        assert commit["steps"] == [event["steps"] for event in events]


def left(running, silo, job):
    """Rounds whose update left."""
    return [intent["round"] for intent in intents_of(running, silo, job)]


def check_spent(running, silo, job, most):
    """What was spent on a job is what its rounds took, and no more than its target."""
    _, reservations = budget_of(running, silo)
    own = [each for each in reservations.values() if each["job_digest"] == job.digest]
    events = [
        MechanismSteps(**event).event(event["steps"]) for each in own for event in each["events"]
    ]
    assert cost(events, 1e-5) <= most
    assert {each["round"] for each in own if each["purpose"] == "training"} >= set(
        left(running, silo, job)
    )
    return [each["round"] for each in own if each["purpose"] == "training"]


def check_noisy_counts(running, job):
    """Sums of noisy tables cross masked, and cells that had no record fall below zero, too."""
    for closed in read(running.kept, job.name).rounds:
        assert closed["noisy"]
        cells = np.array(closed["metrics"]["confusion.trained"])
        assert cells.min() < 0 < cells.max()
        assert cells.std() > 50  # 4 silos' noise of 50 * √(3 + 2 + 20), and more
        assert np.array(closed["metrics"]["scores.trained"]).shape == (10, 2, 8)


@pytest.mark.timeout(120)
def test_private_jobs_are_paid_for_whatever_crashes_and_who_runs_out_receives(start, document):
    """Two silos die at their writes.

    One of them so often that its job's target is used up before the last round.
    """
    running = start(*SILOS)
    even(running, SILOS)
    events = [each.event(each.steps) for each in [*[HISTOGRAM] * 4, *[ROUND] * COVERED]]
    target = round(cost(events, 1e-5) + 0.001, 3)
    crash = running.job(private(document, "crash", "fedavg", target, rounds=ROUNDS))
    blind = running.job(
        private(
            document,
            "blind",
            "fedper",
            target,
            min_cohort=3,
            security=SECURITY,
            metrics={"confusion": True, "score_bins": 8},
            metrics_sigma=50.0,
        )
    )
    over = running.job(private(document, "over", "fedavg", target, rounds=1))
    coordinator = running.start_coordinator(**TIMING)
    for silo in SILOS:
        running.write_silo(silo)
        policy = running.federation.folder / silo / "policy.toml"
        # which leaves too little for the third job
        most = target + 0.5 if silo == "north" else 100.0
        policy.write_text(undrafted(policy.read_text()) + dataset(epsilon=most, required="true"))
    running.start_daemon("north")
    running.start_daemon("east")
    running.start_daemon("south", f"every:{'|'.join(DEADLY)}")
    running.start_daemon("west", "every:budget.reserve crash")
    seen = []
    while sum(event["event"] == "job.ended" for event in seen) < len(running.jobs):
        seen.append(coordinator.event(60))
        assert seen[-1] is not None, [event["event"] for event in seen]
    for silo in SILOS:
        running.daemons[silo].stop()
        check_silo(running, silo)
    ended = [(event["job"], event["outcome"]) for event in seen if event["event"] == "job.ended"]
    assert ended == [(job.name, "completed") for job in (crash, blind, over)]
    check_noisy_counts(running, blind)
    # Who dies before a round is paid for pays again; what was trained is sent again, and not
    # trained again.
    assert check_spent(running, "north", crash, target) == [0, 1, 2, 3]
    assert check_spent(running, "south", crash, target) == [0, 1, 2, 2, 2, 3]
    assert check_spent(running, "west", crash, target) == [0, 1, 1, 2, 2, 3]
    # Who runs out stays, and gets the model in the end.
    dropped = [event for event in seen if event["event"] == "silo.dropped"]
    assert [(event["silo"], event["round"], event["code"]) for event in dropped] == [
        ("west", 3, "BUDGET")
    ]
    assert left(running, "west", crash) == [0, 1, 2]
    models = [
        running.federation.state(silo) / "jobs" / "crash" / "model" / "model.safetensors"
        for silo in ("north", "west")
    ]
    north, west = (state_from_bytes(path.read_bytes()).flat for path in models)
    assert all(torch.equal(north[name], west[name]) for name in north)
    # Another job spends out of the same budget, which one silo's does not cover.
    declined = [event for event in seen if event["event"] == "job.declined"]
    assert [(event["job"], event["silo"], event["code"]) for event in declined] == [
        ("over", "north", "POLICY")
    ]
    assert [check_spent(running, silo, over, target) for silo in ("north", "east")] == [[], [0]]
