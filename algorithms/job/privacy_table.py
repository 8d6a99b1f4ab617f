"""The ``[privacy]`` table of a job file."""

from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...files.documents import Real, Strict

LARGEST_SIGMA = 100_000  # costs are computed up to here
# A class counts as present from so many standard deviations of the noise on: then 1 in 741 absent
# classes seems present, P(z >= 3).
PRESENT = 3.0
# Sums under shared noise cross as whole numbers, 2^SHARED_BITS to a clip. A secure sum takes
# numbers below 2^40 from a silo (security/blind/sum.py). Records have half of that room: no step
# ever draws twice MOST_DRAWN. So has noise, whose deviation is a thirtieth of it.
SHARED_BITS = 24
MOST_DRAWN = 2**14
MOST_SHARED_SIGMA = 1000
LEAST_SHARE = 8  # variance of a share
SHARING = {"noise", "dishonest", "local_rate", "unit"}  # keys of shared noise
Sigma = Annotated[Real, Field(gt=0, le=LARGEST_SIGMA)]


def share_variance(sigma: float | str, units: int, honest: int, numbers: int = 1) -> int:
    """The variance of a share of noise: that of ``honest`` shares is ``numbers`` (σ units)².

    ``units`` are the most that one record moves each of so many sums of integers, ``sigma`` is the
    decimal that was signed. Exact, rounded up, and at least LEAST_SHARE, from which on a sum of
    shares is a discrete Gaussian for all that one could tell (security/dp/shared_noise.py).
    """
    # By its text: a float may lie below the decimal.
    return max(ceil((Fraction(str(sigma)) * units) ** 2 * numbers / honest), LEAST_SHARE)


# Beyond these bounds a gradient in float32 overflows or is lost.
Clip = Annotated[Real, Field(ge=1e-6, le=1e12)]


class PrivacyTable(Strict):
    """The [privacy] table.

    Each noise multiplier is a standard deviation over the most that one record can change.
    """

    epsilon: Annotated[Real, Field(gt=0, le=1000)]
    """The cost that a job may have for a silo's data set, all its releases together."""
    delta: Annotated[Real, Field(gt=0, lt=1)]
    clip: Clip = 1.0
    """Norm to which a record's gradient is clipped, over all parameters that a step moves.

    With unit "silo", the norm to which a silo's update of a round is clipped.
    """
    sample_rate: Annotated[Real, Field(gt=0, le=1)]
    """Probability with which a step draws each record; it replaces training.batch_size."""
    physical_batch: Annotated[int, Field(strict=True, ge=16, le=32_768)] = 32
    """Records whose gradients are in memory at a time: the rows of each call.

    It changes memory and time only. Calls of fewer rows are not much faster, and more rows are not
    added up exactly (training/clipped_sum.py). The last call may have empty rows.
    """
    unit: Literal["record", "silo"] = "record"
    """What is protected: whether one record is there, or all that a silo uploads."""
    noise: Literal["local", "shared"] = "local"
    """Each silo adds all of a step's noise to what it gives ("local"), or a share of it.

    Shares add up to all of it in a blind sum (shared_steps.py).
    """
    dishonest: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    """Silos whose shares of the noise do not count: they may know them, or leave them out."""
    local_rate: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """With shared noise: learning rate of what has local noise all the same, as a share of lr.

    These are parameters that stay at a silo, and rounds that sum no steps: they bear smaller steps.
    """
    sigma: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?$")] | None = None
    """Noise of a step in units of ``spread`` clips; planned where a job is signed."""
    histogram_sigma: Sigma = 10.0
    """Noise of the counts of training records by class, which are released once."""
    statistics_clip: Clip = 1.0
    """Norm to which a record's share of a method's statistics is clipped, all together."""
    statistics_sigma: Sigma = 20.0
    """Noise of a method's statistics of a round, in units of ``statistics_clip``."""
    metrics_sigma: Sigma | None = None
    """Noise of a round's sums over test records; default: they stay at the silo."""

    @model_validator(mode="after")
    def _fit(self) -> "PrivacyTable":
        if self.noise == "local" and self.dishonest != 1:
            raise ValueError(
                f"dishonest = {self.dishonest} does nothing with local noise, which needs nobody"
                ' else; take it out, or write noise = "shared"'
            )
        if self.shared and (self.metrics_sigma or 0) > MOST_SHARED_SIGMA:
            raise ValueError(
                f"metrics_sigma = {self.metrics_sigma:g}: noise that silos share is at most"
                f" {MOST_SHARED_SIGMA:,}; lower it"
            )
        if self.noise == "local" and self.local_rate != 1:
            raise ValueError(
                f"local_rate = {self.local_rate:g} does nothing where all noise is local: lower"
                ' training.lr, or write noise = "shared"'
            )
        if self.whole_silos:
            self._check_whole_silos()
        return self

    def _check_whole_silos(self) -> None:
        """ValueError for a setting that does not protect a whole silo, or does nothing there."""
        where = 'unit = "silo"'
        if not self.shared:
            raise ValueError(
                f"{where} with local noise: each silo would add more than all that it uploads;"
                ' write noise = "shared"'
            )
        if self.sample_rate != 1:
            raise ValueError(
                f"{where} with sample_rate = {self.sample_rate:g}: every silo takes part in every"
                " round, and trains by training.batch_size; write sample_rate = 1"
            )
        if self.local_rate != 1:
            raise ValueError(
                f"{where} with local_rate = {self.local_rate:g} does nothing: silos train without"
                " local noise; leave local_rate out"
            )
        if self.metrics_sigma is not None:
            raise ValueError(
                f"{where}: how much a silo's test records add to metrics has no bound; leave"
                " metrics_sigma out, and they stay at the silos"
            )

    @property
    def whole_silos(self) -> bool:
        """True if what is protected is all that a silo uploads, not single records."""
        return self.unit == "silo"

    @property
    def spread(self) -> int:
        """The most that what is protected moves a step's sum, in clips.

        A record is in a data set or not. A silo is always there: of two updates that it might give
        the clip bounds each, so they are two clips apart at most. That holds for two updates that
        differ by a record, too.
        """
        return 2 if self.whole_silos else 1

    @property
    def share_unit(self) -> float:
        """What 1 in a sum under shared noise is, of a gradient."""
        return self.clip / 2.0**SHARED_BITS

    @property
    def shared(self) -> bool:
        """True if the silos share the noise of what they sum."""
        return self.noise == "shared"

    @property
    def largest_sigma(self) -> int:
        """The most that ``sigma`` may be."""
        return MOST_SHARED_SIGMA // self.spread if self.shared else LARGEST_SIGMA

    def honest(self, silos: int) -> int:
        """Silos whose shares are all of a step's noise: of a job of so many, those not dishonest.

        One where the noise is local.
        """
        return silos - self.dishonest if self.shared else 1
