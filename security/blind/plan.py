"""What crosses in a blind round, as silo and coordinator both know it before its cohort: one place, so that they agree.

A round of a job with ``secure_aggregation = "required"`` is one secure sum over all of its ``Sum`` parts, each of which
is a group of that sum, in the order in which the parts cross (security/blind/sum.py). Behind them come the rows of a
directed ``Mix``: a group for each silo that gets one (security/blind/directed_mix.py). Every other part of a ``Mix`` or
a ``Gram`` is an upload of its own, before that of the masked words: padded words (security/blind/padded_mix.py), or
rotated vectors (security/blind/rotation.py). They are bound to lines and uses that ``line_of`` and ``use_of`` make. A
``Gram`` by secret sharing crosses with the masked words (security/secagg/gram_pieces.py).

In a keyed job uploads carry linear tags, and what is published as it was summed comes down in words (``sums_down``), so
that silos check it (security/blind/open_sum.py). Where the job's audience are its silos these words are under pads that
the coordinator cannot take off (security/blind/silo_pads.py).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...algorithms.exchange.parts import Gram, Item, Mix, Part, Sum
from ...algorithms.job.job import Job
from ...algorithms.method import METRICS
from ...files.documents import canonical_json
from ..arithmetic.fixedpoint import Group
from ..identity.domains import SECAGG_MODEL, framed
from ..secagg.shared_gram import compared_of
from ..secagg.spec import Frame, Terms
from .mix_context import MixContext, mix_group
from .rotation import Use
from .sum import SOME_KEY, Bounds, Quantised, group, row_group, row_name

PURPOSE = "update"
WORDS = b"@words"  # in place of a tensor's name; "@" cannot start one
RECIPIENT = "coordinator"


def summed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a round's secure sum."""
    return tuple(part for part in parts if isinstance(part.exchange, Sum))


def uploaded(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a round that are uploads of their own, in the order in which they leave."""
    return tuple(part for part in parts if _rotated(part) or part.exchange == Mix())


def _rotated(part: Part) -> bool:
    return isinstance(part.exchange, Gram) and not part.exchange.shared


def shared(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The part that is compared by shares, which cross with the masked words of a round's sum; none or one."""
    return tuple(part for part in parts if isinstance(part.exchange, Gram) and part.exchange.shared)


def directed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of which some silos get a row each, by the round's secure sum (``Job.row_readers``)."""
    return tuple(part for part in parts if part.exchange == Mix(directed=True))


def sum_groups(
    parts: Sequence[Part], bounds: Bounds, readers: Sequence[str]
) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
    """The groups of a round's sum, without scale, and the part that each is of; ``readers`` are those who get rows."""
    sums = [(part, group(part, bounds)) for part in summed(parts)]
    rows = [(part, row_group(part, bounds, silo)) for part in directed(parts) for silo in readers]
    found = [*sums, *rows]
    return tuple(part for part, _ in found), tuple(own for _, own in found)


@dataclass(frozen=True)
class SumDown:
    """A part that comes down as the words of an open sum: the part as it was summed, in which round, as which group."""

    part: Part
    round: int
    group: int


def sums_down(job: Job, round_: int) -> tuple[SumDown, ...]:
    """What can come down so at the start of a round, in wire order: the sums of the rounds before it, in a keyed job.

    Each round that sums a part publishes it, or is the last one, so it is known of which round the newest is.
    """
    starts = (*job.phase_starts, job.length)
    phases = [(start, min(end, round_)) for start, end in pairwise(starts) if start < round_]
    found = []
    for part in in_words(job, round_):
        for start, end in reversed(phases):
            names = [each.name for each in summed(job.up(start))]
            if part in names:
                group_ = names.index(part)
                found.append(SumDown(summed(job.up(start))[group_], end - 1, group_))
                break
    return tuple(found)


def in_words(job: Job, round_: int) -> tuple[str, ...]:
    """Parts of a round's delivery that never come as tensors: in a keyed job, what is summed and published as it is."""
    if not job.keyed:
        return ()
    given = {part.name for start in job.phase_starts for part in summed(job.up(start))}
    return tuple(part.name for part in job.down(round_) if part.name in given)


def summed_before(job: Job, round_: int) -> tuple[str, ...]:
    """Parts of a round's delivery of which the round before it opened a sum, in wire order.

    Each round of a blind job is summed before the next begins, so a delivery without such a part hides a sum that silos
    know to be open (SECURITY.md rule 34).
    """
    given = {part.name for part in summed(job.up(round_ - 1))} if round_ else set()
    return tuple(part.name for part in job.down(round_) if part.name in given)


def sums_published(job: Job, round_: int) -> tuple[str, ...]:
    """Parts of a round's sum whose words are kept for silos: those that come down in a later round."""
    later = {name for start in (*job.phase_starts, job.length) for name in in_words(job, start)}
    return tuple(part.name for part in summed(job.up(round_)) if part.name in later)


def line_of(job: Job, part: Part, federation: str, roster: str) -> MixContext:
    """What all uploads of a Mix part are bound to; ``roster`` is the digest of the roster.

    The key is made once for a job and its roster, so its epoch is 0 (security/blind/group_key.py).
    """
    elements = sum(spec.elements for spec in part.tensors)
    return MixContext(
        federation=federation,
        roster=roster,
        key_epoch=0,
        job=job.name,
        job_digest=job.digest,
        schema_digest=schema_digest(job),
        group=mix_group(part.name, elements, job.security.clip_exponent),
    )


def use_of(job: Job, part: Part, round_: int, row: int = 0) -> Use:
    """What one secret rotation of a Gram part is for: a row of its tensor in one round."""
    return Use(epoch=0, job=job.digest, round=round_, attempt=0, group=part.name, row=row)


def schema_digest(job: Job) -> str:
    """SHA-256, in hex, of what the job says of all that crosses."""
    return hashlib.sha256(canonical_json(job.document()["schema"])).hexdigest()


def bounds(job: Job) -> Bounds:
    """What the job declares of its values."""
    said = job.security
    return Bounds(said.clip_exponent, said.weights, said.weight_least, said.weight_most, job.for_silos)


def row_terms(job: Job) -> Terms:
    """By what rules the coordinator opens sums and makes rows of a Mix; who asks for more gives no part to them."""
    return Terms(min_cohort=job.min_cohort, colluders=job.security.colluders)


def simulated(job: Job, group_key: bytes = SOME_KEY) -> Quantised:
    """The exchanges by which a simulation of the job gives what it gives over the network.

    The same bits under the job's own group key; under another one inner products, and what a method makes of them, are
    within a bound of it (security/blind/mix_and_gram.py).
    """
    return Quantised(bounds(job), job.security.counts, row_terms(job), group_key, job.digest)


def model_digest(
    job: Job, round_: int, items: Sequence[Item], tensors: Sequence[bytes], sums: Sequence[tuple[str, bytes]] = ()
) -> str:
    """SHA-256, in hex, of what a silo received for a round: names and digests of its tensors, in wire order.

    ``sums`` are the names of parts that came as the words of open sums, and the digests of these.

    It is of what comes down to all silos alike, results of sums and what a method makes of them, and leaves out rows
    and other values of one silo. What was summed once is never summed again (security/secagg/memory.py), so the round
    is part of it only where there is no such result, as before the first; in rounds that sum rows of single silos, or
    metrics alone, it is all.
    Where holders are counted it is always part of it: rows that too few hold come down as they were, and all sums are
    over all of the job's silos.
    """
    alone, own = sums_no_model(job, round_), job.method().addressed
    every = zip(items, tensors, strict=True)
    pairs = [] if alone else [(item, digest) for item, digest in every if item.part not in own]
    named = [piece for item, digest in pairs for piece in (*_names(item), digest)]
    named += [piece for part, digest in (() if alone else sums) for piece in (part.encode(), WORDS, digest)]
    when = [] if named and not job.counted else [round_.to_bytes(8)]
    return hashlib.sha256(framed(SECAGG_MODEL, bytes.fromhex(job.digest), *named, *when)).hexdigest()


def sums_metrics_alone(job: Job, round_: int) -> bool:
    """Whether a round's sum has nothing of a model."""
    up = job.up(round_)
    return (*summed(up), *directed(up)) == (METRICS,)


def sums_no_model(job: Job, round_: int) -> bool:
    """Whether nothing that came down to all silos alike has a part in what a round sums: metrics, rows, no more."""
    return summed(job.up(round_)) == (METRICS,)


def _names(item: Item) -> tuple[bytes, bytes]:
    return item.part.encode(), item.spec.name.encode()


def round_terms(job: Job, terms: Terms, proven: frozenset[str] = frozenset()) -> Terms:
    """What ``terms`` ask of this job's sums: the silos of a batch are in one together or not at all (rule 1).

    Sums may lack silos that are ``proven`` to have misdealt (security/secagg/evidence.py).
    """
    return replace(terms, batches=job.batches, excused=proven)


def instance_of(job: Job) -> str:
    """Names the sums of a job in what its silos remember of them: ``Frame.instance``."""
    return f"{job.name}/sum/{PURPOSE}/{RECIPIENT}"


def round_frame(
    job: Job,
    round_: int,
    federation: str,
    roster: str,
    model: str,
    parts: bytes = b"",
    weights: Callable[[str], Mapping[str, float]] | None = None,
) -> Frame:
    """The frame of a round's sum; ``roster`` is the digest of the roster, ``model`` that of what was received.

    ``parts``: of all that made the key of a keyed job (``group_key.parts_of``). ``weights``, by silo, are those of rows
    that the coordinator weighs (``Method.member_weights``); silos have none, and look at what it brings.
    """
    said = job.security
    declared: Mapping[str, int] = said.counts
    method, up, readers = job.method(), job.up(round_), job.row_readers(round_)
    members = method.directed_for == "members"
    rows = {
        row_name(part.name, silo): (weights(silo) if weights else {}) if members else method.row_weights(round_, silo)
        for part in directed(up)
        for silo in readers
    }
    return Frame(
        federation=federation,
        roster=roster,
        job=job.name,
        job_digest=job.digest,
        round=round_,
        exchange="sum",
        purpose=PURPOSE,
        recipient=RECIPIENT,
        model_digest=model,
        schema_digest=schema_digest(job),
        groups=sum_groups(up, bounds(job), readers)[1],
        key_parts=parts.hex(),
        compared=next((compared_of(part, said.clip_exponent) for part in shared(up)), None),
        min_cohort=job.min_cohort,
        colluders=job.security.colluders,
        tagged=job.keyed,
        counts=tuple(sorted(declared.items())),
        rows=rows,
        brought=frozenset(rows) if members else frozenset(),
    )
