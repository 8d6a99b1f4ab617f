"""What the coordinator can see of a job, and what more its members may learn of records."""

from collections.abc import Sequence

from ...algorithms.exchange.parts import Gram, Kind, Mix, Part
from ...algorithms.job.job import Job
from ...security.blind.plan import JobPlan
from ...security.policy.release import GRAM_READER, MASKED, SILOS_READER, Release
from ..console.output import number

# ways to leave masked, next to MASKED itself, which is a sum for the coordinator
FOR_SILOS, ROWS = f"{MASKED} for silos", f"{MASKED} for each silo"
SHARED = f"{MASKED} to be compared"


def seen(job: Job) -> str:
    """What the coordinator sees unless silos collude with it; for mixes, also where some do."""
    if not job.security.required:
        return "in the clear: the coordinator sees what each silo gives"
    exchanges = {type(part.exchange) for start in job.phase_starts for part in job.up(start)}
    reads = [f"the sums over {_sets(job)}"]
    if job.for_silos:
        hidden = f"nothing of the sum of {', '.join(sorted(job.for_silos))}"
        reads = [hidden, f"other sums over {_sets(job)}"]
    if job.counted:
        enough = job.min_holders + job.security.colluders
        reads.append(f"no row of a class that fewer than {enough} of them hold")
    if Mix in exchanges:
        reads.append(f"nothing of what it mixes{_mixed(job)}")
    if Gram in exchanges:
        reads.append("of what it compares the inner products")
    reads.append("who took part, sizes and times")
    return f"blind: what a silo gives is masked, the coordinator reads {', '.join(reads)}"


def _sets(job: Job) -> str:
    """The sets of silos over which a sum may be."""
    silos = len(job.silos)
    whole = f"all {silos}" if job.cohort_size == silos else f"{job.cohort_size} of {silos}"
    if len(job.batches) > 1:
        return f"{whole} silos in fixed batches"
    if job.security.dropouts == "any":
        return f"{whole} silos or those that are left"
    return f"{whole} silos"


def unbounded(plan: JobPlan) -> str:
    """What blind sums leave open, to the coordinator and to a silo.

    Empty where it is bounded, or where all is seen.

    A coordinator alone can hand down a model of its own where silos cannot check it: a part that is
    neither the words of a sum that they tagged nor a row of a Mix.
    """
    job = plan.job
    if not job.security.required or job.privacy is not None:
        return ""
    rounds = [plan.round(start) for start in (*job.phase_starts, job.length)]
    down = [(round_, part) for round_ in rounds for part in round_.down]
    if not down:
        return ""
    whom = "one silo, alone or in league with the coordinator"
    for round_, part in down:
        checked = part.name in round_.in_words or isinstance(part.exchange, Mix)
        if not checked:
            whom = "the coordinator or to one silo"
    return (
        "blind sums do not bound what a model that is made to leak shows of single records, to"
        f" {whom}: policies look for such models, [privacy] alone bounds what any of them shows"
    )


def together(job: Job) -> str:
    """Which silos are summed only together, and what a lost one costs.

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


def revealed_by_likeness(plan: JobPlan) -> str:
    """What a job's comparisons reveal of the records; empty where it compares nothing.

    The figures are those of pFedSim's classifier rows, which alone were examined
    (docs/threat-model.md).
    """
    compared = [part for phase in plan.phases for part in phase.up if _compares(part)]
    if not compared:
        return ""
    rows: list[int] = []
    for part in compared:
        if part.kind is Kind.CLASSIFIER_ROWS:
            rows += [spec.shape[0] for spec in part.tensors]

    whom = "the coordinator"
    if any(phase.rows for phase in plan.phases):
        whom = "the coordinator, and the silos of a round, which check the weights of its rows,"
    return f"it compares silos, and that tells {whom} {_facts(rows)}"


def _facts(rows: Sequence[int]) -> str:
    """What likenesses reveal, by the numbers of rows in which classifiers are compared."""
    if not rows:
        return "which silos have similar records"

    # a likeness for each class shows who has it; one for all rows shows only their proportions
    if max(rows) > 1:
        return "which silo holds which class (AUC 0.97 to 1.00 where this was examined)"
    return (
        "which silos have similar shares of labels (rank correlation 0.5 to 0.87 where this was"
        " examined)"
    )


def _compares(part: Part) -> bool:
    return isinstance(part.exchange, Gram)


def _mixed(job: Job) -> str:
    """What is different where silos collude with the coordinator."""
    security = job.security
    if security.mix == "one-upload":
        return " (but all of it as soon as one silo is in league with it)"
    if not security.colluders:
        return ""
    they = "it gets" if security.colluders == 1 else "they get"
    means = f"the means that {they}"
    if job.method().directed_for == "members":
        means = f"{means}, by the coordinator's weights"
    return f" (nor, with {number(security.colluders, 'silo')} in league, more than {means})"


def way_of(release: Release) -> str:
    """How something leaves: its form, and of what is masked the one by who can read it."""
    if SILOS_READER in release.readers:
        return FOR_SILOS
    if release.is_row:
        return ROWS
    if release.form == MASKED and GRAM_READER in release.readers:
        return SHARED
    return release.form
