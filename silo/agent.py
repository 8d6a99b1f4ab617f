"""The agent: runs the effects of ``session.advance``, with heartbeats.

It has a *lane* for each job that it takes part in at a time. Each lane is a conversation of its own
and does one task at a time, of a job on which no other lane works. All share one session: whichever
finds it lost opens the next one, under which the others continue.
"""

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from operator import attrgetter
from types import MappingProxyType

from .. import log
from ..algorithms.job.class_census import HOLDERS
from ..algorithms.job.job import Job
from ..algorithms.leaks.traps import Caution, TrapError
from ..algorithms.training.record_checks import (
    counts_by_class,
    range_advice,
    withheld_classes,
)
from ..bundle.description import Origin
from ..bundle.making import ModelMaker
from ..errors import (
    CancelledError,
    ExhaustedError,
    LocalError,
    PeerError,
    RefusedError,
    StaddleError,
    UnwritableError,
)
from ..proto import federation_pb2 as pb
from ..security.identity import roster as rosters
from ..security.identity.certificate import utc_now
from ..security.identity.keys import ID_PATTERN, Keys
from ..security.identity.renewal import Renewal, own_renewal
from ..security.identity.roster import Roster
from ..security.ledger.records import JobAccept, JobDecline, PersonsDecision
from ..security.policy.policy import SiloPolicy
from .admission import approvals
from .admission.budget import DatasetBudget
from .admission.checks import Admitted, admit, checked_cohort
from .admission.private_jobs import advice, check_room, payer
from .admission.start_weights import WeightsNeededError, start_objection
from .blind.group_keys import GroupKeys
from .blind.round import REFUSED
from .blind.rounds import BlindRounds, OwnValues
from .config import SiloConfig
from .egress.gate import Gate
from .egress.outcomes import DeniedError, OtherRosterError
from .egress.session import TurnedAwayError, UnreachableError
from .ingress.coordinator_word import KeptWord
from .ingress.delivery import ReceivedDelivery
from .ingress.mix_memory import MixMemory
from .ingress.start_weights import take
from .job_folder import MOST_REASON, JobFolder, split_key
from .parts.contributions import UNSAID, Contributions
from .plain_rounds import PlainRounds
from .session import (
    Barred,
    Conclude,
    Connect,
    Connected,
    ConnectionLost,
    Decide,
    Effect,
    Event,
    Exit,
    JobFinished,
    JobOffered,
    Poll,
    Reload,
    ReloadAsked,
    RoundOpened,
    Stage,
    StopAsked,
    TakePart,
    Task,
    TaskReceived,
    Worked,
    advance,
    begin,
    may_reload,
)
from .training.launched import place_of
from .training.round import JobTraining
from .training.trainer import Trainer, pool_of

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 10.0
BARRING = ("PROTOCOL_VERSION", "ROSTER", "IDENTITY")  # trying again does not cure these
# what ``admit`` says, after a restart too
ADMISSION = ("JOB_SIGNATURE", "JOB_INVALID", "POLICY", "DATA")
# after what led to nothing: a coordinator must not be able to make us spin
PAUSE_SECONDS = 0.5
# between two looks at the files that are read again once they change
LOOK_SECONDS = 1.0
# between two looks at our own certificate, whether it is to be renewed
RENEWAL_SECONDS = 3600.0
# events of jobs that are no longer offered, and of those that are again
MOVED = {approvals.GONE: "job.gone", approvals.OFFERS: "job.waits"}
# texts of losses that are told apart
MOST_LOSSES = 100
# before a job that was declined is judged again under the same policy
DECIDE_AGAIN_SECONDS = 60.0


@dataclass
class Lane:
    """One conversation with the coordinator.

    ``task`` is in hand: no other lane works on its job. ``session`` is the number of the session
    that it was told of last.
    """

    number: int
    stage: Stage = "offline"
    task: Task | None = None
    session: int = 0


@dataclass(frozen=True)
class Declined:
    """A job's answer that is repeated until then, in seconds of the event loop's clock."""

    code: str
    until: float


class Agent:
    """The agent of one silo at one coordinator.

    It trains in threads of its own, or in processes (silo/training/launched.py).
    """

    def __init__(
        self,
        config: SiloConfig,
        silo: str,
        roster: Roster,
        policy: SiloPolicy,
        gate: Gate,
        keys: Keys,
        follow: Callable[[Roster], None],
        budgets: Mapping[str, DatasetBudget] = MappingProxyType({}),
    ) -> None:
        """``keys`` are the silo's own; ``budgets`` are those that the policy sets, by data set.

        ``follow`` takes over the coordinator's roster, or says what is wrong with it; this agent
        goes on under its own.
        """
        self._config = config
        self._silo = silo
        self._roster = roster
        self._policy = policy
        self._gate = gate
        self._budgets = budgets
        self._keys = keys
        self._follow = follow
        self._group_keys = GroupKeys(roster, keys, gate.protocol, config.directory / "jobs")
        self._blind = BlindRounds(roster, policy, gate, keys, self._group_keys)
        self._plain = PlainRounds(gate)
        self._lanes = tuple(map(Lane, range(config.training.jobs)))
        self._greeting = asyncio.Lock()
        self._greeted = 0  # sessions so far
        self._freed = asyncio.Event()  # set once a lane has no task in hand any more, and replaced
        self._why_reload = ""
        self._downloading = asyncio.Lock()  # two jobs may begin with the same file
        # One for each job, since each is stopped on its own.
        self._pool = pool_of(len(self._lanes))
        self._trainers: dict[str, Trainer] = {}
        self._place = place_of(config)
        # Kept for all tasks of a job, since the checks read the whole data set.
        self._admitted: dict[str, Admitted] = {}

        # The answers of this agent, whose policy stays the same, by SHA-256 of the signed job.
        self._declined: dict[bytes, Declined] = {}

        # What the coordinator said last that it offers, by SHA-256 of the signed jobs.
        self._open_offers: frozenset[bytes] | None = None

        self._word = KeptWord(config.directory)
        self._losses: Counter[str] = Counter()  # why there was no session, since the last task
        self._stops_told: Counter[str] = Counter()  # by job

        # Each notice is logged once: a coordinator that repeats a round must not fill the disk.
        self._withheld_logged: set[str] = set()  # digests of jobs
        # by digest of its job, the private round of which the log says that it waits
        self._waits_logged: dict[str, int] = {}

        # Handed in by this agent, and when it looks again, in seconds of the event loop's clock.
        self._renewal: Renewal | None = None
        self._renewal_at = 0.0

        # The reply to Hello replaces this default.
        self._beat_seconds = 5
        self._stop = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether a session is open, for the metrics, which ask in another thread."""
        return any(lane.stage in ("waiting", "working") for lane in self._lanes)

    def stop(self) -> None:
        """Leave at the next chance; training ends at its next batch.

        It does not wait, so a signal handler of the loop may call it.
        """
        self._stop.set()
        for trainer in list(self._trainers.values()):
            trainer.cancel()

    async def run(
        self, changed: Callable[[], str] = str, settling: Callable[[], bool] = bool
    ) -> Exit | Reload:
        """Run until stopped, barred, or until a file has changed that it was made from.

        ``changed`` says which files have, empty for none; it is asked between tasks only, and once
        one has, each lane ends after its task. ``settling`` says whether one has new content that
        does not count yet. UnwritableError where the disk does not take what we keep.
        """

        # Whichever lane sees a change, all end: one file may be changed back before the last looks.
        def why_reload() -> str:
            self._why_reload = self._why_reload or changed()
            return self._why_reload

        lanes = [
            asyncio.create_task(self._converse(lane, why_reload, settling)) for lane in self._lanes
        ]
        try:
            # Each ends the others, but for a reload.
            await asyncio.wait(lanes)
            ends = [lane.result() for lane in lanes]
        finally:
            self.stop()
            self._pool.shutdown(wait=True, cancel_futures=True)
            await self._blind.leave_all()
            await self._gate.session.close()
        # Why the coordinator bars us comes first, and an end that was asked for before a reload.
        return min(ends, key=lambda end: (isinstance(end, Reload), not end.why))

    async def _converse(
        self, lane: Lane, changed: Callable[[], str], settling: Callable[[], bool]
    ) -> Exit | Reload:
        """Run one lane until it ends, and with it all others, unless files are read again."""
        state, effect = begin()
        try:
            while not isinstance(effect, Exit | Reload):
                state, effect = advance(state, await self._next(lane, effect, changed, settling))
                lane.stage, before, lane.task = state.stage, lane.task, state.task
                if before not in (None, lane.task):
                    self._freed.set()
                    self._freed = asyncio.Event()
            return effect
        finally:
            # For a reload each lane finishes its task. Whatever else ends one ends all, at once.
            if not isinstance(effect, Reload):
                self.stop()

    async def _next(
        self, lane: Lane, effect: Effect, changed: Callable[[], str], settling: Callable[[], bool]
    ) -> Event:
        """Run one effect; returns its event, or why it was not waited for."""
        # Asked first: no job is decided by a policy that is no longer the file's.
        why = changed() if may_reload(effect) else ""
        # Whoever changes a policy for a job may submit it at once.
        decides = isinstance(effect, Decide)
        while decides and not why and settling() and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)
            why = changed()
        if why:
            return ReloadAsked(why)
        work = asyncio.create_task(self._perform(lane, effect))
        others = [asyncio.create_task(self._stopped())]
        if isinstance(effect, Poll):
            others.append(asyncio.create_task(_reloaded(changed)))
        await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)

        # What the work brought comes first: the files are looked at again before the next effect.
        found = next(filter(asyncio.Task.done, (work, *others)))
        # Do not wait for a long poll or an upload: the next session settles it.
        dropped = {work, *others} - {found}
        for task in dropped:
            task.cancel()
        await asyncio.wait(dropped)
        return found.result()

    async def _stopped(self) -> Event:
        await self._stop.wait()
        return StopAsked()

    async def _perform(self, lane: Lane, effect: Effect) -> Event:
        """Run one effect; returns the event that came of it, of which people are told."""
        event = await self._performed(lane, effect)
        if isinstance(effect, Connect) or isinstance(event, Barred):
            self._word.note_lost(getattr(event, "why", ""))
        # What comes behind it is new, even in the same words.
        if isinstance(event, TaskReceived):
            self._losses.clear()
        return event

    async def _performed(self, lane: Lane, effect: Effect) -> Event:
        try:
            return await self._run_effect(lane, effect)
        except TurnedAwayError as error:
            return await self._turned_away(effect, error)
        except OtherRosterError as error:
            return await asyncio.to_thread(self._other_roster, error.roster)
        except PeerError as error:
            self._tell_lost(str(error))
            return ConnectionLost(str(error))

    def _tell_lost(self, why: str) -> None:
        """Log a loss the first time, and then each time that it was met twice as often."""
        # Its texts are partly the coordinator's, which could think of any number.
        if len(self._losses) > MOST_LOSSES:
            self._losses.clear()
        self._losses[why] += 1
        times = self._losses[why]
        tell = log.problem if times.bit_count() == 1 else log.unwritten
        tell("coordinator.lost", why=why, times=times)

    async def _run_effect(self, lane: Lane, effect: Effect) -> Event:
        match effect:
            case Connect(attempt):
                async with self._greeting:
                    return await self._connect(lane, attempt)
            case Poll():
                return await self._poll(lane)
            case Decide(offer):
                # All records are read for it, which may take long.
                async with self._beating(offer.job, 0):
                    return await self._decide(offer)
            case TakePart(asked):
                return await self._take_part(asked)
            case Conclude(finished):
                return await self._conclude(finished)
            case Exit() | Reload():
                return StopAsked()

    def _other_roster(self, data: bytes) -> Event:
        """Take over a newer roster that our founders signed; any other one bars us.

        UnwritableError where the disk does not take it: that is not the coordinator's fault.
        """
        coordinator = self._roster.coordinator.id
        try:
            roster = rosters.parse(data, "the coordinator's roster")
            self._follow(roster)
        except UnwritableError:
            raise
        except (LocalError, PeerError) as error:
            why = f"holds another roster, which this silo does not take over: {error}"
            return Barred(str(PeerError(coordinator, why)))
        # Whoever watches the files has it (``changed``), and makes an agent of it.
        return ConnectionLost(f"{coordinator} holds roster version {roster.version}")

    async def _turned_away(self, effect: Effect, error: TurnedAwayError) -> Event:
        """Stop, greet again or continue, by what the coordinator turned away, and why."""
        # Retrying does not help: an operator has to fix these.
        if error.code in BARRING:
            return Barred(str(error))
        log.problem("turned.away", code=error.code, why=str(error))
        # A refused task leaves the session open. A refused greeting or poll needs another one.
        if error.passes or not isinstance(effect, Decide | TakePart | Conclude):
            return ConnectionLost(str(error))
        await asyncio.sleep(PAUSE_SECONDS)
        return Worked()

    async def _renew(self) -> None:
        """Hand in a new certificate in good time; again each hour, until a roster has it."""
        now = asyncio.get_running_loop().time()
        if now < self._renewal_at:
            return
        self._renewal_at = now + RENEWAL_SECONDS
        try:
            renewal = await asyncio.to_thread(
                own_renewal,
                self._config.keys,
                self._keys.entry,
                utc_now(),
                self._config.directory,
            )
            if renewal is not None:
                await self._gate.session.renew(renewal)
        # Nothing else waits for it. A lost connection shows at the next poll.
        except StaddleError as error:
            log.problem("renewal.failed", member=self._silo, why=str(error))
            return
        if renewal not in (None, self._renewal):
            log.event("renewal.waits", member=self._silo)
        self._renewal = renewal

    async def _poll(self, lane: Lane) -> Event:
        # The coordinator may give fewer tasks at a time.
        if lane.number >= self._gate.session.jobs:
            await asyncio.sleep(LONGEST_WAIT_SECONDS)
            return TaskReceived(None)
        await self._renew()
        # A coordinator that answers polls at once with nothing would make this silo spin.
        loop = asyncio.get_running_loop()
        asked = loop.time()
        told = await self._gate.session.poll(list(map(_in_hand, self._in_hand())))
        self._sort_offers(told)
        self._note_stops(told)
        task = _task(self._roster.coordinator.id, told)
        # Whatever a coordinator says, no two lanes work on one job. Several may be told of it at
        # once: the others ask again.
        if task is not None and task.job in {own.job for own in self._in_hand()}:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), PAUSE_SECONDS)
            return TaskReceived(None)
        lane.task = task
        if task is None and loop.time() - asked < PAUSE_SECONDS:
            await asyncio.sleep(PAUSE_SECONDS)
        return TaskReceived(task)

    def _in_hand(self) -> list[Task]:
        return list(filter(None, map(attrgetter("task"), self._lanes)))

    def _sort_offers(self, told: pb.Task) -> None:
        """Note which offers the coordinator no longer makes; an older one does not say."""
        open_offers = frozenset(told.open_offers.signed_sha256)
        if told.HasField("open_offers") and open_offers != self._open_offers:
            moved = approvals.sort_offers(self._config.directory, open_offers)
            for job, kind in moved.items():
                log.event(MOVED[kind], job=job)
            self._open_offers = open_offers

    def _note_stops(self, told: pb.Task) -> None:
        """Keep which jobs an operator stopped, for our people; an older coordinator does not say.

        None on which a lane works: whatever a coordinator says, it does not stand still.
        """
        if not told.HasField("stopped"):
            return
        at_work = set(map(attrgetter("digest"), self._in_hand()))
        stopped = {each.job_digest.hex(): each.reason for each in told.stopped.jobs}
        left = {digest: stopped[digest] for digest in stopped.keys() - at_work}
        for job, why in self._word.note_stops(left).items():
            # However often a coordinator changes its word, the log has few lines of it.
            self._stops_told[job] += 1
            times = self._stops_told[job]
            tell = log.event if times.bit_count() == 1 else log.unwritten
            tell("job.stopped", job=job, why=why, times=times)

    async def _connect(self, lane: Lane, attempt: int) -> Event:
        # Another lane has opened a session meanwhile. It settled uploads that broke before, not one
        # of this lane that broke under it.
        if lane.session < self._greeted and not self._gate.unsettled:
            lane.session = self._greeted
            return Connected()
        # Doubled each time, with jitter: after an outage not all silos greet in the same instant.
        if attempt > 0:
            longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(attempt - 1, 8))
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 jitter is no secret

        # Settled before any new upload, which continues behind the bytes that the coordinator has.
        async with self._gate.door:
            self._beat_seconds = await self._gate.session.hello(len(self._lanes))
            settled = await self._gate.settle()
        self._greeted += 1
        lane.session = self._greeted
        for upload in settled:
            log.event(
                "upload.settled",
                job=upload.job,
                round=upload.round,
                outcome=upload.status,
                why=upload.why,
            )
            self._blind.settled(upload)
        log.event(
            "connected", coordinator=self._roster.coordinator.id, address=self._config.coordinator
        )
        return Connected()

    # A job is offered.

    async def _decide(self, offer: JobOffered) -> Event:
        # Rate limit: the coordinator may offer it at any time, and under the same policy a silo
        # says the same. Only a later look may find other records, or more of a budget.
        now = asyncio.get_running_loop().time()
        self._declined = {key: own for key, own in self._declined.items() if own.until > now}
        if (before := self._declined.get(sha256(offer.signed).digest())) is not None:
            return await self._answer_declined(offer, before.code)
        try:
            admitted = await self._admit_with_weights(offer)
        # The download did not end: the job will be offered again.
        except TurnedAwayError:
            raise
        except RefusedError as error:
            # It waited for a person under another policy, or by other records.
            approvals.drop_offer(self._config.directory, offer.job, offer.signed)
            # An operator signed it: a person may have the policy allow it, without its file.
            if error.code == "POLICY":
                approvals.keep_declined(self._config.directory, offer.job, offer.signed)
                # Without a rule nobody here has decided anything yet.
                if not self._policy.file.allow:
                    return await self._wait(offer, error.why)
            return await self._decline(offer, error)
        job = admitted.job
        policy, peer = self._policy.digest, self._roster.coordinator.id
        try:
            person = approvals.asked(self._config, job.name, offer.signed, policy, peer)
        except RefusedError as error:
            return await self._wait(offer, error.why)
        if person is not None and person.answer == "declined":
            why = "a person at this silo declined it"
            return await self._decline(
                offer, RefusedError(peer, approvals.NOT_APPROVED, why), person.recorded()
            )
        if job.name in self._admitted:  # rate limit: it is offered again
            await asyncio.sleep(PAUSE_SECONDS)
        self._admitted[job.name] = admitted

        # ledger and folder come before any answer: after a crash this silo knows what it accepted
        accept = JobAccept(
            job=job.name,
            job_digest=job.digest,
            signer=admitted.signer,
            person=person.recorded() if person else None,
        )
        await self._gate.session.record_decision(accept)
        on = self._policy.on(job.dataset).dataset
        await asyncio.to_thread(self._folder(job.name).accept, offer.signed, on)
        approvals.forget_offer(self._config.directory, job.name)
        if job.keyed:
            # Before our contribution to the key: from then on, missing memory of rows was lost.
            await asyncio.to_thread(self._mixed(job.name).begin, job)
            try:
                await self._group_keys.contribute(job)
            except TurnedAwayError as error:
                # A contribution that is not taken leaves this silo without the key of the job.
                if error.code != REFUSED:
                    raise
                return await self._decline(offer, error)
        await self._gate.session.answer(job.name, job.digest, 0, "ACCEPT")
        self._log_accepted(admitted)
        return Worked()

    def _log_accepted(self, admitted: Admitted) -> None:
        job = admitted.job
        on = self._policy.on(job.dataset).dataset
        log.event(
            "job.accepted",
            job=job.name,
            method=job.method_name,
            dataset=on,
            signer=admitted.signer,
        )
        for part in job.method().loadable:
            digest = admitted.digests.get(part, "none: from scratch")
            log.event("weights", job=job.name, part=part, sha256=digest)
        counts = counts_by_class(job, admitted.train, admitted.test)
        log.event("job.records", job=job.name, **counts)
        for text in advice(job, len(admitted.train)):
            log.problem("privacy.advice", job=job.name, why=text)
        for text in range_advice(job, admitted.train, admitted.test):
            log.problem("records.advice", job=job.name, why=text)

    async def _decline(
        self, offer: JobOffered, error: RefusedError, person: PersonsDecision | None = None
    ) -> Event:
        log.problem("job.declined", job=offer.job, code=error.code, why=error.why)
        # Recorded before it is sent, like an acceptance.
        decline = JobDecline(
            job=offer.job,
            job_digest=offer.digest,
            signer="",
            reasons=(error.why,),
            person=person,
        )
        await self._gate.session.record_decision(decline)
        # What the coordinator refused, such as our part in a key, may be taken the next time. Any
        # other answer stays: a coordinator must not be able to fill our ledger with it.
        stays = error.code in (*ADMISSION, approvals.NOT_APPROVED)
        again = self._answer_again if stays else self._answer_declined
        return await again(offer, error.code)

    async def _wait(self, offer: JobOffered, why: str) -> Event:
        """Say that a person here has to decide; no decision is recorded, since there is none."""
        log.event("job.waits", job=offer.job, why=why)
        return await self._answer_again(offer, approvals.WAITING)

    async def _answer_again(self, offer: JobOffered, code: str) -> Event:
        """Answer, and the same for some time where the job is offered again."""
        until = asyncio.get_running_loop().time() + DECIDE_AGAIN_SECONDS
        self._declined[sha256(offer.signed).digest()] = Declined(code, until)
        return await self._answer_declined(offer, code)

    async def _answer_declined(self, offer: JobOffered, code: str) -> Event:
        await self._gate.session.answer(offer.job, offer.digest, 0, "DECLINE", code)
        # Rate limit: the coordinator may offer the job again at once.
        await asyncio.sleep(PAUSE_SECONDS)
        return Worked()

    async def _admit_with_weights(self, offer: JobOffered) -> Admitted:
        try:
            return await asyncio.to_thread(self._admit, offer)
        # The policy has nothing against the job; earlier jobs are asked before the download.
        except WeightsNeededError as needed:
            await asyncio.to_thread(self._check_earlier, needed.job, offer.signed)
            await self._download(needed)
        return await asyncio.to_thread(self._admit, offer)

    async def _download(self, needed: WeightsNeededError) -> None:
        async with self._downloading:
            await self._download_missing(needed)

    async def _download_missing(self, needed: WeightsNeededError) -> None:
        job, weights = needed.job, needed.weights
        if needed.path.exists():
            log.problem(
                "weights.spoilt", job=job.name, why=f"{needed.path}: changed since; replaced"
            )
        pieces = partial(self._gate.session.weights, job, weights.expected[1])
        try:
            await take(weights, needed.path, pieces, self._roster.coordinator.id)
        except TurnedAwayError:
            # Rate limit: the job is offered, or its round open, until an operator acts.
            await asyncio.sleep(LONGEST_WAIT_SECONDS)
            raise
        log.event("weights.downloaded", job=job.name, sha256=weights.sha256, bytes=weights.size)

    def _admit(self, offer: JobOffered) -> Admitted:
        # Policy and data come first: they are the same after a restart, while what is left of a
        # budget and what was signed changes from job to job.
        admitted = self._checked(offer.signed)
        name = admitted.job.name
        # Lanes keep apart by the name that they are told.
        if name != offer.job:
            why = f"offers job {name!r} as {offer.job!r}"
            raise RefusedError(self._roster.coordinator.id, "JOB_INVALID", why)
        self._check_earlier(admitted.job, offer.signed)
        return admitted

    def _check_earlier(self, job: Job, signed: bytes) -> None:
        """What earlier jobs have against one; RefusedError says why it is declined."""
        coordinator, jobs = self._roster.coordinator.id, self._config.directory / "jobs"
        try:
            why = self._gate.signed_sets.objection_to(job)
            if why := why or start_objection(job, jobs, self._policy):
                raise RefusedError(coordinator, "POLICY", why)
            check_room(job, self._budget(job), self._beside(job))
            self._folder(job.name).check_new(signed, self._gate.signed_sets.left)
            # Another job of this name that never began may have been on other records.
            if self._folder(job.name).signed() == signed:
                self._folder(job.name).check_on(self._policy.on(job.dataset).dataset)
            if job.keyed:
                self._group_keys.check_new(job)
                contributed = self._gate.protocol.contributed(job)
                self._mixed(job.name).check_begun(job, contributed)
        except ExhaustedError as error:
            raise RefusedError(coordinator, "POLICY", str(error)) from error
        except LocalError as error:
            raise RefusedError(coordinator, "JOB_INVALID", str(error)) from error

    def _checked(self, signed: bytes) -> Admitted:
        key = split_key(self._config.directory)
        return admit(signed, self._silo, self._roster, self._policy, self._config, key)

    async def _accepted(self, job: str, digest: str) -> Admitted:
        """Like ``_known``; after a restart its file of weights may have to come again."""
        try:
            return await asyncio.to_thread(self._known, job, digest)
        except WeightsNeededError as needed:
            await self._download(needed)
        return await asyncio.to_thread(self._known, job, digest)

    def _known(self, job: str, digest: str) -> Admitted:
        """A job that we accepted, read again from disk after a restart."""
        known = self._admitted.get(job)
        signed = self._folder(job).signed() if known is None else None
        if signed is not None:
            known = self._admitted[job] = self._checked(signed)
        # Another job of the same name was never accepted here.
        if known is None or known.job.digest != digest:
            raise RefusedError(
                self._roster.coordinator.id, "UNKNOWN_JOB", f"we did not accept job {job!r}"
            )
        return known

    def _trainer(self, job: str) -> Trainer:
        return self._trainers.setdefault(job, Trainer(self._pool))

    def _folder(self, job: str) -> JobFolder:
        return JobFolder(self._config.directory / "jobs" / job)

    def _mixed(self, job: str) -> MixMemory:
        return MixMemory(self._folder(job).path)

    def _beside(self, job: Job) -> list[Job]:
        """Other jobs on the same data set of which this process has worked on a round."""
        budget, known = self._budget(job), [own.job for own in list(self._admitted.values())]
        begun = self._trainers.keys() - {job.name}
        return [own for own in known if own.name in begun and self._budget(own) is budget]

    def _budget(self, job: Job) -> DatasetBudget | None:
        """The budget of the data set that a job is on; None where the policy sets none."""
        return self._budgets.get(self._policy.on(job.dataset).dataset)

    # A round.

    async def _take_part(self, asked: RoundOpened) -> Event:
        """Fetch, train, upload; a failure on our side is answered with a code.

        The federation continues without this silo. A full disk is no such failure: the agent ends,
        so that the round is as it was once there is room.
        """
        await self._make_room()
        async with self._beating(asked.job, asked.round):
            try:
                await self._round(await self._accepted(asked.job, asked.digest), asked)
            # The coordinator wanted the round no more: there is nothing to answer.
            except CancelledError:
                log.event("round.abandoned", job=asked.job, round=asked.round)
            except UnwritableError:
                raise

            # These are facts about this silo: it answers with a code of a closed list, never with
            # an error's text, in which code of a method could say anything.
            except DeniedError as error:
                await self._give_up(asked, "POLICY", error)
            # nothing was trained, nothing leaves; what comes down is taken further
            except ExhaustedError as error:
                log.problem("budget.exhausted", job=asked.job, round=asked.round, why=str(error))
                await self._give_up(asked, "BUDGET", error)
            except LocalError as error:
                await self._give_up(asked, "TRAINING", error)
            except (
                MemoryError
                # of what the gate makes of a round; training has its own (silo/training/trainer.py)
            ) as error:
                await self._give_up(
                    asked, "TRAINING", LocalError(f"out of memory: {error or 'no details'}")
                )

            # The connection is lost, or the coordinator refused us: the session decides what next.
            except (UnreachableError, TurnedAwayError):
                raise
            except PeerError as error:
                await self._give_up(asked, _code(error), error)
        return Worked()

    async def _make_room(self) -> None:
        """Leave rounds on which no lane works, so that no more jobs train than there are lanes."""
        jobs = {task.job for task in self._in_hand()}
        await self._blind.leave_all(but=jobs, most=len(self._lanes))

    async def _give_up(self, asked: RoundOpened, code: str, error: Exception) -> None:
        log.problem("round.failed", job=asked.job, round=asked.round, code=code, why=str(error))
        await self._gate.session.answer(asked.job, asked.digest, asked.round, "FAILED", code)
        await asyncio.sleep(PAUSE_SECONDS)

    async def _round(self, admitted: Admitted, asked: RoundOpened) -> None:
        job, folder, round_ = admitted.job, self._folder(admitted.job.name), asked.round
        cohort = checked_cohort(asked.cohort, job, round_, self._silo, self._roster)

        # Under an older copy of the ledger, privacy that was already spent would be forgotten. The
        # coordinator's word is not enough against that: it gains by it (security rule 42).
        if job.privacy is not None and not self._gate.session.witnessed:
            await self._await_word(asked)
            return

        # A round that was trained before is uploaded as it was: training again would be another
        # model for the same round, and in a private job cost privacy a second time.
        rounds = self._rounds(admitted)
        goes_on = rounds.goes_on(job.digest, round_)
        contributions = None if goes_on else await self._outbox(job, folder, round_)
        if contributions is not None:
            self._check_start(job, asked, contributions)

        # whoever could repeat rounds would ask this silo about models of its own choice
        over = contributions is None and not goes_on and round_ < folder.rounds_done
        if folder.finished or round_ >= job.length or over:
            raise RefusedError(
                self._roster.coordinator.id,
                "ROUND_CLOSED",
                f"asks for round {round_} of job {job.name!r}, but {folder.rounds_done} of"
                f" {job.length} rounds are over here, and a round is uploaded once",
            )
        plan = admitted.plan.round(round_)
        # What is trained from now on is this job's alone.
        await asyncio.to_thread(folder.begin)
        train = partial(self._train, admitted, asked)
        own = self._own(admitted, asked.counted)
        await rounds.take_part(admitted.declared, plan, cohort, own, contributions, train)
        log.event("round.given", job=job.name, round=round_)

    def _check_share(self, admitted: Admitted, round_: int) -> None:
        """LocalError where a round of shared noise would be trained a second time.

        Its first sum may be open. A second one would differ from it by this silo's part alone,
        under no other noise than its two shares, and no budget pays for that.
        """
        shared = admitted.job.shares_noise
        if shared and self._gate.part_left(admitted.declared, round_, ""):
            raise LocalError(
                f"{self._folder(admitted.job.name).path}: what was trained in round {round_} is"
                " gone, and by the ledger it left this silo; the silos share the noise, so it is"
                " not trained again: restore the latest copy of the folder, or have the job signed"
                " under a new name"
            )

    def _check_start(self, job: Job, asked: RoundOpened, contributions: Contributions) -> None:
        # The memory of sums goes by the state that values were trained from (security rule 34),
        # so they must not be summed under another one.
        if contributions.start not in (UNSAID, asked.counted):
            raise RefusedError(
                self._roster.coordinator.id,
                "DELIVERY",
                f"asks for round {asked.round} of job {job.name!r} from the state after round"
                f" {asked.counted - 1}, but its contribution was trained from the state after round"
                f" {contributions.start - 1}, as the coordinator had said before",
            )

    def _rounds(self, admitted: Admitted) -> BlindRounds | PlainRounds:
        return self._plain if admitted.declared.bounds is None else self._blind

    def _own(self, admitted: Admitted, counted: int) -> OwnValues:
        own = partial(self._work(admitted).own, counted)
        return OwnValues(self._folder(admitted.job.name).path, counted, own)

    async def _outbox(self, job: Job, folder: JobFolder, round_: int) -> Contributions | None:
        """Contributions of a round that was trained before; None where it has to be trained.

        If the disk changed them and nothing left, the round is trained again. LocalError names a
        damaged file of which something left, and one of a private job: training again would cost
        privacy a second time.
        """
        try:
            return await asyncio.to_thread(folder.outbox, round_)
        except LocalError as error:
            if job.privacy is not None or self._gate.left(job, round_):
                raise
            log.problem("outbox.damaged", job=job.name, round=round_, why=str(error))
        # Nothing of it has left, and it cost no privacy: training again costs only time.
        await asyncio.to_thread(folder.forget, round_)
        return None

    async def _await_word(self, asked: RoundOpened) -> None:
        """Let a private round wait for another silo's word, which comes with a poll.

        The coordinator offers the round again then. LocalError where no silo's word would count.
        """
        # Waiting could never end: no silo's word would count.
        witnesses = sorted(self._gate.session.witnesses)
        if not witnesses:
            raise LocalError(
                "before a private round, another silo must confirm this silo's ledger, which"
                " records what its data set has cost; but the coordinator's organisation runs all"
                " other silos of the roster: have a silo added that another organisation runs"
            )

        # The round is told again and again while it waits; its operator needs to read it once.
        if self._waits_logged.get(asked.digest) != asked.round:
            self._waits_logged[asked.digest] = asked.round
            log.problem(
                "round.waits",
                job=asked.job,
                round=asked.round,
                why=(
                    "no other silo has confirmed this silo's ledger in this session, which records"
                    " what its data set has cost, and the coordinator's word is not enough; this"
                    " private round begins as soon as one does. If none does, ask the operators of"
                    f" {', '.join(witnesses)} whether their agents run, and the coordinator's"
                    " operator whether it relays their answers"
                ),
            )
        await asyncio.sleep(PAUSE_SECONDS)

    async def _train(
        self, admitted: Admitted, asked: RoundOpened, delivered: ReceivedDelivery
    ) -> Contributions:
        self._check_share(admitted, asked.round)
        began = time.monotonic()
        train = self._work(admitted).train
        try:
            contributions = await self._trainer(admitted.job.name).run(
                train, asked.round, asked.counted, delivered.tensors
            )
        except TrapError as error:
            # Records why in the ledger, and raises DeniedError, which is answered with a code.
            await self._gate.hold_back(admitted.job, asked.round, "delivery", str(error))
        seconds = round(time.monotonic() - began, 3)
        log.event("round.trained", job=admitted.job.name, round=asked.round, seconds=seconds)
        self._tell_withheld(admitted, delivered)
        return contributions

    def _tell_withheld(self, admitted: Admitted, delivered: ReceivedDelivery) -> None:
        """Log the withheld classes, once per job: who holds which class does not change."""
        job = admitted.job
        if job.counted and HOLDERS in delivered.tensors and job.digest not in self._withheld_logged:
            self._withheld_logged.add(job.digest)
            (holders,) = delivered.tensors[HOLDERS].values()
            log.event(
                "job.withheld", job=job.name, **withheld_classes(job, admitted.train, holders)
            )

    def _work(self, admitted: Admitted) -> JobTraining:
        folder, threads = self._folder(admitted.job.name), self._config.training.threads
        private = payer(admitted.job, self._budget(admitted.job), folder)
        limits = self._policy.file.limits
        caution = Caution.of(limits.max_step, limits.max_parallel)
        return JobTraining(
            admitted,
            folder,
            self._silo,
            threads,
            self._trainer(admitted.job.name).cancelled,
            private,
            self._place,
            caution,
        )

    @contextlib.asynccontextmanager
    async def _beating(self, job: str, round_: int) -> AsyncIterator[None]:
        """Heartbeats while the block runs; training stops when the coordinator wants it no more."""
        beating = asyncio.create_task(self._beat(job, round_))
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _beat(self, job: str, round_: int) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            try:
                wanted = await self._gate.session.beat(job, round_)
                if not wanted and job in self._trainers:
                    self._trainers[job].cancel()
            # Work continues without heartbeats: the next call that needs the connection will fail.
            except StaddleError as error:
                log.problem("beat.failed", job=job, round=round_, why=str(error))

    # The end of a job.

    async def _conclude(self, finished: JobFinished) -> Event:
        """Take the last results; confirm in any case, so that nobody waits for us."""
        await self._make_room()
        await self._blind.leave(finished.job)
        # Nothing of it is signed from here on, and what was signed is in the ledger.
        self._gate.signed_sets.forget(finished.job)
        folder, code = self._folder(finished.job), "UNSPECIFIED"
        # asked again: its keys are gone, and what we can take we have
        ended = self._group_keys.ended(finished.job)
        awaited = finished.completed and not folder.finished
        if ended and awaited:
            code = "DELIVERY"
        # Rate limit: there is nothing to do, so the coordinator could repeat this at once.
        if ended or not awaited:
            await asyncio.sleep(PAUSE_SECONDS)
        try:
            if not finished.completed:
                await asyncio.to_thread(folder.fail, finished.reason)
            elif not ended:
                await self._take_final(finished)
            said = {"why": finished.reason[:MOST_REASON]} if finished.reason else {}
            log.event("job.finished", job=finished.job, completed=finished.completed, **said)
        except (UnreachableError, TurnedAwayError, UnwritableError):
            raise
        except (PeerError, LocalError) as error:
            # This agent stops: the next one is asked again.
            if isinstance(error, CancelledError) and self._stop.is_set():
                return Worked()
            code = _code(error)
            log.problem("job.finish_failed", job=finished.job, why=str(error))
            await asyncio.sleep(PAUSE_SECONDS)

        # Keys go by the job's end at the latest: what was uploaded is then opened by nobody
        # (security rule 10).
        await asyncio.to_thread(self._group_keys.end, finished.job)
        await self._gate.session.answer(finished.job, finished.digest, finished.round, "DONE", code)
        # With it go its records, and the processes that read them.
        self._admitted.pop(finished.job, None)
        self._trainers.pop(finished.job, None)
        return Worked()

    async def _take_final(self, finished: JobFinished) -> None:
        admitted = await self._accepted(finished.job, finished.digest)
        plan, own = admitted.plan.round(finished.round), self._own(admitted, finished.counted)
        delivered = await self._rounds(admitted).fetch(plan, own)
        finish, maker = self._work(admitted).finish, partial(self._maker, admitted)
        trainer = self._trainer(finished.job)
        await trainer.run(finish, finished.counted, delivered.tensors, maker)

    def _maker(self, admitted: Admitted) -> ModelMaker:
        origin = Origin(
            kind="silo",
            name=self._silo,
            federation=self._roster.federation,
            signer=admitted.signer,
            head=self._gate.ledger_head(),
        )
        # As the records were read: a later change of the configuration changes no model.
        source = self._config.sources[admitted.job.dataset or self._config.dataset]
        key = split_key(self._config.directory)
        return ModelMaker(admitted.job, origin, source.contract(), key, self._keys)


async def _reloaded(changed: Callable[[], str]) -> Event:
    while not (why := changed()):  # noqa: ASYNC110 a file tells nobody that it changes
        await asyncio.sleep(LOOK_SECONDS)
    return ReloadAsked(why)


def _code(error: StaddleError) -> str:
    """The code for work that we refused.

    It is an admission check's where our files changed since, otherwise that of a delivery.
    """
    if isinstance(error, RefusedError) and error.code in ADMISSION:
        return error.code
    return "DELIVERY"


KINDS: Mapping[type[Task], pb.TaskKind] = {
    JobOffered: pb.TASK_KIND_OFFER,
    RoundOpened: pb.TASK_KIND_ROUND,
    JobFinished: pb.TASK_KIND_FINISH,
}


def _in_hand(task: Task) -> pb.InHand:
    number = getattr(task, "round", 0)  # an offer has none
    return pb.InHand(job=task.job, kind=KINDS[type(task)], round=number)


def _task(coordinator: str, task: pb.Task) -> Task | None:
    """A task as the session reads it; PeerError for an invalid job name or digest."""
    match task.WhichOneof("body"):
        case "offer":
            job, digest = task.offer.job, task.offer.job_digest
            found: Task = JobOffered(job, digest.hex(), task.offer.signed_job)
        case "round":
            job, digest = task.round.job, task.round.job_digest
            found = RoundOpened(
                job, digest.hex(), task.round.round, task.round.counted, tuple(task.round.cohort)
            )
        case "finish":
            job, digest = task.finish.job, task.finish.job_digest
            over = task.finish
            found = JobFinished(
                job, digest.hex(), over.round, over.completed, over.counted, over.reason
            )
        # No task, or one that this release does not know: the next poll may bring another.
        case _:
            return None
    # The job's name becomes a folder's name, so it must not be a path.
    if not re.fullmatch(ID_PATTERN, job) or len(digest) != 32:
        raise PeerError(
            coordinator, f"told a task of job {job[:64]!r} with a digest of {len(digest)} bytes"
        )
    return found
