"""The daemon: runs the effects of ``machine.advance`` on disk, clock and threads.

It wakes waiting silos when there is something new for them.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from .. import log
from ..algorithms.job.job import Job
from ..errors import LocalError, RefusedError, StaddleError
from ..proto import federation_pb2 as pb
from ..proto import secure_pb2 as secure
from ..proto import tensor_pb2 as tensor
from ..proto.stream import Digests
from ..security.blind.weight_checks import weights_fault
from ..security.identity import roster as rosters
from ..security.identity.keys import Keys, Role
from ..security.identity.selection import among, without
from ..security.ledger.ingress_ledger import ReceivingLedger
from . import live_status
from .config import CoordinatorConfig
from .disk_need import check_room
from .jobs.blind_collector import BlindCollector
from .jobs.collector import StoredUploadFile, Upload
from .jobs.job_run import Collecting, FoldResult, JobRun, nothing
from .jobs.plain_collector import PlainCollector
from .jobs.secure_sum_runner import SumResources
from .live_status import Greeting, SiloSeen
from .rounds.events import (
    Began,
    Broken,
    Damaged,
    DrawCohort,
    Drawn,
    Effect,
    Event,
    Fold,
    Folded,
    FoldFailed,
    Greeted,
    LogEvent,
    Overtaken,
    RoundDeadline,
    SiloLost,
    StartRoundTimer,
    Unkeyed,
)
from .rounds.machine import JobState, advance, resumed
from .rounds.queue import next_to_begin
from .rounds.tasks import SiloTask, awaited, concerned, stop_for, task_for
from .storage.attestations import Attesting
from .storage.database import Database, StoredJob
from .storage.key_contributions import KeyContributions
from .storage.receiving import Receiving
from .storage.silo_heads import Head
from .storage.spool import Spool, disk_errors
from .storage.store import DamagedError, check_folder

T = TypeVar("T")

LOST_AFTER_BEATS = 6
# without an answer of a silo that is there, before the queue no longer waits for it
ANSWER_BEATS = 60
FOLD_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before a fold that met an OSError is tried again


@dataclass(frozen=True)
class PartialUpload:
    """An upload whose connection was lost: ``size`` bytes in a spool that waits for the rest."""

    run: JobRun
    round: int
    spool: Spool
    size: int
    context: bytes = b""  # of a blind job: what it is bound to
    part: str = ""  # of a blind job, where it crosses by itself

    def fits(self, run: JobRun, round_: int, part: str = "") -> bool:
        """True for an upload to this round, or of this part in it, of this job.

        Before an upload resumes, the caller also compares the context (rpc/uploads.py); a silo that
        asks how much has arrived does not send it.
        """
        return self.run is run and (self.round, self.part) == (round_, part)


def _nobody(_: JobRun) -> tuple[str, ...]:
    return ()


class Daemon:
    """All jobs of one coordinator.

    Use it from the event loop's thread only. Folds and the opening of sums run in one other thread.
    Every change of a job's state goes through ``apply``, which writes it to the database first.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        keys: Keys,
        roster: rosters.Roster,
        database: Database,
        ledger: ReceivingLedger,
    ) -> None:
        self.config = config
        self.roster = roster
        self.receiving = Receiving(roster, keys, database, ledger)
        self.attesting = Attesting()
        self.contributions = KeyContributions(roster, database)
        self.runs: list[JobRun] = []
        # In memory only: after a restart each silo has to say hello again.
        self.sessions: dict[str, bytes] = {}
        self._greetings: dict[str, Greeting] = {}
        # silo and job → what is here of its interrupted upload
        self.held: dict[tuple[str, str], PartialUpload] = {}
        self.changed = asyncio.Event()  # anything; a silo waits on one of its own (``changed_for``)
        self.stopping = False
        self.generation = 0  # of the lease under which it serves; 0: without one
        self._database = database
        self._began = time.monotonic()
        # silo → when it was last heard of, since this process began
        self._seen: dict[str, float] = {}
        # silo → what its calls wait on, until it is set
        self._changed_for: dict[str, asyncio.Event] = {}
        self._waiting: Counter[str] = Counter()  # silo → its calls that wait
        self._folding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._deadlines: dict[str, asyncio.TimerHandle] = {}  # of each job's present stage
        self._resources = SumResources(config.timing, roster, keys, database, self.contributions)
        # What was interrupted is kept while this process lives: the others are rubbish.
        self._spool = config.directory / "spool"
        shutil.rmtree(self._spool, ignore_errors=True)
        self._spool.mkdir(parents=True)
        self._effects: dict[type[Effect], Callable[[JobRun, Any], None]] = {
            DrawCohort: self._draw,
            Fold: self._start_fold,
            StartRoundTimer: self._watch,
            LogEvent: self._report,
        }

    def run_of(self, name: str) -> JobRun | None:
        """The run of the job of this name, if there is one."""
        return next((run for run in self.runs if run.job.name == name), None)

    def check_new(self, job: Job) -> None:
        """LocalError if a job that is not in the database may not begin here.

        Configured and submitted jobs are checked alike.
        """
        check_folder(self._folder(job), -1)
        check_room(job, self.config.limits.max_job_bytes)
        # Silos would refuse it anyway; here its operator hears of it (security rule 5).
        if fault := weights_fault(job.weighing, job.summed_sets(), job.min_cohort):
            raise LocalError(f"job {job.name!r}: {fault}")

    def check_known(self, jobs: Sequence[tuple[Job, StoredJob]]) -> None:
        """LocalError if the database is older than the jobs' folders.

        Files of rounds that such a database does not know are their only copy, and would be lost.
        """
        for job, stored in jobs:
            check_folder(self._folder(job), stored.state.round)

    def restore(self, jobs: Sequence[tuple[Job, StoredJob]]) -> None:
        """Resume all jobs.

        Effects that may not have run before the process ended are run again.
        """
        for job, stored in jobs:
            fitting, reports = self._fitting(job, stored)
            self.runs.append(self._job_run(job, fitting))
            for report in reports:
                self._report(self.runs[-1], report)
        for run in self.runs:
            run.collector.recover()
        # Only now: an effect of one job may begin another.
        for run in self.runs:
            run.last_sums = next(
                (sums for *_, sums in self.rounds(run, run.state.round - 1)[-1:]), {}
            )
            run.collector.resume()
            self._run(run, resumed(run.state))

    def _fitting(self, job: Job, stored: StoredJob) -> tuple[StoredJob, list[LogEvent]]:
        """A job as it is taken up; failed where its key cannot be under this roster."""
        why = self.contributions.fault(job) if stored.state.keyed else ""
        failed, effects = advance(stored.state, Unkeyed(why))
        if not why or failed == stored.state:
            return stored, []
        # Under another key nobody can open what was uploaded for the open round.
        closed = tuple(each for each in stored.hidden if each.round != stored.state.round)
        open_ = without((each.file for each in stored.hidden), {each.file for each in closed})
        # One transaction: a failed job must not keep its open uploads.
        with self.writing():
            self._database.save_state(failed)
            self._database.drop_secure(job.name)
            self._database.drop_hidden(job.name, sorted(open_))
        # ``resumed`` knows the other effects.
        reports = [effect for effect in effects if isinstance(effect, LogEvent)]
        return replace(stored, state=failed, hidden=closed), reports

    def add(self, job: Job, signed: bytes) -> JobRun:
        """Queue a job, after ``check_new``; it begins at once where none runs.

        The caller has verified the signature, and that ``name_kept`` has nothing against the name.
        The job is durable when this returns.
        """
        state = JobState(
            job.name,
            job.silos,
            job.length,
            job.min_cohort,
            job.quorum,
            blind=job.security.required,
            keyed=job.keyed,
            batches=job.together,
            fewest=job.fewest,
            least=job.least_batch,
        )
        method = job.method().begin()
        run = self._job_run(job, StoredJob(signed, state, dict(method), {}))
        # One that ended before it began gives its name to this one.
        before = self.run_of(job.name)
        with self.writing():
            self._database.drop_job(job.name)
            self._database.add_job(signed, state, method)
        self.runs = [*(each for each in self.runs if each is not before), run]
        self._begin_next()
        return run

    def name_kept(self, run: JobRun) -> str:
        """Why no other job may have the name of this one; empty if one may.

        Only a job that ended before its first round, and to whose key nobody contributed, left
        nothing at any silo that a namesake could be mixed up with.
        """
        if run.state.stage != "ended":
            return f"it has not ended yet ({run.state.stage})"
        if run.state.opened:
            return "it has begun"
        if self._database.contributions(run.job.name):
            return "silos have contributed to the key that they share in it"
        return ""

    def rounds(self, run: JobRun, first: int = 0) -> list[tuple[int, list[str], dict[str, int]]]:
        """Number, members and metrics of a job's closed rounds, from ``first`` on.

        In ascending order. The metrics are sums over the members.
        """
        return self._database.rounds(run.job.name, first)

    def _job_run(self, job: Job, stored: StoredJob) -> JobRun:
        collecting: Collecting = partial(PlainCollector, self)
        if job.security.required:
            collecting = partial(BlindCollector, self._resources, self)
        return JobRun(job, stored, self._folder(job), collecting)

    def _folder(self, job: Job) -> Path:
        return self.config.directory / "jobs" / job.name

    # What the service asks.

    def saw(self, silo: str) -> None:
        """Note that a silo is alive.

        Also called for each piece of a transfer, so that a silo is not lost in a long one.
        """
        new = silo not in self._seen
        self._seen[silo] = time.monotonic()
        # Operators watch which silos were not heard of (``unheard``).
        if new:
            self.tell(())

    def greeted(self, silo: str, greeting: Greeting) -> None:
        """Offer a silo again what it declined, once per session: its policy may have changed."""
        self._greetings[silo] = greeting
        self.note_silos()
        for run in self.runs:
            self.apply(run, Greeted(silo))
        # It may take part in more jobs than before.
        self._begin_next()

    def note_silos(self) -> None:
        """Write which silos are here, for those who look from outside."""
        silos = [entry.id for entry in self.roster.having(Role.SILO)]
        # Who still calls while it stops finds the file removed.
        if self.stopping:
            return
        live_status.write(self.config.directory, {silo: self._silo_seen(silo) for silo in silos})

    def _silo_seen(self, silo: str) -> SiloSeen:
        heard = silo in self._seen
        # Whose call waits is here now.
        silent = 0.0 if self._waiting[silo] else self.silent_seconds(silo)
        return SiloSeen(
            connected=heard and not self._is_lost(silo),
            seen=live_status.ago(silent) if heard else "",
            **vars(self._greetings.get(silo, Greeting())),
        )

    def hold(self) -> float:
        """Until when a call that begins now may wait, on the clock of the event loop."""
        return asyncio.get_running_loop().time() + self.config.timing.hold_seconds

    def changed_for(self, silo: str) -> asyncio.Event:
        """Set once a task of this silo, a message to it or its session may have changed.

        Each event is set once and then replaced. Take it before you read the state, so that no
        change in between is missed.
        """
        return self._changed_for.setdefault(silo, asyncio.Event())

    async def woken(self, silo: str, changed: asyncio.Event, until: float) -> bool:
        """Wait for ``changed_for`` a silo, which is alive meanwhile.

        False where nothing changed until then.
        """
        # A counter: an old poll of a silo may still wait next to its new one.
        self._waiting[silo] += 1
        try:
            async with asyncio.timeout_at(until):
                await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting[silo] -= 1
            self.saw(silo)
        return True

    def _is_lost(self, silo: str) -> bool:
        """Whether a silo was not heard of for some beats.

        After a restart each has as many to come back.
        """
        # A silo whose call waits is there, however long it is silent.
        silent = time.monotonic() - LOST_AFTER_BEATS * self.config.timing.beat_seconds
        return self._seen.get(silo, self._began) < silent and not self._waiting[silo]

    def connected(self) -> set[str]:
        """Silos that were heard of within some beats.

        A silo with a waiting call may be missing here, since it is heard of when the call ends.
        """
        since = time.monotonic() - LOST_AFTER_BEATS * self.config.timing.beat_seconds
        # A copy of the items: the metrics' thread calls this, too.
        return {silo for silo, seen in list(self._seen.items()) if seen > since}

    def silent_seconds(self, silo: str) -> float:
        """Time since a silo was heard of, or since this process began."""
        return time.monotonic() - self._seen.get(silo, self._began)

    def stage_limit(self, run: JobRun, stage: str) -> float:
        """Seconds after which a stage of a job is closed."""
        # The configuration limits admission; the signed job limits every other stage.
        own = {"admitting": self.config.timing.admission_seconds}
        return own.get(stage, run.job.round_timeout)

    def unheard(self, run: JobRun) -> list[str]:
        """Silos of a job that runs of which this process has not heard.

        After a restart, all of them at first.
        """
        runs = run.state.stage not in ("queued", "stopped", "ended")
        return [silo for silo in run.state.silos if runs and silo not in self._seen]

    def spool(self, silo: str, job: str, *, going_on: bool) -> Spool:
        """A file for an upload in flight, or the one that an interrupted upload left.

        There is one per silo and job. RefusedError STORAGE if the disk fails.
        """
        with disk_errors(silo):
            return Spool(self._spool / f"{silo}.{job}.part", silo, going_on=going_on)

    def tasks_for(self, silo: str) -> Iterator[tuple[JobRun, SiloTask]]:
        """The tasks of this silo, in job order; those of jobs that were overtaken come last.

        Tasks follow from the jobs' states, so one that was lost on the way is returned again.
        """
        # In one order: silos that served jobs in different orders would wait for each other.
        # An offer that pends does not draw a silo away from the round on which it works.
        for run in sorted(self.runs, key=lambda run: run.state.aside):
            if (task := task_for(run.state, silo)) is not None:
                yield run, task

    def open_offers(self, silo: str) -> list[bytes]:
        """The SHA-256 of each signed job that waits for this silo, or would take another answer."""
        waits = (run for run in self.runs if run.state.is_open_to(silo))
        return [sha256(run.signed).digest() for run in waits]

    def stopped_jobs(self, silo: str) -> dict[str, str]:
        """Why jobs of this silo are stopped, by their digests."""
        reasons = {run.job.digest: stop_for(run.state, silo) for run in self.runs}
        return {digest: why for digest, why in reasons.items() if why}

    def contribute(self, run: JobRun, silo: str, message: secure.Contributed) -> None:
        """Keep a silo's contribution to the key of a job before it accepts.

        RefusedError says why it cannot be taken.
        """
        body = self.contributions.taken(run.job, silo, message)
        if body is None:
            return
        # A silo that has answered gave its part before, or has none in the job.
        if not run.state.may_answer(silo):
            raise RefusedError(
                silo,
                "ROUND_CLOSED",
                f"job {run.job.name!r} no longer waits for its share of a key",
            )
        with self.writing():
            self.contributions.keep(run.job, silo, body)

    def conclude(
        self,
        run: JobRun,
        silo: str,
        upload: Upload,
        file: str,
        end: tensor.End,
        digests: Digests,
        head: Head,
    ) -> pb.Receipt:
        """Take an accepted upload into the state; the signed receipt."""
        round_, size = upload.round, run.collector.upload_bytes(upload.round, upload.name)
        taken = self.receiving.take(
            run.job, silo, round_, file, size, end, digests, head, upload.name
        )
        record = partial(self.receiving.record, taken)
        committed = partial(self.receiving.committed, taken)
        stored = StoredUploadFile(file, size, digests, record, committed)
        run.collector.take(silo, upload, stored)
        return taken.receipt

    def delivered(self, run: JobRun, silo: str, round_: int, size: int, digests: Digests) -> None:
        """Note a delivery that was sent to its end.

        The record in the ledger is durable when this returns.
        """
        with self._keeping():
            self.receiving.delivered(run.job, silo, round_, size, digests)

    def receipt(self, run: JobRun, round_: int, silo: str, part: str = "") -> pb.Receipt | None:
        """The receipt of an upload that was accepted, and still counts."""
        # With the receipt of an earlier attempt, the silo would not upload for the active one.
        if not run.collector.counts(silo, round_, part):
            return None
        given = self._database.submission(run.job.name, round_, silo, part)
        if given is None:
            return None
        return pb.Receipt(
            round=round_,
            size=given.size,
            sha256=bytes.fromhex(given.sha256),
            signature=given.receipt,
        )

    async def watch_silos(self) -> None:
        """For ever: drop the silos of open rounds that were not heard of for some beats.

        In a plain job, a silo that comes back stays out of the round; in a blind one it may take
        part in the next attempt.
        """
        while True:
            self.note_silos()
            await asyncio.sleep(self.config.timing.beat_seconds)
            for run in self.runs:
                for silo in filter(self._is_lost, awaited(run.state)):
                    self.apply(run, SiloLost(silo))
            self._begin_next(self._silent)

    # Events and effects.

    def apply(
        self,
        run: JobRun,
        event: Event,
        record: Callable[[], None] = nothing,
        committed: Callable[[], None] = nothing,
    ) -> None:
        """One event into one job: first on disk, then all its effects.

        The state is written in one transaction with what ``record`` writes; ``committed`` then
        turns to it in memory.
        """
        before = run.state
        state, effects = advance(before, event)
        # The event came too late and changes nothing.
        if state == before:
            return

        # A crash before the commit leaves the state before the event, one after it the next state,
        # whose effects ``resumed`` runs again.
        with self.writing():
            if state != replace(before, given=state.given) or state.blind:
                # else it follows from the row of the upload, which ``record`` adds
                self._database.save_state(state)
            record()
            run.collector.record(event, state)

        # After the commit: nobody may act on a state that a restart would not find.
        run.turn_to(state)
        committed()
        run.collector.moved(event, before)
        self._run(run, effects)
        # After the effects, so that a silo that wakes finds what they changed.
        self.tell(concerned(before, state))
        if state.expired and not before.expired:
            run.collector.expire()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction. Where the disk does not take it, the daemon stops, whoever called.

        It may be in the middle of what follows from an event; started again, it resumes from what
        is written.
        """
        with self._keeping(), self._database.transaction():
            yield

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        # The loop's exception handler stops the daemon (server.py): it must not promise anything
        # that is not on the disk.
        try:
            yield
        except LocalError as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the disk failed", "exception": error}
            )
            raise

    def _run(self, run: JobRun, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            kind = type(effect)
            if (own := run.collector.effects.get(kind)) is not None:
                own(effect)
            else:
                self._effects[kind](run, effect)
        self.let_go()
        self._begin_next()

    def tidy(self) -> None:
        """Call ``let_go``, and wake all who wait.

        For steps of a secure sum that do not change the job's state.
        """
        self.let_go()
        self.tell()

    def let_go(self) -> None:
        """Drop what was held for a round that does not await it any more.

        The silo then has to upload from the beginning.
        """
        for (silo, job), held in list(self.held.items()):
            if not held.run.awaits(silo, held.round, held.context, held.part):
                self.held.pop((silo, job)).spool.discard()

    def tell(self, silos: Iterable[str] | None = None) -> None:
        """Wake the calls of these silos that wait, by default of all, and every watcher.

        Later calls wait for the next change.
        """
        # Removed before it is set: later calls wait on a new event.
        for silo in list(self._changed_for) if silos is None else silos:
            if (waits := self._changed_for.pop(silo, None)) is not None:
                waits.set()
        self.changed.set()
        self.changed = asyncio.Event()

    def _silent(self, run: JobRun) -> tuple[str, ...]:
        """Silos whose answer to a job that is offered holds up the queue no longer."""
        deadline = self._deadlines[run.job.name]
        since = deadline.when() - self.stage_limit(run, "admitting")
        patience = ANSWER_BEATS * self.config.timing.beat_seconds
        # Who reads its records before it answers is heard of meanwhile.
        late = asyncio.get_running_loop().time() > since + patience
        return tuple(silo for silo in run.job.silos if late or self._is_lost(silo))

    def _begin_next(self, silent: Callable[[JobRun], tuple[str, ...]] = _nobody) -> None:
        """Begin the jobs whose turn it is (rounds/queue.py); those that pend let others begin.

        A job that waits for ``silent`` silos pends, too. Only each beat looks at these: a whole
        queue of such jobs would begin at once.
        """
        states = [run.state for run in self.runs]
        ready = next_to_begin(states, self._places, self.config.limits.jobs)
        # Once one begins, or is overtaken, this is called again.
        if ready is not None:
            self.apply(self.runs[states.index(ready)], Began())
            return
        if any(map(attrgetter("waits"), states)):
            for run in filter(attrgetter("state.admits"), self.runs):
                self.apply(run, Overtaken(silent(run)))

    def _places(self, silo: str) -> int:
        """In how many jobs a silo takes part at a time; in one as long as it has not said."""
        return self._greetings.get(silo, Greeting()).jobs

    def _draw(self, run: JobRun, effect: DrawCohort) -> None:
        admitted = set(run.state.admitted)
        # The cohort follows from the job, so that silos can check it (security rule 36).
        cohort = among(run.job.cohort(effect.round), admitted)
        self.apply(run, Drawn(effect.round, cohort, tuple(filter(self._is_lost, cohort))))

    def _report(self, run: JobRun, effect: LogEvent) -> None:
        # A silo dropped out or declined.
        bad = effect.fields.get("outcome") == "failed" or "code" in effect.fields
        tell = log.problem if bad else log.event
        tell(effect.event, job=run.job.name, **effect.fields)

    def _watch(self, run: JobRun, effect: StartRoundTimer) -> None:
        seconds = self.stage_limit(run, effect.stage)
        # It was set for a stage that is over, or has begun again.
        if (before := self._deadlines.get(run.job.name)) is not None:
            before.cancel()
        deadline = RoundDeadline(effect.stage, effect.round)
        self._deadlines[run.job.name] = self.later(seconds, self.apply, run, deadline)

    def later(self, seconds: float, work: Callable[..., None], *given: Any) -> asyncio.TimerHandle:
        """Call ``work`` in so many seconds, unless this daemon has stopped by then."""

        def due() -> None:
            self._timers.discard(handle)
            work(*given)

        handle = asyncio.get_running_loop().call_later(seconds, due)
        self._timers = {handle, *(each for each in self._timers if not each.cancelled())}
        return handle

    def start(
        self, work: Coroutine[Any, Any, Any], done: Callable[[asyncio.Task[Any]], None]
    ) -> None:
        """Run it alongside all else; ``done`` hears how it ended, unless it was cancelled."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                done(task)

        task = asyncio.get_running_loop().create_task(work)
        # The event loop itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _start_fold(self, run: JobRun, effect: Fold) -> None:
        # Monotonic: the wall clock may be set meanwhile.
        began = time.monotonic()
        work = self.in_turn(run, effect.round, partial(run.fold, effect.round, effect.members))
        self.start(work, lambda done: self._folded(run, effect, done, time.monotonic() - began))

    def _folded(
        self, run: JobRun, effect: Fold, task: "asyncio.Task[FoldResult]", seconds: float
    ) -> None:
        """Whatever ended the fold, the job hears of it."""
        if (error := task.exception()) is not None:
            self._unfolded(run, effect.round, error)
            return
        result = task.result()
        known = {"silos": len(effect.members), "seconds": round(seconds, 3)}
        log.event("round.metrics", job=run.job.name, round=effect.round, **known, **result.metrics)

        # In the event's transaction: after a crash the round was folded whole, or is folded again.
        def record() -> None:
            fields = (effect.members, result.metrics, result.method, result.files)
            self._database.close_round(run.job.name, effect.round, *fields)
            self._database.save_memories(run.job.name, result.left.memories)
            self._database.drop_hidden(run.job.name, result.left.gone)

        self.apply(run, Folded(effect.round), record, lambda: run.commit(effect.round, result))

    def _unfolded(self, run: JobRun, round_: int, error: BaseException) -> None:
        # Silos still have what the disk changed: the receipts go, so that they may upload it again.
        if isinstance(error, DamagedError):
            forget = partial(self._database.drop_submissions, run.job.name, round_, error.silos)
            damaged = Damaged(round_, error.silos, f"round {round_}: {error}")
            self.apply(run, damaged, forget)
            return
        why = f"{type(error).__name__}: {error}"
        log.problem("fold.failed", job=run.job.name, round=round_, why=why)
        # Silos read it: in our own words, not in those of a library, which may hold values.
        short = getattr(error, "strerror", None) or type(error).__name__
        said = f"{short}; the coordinator's log says more (fold.failed)"
        if isinstance(error, StaddleError):
            said = str(error)
        self.apply(run, FoldFailed(round_, f"round {round_} could not be folded: {said}"))

    @contextmanager
    def reading(self, run: JobRun, silo: str) -> Iterator[None]:
        """Where what goes down to a silo is damaged the job ends.

        RefusedError ROUND_CLOSED for the silo.
        """
        try:
            yield
        except LocalError as error:
            self.broken(run, error)
            raise RefusedError(
                silo, "ROUND_CLOSED", f"job {run.job.name!r} cannot continue"
            ) from error

    def broken(self, run: JobRun, error: LocalError) -> None:
        """End a job whose files are damaged, or gone; its reason names the file.

        No silo can upload again what the coordinator published or kept.
        """
        log.problem("job.broken", job=run.job.name, why=str(error))
        self.apply(run, Broken(str(error)))

    async def in_turn(self, run: JobRun, round_: int, work: Callable[[], T]) -> T:
        """Run it in the thread of the folds.

        An exhausted disk or file table is waited for: again it gives the same.
        """
        # One thread for all: two folds at a time would need twice the memory.
        loop = asyncio.get_running_loop()
        for wait in FOLD_WAITS:
            try:
                return await loop.run_in_executor(self._folding, work)
            except OSError as error:
                log.problem(
                    "fold.waits", job=run.job.name, round=round_, seconds=wait, why=str(error)
                )
                await asyncio.sleep(wait)
        # The last try: its error ends the job.
        return await loop.run_in_executor(self._folding, work)

    async def stop(self) -> None:
        """Let waiting polls go, finish the fold in hand.

        No task is left when it returns, so ledger and database may be closed.
        """
        self.stopping = True
        live_status.remove(self.config.directory)
        self.tell()
        # A task may begin another: an open sum is folded, too.
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._folding.shutdown(wait=True)
        # The process may continue with another daemon (server.py), and this one's files are closed.
        for timer in self._timers:
            timer.cancel()
