"""What the coordinator can see of a job, in one line."""

from ..algorithms.exchange import Gram, Mix
from ..algorithms.job import Job
from .units import number


def seen(job: Job) -> str:
    """Unless a silo is in league with it; of what is mixed also where some are."""
    if not job.security.required:
        return "in the clear: the coordinator sees what each silo gives"
    exchanges = {type(part.exchange) for start in job.phase_starts for part in job.up(start)}
    hidden = f"nothing of the sum of {', '.join(sorted(job.for_silos))}, " if job.for_silos else ""
    mixed = f"nothing of what it mixes{_mixed(job)}, " if Mix in exchanges else ""
    compared = "of what it compares the inner products, " if Gram in exchanges else ""
    enough = job.min_holders + job.security.colluders
    rare = f"no row of a class that fewer than {enough} of them hold, " if job.counted else ""
    whole = f"all {len(job.silos)}" if job.cohort_size == len(job.silos) else f"{job.cohort_size} of {len(job.silos)}"
    read = "other sums" if hidden else "the sums"
    reads = f"{hidden}{read} over {whole} silos, {rare}{mixed}{compared}who took part, sizes and times"
    return f"blind: what a silo gives is masked, the coordinator reads {reads}"


def _mixed(job: Job) -> str:
    """What is different where silos are in league with it."""
    security = job.security
    if security.mix == "one-upload":
        return " (but all of it as soon as one silo is in league with it)"
    if not security.colluders:
        return ""
    who, get = number(security.colluders, "silo"), "it gets" if security.colluders == 1 else "they get"
    return f" (nor, with {who} in league, more than the means that {get})"
