"""One job at the coordinator: its state, its method's state, its files."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..algorithms.delivery import CoordinatorState, Latest
from ..algorithms.engines import aggregation
from ..algorithms.exchange.parts import Exchanges, Gram, Item, Part, upload_items
from ..algorithms.exchange.plain import PLAIN
from ..algorithms.job.job import Job
from ..errors import LateError, LocalError, RefusedError
from ..proto.convert.mix import PaddedWord
from ..proto.convert.secagg_received import SecaggDelivery
from ..security.blind.mix_row import RowMemory
from ..security.blind.plan import JobPlan, RoundPlan
from ..security.blind.sum import group
from ..security.identity import roster as rosters
from ..security.identity.signers import Sign
from ..security.secagg.gram_pieces import payload_bytes
from . import heap
from .blind.directed_rows import DirectedRow, row_words
from .blind.mix_rows import Memories, PlannedRow
from .blind.mixing import Mixing, name_of, part_bytes
from .blind.secure_sum import SecureSum
from .blind.unmask import KeptSum, OpenedSums, kept_sum, masked_bytes
from .storage.database import Place, StoredJob
from .storage.spool import Spool, SpooledUpload
from .storage.store import JobStore, masked_words, opened_sum, summed_words


@dataclass(frozen=True)
class FoldResult:
    """What a fold gave, to be committed."""

    metrics: dict[str, int]
    method: CoordinatorState
    files: Mapping[Place, str | None]
    digests: Mapping[str, dict[str, bytes]]  # of published tensors, by part
    memories: Memories = field(default_factory=dict)  # of the rows that were put aside
    # files that these are of
    mixed: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # files of uploads of parts that nothing needs any more


@dataclass(frozen=True)
class SiloDelivery:
    """What one silo gets: tensors by part, and the digests that are known already, by
    (part, name).
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    digests: Mapping[tuple[str, str], bytes]


class JobRun:
    """One job: its state, its method's state, its files."""

    def __init__(
        self, job: Job, stored: StoredJob, folder: Path, roster: rosters.Roster, sign: Sign
    ) -> None:
        self.job = job
        self.plan = JobPlan(job)
        self.signed = stored.signed
        self.state = stored.state
        self.store = JobStore(
            folder, lambda round_: upload_items(job.up(round_)), stored.files, stored.given
        )
        self.mixing = Mixing(self.plan, roster, sign, stored, self.store) if job.keyed else None
        words = (
            _words(self.plan.round(stored.state.round)) if stored.state.round < job.length else ()
        )
        self.store.clean(
            _kept(stored, words), self.mixing.needed if self.mixing is not None else ()
        )
        self.exchanges: Exchanges = PLAIN
        self.summing: SecureSum | None = None  # of the open round of a blind job, once it was begun
        # of the round before: silos may still ask what came of it
        self.summed: SecureSum | None = None
        self._method = job.method()
        self._method_state: CoordinatorState = stored.method
        self._reading = asyncio.Semaphore(2)  # deliveries in memory at a time
        if self.state.blind:
            self.exchanges = OpenedSums(self.store, lambda: self.state.round, self.plan.bounds)
        self.largest_upload = max(
            self.upload_bytes(round_, part)
            for round_ in job.phase_starts
            for part in ("", *self._parts(round_))
        )

    @property
    def keyed(self) -> Mixing:
        """What mixes and compares; LocalError for a job in which nothing does."""
        if self.mixing is None:
            raise LocalError(f"job {self.job.name!r} mixes nothing; this is a bug in Staddle")
        return self.mixing

    def upload_bytes(self, round_: int, part: str = "") -> int:
        """How long a silo's upload is in a round.

        In a blind one that of its masked words, or of this part.
        """
        if part:
            return self._parts(round_)[part]
        if (
            self.state.blind
            and self.summing is not None
            and self.summing.round == round_
            and self.summing.attempt >= 0
        ):
            # its cohort may have fewer silos than the job draws
            return payload_bytes(self.summing.spec)
        if self.state.blind:
            return masked_bytes(self.plan.round(round_))
        return sum(item.spec.nbytes for item in upload_items(self.job.up(round_)))

    def _parts(self, round_: int) -> dict[str, int]:
        parts = self.plan.round(round_).uploads if self.job.keyed else ()
        return {part.name: part_bytes(part) for part in parts}

    def check_open(self, silo: str, round_: int, context: bytes = b"", part: str = "") -> None:
        """RefusedError ROUND_CLOSED unless this silo's upload is awaited in this round, bound to
        this context.
        """
        if self.awaits(silo, round_, context, part):
            return
        why = f"job {self.job.name!r}: round {round_} does not await it"
        if part:
            raise RefusedError(silo, "ROUND_CLOSED", f"{why}, or has all of part {part[:64]!r}")
        if self._lacks(silo, round_):
            raise RefusedError(
                silo, "ROUND_CLOSED", f"{why}: {', '.join(self._lacks(silo, round_))} come first"
            )
        raise RefusedError(silo, "ROUND_CLOSED", f"{why} with these masks" if context else why)

    def awaits(self, silo: str, round_: int, context: bytes = b"", part: str = "") -> bool:
        """Whether this silo's upload of this round, bound to this context, is still to come.

        Masked words are awaited of a silo that has given all that crosses by itself, and signed
        what is padded.
        """
        if not self.opens(silo, round_):
            return False
        if part:
            return self.mixing is not None and self.mixing.hidden.awaits(
                silo, round_, part, context
            )
        if not self.state.blind:
            return True
        return (
            not self._lacks(silo, round_)
            and self.summing is not None
            and self.summing.awaits(silo, context)
        )

    def opens(self, silo: str, round_: int) -> bool:
        """Whether a round is open for this silo."""
        return (
            self.state.stage == "round" and self.state.round == round_ and silo in self.state.open
        )

    def check_padded(self, silo: str, given: PaddedWord) -> None:
        """RefusedError unless this may be a silo's word on its upload of a part of the open
        round.
        """
        round_ = given.upload.version.round
        if self.mixing is None or not self.opens(silo, round_):
            raise RefusedError(
                silo, "ROUND_CLOSED", f"job {self.job.name!r}: round {round_} does not await it"
            )
        self.mixing.hidden.check(silo, given)

    def _lacks(self, silo: str, round_: int) -> list[str]:
        lacks = (
            self.mixing is not None
            and self.opens(silo, round_)
            and self.mixing.hidden.lacks(silo, round_)
        )
        return lacks or []

    def sum_of(self, silo: str, round_: int) -> SecureSum:
        """The sum of an open blind round; RefusedError ROUND_CLOSED where there is none.

        LateError for the round that closed last: t silos open its sum, and one that was slower
        gives in vain.
        """
        if self.summing is None or self.state.round != round_ or not self.state.cohort:
            late = self.summed is not None and self.summed.round == round_
            refused = LateError if late else RefusedError
            raise refused(
                silo, "ROUND_CLOSED", f"job {self.job.name!r}: round {round_} sums nothing now"
            )
        return self.summing

    def told(self, silo: str, round_: int, had: int) -> SecaggDelivery | None:
        """The next message of a round's sum for a silo that has had so many, None where there is
        none yet.

        What came of the round that closed last is told too. RefusedError ROUND_CLOSED for any
        other, and where an operator has stopped the job and all was told: nobody waits in a round
        that may not go on for days.
        """
        before = self.summed if self.summed is not None and self.summed.round == round_ else None
        if before is not None and (told := before.told(silo, had)) is not None:
            return told
        summing = self.sum_of(silo, round_)
        told = summing.told(silo, had)
        if told is None and self.state.stage in ("stopped", "queued") and not summing.goes_on:
            raise RefusedError(
                silo, "ROUND_CLOSED", f"job {self.job.name!r} is stopped in round {round_}"
            )
        return told

    async def delivery(self, round_: int, silo: str) -> SiloDelivery:
        """What this silo gets at the start of this round."""
        async with self._reading:
            tensors = await asyncio.to_thread(
                aggregation.deliver,
                self._method,
                self.exchanges,
                self._method_state,
                round_,
                silo,
                self.store,
            )
        return SiloDelivery(tensors, self.store.digests(tensors))

    def sums(self, round_: int, silo: str) -> list[KeptSum]:
        """The open sums that a silo gets in words beside it, in wire order."""
        places = {each.part.name: each for each in self.plan.round(round_).sums_down}
        if not places:
            return []
        given = self._method.deliveries(self._method_state, round_, silo)
        latest = {delivery.part for delivery in given if isinstance(delivery, Latest)}
        found = []
        for name, place in places.items():
            path = self.store.words(name)
            if path is not None and name in latest:
                found.append(kept_sum(name, path, group(place.part, self.plan.bounds).nbytes))
        return found

    def rows(self, round_: int, silo: str) -> tuple[list[PlannedRow], Memories]:
        """The rows that a silo gets beside it, and what is to be remembered of them before they
        leave.
        """
        if self.mixing is None:
            return [], {}
        deliveries = self._method.deliveries(self._method_state, round_, silo)
        return self.mixing.rows(deliveries, self.job.down(round_), silo)

    def directed_rows(self, round_: int, silo: str) -> list[DirectedRow]:
        """The same of a directed Mix, of which nothing is to be remembered."""
        if self.mixing is None:
            return []
        deliveries = self._method.deliveries(self._method_state, round_, silo)
        return self.mixing.directed.rows(deliveries, self.job.down(round_), silo)

    async def check_words(self, kept: Sequence[KeptSum], rows: Sequence[PlannedRow]) -> None:
        """LocalError where the disk changed words that are about to go down.

        Each file is looked at once a round.
        """
        async with self._reading:
            for each in kept:
                await asyncio.to_thread(self.store.check_once, each.path.name, each.check)
            if self.mixing is not None:
                await asyncio.to_thread(self.mixing.check_words, rows)

    def member_weights(self, silo: str) -> Mapping[str, float]:
        """Those by which the open round is mixed for one of its members, as the rounds so far have
        them.
        """
        return self._method.member_weights(self._method_state, silo)

    async def accept(
        self, silo: str, round_: int, spool: Spool, items: Sequence[Item], context: bytes = b""
    ) -> str:
        """Check what was spooled, keep it, name it.

        RefusedError for a bad value, or if the round closed meanwhile.

        Masked words have no values of their own; the round's canaries are checked when its sum is
        opened.
        """
        path = await asyncio.to_thread(spool.finished)
        if not context:
            await asyncio.to_thread(SpooledUpload(path, items).check_values, silo)
        self.check_open(silo, round_, context)
        return self.store.keep(silo, round_, path, masked=bool(context))

    async def accept_part(
        self,
        silo: str,
        round_: int,
        spool: Spool,
        part: Part,
        context: bytes,
        forget: Callable[[str], None],
    ) -> str:
        """The same of padded words or rotated vectors.

        ``forget`` makes durable that the file of an older version, which nobody signed, does not
        count any more.
        """
        path = await asyncio.to_thread(spool.finished)
        if isinstance(part.exchange, Gram):
            await asyncio.to_thread(SpooledUpload(path, upload_items([part])).check_values, silo)
        self.check_open(silo, round_, context, part.name)
        name = name_of(part, round_, silo)
        if self.mixing is not None and self.mixing.hidden.has(round_, part.name, silo):
            forget(name)
        return self.store.keep_as(name, path)

    def make_room(self) -> None:
        """Let memory go that what is summed or folded next can take."""
        self.store.forget_loaded()
        if self.largest_upload > heap.WORTH_BYTES:
            heap.trim()

    def fold(self, round_: int, members: tuple[str, ...]) -> FoldResult:
        """Fold the round's uploads; nothing changes before ``commit``."""
        self.make_room()
        # one by one
        given = {silo: digest for silo in members if (digest := self.state.given.get(silo, ""))}
        self.store.check_uploads(given, round_)
        plan, memories = self.plan.round(round_), dict[tuple[str, str], RowMemory]()
        if self.mixing is None:
            read, archive = self.store.reader(members, round_), self.store.folding(round_)
        else:
            compared = [part for part in plan.uploads if isinstance(part.exchange, Gram)]
            self.mixing.check_rotated(round_, members, compared)
            read = self.store.rotated(members, round_, compared)
            posting = self.mixing.posting(round_, memories)
            archive = self.store.folding(round_, posting, plan.published)
        method, metrics = aggregation.close_round(
            self._method,
            self.exchanges,
            self._method_state,
            round_,
            members,
            plan.up,
            read,
            archive,
        )
        if round_ + 1 == self.job.length:
            self.store.keep_result(method, self.job.silos)
        counted = {name: int(value) for name, value in metrics.items()}
        if self.mixing is None:
            return FoldResult(counted, method, archive.changes, archive.digests)
        mixed = self.mixing.mixed(archive.changes)
        needed = {
            *self.store.after(archive.changes).values(),
            *frozenset[str]().union(*mixed.values()),
        }
        gone = frozenset(self.mixing.hidden.files() - needed)
        return FoldResult(counted, method, archive.changes, archive.digests, memories, mixed, gone)

    def commit(self, round_: int, result: FoldResult) -> None:
        """Turn to what the database has committed."""
        self._method_state = result.method
        if self.mixing is not None:
            self.mixing.committed(result.memories, result.mixed, result.gone)
        self.store.commit(
            round_,
            result.files,
            result.digests,
            self.mixing.needed if self.mixing is not None else (),
        )

    def expire(self) -> None:
        """The job is over, and nothing that was padded is in the database any more (SECURITY.md
        rule 10).
        """
        self.keyed.expire()
        self.store.expire()

    def abandoned(self, round_: int) -> None:
        """A round is over without a fold, and nothing that was given in it is in the database any
        more.
        """
        if self.mixing is not None:
            self.mixing.hidden.let_go(self.mixing.hidden.files(round_))
            self.store.discard_hidden(round_)


def _words(plan: RoundPlan) -> tuple[str, ...]:
    """Names of the files of words that the sum of a round may leave."""
    published = (summed_words(plan.round, part) for part in plan.published)
    return (*published, *row_words(plan))


def _kept(stored: StoredJob, words: Sequence[str]) -> list[str]:
    """Names of the files that the open round may need.

    ``words`` are those that are kept of its sum.
    """
    state = stored.state
    if state.blind:
        parts = [each.file for each in stored.hidden if each.round == state.round]
        return [
            opened_sum(state.round),
            *(masked_words(state.round, silo) for silo in state.cohort),
            *parts,
            *words,
        ]
    return [f"{state.round}.{silo}.upload" for silo in state.given]
