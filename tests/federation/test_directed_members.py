"""Jobs whose directed rows are for the round's own members, with real processes and TLS: silos get
what is computed.
"""

import json

import pytest
from federation.keyed import check_ledgers, check_result, even

SILOS = ("north", "east", "south", "west", "middle")
SECURITY = {"secure_aggregation": "required", "mix": "directed"}


def documents(document, running):
    counts = {silo: len(train) for silo, (train, _) in running.shards(SILOS).items()}
    declared = {**SECURITY, "weights": "public", "dropouts": "any", "counts": counts}
    common = {"min_cohort": 3, "model": "cnn-digits"}
    every, part = {"rounds": 4, "options": {"rho": 0.25}}, {"rounds": 5, "options": {"rho": 0.2}}
    # nothing of it is hidden by the silos' key
    private = {**SECURITY, "weight_most": 2000, "compare": "shared"}
    return [
        document("all", SILOS, "pfedsim", **every, **common, security=private),
        document(
            "in-part", SILOS, "pfedsim", **part, **common, participation=0.8, security=declared
        ),
    ]


def opened(running, job, silo):
    """The newest round of which a silo opened a row."""
    return json.loads((running.job_folder(job, silo) / "mix-extractor.directed.json").read_bytes())[
        "newest"
    ]


@pytest.mark.timeout(240)
def test_members_get_what_the_oracle_computes(start, document):
    running = start(*SILOS)
    even(running, SILOS)
    for each in documents(document, running):
        running.job(each)
    running.start_coordinator()
    running.start_silos()
    for job in running.jobs:
        running.finished(job.name)
    running.stop()
    everybody, in_part = running.jobs
    for job in running.jobs:
        members = check_result(running, job, SILOS)
        assert [set(members[round_]) for round_ in range(job.length)] == [
            set(job.cohort(round_)) for round_ in range(job.length)
        ]
    # each in each round
    assert {opened(running, everybody, silo) for silo in SILOS} == {everybody.length - 1}
    assert {opened(running, in_part, silo) for silo in SILOS} - {-1}
    check_ledgers(running, SILOS)
