from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from staddle.coordinator.rounds.events import Began, Overtaken
from staddle.coordinator.rounds.machine import JobState, advance
from staddle.coordinator.rounds.queue import next_to_begin

STAGES_THAT_RUN = ("admitting", "drawing", "round", "folding", "finishing")


def jobs(*silos):
    """Queued jobs, each named after its place, of the silos that a word's letters name."""
    return [JobState(str(place), tuple(word), 2, 1) for place, word in enumerate(silos)]


def begun(states, places, most=9):
    """The names of all jobs that begin now, one after another, and the states then."""
    states, names = list(states), []
    while (ready := next_to_begin(states, lambda silo: places.get(silo, 1), most)) is not None:
        names.append(ready.job)
        states[states.index(ready)], _ = advance(ready, Began())
    return names, states


def ended(states, *names):
    return [replace(each, stage="ended") if each.job in names else each for each in states]


@pytest.mark.parametrize(
    ("silos", "places", "begin"),
    [
        (("ab", "ab", "ab"), {}, ["0"]),  # as one after another
        (("ab", "ab", "ab"), {"a": 2, "b": 2}, ["0", "1"]),
        (("ab", "ab"), {"a": 2}, ["0"]),  # the smaller number counts
        (("ab", "cd", "ab", "cd"), {}, ["0", "1"]),  # of other silos: at the same time
        # The third may not take the place at c for which the second waits.
        (("ab", "bc", "cd", "d"), {}, ["0"]),
        (("ab", "bc", "d"), {}, ["0", "2"]),
    ],
)
def test_jobs_begin_in_order_where_each_silo_has_a_place(silos, places, begin):
    assert begun(jobs(*silos), places)[0] == begin


def test_no_more_run_than_the_coordinator_lets_and_the_next_is_the_first_that_may():
    names, states = begun(jobs("a", "b", "c", "a", "d"), {}, most=2)
    assert names == ["0", "1"]
    assert begun(ended(states, "1"), {}, most=2)[0] == ["2"]  # the first that waits for no silo
    assert begun(ended(states, "0"), {}, most=2)[0] == ["2"]
    assert begun(ended(states, "0", "1"), {}, most=2)[0] == ["2", "3"]


@pytest.mark.parametrize("stage", STAGES_THAT_RUN)
def test_a_job_has_its_places_until_it_has_ended(stage):
    first, second = jobs("ab", "b")
    assert begun((replace(first, stage=stage), second), {})[0] == []
    for stage_without in ("stopped", "ended"):
        assert begun((replace(first, stage=stage_without), second), {})[0] == ["1"]


def test_a_job_that_pends_has_no_place_once_it_is_overtaken():
    first, second = jobs("ab", "b")
    pending = advance(advance(first, Began())[0], Overtaken(("a", "b")))[0]
    assert (pending.stage, pending.aside) == ("admitting", True)
    assert begun((pending, second), {})[0] == ["1"]
    # Admitted, it is the first in the queue again.
    assert begun((replace(pending, stage="queued"), second), {})[0] == ["0"]


def test_whatever_jobs_come_and_end_each_waits_for_those_before_it_alone():
    """States are all there is, so a restart in between changes nothing."""
    draw = Random(7)
    for _ in range(300):
        places = {silo: draw.randint(1, 3) for silo in "abcde"}
        states, most = [], draw.randint(1, 9)
        coming = jobs(*("".join(draw.sample("abcde", draw.randint(1, 4))) for _ in range(8)))
        while coming or any(each.stage == "queued" for each in states):
            running = [each.job for each in states if each.runs]
            if coming and (draw.random() < 0.6 or not running):
                states.append(coming.pop(0))
            else:
                states = ended(states, draw.choice(running))
            _, states = begun(states, places, most)
            held = Counter(silo for each in states if each.runs for silo in each.silos)
            assert all(held[silo] <= places[silo] for silo in held)
            assert sum(each.runs for each in states) <= most

            # Whatever began before the first that waits took no place which that one needs.
            first = next((each for each in states if each.stage == "queued"), None)
            if first is not None:
                before = [each.job for each in states[: states.index(first)]]
                assert begun(ended(states, *before), places)[0][0] == first.job
