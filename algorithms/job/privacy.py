"""The [privacy] table of a job, and the budget that its rounds spend.

Both are the same at every silo, and neither depends on a record.

::

    [privacy]
    epsilon = 8.0            # what the whole job may cost each silo's data set, at this delta
    delta = 1e-5
    clip = 1.0               # Euclidean norm to which the gradient of a record is cut
    sample_rate = 0.05       # probability with which a step draws each record: ceil(1 / 0.05) steps
                             an epoch
    physical_batch = 32      # records whose gradients are in memory at a time
    sigma = "1.37"           # noise of a step, in clips; left out, it is planned when the job is
                             signed
    histogram_sigma = 10.0   # noise of the counts of records by class, or of all without
                             classes; released once
    statistics_clip = 1.0    # norm to which a record's share of what a method measures is cut, such
                             as its features
    statistics_sigma = 20.0  # noise of that, in this clip
    metrics_sigma = 20.0     # noise of a round's sums over test records; left out, they stay here,
                             and zeros leave

A step on all records at once has noise sigma / sample_rate: as much on the mean of the gradients,
for about the same cost. The noise is planned for SLACK more rounds of each effort than a silo is
drawn for, one at least. A round that a crash interrupts is spent, and a job with nothing left for a
retry would end there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from math import ceil
from typing import TYPE_CHECKING

from ...errors import LocalError
from .privacy_table import LARGEST_SIGMA, PrivacyTable

if TYPE_CHECKING:
    from ..course import Effort
    from .job import Job

# security rule 25: a round that crashed is spent, and its retry takes noise that was planned.
SLACK = Decimal("0.05")
SIGMA_STEP = Decimal("0.001")
MOST_STEPS = 10**9

Steps = Counter[tuple[str, str, str]]  # by purpose, sigma and q

TRAINING, SHARED, WHOLE, STATISTICS, METRICS, SHARED_METRICS, HISTOGRAM = (
    "training",
    "training-shared",
    "training-whole",
    "statistics",
    "metrics",
    "metrics-shared",
    "histogram",
)


@dataclass(frozen=True, slots=True)
class Spend:
    """Equal steps of the sampled Gaussian mechanism for one purpose.

    ``sigma`` is the noise multiplier: standard deviation over sensitivity. A step draws each record
    with probability ``q``. Both are decimals as text, so that a budget holds exactly what was
    signed.
    """

    purpose: str
    sigma: str
    q: str
    steps: int

    @property
    def shared(self) -> bool:
        """True if the silos share the noise of these steps."""
        return self.purpose in (SHARED, SHARED_METRICS)


def decimal(value: float | Decimal) -> str:
    """A number as a plain decimal without exponent, as a budget's records hold it.

    A float becomes the shortest decimal that reads back as the same float.
    """
    if not isinstance(value, Decimal):
        value = Decimal(repr(value))
    return format(value, "f")


def whole_sigma(sigma: str, sample_rate: float) -> str:
    """Noise of a step on all records: sigma / q, rounded up."""
    # Decimal arithmetic, since a budget holds exactly this number.
    noise = Decimal(sigma) / Decimal(repr(sample_rate))
    return decimal(noise.quantize(SIGMA_STEP, ROUND_CEILING))


def signed_sigma(job: "Job") -> str:
    """The noise of a step that the job was signed with; LocalError where it has none yet."""
    if job.private.sigma is None:
        raise LocalError(
            f"job {job.name!r} has no privacy.sigma yet; sign the job, which plans one, or set it"
        )
    return job.private.sigma


def count_spends(table: PrivacyTable) -> tuple[Spend, ...]:
    """What the counts by class cost: nothing where they stay at the silo."""
    return () if table.whole_silos else (histogram_spend(table),)


def histogram_spend(table: PrivacyTable) -> Spend:
    """The one release of the counts by class, of sensitivity 1: a record is in one of them."""
    return Spend(HISTOGRAM, decimal(table.histogram_sigma), "1", 1)


def round_spends(job: "Job", round_: int, sigma: str) -> tuple[Spend, ...]:
    """The steps that one silo spends in a round, without the histogram; none has 0 steps."""
    return _spends(job.private, job.method().effort(round_), sigma)


def _spends(table: PrivacyTable, effort: "Effort", sigma: str) -> tuple[Spend, ...]:
    rate = table.sample_rate
    spends = [
        # Steps per epoch follow from q: the number of records is not public.
        Spend(TRAINING, sigma, decimal(rate), effort.epochs * ceil(1 / rate)),
        Spend(SHARED, sigma, decimal(rate), effort.shared),
        Spend(WHOLE, whole_sigma(sigma, table.sample_rate), "1", effort.whole),
        Spend(STATISTICS, decimal(table.statistics_sigma), "1", int(effort.measures)),
    ]
    # Test counts without noise do not leave, so they cost nothing.
    if table.metrics_sigma is not None:
        purpose = SHARED_METRICS if table.shared else METRICS
        spends.append(Spend(purpose, decimal(table.metrics_sigma), "1", 1))
    return tuple(spend for spend in spends if spend.steps)


def job_spends(job: "Job", sigma: str) -> tuple[Spend, ...]:
    """Upper bound on what a silo spends in the job, SLACK for interrupted rounds included.

    It counts steps per mechanism; accountants turn them into epsilon.
    """
    return spends_by_sigma(job)(sigma)


def spends_by_sigma(job: "Job") -> Callable[[str], tuple[Spend, ...]]:
    """``job_spends`` by the noise of a step, for a caller who tries many.

    LocalError for more steps, or more noise, than the cost can be computed for.
    """
    # Going through a job's rounds takes a while, so it is done once.
    table, schedules = job.private, _schedules(job)
    rate = table.sample_rate

    def spends(sigma: str) -> tuple[Spend, ...]:
        # All silos have the same noise, so the largest number of steps of any silo decides.
        most: Steps = Counter()
        for rounds in schedules:
            most |= _steps(table, rounds, sigma)  # the larger of each purpose

        steps = max(most.values(), default=0)
        if steps > MOST_STEPS:
            raise LocalError(
                f"job {job.name!r}: privacy.sample_rate = {rate:g} makes {steps:,} steps in its"
                f" rounds, {MOST_STEPS:,} are the most; raise it, or take fewer epochs or rounds"
            )

        # a step on all records has more noise than one on a sample, maybe more than costs reach
        noise = whole_sigma(sigma, rate)
        if (WHOLE, noise, "1") in most and Decimal(noise) > LARGEST_SIGMA:
            raise LocalError(
                f"job {job.name!r}: privacy.sigma = {sigma!r} by sample_rate = {rate:g}, the noise"
                f" of a step on all records, is over {LARGEST_SIGMA:,}; lower sigma, or raise"
                " sample_rate"
            )
        # more noise than a sum of whole numbers has room for
        if table.shared and Decimal(sigma) > table.largest_sigma:
            raise LocalError(
                f"job {job.name!r}: privacy.sigma = {sigma!r} is noise of"
                f" {Decimal(sigma) * table.spread:f} clips, and noise that silos share is at most"
                f" {table.largest_sigma * table.spread:,} clips; lower it, or leave it out, and it"
                " is planned"
            )
        return (*count_spends(table), *(Spend(*key, steps) for key, steps in most.items()))

    return spends


def most_rounds(job: "Job") -> int:
    """Number of rounds of the silo that is drawn most often."""
    return max(sum(rounds.values()) for rounds in _schedules(job))


def spare_rounds(job: "Job") -> int:
    """Number of rounds of that silo that may be lost to crashes, of each effort its own."""
    return max(sum(map(slack, rounds.values())) for rounds in _schedules(job))


def slack(rounds: int) -> int:
    """Number of rounds that may be lost to crashes, for a silo that is drawn for ``rounds``.

    They are of one effort. It is rounded up, so at least 1 for a silo that is ever drawn.
    """
    return ceil(SLACK * rounds)


def _schedules(job: "Job") -> list[Counter["Effort"]]:
    """Numbers of rounds by effort, for each silo; equal schedules of several silos come once."""
    # Rounds of the same effort cost the same, so only their number matters.
    method = job.method()
    by_silo: dict[str, Counter[Effort]] = {silo: Counter() for silo in job.silos}
    for round_, drawn in enumerate(job.cohorts()):
        effort = method.effort(round_)
        for silo in drawn:
            by_silo[silo][effort] += 1
    # A job may have thousands of silos, but few different schedules.
    distinct = {frozenset(rounds.items()): rounds for rounds in by_silo.values()}
    return list(distinct.values())


def _steps(table: PrivacyTable, rounds: Counter["Effort"], sigma: str) -> Steps:
    """Steps of each mechanism in all these rounds, and in SLACK more of each effort."""
    total: Steps = Counter()
    for effort, times in rounds.items():
        # One dear round at the end, such as one that tunes, must not make all spare rounds dear.
        total += _times(_steps_of_round(table, effort, sigma), times + slack(times))
    return total


def _steps_of_round(table: PrivacyTable, effort: "Effort", sigma: str) -> Steps:
    spends = _spends(table, effort, sigma)
    return Counter({(spend.purpose, spend.sigma, spend.q): spend.steps for spend in spends})


def _times(steps: Steps, rounds: int) -> Steps:
    return Counter({mechanism: number * rounds for mechanism, number in steps.items()})
