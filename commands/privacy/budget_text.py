"""What private jobs cost a data set, in a policy that is drafted and in words about one."""

import textwrap
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import decimal, job_spends, signed_sigma
from ...security.dp.rdp import cost, shown
from ...security.policy.policy import Policy
from ..console.output import number
from .noise import noise

WIDTH = 100
MOST = Decimal(1000)  # epsilon that a policy can have


def table(jobs: Sequence[Job], dataset: str) -> list[str]:
    """Lines of ``[dataset.NAME]`` with what these jobs cost together, at most.

    None where none of them is private.
    """
    own = [job for job in jobs if job.privacy]
    if not own:
        return []
    private = [(job.name, job.private) for job in own]
    delta = max(one.delta for _, one in private)
    named = ", ".join(
        f"{name!r} epsilon = {decimal(one.epsilon)} at delta = {decimal(one.delta)}"
        for name, one in private
    )
    whole = (
        f"What all jobs together may cost data set {dataset!r}, for ever: so much that these can"
        f" run, and hardly anything besides. What each may cost by itself: {named}. A higher limit"
        " lets more jobs run and protects each record less."
    )
    lines = [
        "",
        *_comment(whole),
        f"[dataset.{dataset}]",
        *_comment(
            "What is protected: one record, such as an image. A person who has several is protected"
            " less."
        ),
        'unit = "record"',
        f"epsilon = {min(_together(own, delta), MOST):f}",
        f"delta = {decimal(delta)}",
    ]
    if len(private) == len(jobs):
        why = (
            "Nothing that is computed from its records without noise leaves: jobs without [privacy]"
            " are declined."
        )
        lines += [*_comment(why), "required = true"]
    else:
        plain = number(len(jobs) - len(private), "job")
        why = (
            f"With true nothing that is computed from its records without noise leaves; {plain} of"
            " these gives such."
        )
        lines += [*_comment(why), "required = false"]
    return [
        *lines,
        *_comment(
            "Least noise of a step of a job, in clips; left out, what the job's own epsilon asks."
        ),
        "# min_sigma = 0.5",
        *_comment(
            "How many records one person has in the data set at most; the report of what was spent"
            " uses it."
        ),
        "# records_per_person = 1",
    ]


def _together(jobs: Sequence[Job], delta: float) -> Decimal:
    """Epsilon that private jobs cost a data set together.

    Where noise is planned, it is less than the sum of what each may cost.
    """
    most = sum((Decimal(decimal(job.private.epsilon)) for job in jobs), Decimal(0))
    if any(job.private.sigma is None for job in jobs):
        return most
    spends = [spend for job in jobs for spend in job_spends(job, job.private.sigma or "")]
    return min(Decimal(shown(cost(spends, delta))), most)


def told(job: Job, policy: Policy) -> Iterator[str]:
    """What a private job costs, and what the policy lets it."""
    yield noise(job)
    if (asked := policy.budget) is None:
        return
    alone = "; jobs without [privacy] are declined" if asked.required else ""
    yield (
        f"[dataset.{policy.dataset}] lets all jobs together cost epsilon = {asked.epsilon:f} at"
        f" delta = {asked.delta:f}{alone}; staddle privacy show says what is left of it"
    )
    yield (
        "what it gives is meant to be differentially private; tensor by tensor the gate asks what"
        " was paid for it, round by round"
    )


def document(job: Job, policy: Policy) -> dict[str, Any] | None:
    """The same for scripts; None for a job that is not private."""
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
