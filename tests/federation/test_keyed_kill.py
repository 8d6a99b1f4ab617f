"""Blind jobs that mix and compare, in which both sides die at durable steps: silos get what the
oracle computes.
"""

import signal
from collections import defaultdict

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
# a round of means, two of rows
PFEDSIM = {"method": "pfedsim", "options": {"rho": 0.34}, "rounds": 3}
TWO = {"method": "pfedsim", "options": {"rho": 0.5}, "rounds": 2}
ROWS_ALONE = {**TWO, "options": {"rho": 0.0}}
AWAY = {"similarity": "samples", "tau_theta": 1, "supervisor": "cnn"}
AWAY = {"method": "fedsimsup", "options": AWAY}
AWAY |= {"rounds": 4, "participation": 0.8}
GIVEN = "every:mix-|rename gram|job 1 padded|job 1 rotated|of 43264|of 2560|ingress job 2"
TAKEN = "every:padded|rows of|folding 1"
# too few are left to open either sum
SIGNED = "every:egress.protocol job 0 reveal|egress.protocol job 1 reveal"
MAIL = "every:mix-theta.rows|rename mix-theta|intent job 3 padded"
ASIDE = "every:rotated 2|padded 2|rename 2.theta|folding 2|drawing 3"
OPENED = "every:rename mix-theta.directed|ingress job 3"
ROWS = "every:rename 2.theta|rename 2.@sum|folding 2|drawing 3"
CASES = {
    "both phases": ({"coordinator": TAKEN, "north": GIVEN, "east": "every:gram-"}, PFEDSIM),
    "two who signed": ({"north": SIGNED, "east": SIGNED}, TWO),
    "at random": ({"coordinator": "seed:3:6", "north": "seed:4:6"}, ROWS_ALONE),
    "mail": ({"coordinator": ASIDE, "north": MAIL}, AWAY),
    "directed": ({"coordinator": ROWS, "middle": OPENED}, {**AWAY, "mix": "directed"}),
}
LEDGER = "sync seg-00000001.jsonl"
WRITTEN = ("versions.json", "signed", "rows.json")  # of a mix


def commits(step):
    return f"before COMMIT of job {step}", f"after COMMIT of job {step}"


REVEALS = [f"{LEDGER} egress.protocol job {round_} reveal" for round_ in (0, 1)]
STEPS = {
    "both phases": {
        "coordinator": (
            *(
                step
                for round_ in (1, 2)
                for what in ("padded or rotated {}: extractor", "word on padded {}: extractor")
                for step in commits(what.format(round_))
            ),
            *commits("padded or rotated 1: rows"),
            *commits("padded or rotated 2: rows"),
            *commits("extractor rows of 0"),
            *(f"rename {n}.*.extractor.padded" for n in (1, 2)),
            "after COMMIT of job folding 1 answers given",
        ),
        "north": (
            *(f"rename mix-extractor.{name}" for name in WRITTEN),
            f"{LEDGER} egress.intent job 1 padded",
            f"{LEDGER} egress.digest   of 43264 bytes",
            f"{LEDGER} egress.protocol job 1 padded",
            "rename gram-rows.json",
            f"{LEDGER} egress.intent job 1 rotated",
            f"{LEDGER} egress.digest   of 2560 bytes",
            f"{LEDGER} ingress job 2 ",
        ),
        "east": ("rename gram-rows.json",),
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
            "after COMMIT of job folding 2 answers given",
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


def check_one_word_a_round(running, job, silo):
    """Many versions may have been begun in a round, one was signed.

    Vectors were rotated in one way.
    """
    words, used = defaultdict(set), defaultdict(set)
    for record in running.records(silo, "egress.protocol"):
        if record["kind"] == "padded":
            words[record["round"]].add(record["ctx"])
    intents = running.records(silo, "egress.intent")
    for record in intents:
        if record["form"] == "rotated":
            used[record["round"]].add(record["hidden"]["ctx"])
    rounds = {n for n in range(job.length) if any(p.name == "extractor" for p in job.up(n))}
    assert set(words) == set(used) == rounds
    assert {len(found) for found in (*words.values(), *used.values())} == {1}
    begun = [each["hidden"]["number"] for each in intents if each["form"] == "padded"]
    assert begun == sorted(begun)
    assert max(begun) >= len(rounds) - 1


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
    running.ended()
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    if case == "both phases":  # the last may have died as it deleted what the ended job left
        running.start_daemon("coordinator").wait_for("listening", 60)
        running.daemons["coordinator"].stop()
        assert {silo for (silo,) in running.rows("SELECT silo FROM mixed")} == set(silos)
        assert any(
            at.startswith("remove 2.") and at.endswith(".padded")
            for at in died(running, "coordinator")
        )
    members = check_result(running, job, silos)
    if case != "mail":  # nobody was left out
        assert members == {round_: job.cohort(round_) for round_ in range(job.length)}
    else:
        assert any(len(who) < job.cohort_size for who in members.values()), "nobody dropped out"
    check_ledgers(running, silos)
    check_left_over(running)
    for silo in silos if job.method_name == "pfedsim" else ():
        check_one_word_a_round(running, job, silo)
    if case == "at random":
        assert sum(len(running.killed(name)) for name in plans) == 12
        return
    for name in plans:
        assert set(STEPS[case][name]) <= set(died(running, name)), died(running, name)
