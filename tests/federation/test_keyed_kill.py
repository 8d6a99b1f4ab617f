"""Blind jobs that mix and compare, in which either side dies at every durable step: what silos get is the oracle's."""

import signal

import pytest
from federation.keyed import (
    SECURITY,
    check_ledgers,
    check_left_over,
    check_result,
    configure,
    counts,
    even,
    events,
    finished,
)

SILOS = ("north", "east", "south", "west", "middle")
PFEDSIM = {"method": "pfedsim", "options": {"rho": 0.34}, "rounds": 3}  # one round of means, two of rows
AWAY = {
    "method": "fedsimsup",
    "options": {"similarity": "samples", "tau_theta": 1},
    "rounds": 4,
    "participation": 0.8,
}
UP = "mix-extractor|gram-rows|padded|rotated|of 104448|of 2560|job 2 masked"  # a silo's steps of what it gives
DOWN = "ingress job 2|ingress job 3"
TAKEN = "extractor|rotated|job rows|job sum 1: spooled|folding|drawing|finishing"  # and the coordinator's
MAIL = "mix-theta.rows|rename mix-theta|intent job 3 padded"
CASES = {
    "coordinator": ({"coordinator": f"every:{TAKEN}"}, {**PFEDSIM, "options": {"rho": 0.5}, "rounds": 2}),
    "silo": ({"north": f"every:{UP}|{DOWN}"}, PFEDSIM),
    "both at random": ({"coordinator": "seed:3:6", "north": "seed:4:6"}, PFEDSIM),
    "both, and mail": (
        {"coordinator": "every:theta 2:|rename 2.theta|folding 2|drawing 3", "north": f"every:{MAIL}"},
        AWAY,
    ),
}
STEPS = {
    "coordinator": {
        "coordinator": (
            "before COMMIT of job extractor 1: here",
            "after COMMIT of job extractor 1: here",
            "before COMMIT of job extractor 1: signed",
            "after COMMIT of job extractor 1: signed",
            "before COMMIT of job rows 1: here",
            "after COMMIT of job rows 1: here",
            "before COMMIT of job extractor rows of 0",
            "after COMMIT of job extractor rows of 0",
            "before COMMIT of job folding 1: answers 4 given 4 failed 0 done 0",
        )
    },
    "silo": {
        "north": (
            "rename mix-extractor.versions.json",
            "sync seg-00000001.jsonl egress.intent job 1 padded",
            "sync seg-00000001.jsonl egress.digest   of 104448 bytes",
            "rename mix-extractor.signed",
            "sync seg-00000001.jsonl egress.protocol job 1 padded",
            "rename gram-rows.json",
            "sync seg-00000001.jsonl egress.intent job 1 rotated",
            "sync seg-00000001.jsonl egress.digest   of 2560 bytes",
            "rename mix-extractor.rows.json",
            "sync seg-00000001.jsonl ingress job 2 ",
            "sync seg-00000001.jsonl ingress job 3 ",
        )
    },
    "both at random": {},
    "both, and mail": {
        "coordinator": (
            "before COMMIT of job theta 2: here",
            "after COMMIT of job theta 2: here",
            "before COMMIT of job theta 2: signed",
            "after COMMIT of job theta 2: signed",
            "rename 2.theta.middle.rows",
        ),
        "north": (
            "rename mix-theta.rows.json",
            "rename mix-theta.versions.json",
            "sync seg-00000001.jsonl egress.intent job 3 padded",
        ),
    },
}


def begin(running, silos, document, plans, method, **changes):
    even(running, silos)
    security = SECURITY
    if changes.get("participation"):
        security = {"secure_aggregation": "required", "weights": "public", "counts": counts(running, silos)}
    made = {"min_cohort": 3, "round_timeout": 120, "security": security, **changes}
    job = running.job(document("job", silos, method, **made))
    assert job.keyed
    configure(running, silos)
    for name in ("coordinator", *silos):
        running.start_impatient(name, plans.get(name, "never"))
    return job


def died(running, name):
    return [at for line in events(running, name) if line["event"] == "killed" for at in line["at"]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_killed_again_and_again(start, document, case):
    plans, changes = CASES[case]
    silos = SILOS if "participation" in changes else SILOS[:4]
    running = start(*silos)
    job = begin(running, silos, document, plans, **changes)
    finished(running, silos, "job")
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    members = check_result(running, job, silos)
    if job.security.weights == "private":  # nobody was left out
        assert members == dict.fromkeys(range(job.length), job.silos)
    else:
        assert any(len(who) < job.cohort_size for who in members.values()), "nobody dropped out"
    check_ledgers(running, silos)
    check_left_over(running, job.length)
    for name in plans:
        lives = [line["life"] for line in events(running, name) if line["event"] == "killed"]
        assert len(lives) >= 3, f"{name} hardly died"
        assert set(STEPS[case].get(name, ())) <= set(died(running, name))
