"""What a person at a silo reads before the silo takes part in a job."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import decimal
from ...security.blind.plan import JobPlan
from ...security.policy.policy import Policy
from ...silo.admission.checks import Outflow
from ..terminal.output import number
from . import asked
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


@dataclass(frozen=True)
class ReviewedJob:
    """A job as one person or another reads it, and who signed it.

    ``outflows`` are what the policy of now says to its uploads.
    """

    plan: JobPlan
    signer: str
    outflows: Sequence[Outflow]

    @property
    def job(self) -> Job:
        """The job itself."""
        return self.plan.job

    @property
    def parts(self) -> tuple[str, ...]:
        """What leaves, each in its form."""
        releases = (one.release for each in self.outflows for one in each.decision.tensors)
        return tuple(dict.fromkeys(f"{one.part} ({one.form})" for one in releases))

    @property
    def readers(self) -> tuple[str, ...]:
        """Who can read something of it."""
        return tuple(dict.fromkeys(chain.from_iterable(each.readers for each in self.outflows)))

    @property
    def largest(self) -> int:
        """Bytes of the largest round."""
        return max((each.size for each in self.outflows), default=0)


def review(
    reviewed: ReviewedJob, silo: str, policy: Policy, before: ReviewedJob | None
) -> Iterator[str]:
    """The lines: who signed the job, what leaves and who reads it, the risk, and what is new.

    ``before`` is the job on the same data set with which it is compared: one that was accepted.
    """
    plan, job = reviewed.plan, reviewed.job
    yield from lines(plan, reviewed.signer, silo, policy, reviewed.outflows)
    yield from asked.table(plan, policy, reviewed.outflows)
    yield ""
    risk = RISKS[job.security.required, job.privacy is not None]
    for fact in (*packages(job), f"risk: {risk}"):
        yield from wrapped(fact)
    yield ""
    yield from differences(reviewed, before)


def differences(reviewed: ReviewedJob, before: ReviewedJob | None) -> Iterator[str]:
    """In what a job differs from one that was accepted here, a line for each point."""
    if before is None:
        yield "this is the first job on this data set here"
        return
    changed = [
        f"{name}: {said}"
        for name, said_of in COMPARED.items()
        if (said := _difference(said_of(reviewed), said_of(before)))
    ]
    yield from wrapped(
        f"compared with job {before.job.name!r}, which this silo accepted before, "
        + ("these points are new:" if changed else "nothing is new but its name and its draws")
    )
    for line in changed:
        yield from wrapped(line, "  ")


def _difference(new: str | tuple[str, ...], old: str | tuple[str, ...]) -> str:
    """What changed; empty where nothing did. Of lists, what came and what went."""
    if new == old:
        return ""
    if isinstance(new, str):
        return f"{new} (before: {old})"
    came, went = (", ".join(filterfalse(b.__contains__, a)) for a, b in ((new, old), (old, new)))
    texts = {"new: ": came, "no longer: ": went}
    return "; ".join(f"{word}{text}" for word, text in texts.items() if text) or "another order"


def _privacy(reviewed: ReviewedJob) -> str:
    table = reviewed.job.privacy
    if table is None:
        return "none"
    cost = f"epsilon = {decimal(table.epsilon)} at delta = {decimal(table.delta)}"
    return f"{cost}, protects each {table.unit}, {table.noise} noise"


COMPARED: Mapping[str, Callable[[ReviewedJob], str | tuple[str, ...]]] = {
    "operator": lambda own: own.signer,
    "purpose": lambda own: own.job.purpose or "none",
    "method": lambda own: own.job.method_name,
    "model": lambda own: own.job.model.name,
    "what leaves": lambda own: own.parts,
    "read by": lambda own: own.readers,
    "bytes of the largest round": lambda own: f"{own.largest:,}",
    "privacy": _privacy,
    "blind sums": lambda own: "yes" if own.job.security.required else "no",
    "silos": lambda own: own.job.silos,
    "rounds": lambda own: number(own.job.length, "round"),
    # By their digests too: a version may have another content.
    "code of packages": lambda own: tuple(
        f"{one.name} {one.version} ({one.sha256[:12]}…)" for one in own.job.packages
    ),
}
