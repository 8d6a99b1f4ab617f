"""Private jobs at a silo: what one may cost its data set, and what pays for it.

The checks before the silo takes part read the job, the policy and the budget alone. No answer
depends on a record: a silo that accepts a private job reveals nothing of its data but that there
are some and that they fit the model. Facts about the records are advice to the silo's own people.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import (
    Spend,
    decimal,
    job_spends,
    signed_sigma,
    spends_by_sigma,
)
from ...algorithms.job.privacy_table import PrivacyTable
from ...algorithms.job.shared_steps import STEPS
from ...algorithms.training.accountant import PrivateSilo
from ...errors import LocalError
from ...security.dp.noise import Randomness
from ...security.dp.noise_planner import overspent
from ...security.policy.file import BudgetTable
from ...security.policy.policy import Policy
from ..job_folder import JobFolder
from .accountant import JobAccount
from .budget import DatasetBudget


def check_signed(job: Job) -> None:
    """LocalError where a private job, with its signed noise, costs more than it says itself.

    Jobs without [privacy] pass.
    """
    if job.privacy is None:
        return
    table = job.privacy
    # Compute the cost of the signed noise here: the operator's plan is not trusted.
    fault = overspent(
        spends_by_sigma(job),
        signed_sigma(job),
        decimal(table.epsilon),
        table.delta,
        table.largest_sigma,
    )
    if fault:
        raise LocalError(f"privacy.{fault}")


def privacy_objections(job: Job, policy: Policy) -> Iterator[str]:
    """Every objection of the policy to what a job does with the data set, each with its fix.

    They do not depend on the silo's records.
    """
    asked, table, named = policy.budget, job.privacy, f"[dataset.{policy.dataset}]"
    # (1) What must cost something does.
    if table is None:
        if asked is not None and asked.required:
            yield (
                f"the job has no [privacy], but {named} of this silo's policy has required = true;"
                " have the job signed with one, or set required to false"
            )
        return

    # (2) Its owner lets something be spent on the data set.
    if asked is None:
        yield (
            f"the job spends privacy of data set {policy.dataset!r}, but this silo's policy sets"
            f' no budget; add {named} with unit = "record", epsilon = {decimal(table.epsilon)},'
            f" delta = {decimal(table.delta)}: the limit for all jobs together; these figures allow"
            " this one job"
        )
        return

    # (3) Its steps have noise enough: an epsilon over a whole job says little of single steps.
    if asked.min_sigma is not None and Decimal(sigma := signed_sigma(job)) < asked.min_sigma:
        yield (
            f"its steps have sigma = {sigma}; {named} has min_sigma = {asked.min_sigma}; have the"
            " job signed with a lower privacy.epsilon, which plans more noise, or lower min_sigma"
        )

    # (4) It promises its epsilon at no larger a delta.
    if Decimal(decimal(table.delta)) > asked.delta:
        yield (
            f"it promises its epsilon at delta = {decimal(table.delta)}; {named} has delta ="
            f" {asked.delta:f}; have the job signed with at most that, or raise it in the policy"
        )

    # (5) Its owner says whose noise may protect the records.
    yield from _noise_objections(table, asked, named)
    # (6) Nothing that a share of the noise alone hides is seen by others.
    yield from _norm_objections(job, policy)


def _noise_objections(table: PrivacyTable, asked: BudgetTable, named: str) -> Iterator[str]:
    """Objections to who adds the noise of a private job."""
    if not table.shared:
        return
    if asked.noise != "shared":
        yield (
            f'its silos share the noise of its sums, and {named} has noise = "local": this silo'
            " would add a share of it and rely on the others for the rest; have the job signed with"
            ' privacy.noise = "local", or write noise = "shared" (docs/privacy.md says who must be'
            " honest then)"
        )
    elif table.dishonest < asked.dishonest:
        yield (
            f"it counts the shares of noise of all silos but {table.dishonest}; {named} asks for"
            f" dishonest = {asked.dishonest}; have the job signed with a higher"
            " privacy.dishonest"
        )


def _norm_objections(job: Job, policy: Policy) -> Iterator[str]:
    """Objections to bounds on what leaves under a share of the noise.

    Others see whether an upload is held back, and so would see how long it is without their shares.
    """
    parts = job.shares_noise * (STEPS, *(part.name for part in job.counted_parts))
    for part in parts:
        most = getattr(policy.rule(job.method_name, part), "max_norm", None)
        if most is not None:
            yield (
                f"its part {part!r} leaves under a share of the noise, and this silo's policy has"
                f" max_norm = {most:g} for it: whether an upload is held back would tell of the"
                " records; take max_norm out of the part's rule"
            )


def check_room(job: Job, budget: DatasetBudget | None, beside: Iterable[Job] = ()) -> None:
    """ExhaustedError unless the budget covers all of a new job, interrupted rounds included.

    Jobs without [privacy] need none. All of those that run ``beside`` it on the data set counts as
    spent: what two jobs are to spend together must not end both before their last rounds.
    """
    if job.privacy is not None and budget is not None:
        budget.check_room(job, _planned(job), {each.digest: _planned(each) for each in beside})


def _planned(job: Job) -> tuple[Spend, ...]:
    return () if job.privacy is None else job_spends(job, signed_sigma(job))


def payer(job: Job, budget: DatasetBudget | None, folder: JobFolder) -> PrivateSilo | None:
    """The account and the randomness of a private job; None for a plain one.

    LocalError without a budget, which admission should have refused.
    """
    if job.privacy is None:
        return None
    if budget is None:  # admission refuses it
        raise LocalError(
            f"job {job.name!r} spends on a data set without a budget; this is a bug in Staddle"
        )
    return PrivateSilo(JobAccount(budget, job, folder), Randomness)


def advice(job: Job, records: int) -> Iterator[str]:
    """What this silo's own people should know of a private job on so many training records.

    It goes into the silo's log alone: an answer that depended on records would reveal something.
    """
    table = job.privacy
    if table is None:
        return
    # (1) We know who vouches for the code: it could get around all that follows what it computes
    # (taint.py).
    for package in job.packages:
        yield (
            f"the job runs code of the installed package {package.name} {package.version}, not of"
            " Staddle: taints are followed to find mistakes, not to stop code that means to leak,"
            " so the privacy promise is only as good as that code; read it, or decline the job"
            " (docs/privacy.md)"
        )

    # (2) Steps draw records.
    if (expected := table.sample_rate * records) < 1:
        yield (
            f"a step draws {expected:.2g} of this silo's {records} training records on average, so"
            " most steps are pure noise; ask for a job with a higher privacy.sample_rate"
        )

    # (3) A chance of delta for each of them is none to count on.
    if table.delta * records >= 1:
        yield (
            f"delta = {decimal(table.delta)} is not below 1 / {records}, one per training record of"
            " this silo: the promise may well fail for one of them; ask for a job with a smaller"
            " privacy.delta"
        )
