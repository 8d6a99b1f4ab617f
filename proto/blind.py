"""The secure sum of a round, as silo and coordinator both know it before its cohort: one place, so that they agree.

A round of a job with ``secure_aggregation = "required"`` is one sum. Each of its parts is a group of that sum, in the
order in which the parts cross (security/blind_sum.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..algorithms.exchange import Sum
from ..algorithms.job import Job
from ..algorithms.method import METRICS
from ..files import canonical_json
from ..security.blind_sum import Bounds, group
from ..security.labels import SECAGG_MODEL, framed
from ..security.round_spec import Frame, Terms
from .wire import Item

PURPOSE = "update"
RECIPIENT = "coordinator"


def bounds(job: Job) -> Bounds:
    """What the job declares of its values."""
    said = job.security
    return Bounds(said.clip_exponent, said.weights, said.weight_least, said.weight_most)


def model_digest(job: Job, round_: int, items: Sequence[Item], tensors: Sequence[bytes]) -> str:
    """SHA-256, in hex, of what a silo received for a round: names and digests of its tensors, in wire order.

    What was summed once is never summed again (security/secagg_memory.py), so the round is part of it only where
    nothing comes down, as before the first results.
    """
    named = [piece for item, digest in zip(items, tensors, strict=True) for piece in (*_names(item), digest)]
    when = [] if items else [round_.to_bytes(8)]
    return hashlib.sha256(framed(SECAGG_MODEL, bytes.fromhex(job.digest), *named, *when)).hexdigest()


def _names(item: Item) -> tuple[bytes, bytes]:
    return item.part.encode(), item.spec.name.encode()


def round_terms(job: Job, terms: Terms) -> Terms:
    """What ``terms`` ask of this job's sums.

    What does not change from round to round, private weights or which classes a silo has, two sums that differ by one
    silo would show; it is summed over all of the job's silos or not at all (SECURITY.md rule 1). Only means by weights
    that are declared, and the metrics, may be summed over others: METRICS counts records, which are declared then, too.
    """
    parts = [part for start in job.phase_starts for part in job.up(start) if part != METRICS]
    means = all(isinstance(part.exchange, Sum) and part.exchange.form == "mean" for part in parts)
    varying = means and job.security.weights == "public"
    return replace(terms, whole=() if varying else tuple(sorted(job.silos)))


def round_frame(job: Job, round_: int, federation: str, roster: str, model: str) -> Frame:
    """The frame of a round's sum; ``roster`` is the digest of the roster, ``model`` that of what was received."""
    declared: Mapping[str, int] = job.security.counts
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
        schema_digest=hashlib.sha256(canonical_json(job.document()["schema"])).hexdigest(),
        groups=tuple(group(part, bounds(job)) for part in job.up(round_)),
        min_cohort=job.min_cohort,
        colluders=job.security.colluders,
        counts=tuple(sorted(declared.items())),
    )
