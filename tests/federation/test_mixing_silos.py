"""Jobs that mix and compare with real processes and real TLS: every silo ends with the model of the oracle.

Inner products have the bits of an oracle that rotates by the job's own key, which lies at its silos alone.
"""

import pytest
import torch
from federation.test_blind import check_silo, records_of

from staddle.algorithms.data import split
from staddle.algorithms.simulation import simulate
from staddle.proto.blind import simulated
from staddle.security import roster as rosters
from staddle.security.head import own_log_key
from staddle.security.ledger_audit import ledger_folder, verify
from staddle.security.reconcile import reconcile
from staddle.silo.group_keys import KEY
from staddle.silo.state import split_key

FIVE = ("north", "east", "south", "west", "centre")
SECURITY = {"secure_aggregation": "required", "clip_exponent": 6}
PUBLIC = {**SECURITY, "weights": "public", "counts": dict.fromkeys(FIVE, 270)}
JOBS = (
    ("mean", "pfedsim", {"rho": 0.25}, {"security": {**SECURITY, "weight_most": 2000}}),
    ("by-class", "pfedsim", {"rho": 0, "similarity": "per_class"}, {"security": SECURITY}),
    (
        "mail",
        "fedsimsup",
        {"similarity": "samples", "supervisor": "cnn", "tau_theta": 1},
        {"security": PUBLIC, "participation": 0.8, "rounds": 6},
    ),
)


def keyed(document, name, method, options, **changes):
    return document(name, FIVE, method, options=options, **{"rounds": 4, "min_cohort": 3, **changes})


def check_ledger(running, silo):
    """What was mixed left padded, what was compared rotated, all else masked; and both ledgers agree."""
    path = ledger_folder(running.federation.state(silo))
    assert verify(path, key=own_log_key(running.federation.name, running.federation.keys(silo))).ok
    found = records_of(running, silo)
    forms = {}
    for record in found:
        if record["type"] == "egress.intent":
            for each in record["tensors"]:
                forms.setdefault(each["part"], set()).add((record["form"], *record["readers"]))
    assert forms == {
        "model": {("masked", "sum")},
        "metrics": {("masked", "sum")},
        "extractor": {("padded", "mix")},
        "theta": {("padded", "mix")},
        "rows": {("rotated", "gram")},
    }
    padded = sum(record["type"] == "egress.intent" and record["form"] == "padded" for record in found)
    words = [record for record in found if record["type"] == "egress.protocol" and record["kind"] == "padded"]
    assert len(words) == padded
    roster = rosters.load(running.federation.folder / "roster.json")
    theirs = ledger_folder(running.federation.state("coordinator"))
    assert not reconcile(path, theirs, roster).differences


@pytest.mark.timeout(400)
def test_mixes_and_comparisons_give_the_models_of_the_oracle(start, document):
    torch.set_num_threads(1)
    running = start(*FIVE)
    for name, method, options, changes in JOBS:
        running.job(keyed(document, name, method, options, **changes))
    coordinator = running.start_coordinator()
    for silo in FIVE:
        running.write_silo(silo)
        running.start_silo(silo)
    for job in running.jobs:
        ended = coordinator.wait_for("job.ended", 200)
        assert (ended["job"], ended["outcome"], ended["reason"]) == (job.name, "completed", "")
    running.stop()
    shards = {silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25) for silo in FIVE}
    for job in running.jobs:
        folders = [running.federation.state(silo) / "jobs" / job.name for silo in FIVE]
        (key,) = {(folder / KEY).read_bytes()[-32:] for folder in folders}
        expected = simulate(job, shards, exchanges=simulated(job, key))
        for silo in FIVE:
            check_silo(running, job, silo, expected)
        opened = [any(folder.glob("mix-*.rows.json")) for folder in folders]
        assert all(opened) if job.participation == 1 else any(opened)
    for silo in FIVE:
        check_ledger(running, silo)
