"""What a job asks of a silo next to what the silo's policy allows, in a few rows.

Where both are equal, the job asks for the most that the policy lets pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import decimal, job_spends, signed_sigma
from ...security.blind.plan import JobPlan
from ...security.dp.rdp import cost, shown
from ...security.policy.policy import Policy
from ...silo.admission import checks
from ...silo.admission.checks import Outflow

HEADING = ("asked of this silo", "by the job", "by its policy")
MARK = "  <- the policy's limit"
YES = {True: "yes", False: "no"}


@dataclass(frozen=True)
class AskedPoint:
    """One row; ``at_limit`` if the policy would refuse more than the job asks for."""

    what: str
    asked: str
    allowed: str
    at_limit: bool


def table(plan: JobPlan, policy: Policy, outflows: Sequence[Outflow]) -> Iterator[str]:
    """The rows as lines, in columns."""
    points = list(_points(plan, policy, outflows))
    rows = [HEADING, *((point.what, point.asked, point.allowed) for point in points)]
    first, second, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    marks = ["", *(MARK * point.at_limit for point in points)]
    for (what, asked, allowed), mark in zip(rows, marks, strict=True):
        yield f"{what:<{first}}  {asked:<{second}}  {allowed}{mark}".rstrip()


def _points(plan: JobPlan, policy: Policy, outflows: Sequence[Outflow]) -> Iterator[AskedPoint]:
    job, limits = plan.job, policy.file.limits
    sent = max((outflow.size for outflow in outflows), default=0)
    yield _most("bytes per round", sent, limits.max_bytes_per_round)
    yield from _largest(job, policy, outflows)
    yield from _blind(plan, policy)
    yield from _private(job, policy)
    allowed = ", ".join(policy.file.packages) or "none"
    for package in job.packages:
        yield AskedPoint("code of a package", f"{package.name} {package.version}", allowed, False)


def _most(what: str, asked: int | Decimal, limit: int | Decimal, beside: str = "") -> AskedPoint:
    return AskedPoint(
        what, f"{Decimal(asked):,f}", f"at most {Decimal(limit):,f}{beside}", asked == limit
    )


def _least(what: str, asked: int | Decimal, limit: int | Decimal) -> AskedPoint:
    return AskedPoint(what, f"{Decimal(asked):,f}", f"at least {Decimal(limit):,f}", asked == limit)


def _largest(job: Job, policy: Policy, outflows: Sequence[Outflow]) -> Iterator[AskedPoint]:
    """The tensor that comes closest to its rule's limit; nothing where no rule has one of it."""
    releases = (verdict.release for outflow in outflows for verdict in outflow.decision.tensors)
    found = [
        _most(f"numbers in {release.part}/{release.name}", release.elements, rule.max_elements)
        for release in sorted(releases, key=lambda release: -release.elements)
        if (rule := policy.rule(job.method_name, release.part)) is not None
    ]
    yield from [point for point in found if point.at_limit][:1] or found[:1]


def _blind(plan: JobPlan, policy: Policy) -> Iterator[AskedPoint]:
    job, own, terms = plan.job, policy.file.secure_aggregation, policy.terms
    blind = job.security.required
    said = {True: "blind alone", False: "blind or not"}[own.required]
    yield AskedPoint("blind sums", YES[blind], said, not blind)
    if not blind:
        return
    smallest, colluders = checks.smallest_sum(job), job.security.colluders
    yield _least("silos of a sum", smallest, terms.min_cohort)
    yield _least("of these, honest", smallest - colluders, terms.min_honest)
    yield _least("silos assumed to collude", colluders, terms.colluders)
    granted = {
        "sums over changing silos": (job.security.dropouts == "any", own.dropouts == "any"),
        "public counts of records": (job.security.weights == "public", own.public_counts),
        "trust in the coordinator": (checks.trusting(plan), own.trust == checks.TRUSTED),
    }
    for what, (asked, allowed) in granted.items():
        yield AskedPoint(what, YES[asked], YES[allowed], asked and allowed)


def _private(job: Job, policy: Policy) -> Iterator[AskedPoint]:
    table, own = job.privacy, policy.budget
    if table is None or own is None:
        protected = own is not None and own.required
        said = {True: "[privacy] alone", False: "[privacy] or not"}[protected]
        yield AskedPoint("differential privacy", YES[table is not None], said, table is None)
        return
    # What its planned noise costs, as the budget counts it.
    spent = shown(cost(job_spends(job, signed_sigma(job)), float(own.delta)))
    yield _most("epsilon", Decimal(spent), own.epsilon, " in all jobs")
    yield _most("delta", Decimal(decimal(table.delta)), own.delta)
    if own.min_sigma is not None:
        yield _least("sigma of a step", Decimal(signed_sigma(job)), own.min_sigma)
    shared = table.noise == "shared"
    said = {"local": "local alone", "shared": "local or shared"}[own.noise]
    yield AskedPoint("noise", table.noise, said, shared)
    if shared:
        yield _least("silos whose noise may lack", table.dishonest, own.dishonest)
