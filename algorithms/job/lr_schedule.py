"""Schedules by which a job's learning rates fall from round to round, the same for every method.

A job file's ``training.schedule``: ``{ kind = "exponential", factor = 0.99 }``, ``{ kind = "steps",
factor = 0.1, at = [0.5, 0.75] }``, or ``{ kind = "cosine" }``. Without a schedule rates are
constant. Rounds of a warm-up come before and do not count here. The rates of
all stages of local training fall; step sizes that are options of a method and no stage's rate, such
as Per-FedAvg's α, do not.
"""

from dataclasses import replace
from math import cos, pi
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from ...files.documents import Real, Strict
from ..course import Augment, Course, CourseStep, LastBatch, Stage

Factor: TypeAlias = Annotated[Real, Field(gt=0, le=1)]
Share: TypeAlias = Annotated[Real, Field(gt=0, lt=1)]


class Exponential(Strict):
    """γ^t in round t, which t rounds of training came before.

    The first round that trains has the full rate.
    """

    kind: Literal["exponential"]
    factor: Factor

    def at_round(self, done: int, rounds: int) -> float:
        """The factor of the rates after ``done`` of ``rounds`` rounds.

        ``rounds`` has no effect here.
        """
        return self.factor**done


class StepSchedule(Strict):
    """γ once more from each of these shares of the rounds on.

    With ``at = [0.5]`` in ten rounds the rate is lower from the sixth round on.
    """

    kind: Literal["steps"]
    factor: Factor
    at: Annotated[tuple[Share, ...], Field(min_length=1, max_length=100)]

    @field_validator("at")
    @classmethod
    def _in_order(cls, at: tuple[float, ...]) -> tuple[float, ...]:
        if list(at) != sorted(set(at)):
            raise ValueError(
                "each share of the rounds once, smaller ones first, such as [0.5, 0.75]"
            )
        return at

    def at_round(self, done: int, rounds: int) -> float:
        """The factor of the rates after ``done`` of ``rounds`` rounds.

        Only rounds that train count, so a census moves no step.
        """
        # The number of shares passed: two that fall in one round both lower the rate.
        return self.factor ** sum(done >= share * rounds for share in self.at)


class Cosine(Strict):
    """Down along half a cosine (Loshchilov and Hutter, ICLR 2017), to 0 after the last round.

    A round that tunes after the last has the rate of the last.
    """

    kind: Literal["cosine"]

    def at_round(self, done: int, rounds: int) -> float:
        """The factor of the rates after ``done`` of ``rounds`` rounds."""
        return (1 + cos(pi * min(done, rounds - 1) / rounds)) / 2


Schedule: TypeAlias = Annotated[Exponential | StepSchedule | Cosine, Field(discriminator="kind")]


def paced(
    course: Course,
    factor: float,
    rows: int | None = None,
    augment: Augment | None = None,
    last: LastBatch | None = None,
    shuffle: bool = True,
) -> Course:
    """The course with all learning rates multiplied by a factor, and the rest for its stages."""
    return tuple(_paced(step, factor, rows, augment, last, shuffle) for step in course)


def _paced(
    step: CourseStep,
    factor: float,
    rows: int | None,
    augment: Augment | None,
    last: LastBatch | None,
    shuffle: bool,
) -> CourseStep:
    if not isinstance(step, Stage):
        return step
    # Momentum and weight decay have no schedule.
    slower = replace(step.optimiser, lr=step.optimiser.lr * factor)
    return replace(step, optimiser=slower, rows=rows, augment=augment, last=last, shuffle=shuffle)
