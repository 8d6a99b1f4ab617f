"""The ``[privacy]`` table of a job file."""

from typing import Annotated

from pydantic import Field

from ...files.documents import Real, Strict

LARGEST_SIGMA = 100_000  # costs are computed up to here
# A class counts as present from so many standard deviations of the noise on: then 1 in 741 absent
# classes seems present, P(z >= 3).
PRESENT = 3.0
Sigma = Annotated[Real, Field(gt=0, le=LARGEST_SIGMA)]


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
    """Norm to which a record's gradient is clipped, over all parameters that a step moves."""
    sample_rate: Annotated[Real, Field(gt=0, le=1)]
    """Probability with which a step draws each record; it replaces training.batch_size."""
    physical_batch: Annotated[int, Field(strict=True, ge=16, le=32_768)] = 32
    """Records whose gradients are in memory at a time: the rows of each call.

    It changes memory and time only. Calls of fewer rows are not much faster, and more rows are not
    added up exactly (training/clipped_sum.py). The last call may have empty rows.
    """
    sigma: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?$")] | None = None
    """Noise of a step in units of ``clip``; planned where a job is signed."""
    histogram_sigma: Sigma = 10.0
    """Noise of the counts of training records by class, which are released once."""
    statistics_clip: Clip = 1.0
    """Norm to which a record's share of a method's statistics is clipped, all together."""
    statistics_sigma: Sigma = 20.0
    """Noise of a method's statistics of a round, in units of ``statistics_clip``."""
    metrics_sigma: Sigma | None = None
    """Noise of a round's sums over test records; default: they stay at the silo."""
