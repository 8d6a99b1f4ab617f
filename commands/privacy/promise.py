"""A private job in three lines: what it protects, from whom, and what accuracy to expect."""

from math import exp

from ...algorithms.job.job import Job
from ...algorithms.job.privacy_table import PrivacyTable

# Percent by epsilon, mean of the seeds: MNIST, ten silos, as docs/private-training.md has it.
# benchmarks/shared_accuracy.py measures it.
READABLE = 10  # epsilon
ALONE = {1: 64, 2: 81, 4: 85, 8: 88}
LOCAL = {1: 50, 2: 68, 4: 75, 8: 82}
SHARED = {1: 90, 2: 92, 4: 93, 8: 94}

PROTECTED = {
    "record": "each record of a silo's data set. With it or without it",
    "silo": "all records of a silo together. With these, or with any others in their place",
}


def promise(job: Job) -> dict[str, str]:
    """What a private job protects, from whom, and what accuracy to expect."""
    table = job.private
    # Above that, e to the epsilon is a number that nobody reads.
    times = f" = {exp(table.epsilon):,.1f}" if table.epsilon <= READABLE else ""
    return {
        "protects": (
            f"{PROTECTED[table.unit]}, whatever leaves is at most e^{table.epsilon:g}{times} times"
            f" likelier, but for a probability of {table.delta:g}"
        ),
        "from whom": _whom(table, len(job.silos)),
        "expect": _expected(table),
    }


def _whom(table: PrivacyTable, silos: int) -> str:
    if not table.shared:
        return (
            "everybody who sees what leaves, whoever works together. It rests on this"
            " silo's own noise"
        )
    return (
        "everybody who sees sums: the coordinator, other silos, readers of the model. It"
        f" rests on the masks, and on {table.honest(silos)} of {silos} silos that add their share"
        " of the noise and tell it to nobody"
    )


WHOLE_SILOS = (
    "a shared model that is far worse than training alone, which reveals nothing. With 100 silos on"
    " MNIST at epsilon 8 FedAvg reached 62 %, training alone 86 %: docs/private-training.md, Whole"
    " silos"
)


def _expected(table: PrivacyTable) -> str:
    """Of the epsilon measured that is nearest below, or the smallest."""
    # The figures are of records.
    if table.whole_silos:
        return WHOLE_SILOS
    nearest = max(filter(table.epsilon.__ge__, SHARED), default=min(SHARED))
    reached = (SHARED if table.shared else LOCAL)[nearest]
    less = f" (less at {table.epsilon:g})" if table.epsilon < nearest else ""
    return (
        f"on MNIST with ten silos FedAvg reached {reached} % with"
        f" {table.noise} noise at epsilon {nearest}, training alone {ALONE[nearest]} %{less}."
        " Your records decide: docs/private-training.md has more figures"
    )
