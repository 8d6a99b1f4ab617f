"""A silo that gives what no value within the clip can be, in a federation of real daemons over TLS.

It shifts every number of the sum, and tags what it gives, so that no silo's check of tags finds it.
The measures are how far the model goes that the others are handed, in clips, and how many rounds
the job completes. The agent of the bad silo is ours but for one function (hostile_dealer.py);
coordinator and other silos are as they ship.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from federation.conftest import small_document

from staddle.algorithms.data.dataset import digits
from staddle.silo.job_folder import JobFolder

pytestmark = [pytest.mark.actor("silo"), pytest.mark.timeout(300)]

ROUNDS = 2
PROGRAM = str(Path(__file__).with_name("hostile_dealer.py"))
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
CLIP = 8.0


def play(start, silos, bad, how="beyond"):
    """A FedAvg job with this silo in it, to its end: the federation, whose ledgers hold, the job,
    and what the coordinator logged.
    """
    running = start(*silos)
    records = [digits().take(np.arange(at, at + 60)) for at in range(0, 60 * len(silos), 60)]
    running.data = dict(zip(silos, records, strict=True))
    fields = {"rounds": ROUNDS, "min_cohort": 3, "security": SECURITY}
    job = running.job(small_document("job", silos, **fields))
    coordinator = running.start_coordinator()
    running.start_silos(*(silo for silo in silos if silo != bad(job)))
    running.write_silo(bad(job))
    running.launch(bad(job), (PROGRAM, how), running.federation.silo_config(bad(job)))
    coordinator.wait_for("job.ended", 200)
    running.stop()
    running.check_ledgers()
    return running, job, running.events("coordinator")


def silos_of(events, kind):
    """The silos that events of this kind name, in order."""
    named = "members" if kind == "round.closed" else "silos"
    return [sorted(event[named]) for event in events if event["event"] == kind]


def largest(running, job, silo):
    """The largest number of the model that a silo has in the end; 0 where it has none."""
    if not JobFolder(running.job_folder(job, silo)).finished:
        return 0.0
    parts = running.model(job, silo).parts
    return max(
        float(torch.abs(each).max()) for tensors in parts.values() for each in tensors.values()
    )


def test_the_round_goes_on_without_the_batch_that_a_lying_silo_is_in(start):
    """Before: the sum was published, all silos refused it in the next round, and the job ended with
    nobody named.
    """
    silos = tuple(f"silo-{number}" for number in range(8))
    running, job, events = play(start, silos, lambda job: job.batches[1][0])
    good, bad = job.batches
    (ended,) = [event for event in events if event["event"] == "job.ended"]
    assert ended["outcome"] == "completed", ended
    # then the other batch is left out, without which there is a sum
    assert silos_of(events, "sum.spoiled") == [sorted(silos), sorted(bad)]
    assert silos_of(events, "round.closed") == [sorted(good)] * ROUNDS
    assert silos_of(events, "batch.excluded") == [sorted(bad)]
    moved = [largest(running, job, silo) for silo in silos]
    assert all(0 < each < CLIP for each in moved), f"models of {max(moved) / CLIP:.1f} clips"
    for silo in silos:  # each sum that was signed stands in the ledger: unions of batches alone
        signed = {frozenset(each["survivors"]) for each in running.records(silo, "secagg.signed")}
        assert signed <= {frozenset(silos), frozenset(good), frozenset(bad)}


def test_a_lie_told_once_excludes_no_honest_batch(start):
    """The liar of the second batch spoils the sums over all, and gives what it is to where one
    batch is left out.

    Before: the sum without the first batch being sound, its four honest silos were excluded from
    the job.
    """
    silos = tuple(f"silo-{number}" for number in range(8))
    _, job, events = play(start, silos, lambda job: job.batches[1][0], f"once:{len(silos)}")
    honest, bad = job.batches
    assert silos_of(events, "batch.excluded") == []
    assert silos_of(events, "sum.spoiled") == [sorted(silos)] * ROUNDS
    rounds = [sorted((bad, honest)[number % 2]) for number in range(ROUNDS)]
    assert silos_of(events, "round.closed") == rounds


def test_where_the_silos_are_one_batch_the_round_is_not_published(start):
    """Four silos cannot be told apart: no one of them is named, and none has taken the sum."""
    silos = ("north", "east", "south", "west")
    running, job, events = play(start, silos, lambda _: "east")
    (ended,) = [event for event in events if event["event"] == "job.ended"]
    assert ended["outcome"] == "failed"
    assert "that 4 silos within its clip cannot give; one of them gave others" in ended["reason"]
    assert silos_of(events, "round.closed") == []
    moved = [largest(running, job, silo) for silo in silos]
    assert max(moved) < CLIP, f"models of {max(moved) / CLIP:.1f} clips"
    for silo in silos:
        blamed = {each["blame"] for each in running.records(silo, "secagg.end")}
        assert not blamed & {*silos, "coordinator"}
