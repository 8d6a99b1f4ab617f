"""What a person at a silo reads before the silo takes part in a job."""

from collections.abc import Callable, Iterator, Mapping

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import decimal
from ...security.blind.plan import JobPlan
from ...security.identity.roster import Roster
from ...security.policy.policy import Policy
from ...silo.admission import checks
from ..terminal.output import number
from .check import lines
from .overview import packages, wrapped

# By whether sums are blind, and whether the job has [privacy].
RISKS: Mapping[tuple[bool, bool], str] = {
    (False, False): (
        "the coordinator reads each of this silo's updates exactly. From exact updates single"
        " records can be reconstructed, above all where few records are trained on at a time, and"
        " whether a person's record was among them can be tested"
    ),
    (False, True): (
        "the coordinator reads each of this silo's updates, with noise in it. The noise bounds"
        " what anybody can learn about single records, as the privacy figures say"
    ),
    (True, False): (
        "nobody reads this silo's updates alone, only sums over several silos. Sums are exact:"
        " they do not bound what a model that was made to leak reveals about single records, or"
        " what many sums reveal about a silo"
    ),
    (True, True): (
        "nobody reads this silo's updates alone, only sums over several silos, with noise in them."
        " The noise bounds what anybody can learn about single records, as the privacy figures say"
    ),
}


def review(
    plan: JobPlan, signer: str, silo: str, policy: Policy, roster: Roster, before: Job | None
) -> Iterator[str]:
    """The lines: who signed the job, what leaves and who reads it, the risk, and what is new.

    ``before`` is the job that this silo accepted last on the same data set.
    """
    outflows = checks.outflows(plan, roster, policy)
    yield from lines(plan, signer, silo, policy, outflows)
    job = plan.job
    risk = RISKS[job.security.required, job.privacy is not None]
    for fact in (*packages(job), f"risk: {risk}", *differences(job, before)):
        yield from wrapped(fact)


def differences(job: Job, before: Job | None) -> Iterator[str]:
    """In what a job differs from the last one that was accepted here."""
    if before is None:
        yield "this is the first job on this data set here"
        return
    changed = [
        f"{name}: {one} (before: {other})"
        for name, said in COMPARED.items()
        if (one := said(job)) != (other := said(before))
    ]
    what = "; ".join(changed) or "nothing but its name and its draws"
    yield f"compared with job {before.name!r}, the last that was accepted here: {what}"


def _parts(job: Job) -> str:
    found = (release.part for _, _, each in checks.uploads(JobPlan(job)) for release in each)
    return ", ".join(dict.fromkeys(found))


def _privacy(job: Job) -> str:
    table = job.privacy
    if table is None:
        return "none"
    return f"epsilon = {decimal(table.epsilon)} at delta = {decimal(table.delta)}, {table.noise}"


COMPARED: Mapping[str, Callable[[Job], str]] = {
    "method": lambda job: job.method_name,
    "model": lambda job: job.model.name,
    "what leaves": _parts,
    "privacy": _privacy,
    "blind sums": lambda job: "yes" if job.security.required else "no",
    "silos": lambda job: ", ".join(job.silos),
    "rounds": lambda job: number(job.length, "round"),
    "packages": lambda job: ", ".join(f"{one.name} {one.version}" for one in job.packages),
}
