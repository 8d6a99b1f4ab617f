"""What the coordinator can see of a job, and what more its members may learn of records.

Whoever signs or accepts a job reads these sentences, so they say the worst that can happen.
"""

from collections.abc import Sequence
from functools import partial
from itertools import filterfalse

from ...algorithms.exchange.parts import Gram, Kind, Mix, Part
from ...algorithms.job.job import Job
from ...security.blind.plan import JobPlan, RoundPlan
from ...security.policy.release import GRAM_READER, MASKED, SILOS_READER, Release
from ...security.preflight import size
from ..terminal.output import number

# ways to leave masked, next to MASKED itself, which is a sum for the coordinator
FOR_SILOS, ROWS = f"{MASKED} for silos", f"{MASKED} for each silo"
SHARED = f"{MASKED} to be compared"


def seen(job: Job) -> str:
    """A sentence on what the coordinator sees unless silos collude with it.

    For mixes it also says what the coordinator sees if some do.
    """
    if not job.security.required:
        return "in the clear: the coordinator sees what each silo uploads"

    # the parts of a method change between its phases, and only there
    exchanges: set[type] = set()
    for start in job.phase_starts:
        exchanges.update(type(part.exchange) for part in job.up(start))

    sets = _sets(job)
    if job.for_silos:
        withheld = ", ".join(sorted(job.for_silos))
        reads = [f"nothing of the sum of {withheld}", f"other sums over {sets}"]
    else:
        reads = [f"the sums over {sets}"]

    # a class that few silos hold would show them; those who collude know their own share of it
    if job.counted:
        enough = job.min_holders + job.security.colluders
        reads.append(f"no row of a class that fewer than {enough} of them hold")
    if Mix in exchanges:
        reads.append(f"nothing of what it mixes{_mixed(job)}")
    if Gram in exchanges:
        reads.append("the inner products of what it compares")
    # Nothing hides these.
    reads.append("and who took part, sizes and times")
    return f"blind: each silo's upload is masked; the coordinator reads {', '.join(reads)}"


def starts_from(job: Job) -> str:
    """A sentence on the file of weights that the model begins with; empty where there is none."""
    weights = job.model.weights
    if weights is None:
        return ""
    digest, nbytes = weights.expected
    return (
        f"the initial values of {' and '.join(weights.parts)} come from a file of {size(nbytes)},"
        f" SHA-256 {digest}; whoever made it can have made it leak records to those who read what"
        " silos upload"
    )


def _sets(job: Job) -> str:
    """The sets of silos over which a sum may be."""
    silos = len(job.silos)
    whole = f"all {silos}"
    if job.cohort_size < silos:
        whole = f"{job.cohort_size} of {silos}"
    # A batch is in a sum as a whole or not at all.
    if len(job.batches) > 1:
        return f"{whole} silos in fixed batches"
    # Sums over varying sets of silos reveal single silos over many rounds, so say so.
    if job.security.dropouts == "any":
        return f"{whole} silos, or over those that are left when some drop out"
    return f"{whole} silos"


def unbounded(plan: JobPlan) -> str:
    """What blind sums leave open, to the coordinator and to a silo.

    Empty where it is bounded, or where all is seen.
    """
    job = plan.job
    # Differential privacy bounds what anything that leaves reveals about a record.
    is_bounded = job.privacy is not None
    if is_bounded or not job.security.required:
        return ""

    down: list[Part] = []
    unchecked: list[Part] = []
    for start in (*job.phase_starts, job.length):
        round_ = plan.round(start)
        down += round_.down
        unchecked += filterfalse(partial(_is_checked, round_), round_.down)
    if not down:
        return ""

    # a model that leaks comes from a silo, as its contribution, or where silos cannot check what
    # comes down also from the coordinator alone
    whom = "one silo, alone or colluding with the coordinator,"
    if unchecked:
        whom = "the coordinator or one silo"
    return (
        f"blind sums do not bound what {whom} can learn of single records with a model made to"
        " leak; policies look for such models, but only [privacy] bounds what any model reveals"
    )


def _is_checked(round_: RoundPlan, part: Part) -> bool:
    """Whether silos can check what comes down: the words of a sum that they tagged, or a row."""
    return part.name in round_.in_words or isinstance(part.exchange, Mix)


def together(job: Job) -> str:
    """Which silos are summed only together, and what a lost one costs.

    Empty where any may be missing.
    """
    if not job.batches:
        return ""
    if len(job.batches) == 1:
        return "its silos form one batch: a round waits for all of them"
    named = "; ".join(", ".join(batch) for batch in job.batches)
    lost = (
        "when a silo is lost, a round continues without its whole batch, if enough other silos are"
        " left"
    )
    return f"it has {len(job.batches)} batches: {named}; {lost}"


def revealed_by_likeness(plan: JobPlan) -> str:
    """What a job's comparisons reveal of the records; empty where it compares nothing.

    The figures are those of pFedSim's classifier rows, which alone were examined
    (docs/threat-model.md).
    """
    compared: list[Part] = []
    # Not every phase compares.
    for phase in plan.phases:
        compared += filter(_compares, phase.up)
    if not compared:
        return ""

    # attacks were tried on classifier rows alone: of other comparisons no figure is known
    rows: list[int] = []
    for part in compared:
        if part.kind is Kind.CLASSIFIER_ROWS:
            rows += [spec.shape[0] for spec in part.tensors]

    whom = "the coordinator"
    # Silos check the weights of directed rows, which follow from the similarities.
    if any(phase.rows for phase in plan.phases):
        whom = "the coordinator, and to the silos of a round, which check the weights of its rows,"
    return f"it compares silos, which reveals to {whom} {_facts(rows)}"


def _facts(rows: Sequence[int]) -> str:
    """What likenesses reveal, by the numbers of rows in which classifiers are compared."""
    if not rows:
        return "which silos have similar records"

    # a likeness for each class shows who has it; one for all rows shows only their proportions
    if max(rows) > 1:
        return "which silo holds which class (AUC 0.97 to 1.00 where measured)"
    return (
        "which silos have similar proportions of labels (rank correlation 0.5 to 0.87 where"
        " measured)"
    )


def _compares(part: Part) -> bool:
    return isinstance(part.exchange, Gram)


def _mixed(job: Job) -> str:
    """What is different where silos collude with the coordinator."""
    security = job.security
    # one upload serves all recipients: any of them can take its pad off
    if security.mix == "one-upload":
        return " (but all of it as soon as one silo colludes with it)"
    if not security.colluders:
        return ""

    means = "the means that these receive"
    if security.colluders == 1:
        means = "the means that it receives"
    # otherwise the weights follow from counts that the job declares
    if job.method().directed_for == "members":
        means = f"{means}, with the coordinator's weights"
    return f" (or, with {number(security.colluders, 'colluding silo')}, only {means})"


def way_of(release: Release) -> str:
    """How a release leaves: its form; for masked ones, also who can read the result.

    One of the forms in release.py, or FOR_SILOS, ROWS or SHARED.
    """
    if SILOS_READER in release.readers:
        return FOR_SILOS
    if release.is_row:
        return ROWS
    if release.form == MASKED and GRAM_READER in release.readers:
        return SHARED
    return release.form
