"""Whether the rounds that a run has done are also the first rounds of a longer job.

Then the run can be lengthened: it continues from its last snapshot, and ends as if it had been
begun with more rounds.
"""

from ..catalog import method_class
from .job import Job


def lengthening_fault(short: Job, long: Job, done: int) -> str:
    """Why the first ``done`` rounds of two jobs differ; empty if they are the same.

    The jobs differ in ``rounds`` alone. ``done`` counts a census, and the round that tunes.
    """
    name = short.method_name
    method = method_class(name, short.name)
    if done and method.by_rounds:
        return f"method {name!r} {method.by_rounds}"
    if done == short.length and short.method().tunes:
        return f"method {name!r} has tuned each silo's model after the last round"
    for round_ in range(done):
        # As ``Job`` derives both from the number of rounds.
        if short.lr(round_) != long.lr(round_):
            return (
                "the learning rates of training.schedule follow from the number of rounds; those of"
                ' kind = "exponential" do not'
            )
        # Such as a phase that begins after a share of the rounds.
        if _crossing(short, round_) != _crossing(long, round_):
            return f"method {name!r} does something else in round {round_ + 1} of {long.rounds}"
    return ""


def _crossing(job: Job, round_: int) -> tuple[object, ...]:
    return job.cohort(round_), job.up(round_), job.down(round_)
