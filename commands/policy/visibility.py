"""What the coordinator can see of a job, in one line, and in others what more its members may learn
of records.
"""

from ...algorithms.exchange.parts import Gram, Kind, Mix
from ...algorithms.job.job import Job
from ...security.blind.plan import JobPlan
from ..console.output import number


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
    whole = (
        f"all {len(job.silos)}"
        if job.cohort_size == len(job.silos)
        else f"{job.cohort_size} of {len(job.silos)}"
    )
    fixed = " in fixed batches" if len(job.batches) > 1 else ""
    fixed = fixed or (" or those that are left" if job.security.dropouts == "any" else "")
    read = "other sums" if hidden else "the sums"
    reads = (
        f"{hidden}{read} over {whole} silos{fixed}, {rare}{mixed}{compared}who took part, sizes and"
        " times"
    )
    return f"blind: what a silo gives is masked, the coordinator reads {reads}"


def unbounded(plan: JobPlan) -> str:
    """What blind sums leave open, by the coordinator and by a silo.

    Empty where it is bounded, or where all is seen.

    A coordinator alone hands down a model of its own where silos cannot check it: what is neither
    the words of a sum that they tagged nor a row of a Mix.
    """
    job = plan.job
    delivered = [plan.round(start) for start in (*job.phase_starts, job.length)]
    down = [(round_, part) for round_ in delivered for part in round_.down]
    if not job.security.required or job.privacy is not None or not down:
        return ""
    alone = any(
        part.name not in round_.in_words and not isinstance(part.exchange, Mix)
        for round_, part in down
    )
    whom = (
        "the coordinator or to one silo"
        if alone
        else "one silo, alone or in league with the coordinator"
    )
    return (
        "blind sums do not bound what a model that is made to leak shows of single records, to"
        f" {whom}: policies look for such models, [privacy] alone bounds what any of them shows"
    )


def together(job: Job) -> str:
    """Which silos are summed together or not at all, and what a lost one costs.

    Empty where any may be missing.
    """
    if not job.batches:
        return ""
    if len(job.batches) == 1:
        return "its silos are one batch: a round waits for all of them"
    named = "; ".join(", ".join(batch) for batch in job.batches)
    lost = (
        "a round goes on without the whole batch of a silo that is lost, where enough others are"
        " left"
    )
    return f"it has {len(job.batches)} batches: {named}; {lost}"


def told_by_likeness(plan: JobPlan) -> str:
    """What a job's comparisons tell of the records; empty where it compares nothing.

    The figures are those of pFedSim's classifier rows, which alone were examined
    (docs/threat-model.md).
    """
    parts = [part for phase in plan.phases for part in phase.up if isinstance(part.exchange, Gram)]
    if not parts:
        return ""
    rows = [
        spec.shape[0]
        for part in parts
        if part.kind is Kind.CLASSIFIER_ROWS
        for spec in part.tensors
    ]
    if any(groups > 1 for groups in rows):
        told = "which silo holds which class (AUC 0.97 to 1.00 where this was examined)"
    elif rows:
        told = (
            "which silos have similar shares of labels (rank correlation 0.5 to 0.87 where this was"
            " examined)"
        )
    else:
        told = "which silos have similar records"
    weighed = any(phase.rows for phase in plan.phases)
    whom = (
        "the coordinator, and the silos of a round, which check the weights of its rows,"
        if weighed
        else "the coordinator"
    )
    return f"it compares silos, and that tells {whom} {told}"


def _mixed(job: Job) -> str:
    """What is different where silos are in league with it."""
    security = job.security
    if security.mix == "one-upload":
        return " (but all of it as soon as one silo is in league with it)"
    if not security.colluders:
        return ""
    who, get = (
        number(security.colluders, "silo"),
        "it gets" if security.colluders == 1 else "they get",
    )
    weighed = ", by the coordinator's weights" if job.method().directed_for == "members" else ""
    return f" (nor, with {who} in league, more than the means that {get}{weighed})"
