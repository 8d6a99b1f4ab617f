"""The noise of a private job, planned or checked where it is signed."""

from dataclasses import replace

from ..algorithms.job import Job
from ..algorithms.privacy import TRAINING, WHOLE, decimal, spends_by_sigma
from ..errors import LocalError
from ..security.accounting import cost, shown
from ..security.plan import least_sigma, overspent
from .units import number


def planned(job: Job, origin: str) -> Job:
    """The job with its noise, the least that keeps its target where it names none; any other job as it is.

    LocalError where the noise that it names costs more than the job may, or where none costs so little.
    """
    if job.privacy is None:
        return job
    table, spends = job.privacy, spends_by_sigma(job)
    most = decimal(table.epsilon)
    try:
        if table.sigma is None:
            sigma = least_sigma(spends, most, table.delta)
            return replace(job, privacy=table.model_copy(update={"sigma": sigma}))
        if fault := overspent(spends, table.sigma, most, table.delta):
            raise LocalError(fault)
    except LocalError as error:
        raise LocalError(f"{origin}: [privacy] {error}") from error
    return job


def noise(job: Job) -> str:
    """What a planned job adds and costs, in one line; empty for a job that is not private."""
    if job.privacy is None or job.privacy.sigma is None:
        return ""
    table, sigma = job.privacy, job.privacy.sigma
    spends = spends_by_sigma(job)(sigma)
    steps = sum(one.steps for one in spends if one.purpose in (TRAINING, WHOLE))
    return (
        f"private: noise of {sigma} times the clip of {table.clip:g}, {number(steps, 'step')} at most, epsilon "
        f"{shown(cost(spends, table.delta))} of {table.epsilon:g} at delta = {table.delta:g} of each silo's data set"
    )
