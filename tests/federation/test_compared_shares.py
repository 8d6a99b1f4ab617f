"""Jobs that compare by shares, with real processes and TLS: the bits of the oracle, and no vector
in any message.
"""

import itertools
import json

import pytest
from federation.keyed import SECURITY, TIMING, check_ledgers, check_left_over, check_result, even

SILOS = ("north", "east", "south", "west")
SHARED = {**SECURITY, "compare": "shared"}


def begin(running, document, plans, *names):
    even(running, SILOS)
    changes = {"min_cohort": 3, "rounds": 2, "round_timeout": 120, "security": SHARED}
    for name in names:
        options = {"rho": 0.0, "similarity": name.replace("-", "_")}
        running.job(document(name, SILOS, "pfedsim", options=options, **changes))
    if not plans:  # nothing of it is hidden by the silos' key
        changes |= {"rounds": 4, "security": {**SHARED, "mix": "directed"}}
        running.job(document("directed", SILOS, "pfedsim", options={"rho": 0.25}, **changes))
    running.start_all(TIMING, plans)


def check(running):
    running.completed()
    for job in running.jobs:
        running.finished(job.name)
    running.stop()
    for job in running.jobs:
        assert set(check_result(running, job, SILOS).values()) == {SILOS}, job.name
    check_ledgers(running, SILOS)
    check_left_over(running)


@pytest.mark.timeout(200)
def test_what_is_compared_by_shares_has_the_bits_of_the_oracle(start, document):
    shapes = {"mean": [3, 1, 644], "per-class": [3, 10, 68]}  # to each other silo
    running = start(*SILOS)
    begin(running, document, {}, *shapes)
    check(running)
    *undirected, directed = running.jobs
    for silo in SILOS:
        path = running.job_folder(directed, silo) / "mix-extractor.directed.json"
        assert json.loads(path.read_bytes())["newest"] == directed.length - 1
    for job, silo in itertools.product(undirected, SILOS):
        found = running.records(silo, "egress.intent")
        intents = [intent for intent in found if intent["job"] == job.name]
        assert [intent["form"] for intent in intents] == ["padded", "masked"] * job.length
        for intent in intents[1::2]:
            (rows,) = [tensor for tensor in intent["tensors"] if tensor["part"] == "rows"]
            assert (rows["dtype"], rows["shape"]) == ("uint64", shapes[job.name])
            assert set(intent["readers"]) == {"sum", "gram"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plans",
    [
        {"north": "every:mean 0 masked|0 header|0 survival|0 reveal"},
        {"coordinator": "every:masked"},
    ],
    ids=["silo", "coordinator"],
)
def test_killed_between_the_steps(start, document, plans):
    """The next attempt compares what an undisturbed one would."""
    running = start(*SILOS)
    begin(running, document, plans, "mean")
    check(running)
    (name,) = plans
    died = running.killed(name)
    assert len(died) >= 3, died
