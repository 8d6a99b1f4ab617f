"""Rounds whose uploads the coordinator cannot read: secure sums, padded and rotated uploads.

The counterpart of plain_collector.py. A round is one secure sum (secure_sum_runner.py); parts that
cross on their own come before its masked words (blind/mixing.py). Every step is in the database
before anybody hears of it, so that a coordinator that is killed resumes from there.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...algorithms.exchange.parts import Gram, Mix, Part, upload_items
from ...errors import LateError, RefusedError
from ...proto import secure_pb2 as secure
from ...proto import tensor_pb2 as tensor
from ...proto.convert.mix import PaddedWord, mixed_to_wire, words_to_wire
from ...proto.convert.open_sum import sum_to_wire
from ...proto.convert.secagg_messages import proofs_to_wire
from ...proto.convert.secagg_received import SecaggDelivery
from ...proto.wire import check_manifest
from ...security.blind.mix_row import RowMemory
from ...security.secagg.gram_pieces import message_bytes
from ..blind import settled
from ..blind.directed_rows import row_words
from ..blind.mix_rows import PlannedRow, mixed, prekey_word
from ..blind.mixing import Mixing, name_of, part_bytes
from ..blind.secure_sum import SecureSum
from ..blind.unmask import OpenedSums, masked_bytes
from ..rounds.events import Drop, Event, Folded, Gather, Halt
from ..rounds.machine import JobState
from ..storage.database import StoredHidden, StoredJob
from ..storage.store import masked_words, opened_sum, summed_words
from .collector import (
    Attachments,
    Collector,
    DeliveredWords,
    ExpectedUpload,
    FoldInputs,
    HiddenLeft,
    StoredUploadFile,
    Upload,
    misfit,
    not_awaited,
)
from .job_run import DaemonCalls, JobRun
from .secure_sum_runner import SecureSumRunner, SumResources

SignedRow = tuple[PlannedRow, dict[str, bytes]]  # a row, and the words of silos on what it is of


class BlindCollector(Collector):
    """The sum of the open round, the one of the round before, and what is mixed.

    Messages of silos are in the database before they change anything in memory.
    """

    def __init__(
        self, resources: SumResources, daemon: DaemonCalls, run: JobRun, stored: StoredJob
    ) -> None:
        super().__init__(run.job)
        self._daemon, self._resources, self._run = daemon, resources, run
        self._database = resources.database
        self._mixing = Mixing(run.plan, resources.roster, resources.keys.sign, stored, run.store)
        self._hidden = self._mixing.hidden
        self._runner: SecureSumRunner | None = None  # of the open round, once it was begun
        self._before: SecureSum | None = None  # silos may still ask what came of it
        self.exchanges = OpenedSums(run.store, lambda: run.state.round, run.plan.bounds)
        self.effects = {
            Gather: self._gather,
            Drop: self._drop,
            Halt: self._halt,
        }
        self.kept_files = _kept_files(run, stored)
        # Over all phases and parts: the time limit of an upload is set before its manifest arrives.
        self.largest_upload = max(
            self.upload_bytes(round_, part)
            for round_ in run.job.phase_starts
            for part in ("", *self._parts(round_))
        )

    @property
    def needed(self) -> frozenset[str]:
        """Words that the rows are of which are put aside."""
        return self._mixing.needed

    @property
    def summing(self) -> SecureSum | None:
        """The sum of the open round, once it was begun.

        None between rounds, and until the round's sum is first needed.
        """
        return None if self._runner is None else self._runner.summing

    @property
    def _opened(self) -> SecureSumRunner:
        """The runner of the open round, made when it is first needed."""
        if self._runner is None:
            self._runner = SecureSumRunner(self._daemon, self._resources, self._run)
        return self._runner

    # After a restart.

    def recover(self) -> None:
        """Expire what a job left that ended without us; read what is kept of the open sum."""
        run = self._run
        # The process may have ended before the job's uploads were removed.
        if run.state.expired:
            with self._daemon.writing():
                self._database.expire_hidden(run.job.name)
            self.expire()
        if run.state.cohort:
            _ = self._opened

    def resume(self) -> None:
        """Resume the open sum; where an operator stopped the job, only what was signed.

        Also if the job is queued again: silos may have signed before it was stopped.
        """
        state = self._run.state
        if state.stage not in ("queued", "round", "stopped") or not state.cohort:
            return
        # Resume first: only then is it known whether survivors may have signed.
        self._opened.summing.resume()
        # Where survivors may have signed, their sum is finished: they sign no other in this round.
        if state.stage == "stopped":
            self._opened.summing.halt()

    # What the state asks for.

    def _gather(self, effect: Gather) -> None:
        self._opened.gather(effect)

    def _drop(self, effect: Drop) -> None:
        self._opened.summing.drop(effect.silo, effect.code)

    def _halt(self, effect: Halt) -> None:
        self._opened.summing.halt()

    # What silos upload.

    def upload_bytes(self, round_: int, part: str = "") -> int:
        """Length of a silo's masked words in a round, or of its upload of this part."""
        if part:
            return self._parts(round_)[part]
        summing = self.summing
        if summing is not None and summing.round == round_ and summing.attempt >= 0:
            # Its cohort may have fewer silos than the job draws.
            return message_bytes(summing.spec)
        return masked_bytes(self._run.plan.round(round_))

    def _parts(self, round_: int) -> dict[str, int]:
        return {part.name: part_bytes(part) for part in self._run.plan.round(round_).uploads}

    def awaits(self, silo: str, round_: int, context: bytes, part: str) -> bool:
        """True while an upload with this context is still to come.

        Masked words are awaited only once all parts are here, and padded ones signed: every silo of
        the sum must have its parts.
        """
        if part:
            return self._hidden.awaits(silo, round_, part, context)
        if self.summing is None or self._hidden.lacks(silo, round_):
            return False
        return self.summing.awaits(silo, context)

    def missing(self, silo: str, round_: int) -> list[str]:
        """Parts that have to be here, and signed where they are padded, before masked words."""
        return self._hidden.lacks(silo, round_) if self._run.opens(silo, round_) else []

    def check_form(self, silo: str, manifest: tensor.Manifest) -> None:
        """RefusedError MANIFEST for tensors, and for a part where none crosses on its own.

        A silo that takes the job for a plain one would send its tensors in the clear.
        """
        if not manifest.context or (manifest.part and not self._job.keyed):
            raise misfit(silo, manifest, "tensors, the job's sums are blind")

    def expected(self, silo: str, manifest: tensor.Manifest) -> ExpectedUpload:
        """Masked words, or the words or vectors of a part.

        RefusedError MANIFEST if the manifest declares another size, part or context.
        """
        round_ = manifest.round
        if not manifest.part:
            return ExpectedUpload([_due(silo, manifest, self.upload_bytes(round_), "masked")])
        part = self._hidden.part(silo, round_, manifest.part)
        self._hidden.check_context(silo, round_, part, manifest.context)
        if isinstance(part.exchange, Mix):
            due = _due(silo, manifest, self.upload_bytes(round_, part.name), "padded")
            return ExpectedUpload([due], part=part)
        # Rotated vectors are declared as tensors, like a plain upload.
        items = upload_items([part])
        check_manifest(silo, manifest, items)
        return ExpectedUpload.of(items, part)

    def keep(self, silo: str, round_: int, path: Path, part: Part | None) -> str:
        """Name a checked upload, durably.

        The file of an older version, which nobody signed, first ceases to count: else a crash in
        between would leave its row with the bytes of the new one.
        """
        store = self._run.store
        if part is None:
            return store.keep(silo, round_, path, masked=True)
        name = name_of(part, round_, silo)
        if self._hidden.has(round_, part.name, silo):
            with self._daemon.writing():
                self._database.drop_hidden(self._job.name, [name])
            self._hidden.let_go([name])
        return store.keep_as(name, path)

    def take(self, silo: str, upload: Upload, stored: StoredUploadFile) -> None:
        """Masked words go into the sum of the round; a part waits for the fold, or for rows.

        Masked words become a row of the sum's log, a part one of table ``hidden``. The receipt is
        stored in the same transaction.
        """
        again, sha256 = partial(stored.record, again=True), stored.digests.tensors[0]
        if not upload.name:
            self._opened.summing.spooled(silo, stored.size, sha256, again)
            stored.committed()
            return
        hidden = StoredHidden(
            upload.round, upload.name, silo, upload.context, stored.file, stored.size, sha256
        )
        with self._daemon.writing():
            again()
            self._database.add_hidden(self._job.name, hidden)
        self._hidden.take(hidden)
        stored.committed()
        self._daemon.let_go()

    def counts(self, silo: str, round_: int, part: str) -> bool:
        """True unless the upload belongs to an earlier attempt of the open round.

        In a closed round, every upload counts: its receipt stands.
        """
        state = self._run.state
        if not state.cohort or state.round != round_:
            return True
        if part:
            return self._hidden.has(round_, part, silo)
        return self._opened.summing.has_words(silo)

    # The messages of silos and coordinator.

    def padded(self, silo: str, word: PaddedWord, body: bytes) -> None:
        """Take a silo's word on its upload of a part; RefusedError says why not.

        The word is durable when this returns. RefusedError SECURE (EQUIVOCATION) for a second,
        different word on the same upload.
        """
        version, job = word.upload.version, self._job
        if self._hidden.is_signed(version.round, word.part, silo):
            # Its answer was lost on the way. Another word would name another tag or other seeds for
            # an upload that rows may be made of already.
            if self._database.signed(job.name, version.round, word.part, silo) == body:
                return
            raise RefusedError(
                silo, "SECURE", f"EQUIVOCATION: signs another upload of part {word.part!r}"
            )
        if not job.keyed or not self._run.opens(silo, version.round):
            raise not_awaited(silo, job, version.round)
        # All checks come first, since a signed row is never replaced.
        self._hidden.check(silo, word)
        with self._daemon.writing():
            self._database.sign_hidden(job.name, version.round, word.part, silo, body)
        self._hidden.sign(word)

    def sum_of(self, silo: str, round_: int) -> SecureSum:
        """The sum of the open round; RefusedError ROUND_CLOSED where there is none.

        LateError for the round that closed last: t silos open its sum, and a slower one uploads in
        vain.
        """
        if self.summing is not None and self._run.state.round == round_:
            return self.summing
        if self._closed(round_) is not None:
            raise LateError(
                silo, "ROUND_CLOSED", f"job {self._job.name!r}: round {round_} has no open sum"
            )
        return super().sum_of(silo, round_)

    def _closed(self, round_: int) -> SecureSum | None:
        """The sum of the round that closed last, if it is this one."""
        return self._before if self._before is not None and self._before.round == round_ else None

    def message(self, silo: str, round_: int, had: int) -> SecaggDelivery | None:
        """The next message of a round's sum for a silo that has received ``had``; None: not yet.

        RefusedError ROUND_CLOSED for a round that is neither the open one nor the one before.
        """
        # Slow silos fetch the result of a round when the next one is open already.
        before = self._closed(round_)
        if before is not None and (found := before.next_message(silo, had)) is not None:
            return found
        summing, stage = self.sum_of(silo, round_), self._run.state.stage
        found = summing.next_message(silo, had)
        # Nobody waits in a round that an operator may not resume for days.
        if found is None and stage in ("stopped", "queued") and not summing.goes_on:
            raise RefusedError(
                silo, "ROUND_CLOSED", f"job {self._job.name!r} is stopped in round {round_}"
            )
        return found

    # What goes down.

    async def attachments(self, round_: int, silo: str) -> Attachments:
        """Sums and rows in words, and prekeys to seal to.

        The memory of the recipient's rows is durable when this returns. Words are read piece by
        piece while they are sent.
        """
        run, daemon = self._run, self._daemon
        rows = self._rows(round_, silo)
        prekeys = self._prekeys(round_, silo)
        with daemon.reading(run, silo):
            sums = run.sums(round_, silo)
            deliveries = run.deliveries(round_, silo)
            directed = self._mixing.directed.rows(deliveries, run.job.down(round_), silo)
            kept = [*sums, *(each.kept for each in directed)]
            # Each file is read once per round, before any of its words goes down: a silo that gets
            # changed words would blame the coordinator for them.
            async with run.reading:
                for each in kept:
                    await asyncio.to_thread(run.store.check_once, each.path.name, each.check)
                planned = [row for row, _ in rows]
                await asyncio.to_thread(self._mixing.check_words, planned)

        # A job has rows of the one kind or of the other.
        wired = [mixed_to_wire(each.mixed()) for each in directed]
        if rows:
            wired = await asyncio.to_thread(_wired, rows)
        return Attachments(
            rows=wired,
            prekeys=await asyncio.to_thread(_prekeys, silo, prekeys) if prekeys else (),
            sums=[sum_to_wire(each.part, each.claim) for each in sums],
            proofs=proofs_to_wire(self._database.misdealings(run.job.name)) if kept else (),
            words=[
                *(DeliveredWords(each.nbytes, each.words(silo), each.sha256) for each in kept),
                *(
                    DeliveredWords(self._mixing.nbytes(row), self._mixing.words(row))
                    for row in planned
                ),
            ],
        )

    def _rows(self, round_: int, silo: str) -> list[SignedRow]:
        """The rows that go down; what a recipient's rows were made of is durable before."""
        run = self._run
        with self._daemon.reading(run, silo):
            planned, memories = self._mixing.rows(
                run.deliveries(round_, silo), run.job.down(round_), silo
            )
        # Before a word of them leaves: after a crash the recipient might otherwise get other rows
        # over the same versions, which together show more (security rule 4).
        if memories:
            with self._daemon.writing():
                self._database.save_memories(run.job.name, memories)
            self._mixing.remember(memories)
        words = partial(self._database.signed, run.job.name)
        return [
            (row, {v.silo: words(v.round, row.part, v.silo) for v in row.versions})
            for row in planned
        ]

    def _prekeys(self, round_: int, silo: str) -> list[tuple[str, str, bytes]]:
        """The other silos' words, by part and silo, whose prekeys a silo seals to in a round."""
        run = self._run
        # The job's last delivery: no upload follows whose seed could be sealed to a prekey.
        if round_ == run.job.length:
            return []
        found = self._mixing.prekeys(run.job.down(round_), silo)
        words = partial(self._database.signed, run.job.name)
        return [(part, v.silo, words(v.round, part, v.silo)) for part, v in found]

    # The end of a round.

    def inputs(self, round_: int, members: tuple[str, ...]) -> FoldInputs:
        """LocalError where the disk changed vectors: the sum is open, nobody can upload again.

        The open sum itself is checked when it is read (unmask.py).
        """
        run, memories = self._run, dict[tuple[str, str], RowMemory]()
        plan = run.plan.round(round_)
        compared = [part for part in plan.uploads if isinstance(part.exchange, Gram)]
        self._mixing.check_rotated(round_, members, compared)
        # The fold fills ``memories`` through ``posting``; ``left`` reads them afterwards.
        posting = self._mixing.posting(round_, memories)
        archive = run.store.folding(round_, posting, plan.published)

        def left() -> HiddenLeft:
            of_rows = self._mixing.mixed(archive.changes)
            # A row that waits for a silo is made when it is fetched, from uploads of its own round.
            needed = {
                *run.store.after(archive.changes).values(),
                *frozenset[str]().union(*of_rows.values()),
            }
            return HiddenLeft(memories, of_rows, frozenset(self._hidden.files() - needed))

        return FoldInputs(run.store.rotated(members, round_, compared), archive, left)

    def committed(self, left: HiddenLeft) -> None:
        """The database has what a fold left."""
        self._mixing.committed(left.memories, left.mixed, left.gone)

    def record(self, event: Event, state: JobState) -> None:
        """Forget the sum of a round that is over, and uploads that no fold will read.

        In the event's transaction: after a crash, round and sum are both open or both closed.
        """
        before = self._run.state
        if _over(before, state):
            self._settle(state)
            # A fold says itself which uploads go (``HiddenLeft``).
            if not isinstance(event, Folded):
                self._database.drop_hidden(state.job, self._hidden.files(before.round))
        if state.expired and not before.expired:
            self._database.expire_hidden(state.job)

    def _settle(self, state: JobState) -> None:
        """Forget the sum of a round that is over.

        What silos are brought that were away stays for as long as one of them needs it
        (blind/settled.py).
        """
        job, round_, database = state.job, self._run.state.round, self._database
        rounds = {}
        if state.outcome == "running":
            # Only while the job runs: afterwards no silo needs them for another round.
            rounds = {number: settled.loaded(row) for number, row in database.settled_rows(job)}
            if (found := self._opened.summing.settled) is not None:
                database.add_secure(job, round_, settled.dumped(found))
                rounds[round_] = found
        database.drop_secure(
            job,
            (number for number, kept in rounds.items() if kept.is_needed(state.counted, number)),
        )

    def moved(self, event: Event, before: JobState) -> None:
        """Turn from the sum of a round that is over; its files go where it was not folded.

        Files go after the database has dropped them: a restart needs what it still names.
        """
        if not _over(before, self._run.state):
            return
        # Silos may still ask for the result of the closed sum.
        self._before, self._runner = self.summing, None
        if not isinstance(event, Folded):
            self._hidden.let_go(self._hidden.files(before.round))
            self._run.store.discard_hidden(before.round)

    def expire(self) -> None:
        """The job is over: nothing padded is in the database any more (security rule 10).

        Call it after the database has dropped the rows.
        """
        self._mixing.expire()
        self._run.store.expire()


def _over(before: JobState, state: JobState) -> bool:
    """Whether a step ended a round."""
    return bool(before.cohort) and not state.cohort


def _kept_files(run: JobRun, stored: StoredJob) -> list[str]:
    """Files that the open round may need: its sum, its uploads, and words that it may leave."""
    state = stored.state
    uploads = (masked_words(state.round, silo) for silo in state.cohort)
    parts = (each.file for each in stored.hidden if each.round == state.round)
    found = [opened_sum(state.round), *uploads, *parts]
    if state.round < run.job.length:
        plan = run.plan.round(state.round)
        found += (summed_words(state.round, part) for part in plan.published)
        found += row_words(plan)
    return found


def _due(silo: str, manifest: tensor.Manifest, due: int, form: str) -> int:
    """Length of the words that are due; RefusedError MANIFEST where another one is declared."""
    if manifest.tensors or manifest.size != due:
        why = (
            f"declared {manifest.size} bytes of {form} words and {len(manifest.tensors)} tensors,"
            f" due are {due} bytes"
        )
        raise RefusedError(silo, "MANIFEST", why)
    return due


def _wired(rows: Sequence[SignedRow]) -> list[secure.MixedRow]:
    return [mixed_to_wire(mixed(planned, signed)) for planned, signed in rows]


def _prekeys(
    recipient: str, signed: Sequence[tuple[str, str, bytes]]
) -> list[secure.DeliveredPrekey]:
    return words_to_wire([prekey_word(part, recipient, silo, body) for part, silo, body in signed])
