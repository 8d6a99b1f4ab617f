"""What private jobs cost a data set, in a policy that is drafted and in words about one."""

import textwrap
from collections.abc import Iterator, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import decimal, job_spends, signed_sigma
from ...algorithms.job.privacy_table import PrivacyTable
from ...security.dp.rdp import cost, shown
from ...security.policy.policy import Policy
from ..terminal.output import number
from .noise import noise

WIDTH = 100
MOST = Decimal(1000)  # epsilon that a policy can have


def table(jobs: Sequence[Job], dataset: str) -> list[str]:
    """Lines of ``[dataset.NAME]`` with what these jobs cost together, at most.

    Empty if no job is private. ``dataset`` is its name in the silo's configuration.
    """
    # Jobs without [privacy] spend nothing.
    own = [job for job in jobs if job.privacy]
    if not own:
        return []

    # the largest delta: no job of these may promise its epsilon at a larger one than the budget's
    private = [(job.name, job.private) for job in own]
    delta = max(one.delta for _, one in private)
    named = ", ".join(
        f"{name!r} epsilon = {decimal(one.epsilon)} at delta = {decimal(one.delta)}"
        for name, one in private
    )
    whole = (
        f"The most privacy loss that all jobs together may ever cost data set {dataset!r}: enough"
        f" for these jobs and hardly any other. Limits of the single jobs: {named}. A higher limit"
        " lets more jobs run and protects each record less."
    )
    lines = [
        "",
        *_comment(whole),
        f"[dataset.{dataset}]",
        *_comment(
            "The unit of protection is one record, such as an image. A person with several records"
            ' is protected less, but not in jobs with unit = "silo": these protect all records'
            " together, and fit this budget."
        ),
        'unit = "record"',
        f"epsilon = {min(_together(own, delta), MOST):f}",
        f"delta = {decimal(delta)}",
    ]

    # strict where these jobs allow it; where some are plain, the draft must not decline them
    if len(private) == len(jobs):
        why = (
            "Nothing that is computed from the records without noise leaves: this silo declines"
            " jobs without [privacy]."
        )
        lines += [*_comment(why), "required = true"]
    else:
        plain = number(len(jobs) - len(private), "job")
        why = (
            "If true, nothing that is computed from the records without noise leaves, and this silo"
            f" declines {plain} of these."
        )
        lines += [*_comment(why), "required = false"]
    return [
        *lines,
        *_comment(
            "The least noise that a job's steps must have, in multiples of the clipping norm."
            " Default: what the job's own epsilon needs."
        ),
        "# min_sigma = 0.5",
        *_noise_lines([one for _, one in private]),
        *_comment(
            "The most records that one person has in the data set; staddle privacy show uses it."
        ),
        "# records_per_person = 1",
    ]


def _noise_lines(tables: Sequence[PrivacyTable]) -> list[str]:
    """Whose noise may protect the records, as these jobs need it."""
    shared = list(filter(attrgetter("shared"), tables))
    if not shared:
        why = (
            "Whose noise may protect the records: this silo's own, or in blind jobs also shares of"
            ' the other silos ("shared"). Default: this silo\'s own.'
        )
        return [*_comment(why), '# noise = "local"']
    why = (
        "Whose noise may protect the records: in blind jobs that say so, this silo adds a share of"
        " the noise of a sum and relies on the other silos for the rest. So the records are"
        ' protected from everybody who sees sums, as long as no more silos than "dishonest" tell'
        ' their shares or leave them out. "local" declines such jobs.'
    )
    return [
        *_comment(why),
        'noise = "shared"',
        f"dishonest = {min(map(attrgetter('dishonest'), shared))}",
    ]


def _together(jobs: Sequence[Job], delta: float) -> Decimal:
    """Epsilon that private jobs cost a data set together.

    Where noise is planned, it is less than the sum of what each may cost.
    """
    most = sum((Decimal(decimal(job.private.epsilon)) for job in jobs), Decimal(0))
    # Without planned noise there is nothing to compose: the sum of the targets is an upper bound.
    if any(job.private.sigma is None for job in jobs):
        return most
    spends = [spend for job in jobs for spend in job_spends(job, job.private.sigma or "")]
    # Both are upper bounds, so the smaller one holds.
    return min(Decimal(shown(cost(spends, delta))), most)


def budget_lines(job: Job, policy: Policy) -> Iterator[str]:
    """Sentences on the cost of a private job and on what the policy allows.

    The budget itself is not read.
    """
    yield noise(job)
    if (asked := policy.budget) is None:
        return
    alone = "; this silo declines jobs without [privacy]" if asked.required else ""
    yield (
        f"[dataset.{policy.dataset}] allows epsilon = {asked.epsilon:f} at delta ="
        f" {asked.delta:f} for all jobs together{alone}; staddle privacy show says how much is left"
    )
    yield (
        "its uploads are meant to be differentially private; in each round the gate checks for each"
        " tensor that the budget paid for it"
    )


def document(job: Job, policy: Policy) -> dict[str, Any] | None:
    """The same for scripts; None for a job that is not private.

    Decimals as strings, so that no digit is lost in JSON.
    """
    if job.privacy is None:
        return None

    asked = policy.budget
    return {
        "dataset": policy.dataset,
        "sigma": signed_sigma(job),
        "epsilon": shown(cost(job_spends(job, signed_sigma(job)), job.privacy.delta)),
        "target": decimal(job.privacy.epsilon),
        "delta": decimal(job.privacy.delta),
        "limit": (
            None
            if asked is None
            else {"epsilon": f"{asked.epsilon:f}", "delta": f"{asked.delta:f}"}
        ),
        "required": asked is not None and asked.required,
    }


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
