"""The plan of a blind round, as silo and coordinator both know it before its cohort.

A round of a job with ``secure_aggregation = "required"`` is one secure sum over all of its ``Sum``
parts, each of which is a group of that sum, in the order in which the parts cross
(security/blind/sum.py). Behind them come the rows of a directed ``Mix``: a group for each silo that
gets one (security/blind/directed_mix.py). Every other part of a ``Mix`` or a ``Gram`` is an upload
of its own, before that of the masked words: padded words (security/blind/padded_mix.py), or rotated
vectors (security/blind/rotation.py). They are bound to lines and uses that ``JobPlan`` makes. A
``Gram`` by secret sharing crosses with the masked words (security/secagg/gram_pieces.py).

In a keyed job uploads carry linear tags, and what is published as it was summed comes down in words
(``RoundPlan.sums_down``), so that silos check it (security/blind/open_sum.py). Where the job's
audience are its silos these words are under pads that the coordinator cannot take off
(security/blind/silo_pads.py).

A ``JobPlan`` is made once, when a job is admitted; whoever works on a round is handed its
``RoundPlan``.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

from ...algorithms.exchange.parts import Gram, Item, Kind, Mix, Part, Sum, elements_of
from ...algorithms.job.job import Job
from ...files.documents import canonical_json
from ..arithmetic.fixedpoint import Group
from ..identity.domains import SECAGG_MODEL, framed
from ..secagg.shared_gram import compared_of
from ..secagg.spec import Frame, Terms
from .mix_context import MixContext, mix_group
from .rotation import Use
from .sum import SOME_KEY, Bounds, Quantised, group, row_group, row_name

# Purpose and recipient are in each specification, and in the name of a silo's memory of its sums.
PURPOSE = "update"
WORDS = b"@words"  # in place of a tensor's name; "@" cannot start one
RECIPIENT = "coordinator"
ROUNDS_HELD = 64  # plans of one job in memory: a job may have many thousand rounds


def summed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a round's secure sum."""
    return tuple(part for part in parts if isinstance(part.exchange, Sum))


def uploaded(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a round that are uploads of their own, in the order in which they leave.

    They are padded or rotated, and each has an intent of its own in the ledger.
    """
    # A directed Mix is not among them: its rows are groups of the sum.
    return tuple(part for part in parts if _rotated(part) or part.exchange == Mix())


def _rotated(part: Part) -> bool:
    return isinstance(part.exchange, Gram) and not part.exchange.shared


def shared(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The part that is compared by shares, which cross with the masked words of a round's sum.

    None or one.
    """
    return tuple(part for part in parts if isinstance(part.exchange, Gram) and part.exchange.shared)


def directed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of which some silos get a row each by the round's sum (``Job.row_readers``)."""
    return tuple(part for part in parts if part.exchange == Mix(directed=True))


def sum_groups(
    parts: Sequence[Part], bounds: Bounds, readers: Sequence[str]
) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
    """The groups of a round's sum, without scale, and the part that each is of.

    ``readers`` are those who get rows.
    """
    # Sums come before rows, since ``newest_sum`` names a group by its index among the sums.
    sums = [(part, group(part, bounds)) for part in summed(parts)]
    rows = [(part, row_group(part, bounds, silo)) for part in directed(parts) for silo in readers]
    found = [*sums, *rows]
    return tuple(part for part, _ in found), tuple(own for _, own in found)


@dataclass(frozen=True)
class SumDown:
    """A part that is delivered as the words of an open sum: the part, its round and its group."""

    part: Part
    round: int
    group: int


@dataclass(frozen=True)
class RoundPlan:
    """One round of a job: what crosses, and how.

    ::

        up, down       parts that silos upload, and that may be delivered at its start, in wire
                       order
        sums           parts of its secure sum
        rows, readers  parts of which each of these silos gets a row by that sum
        shared         the part that is compared by shares, none or one
        uploads        parts that are uploads of their own, in the order in which they leave
        in_words       of ``down``: never tensors, but words of their sum, since the job is keyed
                       and publishes it
        summed_before  of ``down``: the round before opened a sum of them
        published      of ``sums``: their words are kept for silos, to which they come down in a
                       later round

    Each round of a blind job is summed before the next begins, so a delivery without a part of
    ``summed_before`` hides a sum that silos know to be open (security rule 34).
    """

    whole: "JobPlan"
    round: int
    up: tuple[Part, ...]
    down: tuple[Part, ...]
    sums: tuple[Part, ...]
    rows: tuple[Part, ...]
    readers: tuple[str, ...]
    shared: tuple[Part, ...]
    uploads: tuple[Part, ...]
    in_words: tuple[str, ...]
    summed_before: tuple[str, ...]
    published: tuple[str, ...]

    @property
    def job(self) -> Job:
        """The job whose round it is."""
        return self.whole.job

    @cached_property
    def groups(self) -> tuple[tuple[Part, ...], tuple[Group, ...]]:
        """The groups of its sum, without scale, and the part that each is of."""
        return sum_groups(self.up, self.whole.bounds, self.readers)

    @cached_property
    def sums_down(self) -> tuple[SumDown, ...]:
        """The parts that can come down in words at its start, in wire order.

        Each round that sums a part publishes it, or is the last one, so it is known of which
        round the newest is.
        """
        return tuple(
            each for name in self.in_words for each in self.whole.newest_sum(name, self.round)
        )

    @property
    def sums_metrics_alone(self) -> bool:
        """True if its sum has nothing of a model."""
        return not self.rows and self.sums_no_model

    @property
    def sums_no_model(self) -> bool:
        """True if nothing that all silos received alike is summed, but metrics and rows alone."""
        return bool(self.sums) and all(part.kind is Kind.METRIC for part in self.sums)

    def model_digest(
        self,
        items: Sequence[Item],
        tensors: Sequence[bytes],
        sums: Sequence[tuple[str, bytes]] = (),
    ) -> str:
        """SHA-256, in hex, of its delivery: names and digests of the tensors, in wire order.

        ``sums`` are the names of parts that came as the words of open sums, and the digests of
        these.

        It is of what comes down to all silos alike, results of sums and what a method makes of
        them, and leaves out rows and other values of one silo. What was summed once is never summed
        again (security/secagg/memory.py), so the round is part of it only where there is no such
        result, as before the first; in rounds that sum rows of single silos, or metrics alone, it
        is all. Where holders are counted it is always part of it: rows that too few hold come down
        as they were, and all sums are over all of the job's silos.
        """
        job, own = self.job, self.job.method().addressed
        named: list[bytes] = []
        if not self.sums_no_model:
            for item, digest in zip(items, tensors, strict=True):
                # Silos must agree on the digest, so values that differ between them are left out.
                if item.part not in own:
                    named += (*_names(item), digest)
            for part, digest in sums:
                # No tensor can have the name WORDS, so words never pass for a tensor.
                named += (part.encode(), WORDS, digest)

        # Two rounds of one digest could not both be summed (security/secagg/memory.py).
        when = [] if named and not job.counted else [self.round.to_bytes(8)]
        # The job's digest keeps two jobs with equal deliveries apart.
        fields = framed(SECAGG_MODEL, bytes.fromhex(job.digest), *named, *when)
        return hashlib.sha256(fields).hexdigest()

    def frame(
        self,
        federation: str,
        members: str,
        model: str,
        parts: bytes = b"",
        weights: Callable[[str], Mapping[str, float]] | None = None,
    ) -> Frame:
        """The frame of its sum; ``members`` and ``model`` are digests, of silos and delivery.

        ``parts``: of all that made the key of a keyed job (``group_key.parts_of``). ``weights``, by
        silo, are those of rows that the coordinator weighs (``Method.member_weights``); silos have
        none, and look at what it brings.
        """
        job, said, method = self.job, self.job.security, self.job.method()
        declared: Mapping[str, int] = said.counts
        by_members = method.directed_for == "members"

        # Both ends know the weights of a row by the job, or the coordinator alone has them.
        rows: dict[str, Mapping[str, float]] = {}
        for part, silo in product(self.rows, self.readers):
            name = row_name(part.name, silo)
            if by_members:
                rows[name] = weights(silo) if weights else {}
            else:
                rows[name] = method.row_weights(self.round, silo)

        return Frame(
            federation=federation,
            members=members,
            job=job.name,
            job_digest=job.digest,
            round=self.round,
            exchange="sum",
            purpose=PURPOSE,
            recipient=RECIPIENT,
            model_digest=model,
            schema_digest=self.whole.schema_digest,
            groups=self.groups[1],
            key_parts=parts.hex(),
            compared=next((compared_of(part, said.clip_exponent) for part in self.shared), None),
            min_cohort=job.min_cohort,
            colluders=said.colluders,
            tagged=job.keyed,
            counts=tuple(sorted(declared.items())),
            rows=rows,
            brought=frozenset(rows) if by_members else frozenset(),
        )


def _names(item: Item) -> tuple[bytes, bytes]:
    return item.part.encode(), item.spec.name.encode()


def _named(parts: Sequence[Part], names: Collection[str]) -> tuple[str, ...]:
    return tuple(part.name for part in parts if part.name in names)


class JobPlan:
    """The plan of all rounds of one job, made once from its signed document.

    Silo and coordinator make the same one. Nothing here is secret, or depends on a round's cohort.
    """

    def __init__(self, job: Job) -> None:
        """Plans of rounds are made when they are first asked for."""
        self.job = job
        # Cached per instance: a cache on the method would keep the plans of all jobs alive.
        self.round: Callable[[int], RoundPlan] = lru_cache(ROUNDS_HELD)(self._round)

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of values and weights that the job declares."""
        said = self.job.security
        return Bounds(
            said.clip_exponent,
            said.weights,
            said.weight_least,
            said.weight_most,
            self.job.for_silos,
        )

    @cached_property
    def terms(self) -> Terms:
        """The terms by which the coordinator opens its sums and makes rows.

        A silo whose policy asks for more uploads nothing to them. The silos of a batch are in a sum
        together or not at all (rule 1).
        """
        job = self.job
        return Terms(
            min_cohort=job.min_cohort, colluders=job.security.colluders, batches=job.batches
        )

    @cached_property
    def schema_digest(self) -> str:
        """SHA-256, in hex, of what the job says of all that crosses."""
        return hashlib.sha256(canonical_json(self.job.document()["schema"])).hexdigest()

    @property
    def instance(self) -> str:
        """Names the job's sums in what its silos remember of them: ``Frame.instance``."""
        return f"{self.job.name}/sum/{PURPOSE}/{RECIPIENT}"

    @property
    def phases(self) -> tuple[RoundPlan, ...]:
        """The first round of each set of parts that crosses, in turn.

        The final delivery is not among them.
        """
        return tuple(map(self.round, self.job.phase_starts))

    @property
    def uploads(self) -> dict[str, Part]:
        """All parts that are uploads of their own in any round, by name."""
        return {part.name: part for phase in self.phases for part in phase.uploads}

    def _round(self, round_: int) -> RoundPlan:
        job = self.job
        up, down = job.up(round_), job.down(round_)
        sums, rows = summed(up), directed(up)
        before = summed(job.up(round_ - 1)) if round_ else ()
        return RoundPlan(
            self,
            round_,
            up,
            down,
            sums,
            rows,
            job.row_readers(round_) if rows else (),
            shared(up),
            uploaded(up),
            # Without a key silos cannot check words, so the coordinator sends tensors.
            _named(down, self._summed if job.keyed else ()),
            _named(down, [part.name for part in before]),
            _named(sums, self._published),
        )

    @cached_property
    def _summed(self) -> frozenset[str]:
        """Names of the parts that any round sums."""
        return frozenset(
            part.name for start in self.job.phase_starts for part in summed(self.job.up(start))
        )

    @cached_property
    def _published(self) -> frozenset[str]:
        """Names of the summed parts of a keyed job that any delivery has."""
        job = self.job
        # Without a key silos cannot check words, so none are kept for them.
        if not job.keyed:
            return frozenset()
        # ``job.length`` is the final delivery, after the last round.
        return self._summed & {
            part.name for start in (*job.phase_starts, job.length) for part in job.down(start)
        }

    def newest_sum(self, name: str, round_: int) -> tuple[SumDown, ...]:
        """The last sum of a part before a round, none or one."""
        # From the job alone, so the coordinator cannot pass off an older sum as the newest.
        starts = (*self.job.phase_starts, self.job.length)
        # The newest phase comes first; in it, the newest sum is of the last round before this one.
        for start, end in reversed([pair for pair in pairwise(starts) if pair[0] < round_]):
            sums = summed(self.job.up(start))
            for index, part in enumerate(sums):
                if part.name == name:
                    return (SumDown(part, min(end, round_) - 1, index),)
        return ()

    def line(self, part: Part, federation: str, members: str) -> MixContext:
        """The context of all uploads of a Mix part; ``members`` is the digest of the job's silos.

        The key is made once for a job and its silos, so its epoch is 0
        (security/blind/group_key.py).
        """
        # All tensors of a part make one vector, with one upload, one seed and one tag.
        own = mix_group(part.name, elements_of(part.tensors), self.job.security.clip_exponent)
        return MixContext(
            federation=federation,
            members=members,
            key_epoch=0,
            job=self.job.name,
            job_digest=self.job.digest,
            schema_digest=self.schema_digest,
            group=own,
        )

    def use(self, part: Part, round_: int, row: int = 0) -> Use:
        """The one use of a secret rotation of a Gram part: a row of its tensor in one round."""
        return Use(epoch=0, job=self.job.digest, round=round_, attempt=0, group=part.name, row=row)


def simulated(job: Job, group_key: bytes = SOME_KEY) -> Quantised:
    """The exchanges by which a simulation of the job gives what it gives over the network.

    The same bits under the job's own group key; under another one inner products, and what a method
    makes of them, are within a bound of it (security/blind/mix_and_gram.py).
    """
    plan = JobPlan(job)
    return Quantised(plan.bounds, job.security.counts, plan.terms, group_key, job.digest)
