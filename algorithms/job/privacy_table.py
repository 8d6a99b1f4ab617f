"""The ``[privacy]`` table of a job file."""

from typing import Annotated

from pydantic import Field

from ...files.documents import Real, Strict

LARGEST_SIGMA = 100_000  # as far as costs are reckoned


Sigma = Annotated[Real, Field(gt=0, le=LARGEST_SIGMA)]


# beyond, what float32 has of a gradient overflows or is lost
Clip = Annotated[Real, Field(ge=1e-6, le=1e12)]


class PrivacyTable(Strict):
    """The [privacy] table."""

    epsilon: Annotated[Real, Field(gt=0, le=1000)]
    """The cost that a job may have for a silo's data set, all its releases together."""
    delta: Annotated[Real, Field(gt=0, lt=1)]
    clip: Clip = 1.0
    """Norm to which a record's gradient is cut, of all parameters that a step moves together."""
    sample_rate: Annotated[Real, Field(gt=0, le=1)]
    """Probability with which a step draws each record.

    Training.batch_size takes no part in a private job.
    """
    physical_batch: Annotated[int, Field(strict=True, ge=16, le=32_768)] = 32
    """Records whose gradients are in memory at a time: the rows of each call.

    The last call may have empty rows.

    It changes nothing but memory and time; of fewer rows a call is not much faster, and more are
    not added up exactly.
    """
    sigma: Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?$")] | None = None
    """Noise of a step in units of ``clip``; planned where a job is signed."""
    histogram_sigma: Sigma = 10.0
    """Noise of the counts of training records by class, which are released once."""
    statistics_clip: Clip = 1.0
    """Norm to which what a record adds to a method's statistics is cut, all of them together."""
    statistics_sigma: Sigma = 20.0
    """Noise of a method's statistics of a round, in units of ``statistics_clip``."""
    metrics_sigma: Sigma | None = None
    """Noise of the test counts of a round; none: they stay at the silo."""
