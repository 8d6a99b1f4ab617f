"""The noise of a private job, planned or checked where it is signed."""

from dataclasses import replace
from decimal import Decimal
from math import ceil, log2

from ...algorithms.job.job import Job, JobFile
from ...algorithms.job.privacy import (
    SHARED,
    TRAINING,
    WHOLE,
    decimal,
    signed_sigma,
    spends_by_sigma,
)
from ...algorithms.job.privacy_table import PRESENT
from ...errors import LocalError
from ...files.documents import parse_toml
from ...security.dp.noise_planner import least_sigma, overspent
from ...security.dp.rdp import cost, shown
from ..terminal.job_example import TaskKind, job_text
from ..terminal.output import number

ORIGIN = "job init"
DEVIATIONS = 4.5  # of normal noise: 1 number in 150,000 is farther off
SMALLEST_CLIP = -64
WHOSE = {"record": "each silo's data set", "silo": "all that a silo uploads"}  # by unit
STEPS = {"record": "step", "silo": "update"}  # what has noise


def planned(job: Job, origin: str) -> Job:
    """The job with its noise, the least that keeps its target where it names none.

    A job without [privacy] stays as it is. LocalError where the noise that it names costs more
    than the job may, or where none costs so little.
    """
    if job.privacy is None:
        return job
    table, spends = job.privacy, spends_by_sigma(job)
    most = decimal(table.epsilon)
    try:
        # more noise than the target demands would cost accuracy and buy nothing
        if table.sigma is None:
            sigma = least_sigma(spends, most, table.delta, table.largest_sigma)
            planned_table = table.model_copy(update={"sigma": sigma})
            return replace(job, privacy=planned_table)
        fault = overspent(spends, table.sigma, most, table.delta, table.largest_sigma)
        if fault:
            raise LocalError(fault)
    except LocalError as error:
        raise LocalError(f"{origin}: [privacy] {error}") from error
    return job


def drafted_noise(method: str, task: TaskKind = "classification", *, blind: bool = False) -> str:
    """Noise and cost of [privacy] as ``job init`` drafts it, or why a method cannot have it.

    Planned for the example's own model and rounds, which its author will change.
    """
    file = parse_toml(job_text(method, task, private=True, blind=blind).encode(), JobFile, ORIGIN)
    job = Job.from_file(file, ORIGIN)
    try:
        return noise(planned(job, ORIGIN))
    except LocalError as error:
        return f"refused: {error}"


def check_fits_sums(job: Job, origin: str) -> None:
    """Raise LocalError where the noise of class means is above what a blind sum takes.

    No silo would upload such a round.
    """
    if not job.security.required:
        return
    clip = job.security.clip_exponent
    least = least_clip_exponent(job)
    if clip < least:
        raise LocalError(
            f"{origin}: security.clip_exponent = {clip}: with the noise of statistics_sigma, class"
            f" means of {job.method_name} may be larger than 2^{clip}, and then a silo uploads"
            f" nothing; set it to {least}"
        )


def least_clip_exponent(job: Job) -> int:
    """The least exponent that fits the class means of a private job, noise and all.

    SMALLEST_CLIP where it has none.
    """
    table = job.privacy
    if table is None:
        return SMALLEST_CLIP
    method = job.method()
    # Only rounds that measure upload class means.
    measures = any(method.effort(round_).measures for round_ in range(job.length))
    if not measures:
        return SMALLEST_CLIP

    # a mean is a noised sum over a noised count: the noise is largest in the class with the
    # fewest records that still counts as present
    fewest = max(PRESENT * table.histogram_sigma, 1)
    noise = table.statistics_sigma * table.statistics_clip / fewest
    return ceil(log2(table.statistics_clip + DEVIATIONS * noise))


def noise(job: Job) -> str:
    """Noise and cost of a private job, in one line, epsilon rounded up.

    Empty for a job that is not private, or whose noise is not planned yet.
    """
    if job.privacy is None or job.privacy.sigma is None:
        return ""
    table, sigma = job.privacy, job.privacy.sigma
    spends = spends_by_sigma(job)(sigma)
    steps = sum(one.steps for one in spends if one.purpose in (TRAINING, SHARED, WHOLE))
    spent = shown(cost(spends, table.delta))
    return (
        f"private: noise of {in_clips(job)} times the clip of {table.clip:g},"
        f" {number(steps, STEPS[table.unit])} at most, epsilon {spent} of {table.epsilon:g} at"
        f" delta = {table.delta:g} of {WHOSE[table.unit]}{shared_by(job)}"
    )


def in_clips(job: Job) -> str:
    """The noise of a step, in clips."""
    return decimal(Decimal(signed_sigma(job)) * job.private.spread)


def shared_by(job: Job) -> str:
    """Who adds the noise of a private job, where its silos share it; else empty."""
    if job.privacy is None or not job.privacy.shared:
        return ""
    silos, honest = len(job.silos), job.privacy.honest(len(job.silos))
    return (
        f"; the {silos} silos share the noise of sums, and {honest} of them have to be honest about"
        " their shares"
    )
