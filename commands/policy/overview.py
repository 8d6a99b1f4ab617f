"""A signed job in lines for people: who signed it, what leaves, who reads it, what noise it has.

``job show`` prints all of it, ``policy check`` the same sentences around its own.
"""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from ...algorithms.job.job import Job
from ...algorithms.models.build import input_shape
from ...security.blind.plan import JobPlan
from ...security.identity.roster import Roster
from ...security.policy.release import MASKED, PADDED, ROTATED, Release
from ...silo.admission.checks import uploads
from ...silo.parts.releases import readers_of
from ..privacy.noise import noise
from ..privacy.promise import promise
from ..terminal.output import number
from .visibility import (
    FOR_SILOS,
    ROWS,
    SHARED,
    revealed_by_likeness,
    seen,
    starts_from,
    together,
    unbounded,
    way_of,
)

WIDTH = 100
READ = {  # who reads what leaves in a form that hides it
    MASKED: "masked; readable only as a sum over the round's silos",
    FOR_SILOS: (
        "masked; readable only as a sum over the round's silos, by silos, or by the coordinator if"
        " a silo colludes with it"
    ),
    SHARED: (
        "secret-shared among the silos; the coordinator reads only lengths and similarity, with"
        " colluding silos or without"
    ),
    PADDED: (
        "padded; the other silos read only weighted means, the coordinator nothing, unless a silo"
        " colludes with it: then all of it"
    ),
    ROTATED: (
        "rotated; the coordinator reads only lengths and similarity, unless a silo colludes with"
        " it: then all of it"
    ),
}


def overview(plan: JobPlan, signer: str, roster: Roster) -> Iterator[str]:
    """The lines of ``job show``."""
    job = plan.job
    yield from heading(job, signer)
    for fact in filter(None, (*_settings(job), *_facts(plan), *packages(job))):
        yield from wrapped(fact)

    total = 0
    for first, last, releases in uploads(plan):
        yield ""
        yield f"{rounds(first, last)}:"
        for _, tensors in groupby(releases, key=attrgetter("part")):
            yield from wrapped(part_line(list(tensors), readers_of(roster)), "  ")
        size = sum(map(attrgetter("nbytes"), releases))
        yield f"  {number(len(releases), 'tensor')}, {size:,} bytes per round and silo"
        total += size * (last - first + 1)
    yield ""
    yield f"At most {total:,} bytes of each silo in all rounds."


def heading(job: Job, signer: str) -> Iterator[str]:
    """The job, its digest, who signed it."""
    yield from wrapped(
        f"job {job.name!r}, method {job.method_name}, model {job.model.name}, {job.length} rounds"
    )
    yield f"digest {job.digest}"
    yield f"signed by {signer}"
    if job.purpose:
        yield from wrapped(f"purpose, as the operator says: {job.purpose}")


def _settings(job: Job) -> Iterator[str]:
    drawn = ""
    if job.cohort_size < len(job.silos):
        drawn = f"; {job.cohort_size} are drawn per round"
    yield f"for {number(len(job.silos), 'silo')}: {', '.join(job.silos)}{drawn}"
    on = "each silo's [data]" if job.dataset is None else f"data set {job.dataset!r}"
    yield f"on {on}"
    yield (
        f"task {job.task.kind}, {job.model.outputs_key} = {job.model.width}, records of shape"
        f" {list(input_shape(job.model))}"
    )


def _facts(plan: JobPlan) -> Iterator[str]:
    """Facts about all rounds; empty texts for those that do not apply."""
    job = plan.job
    yield seen(job)
    yield blind(job)
    yield together(job)
    yield starts_from(job)
    yield unbounded(plan)
    yield census(job)
    yield revealed_by_likeness(plan)
    if job.privacy is None:
        yield "no [privacy]: none of what leaves is differentially private"
        return
    yield noise(job)
    yield from map(": ".join, promise(job).items())


def packages(job: Job) -> Iterator[str]:
    """The installed packages whose code the job runs."""
    for package in job.packages:
        yield f"runs code of package {package.name} {package.version}, SHA-256 {package.sha256}"


def blind(job: Job) -> str:
    """Colluders and weights of blind sums; empty for a plain job."""
    if not job.security.required:
        return ""
    # All silos of the job read public weights; private ones are summed, masked like the values.
    weights = "are written in the job" if job.security.weights == "public" else "are masked too"
    colluders = number(job.security.colluders, "colluder")
    return f"its sums are blind: {colluders} assumed; the silos' weights {weights}"


def census(job: Job) -> str:
    """From how many holders on rows of a class leave; empty where no class is counted first."""
    if not job.counted:
        return ""
    # Colluders know which classes they hold, so they cannot hide another silo.
    enough = job.min_holders + job.security.colluders
    return (
        "round 0 counts the silos that hold each class; rows of a class leave only if"
        f" {enough} of {len(job.silos)} silos hold it"
    )


def rounds(first: int, last: int) -> str:
    """Rounds with equal uploads, as the heading of these."""
    return f"round {first}" if first == last else f"rounds {first} to {last}, each"


def part_line(releases: Sequence[Release], readers: Sequence[str]) -> str:
    """One part that leaves: its kind, size and readers; all its tensors leave in one form.

    ``readers`` are those of what leaves in the clear.
    """
    release = releases[0]
    size = sum(map(attrgetter("nbytes"), releases))
    return f"part {release.part!r} ({release.kind}), {size:,} bytes, {_read_by(release, readers)}"


def _read_by(release: Release, readers: Sequence[str]) -> str:
    # Rows are masked, too, but name their readers.
    way = way_of(release)
    if way == ROWS:
        return (
            f"masked and padded; each of {', '.join(release.readers)} reads only its own weighted"
            " means of it"
        )
    return READ.get(way, f"read by {', '.join(readers)}")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a sentence, those after the first indented further."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
