"""Which rounds of a job are also the first rounds of a longer one."""

import inspect
import sys
from dataclasses import replace

import pytest
from support.simulated_jobs import make_job

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.job.lengthening import lengthening_fault
from staddle.algorithms.method import Method

TRAINING = {"epochs": 1, "batch_size": 8, "lr": 0.1}
# What they do by the number of rounds shows in what crosses, or only in the final delivery.
SEEN = {"pfedsim", "ppfl", "fedaims"}


def fault(method="fedavg", done=4, rounds=4, **fields):
    job = make_job(method, rounds=rounds, **fields)
    return lengthening_fault(job, replace(job, rounds=20), done)


def scheduled(kind, done=4, **keys):
    schedule = {"kind": kind, **keys}
    return fault(done=done, training={**TRAINING, "schedule": schedule, "warmup": 1})


def test_rounds_that_know_nothing_of_the_last_are_those_of_a_longer_job():
    assert fault() == fault("fedaims") == fault("ppfl") == ""
    assert scheduled("exponential", factor=0.5) == ""


@pytest.mark.parametrize(
    "schedule", [{"kind": "cosine"}, {"kind": "steps", "factor": 0.1, "at": [0.5]}]
)
def test_rates_that_fall_to_the_last_round_are_not(schedule):
    assert scheduled(**schedule).startswith("the learning rates of training.schedule follow from")
    assert scheduled(done=1, **schedule) == ""  # the warm-up is the same


def test_a_round_that_tuned_is_not():
    assert fault("fedbabu", done=5).startswith("method 'fedbabu' has tuned each silo's model")
    # Stopped before it, nothing has been tuned yet.
    assert fault("fedbabu", done=4) == ""


def test_a_phase_that_begins_after_a_share_of_the_rounds_is_not():
    assert fault("pfedsim", done=3) == "method 'pfedsim' does something else in round 3 of 20"
    assert fault("pfedsim", done=2) == ""


def test_a_method_says_what_does_not_cross():
    assert fault("fedkd", done=1) == (
        "method 'fedkd' keeps more of an update towards the last round (t_end)"
    )
    assert fault("fedsimsup").startswith("method 'fedsimsup' lets mixing decay after")
    assert fault("fedkd", done=0) == ""


def test_whatever_reads_the_number_of_rounds_says_so():
    """Or it shows in what crosses; the folder's tests compare runs of all methods."""
    reading = set()
    for name, method in METHODS.items():
        own = [each for each in method.__mro__ if issubclass(each, Method) and each is not Method]
        texts = [inspect.getsource(sys.modules[each.__module__]) for each in own]
        # A server optimiser only checks whether any round moves it.
        texts = [text for text in texts if "class ServerOptimised" not in text]
        if any("setting.rounds" in text for text in texts):
            reading.add(name)
    assert reading == SEEN | {name for name, method in METHODS.items() if method.by_rounds}
