"""Upper bound on the disk space that a job needs at the coordinator, from its signed schema alone.

With n silos in the job::

    uploads    n · what a silo uploads in a round: while it arrives, and until the fold; masked, and
               their sum, if blind
    versions   2 n · the same, where a Mix needs the last upload of each silo: those that count, and
               those before them
    published  3 · every part that is folded or delivered: being written, last, and the one before,
               which may be read; the words of what silos get in words, the same
    mail       3 n · every part that is put aside for silos that are away
    start      the file of weights that the model begins with
    counts     rounds · the sums of tables of test counts, where the job's [metrics] asks for them

Where a Mix is blind, a version is 8 bytes a number; what is put aside is made when it is fetched,
and until then the versions stay that it is of: those of all rounds, at most. Of a directed Mix the
rows themselves wait, 4 bytes a number: those of all rounds for silos that are away, or the last one
of each member of a round.

Not counted: the database, rows without their words, and what the method's coordinator half knows,
which are small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse

from ..algorithms.exchange.delivery import KEEP
from ..algorithms.exchange.parts import Kind, Mix, Part, delivered_items, upload_items, walk_tensors
from ..algorithms.job.job import Job
from ..errors import LocalError
from ..security.blind.plan import JobPlan, RoundPlan
from ..security.blind.sum import group
from ..security.preflight import size
from .blind.mixing import part_bytes
from .blind.unmask import masked_bytes

GENERATIONS = 3  # of a file that each round replaces
HEADER_BYTES = 512  # of one tensor in a file, besides its name
# behind the words of a sum: more than a specification has for each silo and group, and by itself
SPEC_BYTES = 1024


@dataclass(frozen=True)
class Room:
    """Upper bounds in bytes, one field per row of the table at the top of this module.

    As text, it leaves out rows of 0 bytes.
    """

    uploads: int
    versions: int
    published: int
    mail: int
    counts: int
    start: int = 0

    @property
    def total(self) -> int:
        """The most that they take together: all may be on the disk at once."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        shown = [f"{size(count)} {kind}" for kind, count in vars(self).items() if count]
        return f"{size(self.total)} ({', '.join(shown)})"


def room(job: Job) -> Room:
    """The most that a job's tensors take at a time.

    LocalError if the sums of a blind job are impossible.
    """
    phases = JobPlan(job).phases
    # Phases may differ in what they fold and deliver: of each part the largest file counts.
    folded = chain.from_iterable(phase.sums for phase in phases)
    delivered = list(
        chain.from_iterable(job.down(start) for start in (*job.phase_starts, job.length))
    )
    waits = [part for part in delivered if KEEP in part.tensors]
    once = filterfalse(waits.__contains__, delivered)
    # The metrics are rows of the database, not a file.
    summed = filter(lambda part: part.kind is not Kind.METRIC, folded)
    # Parts and words may be largest in different phases; the sum is still an upper bound.
    files = _largest([*summed, *once]) + max(map(words_bytes, phases))
    # Tables of test counts stay, round by round.
    counts = job.length * _largest(filter(_has_tables, job.counted_parts))
    versions = _versions_kept(job, waits)
    # In a keyed job rows wait as what they are made of, which counts among the versions.
    mail = 0 if job.keyed else _largest(waits)
    return Room(
        max(_uploaded(job, phase) for phase in phases),
        max(_mixed(job, phase, versions) for phase in phases),
        GENERATIONS * files,
        GENERATIONS * len(job.silos) * mail,
        counts,
        0 if job.model.weights is None else job.model.weights.expected[1],
    )


def _versions_kept(job: Job, waits: Sequence[Part]) -> int:
    """How many versions of a padded upload lie there: those of rows that wait, too."""
    # Per silo: the version that counts, and the one that arrives.
    least = 2 * len(job.silos)
    return max(least, job.length * job.cohort_size) if waits else least


def _uploaded(job: Job, phase: RoundPlan) -> int:
    """The uploads of a round, and what they are summed to."""
    silos = len(job.silos)
    if not job.security.required:
        return silos * plain_bytes(phase.up)
    # Padded and rotated parts cross on their own, next to the masked words.
    parts = silos * sum(map(part_bytes, phase.uploads))
    # One float64 per pair of silos and vector.
    products = sum(8 * part.tensors[0].shape[0] * silos**2 for part in phase.shared)
    return silos * masked_bytes(phase) + opened_bytes(phase.sums) + products + parts


def _mixed(job: Job, phase: RoundPlan, versions: int) -> int:
    """Bytes that are mixed later: rows that wait, or versions of silos."""
    mixes = [part for part in phase.up if part.exchange == Mix()]
    if not mixes:
        return _rows_bytes(job, phase)
    if job.keyed:
        return max(_rows_bytes(job, phase), versions * sum(map(part_bytes, mixes)))
    # In the clear the whole upload of a silo stays, since its file is the version.
    return max(_rows_bytes(job, phase), 2 * len(job.silos) * plain_bytes(phase.up))


def _rows_bytes(job: Job, phase: RoundPlan) -> int:
    """The words of directed rows that wait, 4 bytes per number."""
    readers = len(phase.readers)
    row = 4 * sum(spec.elements for part in phase.rows for spec in part.tensors)
    # A member of a round keeps its last row, any other silo all that wait for it.
    if readers and job.method().directed_for == "members":
        return GENERATIONS * len(job.silos) * row
    return job.length * readers * row


def plain_bytes(up: Sequence[Part]) -> int:
    """Bytes of a silo's upload in the clear."""
    return sum(item.spec.nbytes for item in upload_items(up))


def opened_bytes(up: Sequence[Part]) -> int:
    """The file of the open sum of these parts: what they fold to, with the total weights.

    In bytes: 8 per element, and a header per tensor.
    """
    return sum(
        HEADER_BYTES + len(part.name) + len(spec.name) + 8 * spec.elements
        for part, spec in walk_tensors(up)
    )


def words_bytes(plan: RoundPlan) -> int:
    """The files of the words that silos get of the sums of a round.

    In bytes, with the specification and signatures that follow the words.
    """
    groups = [group(part, plan.whole.bounds) for part in plan.sums if part.name in plan.published]
    tail = SPEC_BYTES * (len(plan.sums) + len(plan.job.silos))
    return sum(own.nbytes + tail for own in groups)


def check_room(job: Job, most: int | None) -> Room:
    """The disk need of a job; LocalError where the configuration allows a job less.

    ``most`` in bytes; None for no limit.
    """
    found = room(job)
    if most is not None and found.total > most:
        raise LocalError(
            f"job {job.name!r} with {len(job.silos)} silos may need {found} of disk, but the"
            f" coordinator's limits.max_job_bytes is {size(most)}; raise it, or have the job signed"
            " for fewer silos or a smaller model"
        )
    return found


def _has_tables(part: Part) -> bool:
    # Single numbers are in the database.
    return any(spec.shape for spec in part.tensors)


def _largest(parts: Iterable[Part]) -> int:
    """Bytes of the files of these parts; of those with one name, the largest."""
    sizes: dict[str, int] = {}
    for part in parts:
        header = sum(HEADER_BYTES + len(spec.name) for spec in part.tensors)
        nbytes = header + sum(item.spec.nbytes for item in delivered_items([part]))
        sizes[part.name] = max(sizes.get(part.name, 0), nbytes)
    return sum(sizes.values())
