"""Deals silos out to those that train them, by what each silo is expected to take.

The deal follows from the silos, their records and the number of shares alone, so a run that resumes
deals as before.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from ...algorithms.engines.engine import Records, SiloWork
from ...algorithms.job.job import Job

Task: TypeAlias = Literal["train", "look"]

STEP = 3  # forward passes that a training step takes: its own, and a backward pass of about two
MODELS = 2  # that are evaluated on a record: before and after training, or delivered and own


class Costs:
    """What silos are expected to take, in forward passes of one record."""

    def __init__(self, records: Mapping[str, Records]) -> None:
        self._sides = {silo: tuple(map(len, own.sides)) for silo, own in records.items()}

    def of(self, job: Job, task: Task, one: SiloWork) -> int:
        """The cost of one silo's round, or of a look at it."""
        train, test, *validation = self._sides[one.silo]
        if task == "look":
            return MODELS * (test + sum(validation))
        passed = job.training.epochs * train
        # A silo without time for all of its epochs trains for so many steps at most.
        if one.most_steps is not None:
            passed = min(passed, one.most_steps * job.training.batch_size)
        return STEP * passed + MODELS * test


def shares(
    work: Sequence[SiloWork], cost: Callable[[SiloWork], int], count: int
) -> list[list[SiloWork]]:
    """``count`` shares that take about as long, or one per silo where there are fewer silos.

    The costliest silo is dealt first; each goes to the share that has least so far. So no two
    shares are further apart than one silo's cost.
    """
    dealt: list[list[SiloWork]] = [[] for _ in range(min(count, len(work)))]
    loads = [(0, number) for number in range(len(dealt))]
    for one in sorted(work, key=cost, reverse=True):
        load, number = heappop(loads)
        dealt[number].append(one)
        heappush(loads, (load + cost(one), number))
    return dealt
