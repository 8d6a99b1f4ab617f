"""The local work of a silo in a round: optimiser steps, and records that pass through its model."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from ..course import Course, Stage, Survey, records_taken


@dataclass(frozen=True)
class LocalWork:
    """What a silo's round took, tests apart.

    ``records`` counts a record once per epoch and once per survey; records that fill up the last
    batch count too. ``course`` names the stages in turn, such as ``classifier x 4``: silos of one
    model and one course compute the same for each record.
    """

    steps: int
    records: int
    course: tuple[str, ...]


def work_of(
    course: Course,
    records: int,
    batch_size: int,
    wraps: Callable[[Stage], bool],
    measured: bool,
) -> LocalWork:
    """The work of a course over so many training records, in a plain round.

    ``wraps`` says whether a stage's model has batch norm (``records_taken``). ``measured``: the
    method's ``measure`` went through the records before.
    """
    steps, passed = 0, records if measured else 0
    names = ["measure"] if measured else []
    for step in course:
        match step:
            case Stage(full_batch=True):
                steps += step.epochs
                passed += step.epochs * records
                names.append(f"{_of(step)} whole")
            case Stage():
                taken = records_taken(records, batch_size, step.last, wraps(step))
                steps += step.epochs * ceil(taken / batch_size)
                passed += step.epochs * taken
                names.append(_of(step))
            case Survey():
                passed += records
                names.append("survey")
            case _:
                pass
    return LocalWork(steps, passed, tuple(names))


def _of(stage: Stage) -> str:
    return f"{'+'.join(stage.trains)} x {stage.epochs}"
