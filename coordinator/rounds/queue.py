"""Which job begins next: a function of the states of all jobs, and of how many each silo takes.

A job that runs has a place at each of its silos, whether or not they take part in it: two blind
rounds never wait for each other's silos. Jobs are looked at in the order in which they came:

::

    all of its silos have a place free      it begins
    some silo has none                      it waits, and takes a place at each of its silos

So a job waits for those before it that share a silo with it, and for no other: a slow one elsewhere
does not delay it, and no later one overtakes it. Where the coordinator's own limit is reached, all
wait, and the first of them that may begin is the next.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter

from .machine import JobState


def next_to_begin(
    states: Sequence[JobState], places: Callable[[str], int], most: int
) -> JobState | None:
    """The job of these, in the order in which they came, that begins now; None for none.

    ``places`` says in how many jobs a silo takes part at a time, ``most`` how many run at a time.
    """
    running = tuple(filter(attrgetter("runs"), states))
    if len(running) >= most:
        return None
    taken = Counter(chain.from_iterable(map(attrgetter("silos"), running)))

    def is_free(silo: str) -> bool:
        return taken[silo] < places(silo)

    for state in filter(attrgetter("waits"), states):
        if all(map(is_free, state.silos)):
            return state
        # Those behind it get what is left once it has begun.
        taken.update(state.silos)
    return None
