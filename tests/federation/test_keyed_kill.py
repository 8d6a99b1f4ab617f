"""Blind jobs that mix and compare, in which both sides die at durable steps: silos get what the
oracle computes.
"""

import signal

import pytest
from federation.keyed import (
    SECURITY,
    TIMING,
    check_ledgers,
    check_left_over,
    check_result,
    counts,
    even,
    seeded,
)

SILOS = ("north", "east", "south", "west", "middle")
# a round of means, one of rows
PFEDSIM = {"method": "pfedsim", "options": {"rho": 0.5}, "rounds": 2}
AWAY = {"method": "fedsimsup", "options": {"similarity": "samples", "tau_theta": 1}}
AWAY |= {"rounds": 4, "participation": 0.8}
GIVEN = (
    "every:rename mix-extractor|rename gram|job 1 padded|job 1 rotated|of 104448|of 2560|ingress"
    " job 2"
)
TAKEN = "every:padded or rotated|word on padded|rows of|folding 1"
# too few are left to open either sum
SIGNED = "every:egress.protocol job 0 reveal|egress.protocol job 1 reveal"
MAIL = "every:mix-theta.rows|rename mix-theta|intent job 3 padded"
ASIDE = "every:rotated 2|padded 2|rename 2.theta|folding 2|drawing 3"
OPENED = "every:rename mix-theta.directed|ingress job 3"
ROWS = "every:rename 2.theta|rename 2.@sum|folding 2|drawing 3"
CASES = {
    "both phases": ({"coordinator": TAKEN, "north": GIVEN}, PFEDSIM),
    "two who signed": ({"north": SIGNED, "east": SIGNED}, PFEDSIM),
    "mail": ({"coordinator": ASIDE, "north": MAIL}, AWAY),
    "directed": ({"coordinator": ROWS, "middle": OPENED}, {**AWAY, "mix": "directed"}),
}
LEDGER = "sync seg-00000001.jsonl"


def commits(step):
    return f"before COMMIT of job {step}", f"after COMMIT of job {step}"


REVEALS = [f"{LEDGER} egress.protocol job {round_} reveal" for round_ in (0, 1)]
STEPS = {
    "both phases": {
        "coordinator": (
            *commits("padded or rotated 1: extractor"),
            *commits("word on padded 1: extractor"),
            *commits("padded or rotated 1: rows"),
            "after COMMIT of job folding 1: answers 4 given 4 failed 0 done 0",
        ),
        "north": (
            "rename mix-extractor.versions.json",
            f"{LEDGER} egress.intent job 1 padded",
            f"{LEDGER} egress.digest   of 104448 bytes",
            f"{LEDGER} egress.protocol job 1 padded",
            "rename gram-rows.json",
            f"{LEDGER} egress.intent job 1 rotated",
            f"{LEDGER} egress.digest   of 2560 bytes",
            "rename mix-extractor.rows.json",
            f"{LEDGER} ingress job 2 ",
        ),
    },
    "two who signed": {"north": REVEALS, "east": REVEALS},
    "mail": {
        "coordinator": (
            *commits("padded or rotated 2: theta"),
            *commits("word on padded 2: theta"),
            "rename 2.theta.middle.rows",
        ),
        "north": (
            "rename mix-theta.rows.json",
            "rename mix-theta.versions.json",
            f"{LEDGER} egress.intent job 3 padded",
        ),
    },
    "directed": {
        "coordinator": (
            "rename 2.theta.middle.words",
            "rename 2.@sum.safetensors",
            "rename 2.theta.middle.rows",
            "after COMMIT of job folding 2: answers 5 given 4 failed 0 done 0",
        ),
        "middle": ("rename mix-theta.directed.json", f"{LEDGER} ingress job 3 "),
    },
}


def begin(running, silos, document, plans, method, mix="one-upload", **changes):
    even(running, silos)
    security = SECURITY
    if changes.get("participation"):
        security = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
        security |= {"counts": counts(running, silos), "mix": mix}
    made = {"min_cohort": 3, "round_timeout": 120, "security": security, **changes}
    wanted = document("job", silos, method, **made)
    job = running.job(seeded(wanted, middle_is_away) if changes.get("participation") else wanted)
    assert job.keyed
    running.start_all(TIMING, plans)
    return job


def middle_is_away(job):
    """In round 2 alone, when a row is put aside for it, and it has it in round 3.

    North gives in all of them.
    """
    drawn = [job.cohort(round_) for round_ in (1, 2, 3)]
    return ["middle" in each for each in drawn] == [True, False, True] and all(
        "north" in each for each in drawn
    )


def died(running, name):
    return [at for places in running.killed(name) for at in places]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_killed_again_and_again(start, document, case):
    plans, changes = CASES[case]
    silos = SILOS if "participation" in changes else SILOS[:4]
    running = start(*silos)
    job = begin(running, silos, document, plans, **changes)
    running.finished("job")
    running.daemons["coordinator"].wait_for("job.ended", 60)
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    members = check_result(running, job, silos)
    if case != "mail":  # nobody was left out
        assert members == {round_: job.cohort(round_) for round_ in range(job.length)}
    else:
        assert any(len(who) < job.cohort_size for who in members.values()), "nobody dropped out"
    check_ledgers(running, silos)
    check_left_over(running)
    for name in plans:
        assert set(STEPS[case][name]) <= set(died(running, name)), died(running, name)
    rows = [at for at in died(running, "coordinator") if "rows of" in at]
    assert (len(rows) >= 2) == (case == "both phases"), rows
