"""What a silo asks of what a job costs its data set, before it takes part: of the job and the policy alone.

No answer here depends on a record: whether a silo accepts a private job tells nothing of its data but that there are
some and that they fit the model.
"""

from collections.abc import Iterator
from decimal import Decimal

from ..algorithms.job import Job
from ..algorithms.privacy import decimal, signed_sigma, spends_by_sigma
from ..errors import LocalError
from ..security.policy import Policy


def check_signed(job: Job) -> None:
    """LocalError where a private job costs more, with the noise that it was signed with, than it says itself."""
    if job.privacy is None:
        return
    from ..security.plan import overspent  # noqa: PLC0415 opacus takes two seconds that plain jobs need not

    table = job.privacy
    if why := overspent(spends_by_sigma(job), signed_sigma(job), decimal(table.epsilon), table.delta):
        raise LocalError(f"privacy.{why}")


def privacy_objections(job: Job, policy: Policy) -> Iterator[str]:
    """All that the policy has against what a job does with the data set, each with its fix."""
    asked, table, named = policy.budget, job.privacy, f"[dataset.{policy.dataset}]"
    # (1) What must cost something does.
    if table is None:
        if asked is not None and asked.required:
            yield (
                f"the job has no [privacy], and {named} of this silo's policy has required = true; have it signed "
                "with one, or set that to false"
            )
        return
    # (2) Its owner lets something be spent on the data set.
    if asked is None:
        yield (
            f"the job spends on data set {policy.dataset!r}, and this silo's policy sets no budget; add to it {named}, "
            f'unit = "record", epsilon = {decimal(table.epsilon)}, delta = {decimal(table.delta)}: what all jobs '
            "together may cost, such as this one alone"
        )
        return
    # (3) Its steps have noise enough.
    if asked.min_sigma is not None and Decimal(sigma := signed_sigma(job)) < asked.min_sigma:
        yield (
            f"its steps have sigma = {sigma}, min_sigma = {asked.min_sigma} in {named}; have the job signed "
            "with a lower privacy.epsilon or fewer rounds, or lower min_sigma"
        )
    # (4) It promises its epsilon at no larger a delta.
    if Decimal(decimal(table.delta)) > asked.delta:
        yield (
            f"it promises its epsilon at delta = {decimal(table.delta)}, delta = {asked.delta:f} in {named}; have the "
            "job signed with at most that, or raise it"
        )
