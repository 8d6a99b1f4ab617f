"""Who is there in the rounds of a simulated job: newcomers, absent silos, and those too late.

::

    [attendance]
    newcomers = 2          # the last two silos of the partition, or their names
    join_after = 15        # rounds that train without them
    absent = 0.1           # chance that a silo is away in a round for which it was drawn
    step_seconds = 0.05    # simulated seconds of an optimiser step, so that rounds take time
    spread = 1.0           # by silo: step_seconds · exp(spread · z), z a standard normal draw
    fewer_epochs = true    # who would be late trains fewer epochs, FedProx's stragglers

A round without these silos is what it is in a federation (coordinator/rounds/machine.py). A
newcomer is a silo that answers the offer of the job late, and is drawn from then on. An absent silo
is lost when the round opens, so the others do not wait for it. A silo is late if its upload is not
there when the round closes: after ``round_timeout``, or once a ``quorum`` is there. A silo that was
absent or late begins its next round from the state that it had before this one.

The clock counts local training alone: a silo's optimiser steps times its seconds per step. With
``fewer_epochs`` a silo trains as many of the job's epochs as fit into ``round_timeout``, at least
one (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 5.2, where
stragglers draw their epochs; here they follow from the clock). A federation has no such thing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import filterfalse
from math import ceil, exp
from statistics import NormalDist
from typing import Annotated, Any

import pydantic
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from ...errors import LocalError
from ...files.documents import Real, Strict
from ..catalog import configure
from ..job.job import Job, Whole
from ..job.security import Name
from ..numerics.streams import stream, uniform

Seconds = Annotated[Real, Field(ge=1e-9)]
LEAST_DRAW = 2.0**-53


def _stating(wanted: str) -> WrapValidator:
    """Says what is wanted in place of all that pydantic tried."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except pydantic.ValidationError:
            raise ValueError(f"give {wanted}") from None

    return WrapValidator(check)


Newcomers = Annotated[
    Annotated[Whole, Field(ge=1)] | Annotated[tuple[Name, ...], Field(min_length=1)] | None,
    _stating('a whole number above 0, or names of silos: ["silo-003"]'),
]
StepSeconds = Annotated[
    Seconds | Annotated[dict[Name, Seconds], Field(min_length=1)] | None,
    _stating("seconds from 1e-9 on, or a table of them by silo: { silo-000 = 0.1 }"),
]


@dataclass(frozen=True)
class Closed:
    """The end of a round: whose uploads count, whose came too late, and simulated seconds.

    ``seconds`` is None without a clock.
    """

    members: tuple[str, ...]
    late: tuple[str, ...]
    seconds: float | None


class Attendance(Strict):
    """The [attendance] table; without keys all silos are there in each round.

    All that it draws follows from the seed and the silos' order, so methods have the same draws.
    """

    newcomers: Newcomers = None
    """How many silos at the end of the partition take no part at first, or the names of such."""
    join_after: Annotated[Whole, Field(ge=1)] | None = None
    """Rounds that train before newcomers join; that of all rounds keeps them out."""
    absent: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    """Chance that a silo is away in a round for which it was drawn."""
    step_seconds: StepSeconds = None
    """Simulated seconds per optimiser step, of every silo or by silo; None: no clock."""
    spread: Annotated[Real, Field(ge=0, le=10)] = 0.0
    """Standard deviation of the logarithm of silos' seconds per step."""
    fewer_epochs: bool = False
    """True: a silo that would miss ``round_timeout`` trains fewer epochs, at least one."""

    @pydantic.model_validator(mode="after")
    def _together(self) -> "Attendance":
        if (self.newcomers is None) != (self.join_after is None):
            raise ValueError("newcomers and join_after go together; give both, or neither")
        if self.spread and not isinstance(self.step_seconds, float):
            raise ValueError(
                "spread varies one step_seconds of all silos; give that number, or leave spread out"
            )
        if self.fewer_epochs and self.step_seconds is None:
            raise ValueError("fewer_epochs needs a clock; give step_seconds, too")
        return self

    def joining(self, silos: tuple[str, ...]) -> tuple[str, ...]:
        """The newcomers among a job's silos, in job order."""
        if isinstance(self.newcomers, int):
            return silos[-self.newcomers :]
        return tuple(filter((self.newcomers or ()).__contains__, silos))

    def admitted(self, job: Job, round_: int) -> tuple[str, ...]:
        """The silos that a round draws of those that have joined, in job order."""
        cohort = job.cohort(round_)
        if self.join_after is None or job.rounds_before(round_) >= self.join_after:
            return cohort
        waiting = self.joining(job.silos)
        return tuple(filterfalse(waiting.__contains__, cohort))

    def present(self, job: Job, round_: int) -> tuple[str, ...]:
        """The silos that train in a round: those admitted that are not away."""
        cohort = self.admitted(job, round_)
        if not self.absent:
            return cohort
        # Rounds that train have one number in all methods, whether or not a census comes first.
        number = round_ - job.method().census
        draws = uniform(stream(job.root, "", number, "absent"), (len(job.silos),), 0, 1)
        here = {silo for silo, drawn in zip(job.silos, draws, strict=True) if drawn >= self.absent}
        return tuple(filter(here.__contains__, cohort))

    def paces(self, job: Job) -> dict[str, float]:
        """Seconds per step by silo; the same in all rounds. Without a clock they are 0."""
        if not isinstance(self.step_seconds, float):
            return {silo: (self.step_seconds or {}).get(silo, 0.0) for silo in job.silos}
        draws = uniform(stream(job.root, "", 0, "pace"), (len(job.silos),), 0, 1)
        found = {}
        for silo, drawn in zip(job.silos, draws.tolist(), strict=True):
            # The distribution has no value at 0.
            z = NormalDist().inv_cdf(max(drawn, LEAST_DRAW))
            found[silo] = self.step_seconds * exp(self.spread * z)
        return found

    def most_steps(self, job: Job) -> dict[str, int] | None:
        """Steps for which a silo has time in a round; None where it takes those of the job."""
        if not self.fewer_epochs:
            return None
        return {silo: int(job.round_timeout / pace) for silo, pace in self.paces(job).items()}

    def closed(self, job: Job, round_: int, steps: Mapping[str, int]) -> Closed:
        """The end of a round, in which its silos took so many steps; all of ``present``, in order.

        LocalError where fewer than ``min_cohort`` are there in time: a federation's job fails then.
        """
        if self.step_seconds is None:
            return Closed(tuple(steps), (), None)
        paces = self.paces(job)
        times = {silo: taken * paces[silo] for silo, taken in steps.items()}
        # Silos that were drawn and are absent count in the quorum, as at a coordinator.
        drawn = len(self.admitted(job, round_))
        enough = max(job.min_cohort, ceil(job.quorum * drawn))
        last = sorted(times.values())[min(enough, len(times)) - 1]
        seconds = min(last, job.round_timeout)
        members: list[str] = []
        late: list[str] = []
        for silo, time in times.items():
            # Uploads that come in the moment of closing are taken.
            if time <= seconds:
                members.append(silo)
            else:
                late.append(silo)
        if len(members) < job.min_cohort:
            first = job.rounds_before(round_) + 1
            raise LocalError(
                f"round {first}: {len(members)} silos uploaded within {job.round_timeout:g}"
                f" simulated seconds, min_cohort is {job.min_cohort}, and"
                f" {', '.join(late)} took longer: a federation's job fails there; raise"
                " round_timeout, or lower attendance.step_seconds or spread, or min_cohort"
            )
        return Closed(tuple(members), tuple(late), seconds)


EVERYONE = Attendance()


def check_attendance(attendance: Attendance, job: Job) -> None:
    """LocalError where a job cannot run with these silos away, as a federation could not."""
    if attendance == EVERYONE:
        return
    where = f"attendance, method {job.method_name!r}"
    _check_names(attendance, job)
    if attendance.join_after is not None and attendance.join_after > job.rounds:
        raise LocalError(
            f"{where}: join_after = {attendance.join_after}, but there are {job.rounds} rounds;"
            " lower it"
        )
    # A blind round leaves out whole batches, or begins again: which, depends on who is lost when.
    if job.security.required:
        raise LocalError(
            f"{where}: a blind job sums whole batches of silos, which [attendance] does not take"
            ' apart; write security.secure_aggregation = "off", or leave out [attendance]'
        )
    _check_numbers(attendance, job, where)

    # A method's half may not do with fewer epochs.
    if attendance.fewer_epochs:
        replace(job, training=job.training.model_copy(update={"epochs": 1})).method()

    # A method may need all silos in each round; what it says to fewer holds for absent ones, too.
    one_away = len(job.silos) - 1
    if job.cohort_size > one_away:
        try:
            configure(
                job.method_name,
                job.method_options,
                replace(job.setting(), cohort_size=one_away),
            )
        except LocalError as error:
            raise LocalError(
                f"{where}, where rounds lack silos: {error}, and leave out [attendance]"
            ) from error


def _check_names(attendance: Attendance, job: Job) -> None:
    """LocalError where keys name silos that there are not, or not all that must be named."""
    named = () if isinstance(attendance.newcomers, int) else attendance.newcomers or ()
    paces = attendance.step_seconds if isinstance(attendance.step_seconds, dict) else {}
    if isinstance(attendance.newcomers, int) and attendance.newcomers >= len(job.silos):
        raise LocalError(
            f"attendance.newcomers = {attendance.newcomers}, but there are {len(job.silos)} silos;"
            " leave some that are there from the first round on"
        )
    silos = ", ".join(job.silos)
    for key, names in (("newcomers", named), ("step_seconds", paces)):
        if strangers := sorted(set(names).difference(job.silos)):
            raise LocalError(f"attendance.{key} names {strangers[0]!r}, the silos are {silos}")
    missing = list(filterfalse(paces.__contains__, job.silos))
    if paces and missing:
        raise LocalError(
            f"attendance.step_seconds lacks {missing[0]!r}; name all silos, or give one number"
        )


def _more(job: Job) -> str:
    """The advice to draw more silos, where more can be drawn."""
    return " raise participation," if job.cohort_size < len(job.silos) else ""


def _check_numbers(attendance: Attendance, job: Job, where: str) -> None:
    """LocalError where a round has fewer silos than ``min_cohort``, known before it trains."""
    for round_ in range(job.length):
        here = len(attendance.present(job, round_))
        if here < job.min_cohort:
            raise LocalError(
                f"{where}, seed {job.seed}: round {job.rounds_before(round_) + 1} would have {here}"
                f" of {len(job.cohort(round_))} drawn silos, and min_cohort is {job.min_cohort}:"
                " a federation's job fails there; lower attendance.newcomers, absent or"
                f" min_cohort,{_more(job)} or choose another seed"
            )
