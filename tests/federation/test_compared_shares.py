"""Jobs that compare by shares, with real processes and TLS: the bits of the oracle, and no vector
in any message.
"""

import pytest
from federation.keyed import SECURITY, TIMING, check_ledgers, check_left_over, check_result, even

SILOS = ("north", "east", "south", "west")
SHARED = {**SECURITY, "compare": "shared"}


def begin(running, document, plans, **options):
    changes = {
        "options": {"rho": 0.0, **options},
        "min_cohort": 3,
        "rounds": 2,
        "round_timeout": 120,
    }
    running.job(document("compared", SILOS, "pfedsim", security=SHARED, **changes))
    even(running, SILOS)
    running.start_all(TIMING, plans)


def check(running):
    running.finished("compared")
    running.daemons["coordinator"].wait_for("job.ended", 60)
    running.stop()
    (job,) = running.jobs
    members = check_result(running, job, SILOS)
    assert set(members.values()) == {SILOS}
    check_ledgers(running, SILOS)
    check_left_over(running)
    return job


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("similarity", "groups", "width"), [("mean", 1, 640), ("per_class", 10, 64)]
)
def test_what_is_compared_by_shares_has_the_bits_of_the_oracle(
    start, document, similarity, groups, width
):
    running = start(*SILOS)
    begin(running, document, {}, similarity=similarity)
    job = check(running)
    for silo in SILOS:
        intents = running.records(silo, "egress.intent")
        assert [intent["form"] for intent in intents] == ["padded", "masked"] * job.length
        for intent in intents[1::2]:
            (rows,) = [tensor for tensor in intent["tensors"] if tensor["part"] == "rows"]
            # to each other silo
            assert (rows["dtype"], rows["shape"]) == ("uint64", [3, groups, width + 4])
            assert set(intent["readers"]) == {"sum", "gram"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plans",
    [
        {"north": "every:compared 0 masked|0 header|0 survival|0 reveal"},
        {"coordinator": "every:masked"},
    ],
)
def test_killed_between_the_steps(start, document, plans):
    """The next attempt compares what an undisturbed one would."""
    running = start(*SILOS)
    begin(running, document, plans)
    check(running)
    (name,) = plans
    died = running.killed(name)
    assert len(died) >= 3, died
