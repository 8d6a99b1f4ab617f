"""The privacy budget of one data set: all that was spent on it, never more than its owner allows.

It is a log of its own (security/log/append_log.py) next to the silo's ledger, with records of
budget_records.py::

    reserve  before anything is done with the data: job, round, purpose and steps, on disk before
             the first of them
    (steps)  each takes one of the reserved ones; there are no others
    commit   afterwards: how many were taken. Without one, after a crash, all that was reserved is
             spent for ever

All jobs share it, and a new job, a restart or a new key reset nothing. Its one writer holds the
folder's lock. Costs add up as in rdp.py. All that was committed or is reserved costs at most the
limit; a reservation beyond it is refused before anything is done. That is a filter: jobs may be
chosen in view of what came before, at a price in δ (rdp.py).

An older copy of the folder would have forgotten what was spent. So the head of this log goes into
the silo's own ledger with each reservation, and others hold that one's (silo/egress/witness.py):
``check_held`` compares.
"""

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import le
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import ExhaustedError, LocalError, check_local
from ..log.append_log import AppendLog
from ..log.chain import VerifiedLine
from ..log.head import HeldHead, Signer, stored
from ..log.segments import segments
from ..log.tree_head import TreeHead
from .budget_records import (
    BudgetOpened,
    BudgetRecovery,
    Commit,
    Limit,
    MechanismSteps,
    NoiseSharing,
    Reserve,
    parse,
)
from .rdp import Event, covers, epsilon, shown, spent

LIMIT = "the policy's limit"
ORIGIN = "staddle.example/{federation}/{silo}/privacy/{dataset}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Steps that may be taken: place in the log, and what they are."""

    seq: int
    events: tuple[MechanismSteps, ...]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that one job may cost on its own, whatever is left of the limit; decimals."""

    epsilon: str
    delta: str


@dataclass(frozen=True, slots=True)
class JobSpending:
    """The cost of one job to a data set, and how much of it is still open.

    ``epsilon`` is a decimal, rounded up, at the limit's δ. ``events`` are the steps that were taken
    or are still reserved.
    """

    job: str
    job_digest: str
    epsilon: str
    reserved: int  # reservations without a commit
    events: tuple[Event, ...]
    sharing: NoiseSharing | None  # None where the noise is this silo's own, and in older budgets


@dataclass
class _Job:
    """Steps by mechanism, of what was committed and of what is open."""

    name: str
    # by σ, q, and whether silos share the noise
    steps: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    open: int = 0
    sharing: NoiseSharing | None = None

    def events(self) -> list[Event]:
        return [Event(sigma, q, steps, shared) for (sigma, q, shared), steps in self.steps.items()]


class Budget:
    """The writer of one data set's budget; safe to share between threads.

    ``open`` makes it: it locks the folder and checks all records. Costs are always computed from
    the records, so a restart forgets nothing.
    """

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self._limit: Limit | None = None
        self._opened: BudgetOpened | None = None
        self._open: dict[int, Reserve] = {}  # reservations without a commit, by seq
        # seq of each reservation, committed or not → digest of its job
        self._reserved_by: dict[int, str] = {}
        self._jobs: dict[str, _Job] = {}
        self._mutex = threading.Lock()
        self._log: AppendLog

    @classmethod
    def open(
        cls,
        folder: Path,
        dataset: str,
        federation: str,
        silo: str,
        key: Ed25519PrivateKey,
        *,
        known: bool,
    ) -> Self:
        """Open a data set's budget, checking all of it; ``key`` is the silo's log key.

        ``known``: this silo's ledger says that something was spent on the data set, so there must
        be records. LocalError refuses a folder that is broken, older than its checkpoint, missing,
        or another data set's.
        """
        # An empty folder would open as a budget of which nothing was spent.
        if known and not (folder.exists() and segments(folder)):
            raise LocalError(
                f"{folder}: gone, and with it what was spent on data set {dataset!r}; restore it"
                " from the newest backup"
            )

        budget = cls(dataset)

        def visit(line: VerifiedLine) -> None:
            try:
                budget.replay(line)
            except LocalError as error:
                raise LocalError(f"{folder}: {error}; restore it from the newest backup") from None

        origin = ORIGIN.format(federation=federation, silo=silo, dataset=dataset)
        budget._log = AppendLog.open(folder, Signer(origin, key), visit)
        try:
            if budget._opened is None:
                budget._append(BudgetOpened(silo=silo, dataset=dataset, unit="record"))
        except BaseException:
            budget.close()
            raise
        return budget

    # The owner's limit.

    def set_limit(self, epsilon: str, delta: str, policy: str) -> None:
        """Allow no more than this from now on, whatever was spent.

        ``policy`` is the digest of the file that says so.
        """
        with self._mutex:
            wanted = Limit(epsilon=epsilon, delta=delta, policy=policy)
            # Every start reads the policy; an unchanged limit adds no record.
            if wanted != self._limit:
                self._append(wanted)

    @property
    def limit(self) -> Limit:
        """The most that its owner allows to be spent; LocalError before any was set."""
        if self._limit is None:
            raise LocalError(
                f"data set {self.dataset!r} has no budget; set one in the policy,"
                f" [dataset.{self.dataset}]"
            )
        return self._limit

    def epsilon(self, more: Sequence[Event] = ()) -> float:
        """The ε that was spent or is reserved so far, at the limit's δ.

        With ``more``, as if those events had been added. LocalError before any limit was set.
        """
        with self._mutex:
            return epsilon(spent([*self._events(), *more]), float(self.limit.delta))

    # Spending.

    def reserve(
        self,
        job: str,
        job_digest: str,
        round_: int,
        purpose: str,
        events: Sequence[MechanismSteps],
        ceiling: Ceiling | None = None,
        sharing: NoiseSharing | None = None,
    ) -> Reservation:
        """Set so much aside, durably; ``sharing`` of a job whose silos share the noise.

        ExhaustedError where the limit, or the job's own ``ceiling``, does not cover it: then
        nothing is written.
        """
        record = Reserve(
            job=job,
            job_digest=job_digest,
            round=round_,
            purpose=purpose,
            events=tuple(events),
            sharing=sharing,
        )
        # The check and the record are one step: two jobs at once must not both see the same rest.
        asked = [each.event(each.steps) for each in record.events]
        with self._mutex:
            what = f"{purpose} of round {round_} of job {job!r}"
            check_covered(self.dataset, what, self._limited, self._events(), asked)
            if ceiling:
                # By digest, since a job that is signed again under the same name is another job.
                own = self._jobs[job_digest].events() if job_digest in self._jobs else []
                check_covered(self.dataset, what, ceiling, own, asked, "the job's own target")
            return Reservation(self._append(record), record.events)

    def check_room(
        self,
        job: str,
        job_digest: str,
        planned: Sequence[Event],
        beside: Mapping[str, Sequence[Event]] = MappingProxyType({}),
    ) -> None:
        """ExhaustedError unless the limit covers all of a job, on top of what others spent.

        Of the jobs ``beside`` it, by digest, all that they are to spend counts.
        """
        with self._mutex:
            # Without their own: what a job has reserved is in the log, and its plan would count it
            # a second time.
            others = self._events(without={job_digest, *beside})
            others += chain.from_iterable(beside.values())
            check_covered(self.dataset, f"all of job {job!r}", self._limited, others, planned)

    def commit(self, reservation: Reservation, taken: Sequence[int]) -> None:
        """Record how many steps of each event were taken; no more follow.

        Returns once that is durable; the rest is free again. LocalError for a reservation that is
        not open, or for more steps than it had.
        """
        with self._mutex:
            self._append(Commit(ref=reservation.seq, steps=tuple(taken)))

    # What it shows.

    def paid(self, seq: int, job_digest: str) -> bool:
        """True if there is such a reservation, and it is of this job."""
        with self._mutex:
            return self._reserved_by.get(seq) == job_digest

    def jobs(self) -> list[JobSpending]:
        """The cost of each job so far, in the order in which they came.

        Each ε is at the limit's δ, rounded up, as if there were no other job. The sum of them is
        not the total: that is ``Budget.epsilon``.
        """
        with self._mutex:
            delta = float(self.limit.delta)
            return [
                JobSpending(
                    job.name,
                    digest,
                    shown(epsilon(spent(job.events()), delta)),
                    job.open,
                    tuple(job.events()),
                    job.sharing,
                )
                for digest, job in self._jobs.items()
            ]

    def head(self) -> TreeHead:
        """The head of all records so far, which are durable then: the silo's ledger keeps it."""
        with self._mutex:
            return TreeHead.parse(self._log.checkpoint().text)

    def rekey(self, key: Ed25519PrivateKey) -> None:
        """Sign the head by this log key of the silo from now on."""
        with self._mutex:
            self._log.rekey(Signer(self._log.signer.origin, key))

    def check_held(self, held: HeldHead) -> None:
        """LocalError where this log is older than a head that was kept of it, or another one."""
        if why := self._log.disagreement(held):
            raise LocalError(
                f"{self._log.folder}: was rolled back or altered: {why}; what was spent on data set"
                f" {self.dataset!r} cannot be known from it: restore the newest copy"
            )

    def close(self) -> None:
        """Release the folder."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _events(self, without: Collection[str] = ()) -> list[Event]:
        """The events that were spent or are reserved, without those of some jobs (digests)."""
        events: list[Event] = []
        for digest, job in self._jobs.items():
            if digest not in without:
                events += job.events()
        return events

    @property
    def _limited(self) -> Ceiling:
        return Ceiling(self.limit.epsilon, self.limit.delta)

    # Records, as they come and as they are read.

    def _append(self, record: BudgetOpened | Limit | Reserve | Commit) -> int:
        # Counted once it is on the disk: an append that fails has spent nothing.
        stored = record.model_dump(mode="json")
        # Checked before it is written: with a record that ``replay`` refuses, the budget would
        # never open again.
        self._check(record)
        appended = self._log.append(stored)
        self._accept(appended.seq, record)
        return appended.seq

    def replay(self, line: VerifiedLine) -> None:
        """Take in the next record of the log, as it was read.

        LocalError for one that must not come next.
        """
        record = parse(line)
        # A recovery record is for a torn line, which was no reservation: steps begin only once the
        # whole record is on the disk.
        if not isinstance(record, BudgetRecovery):
            self._check(record)
            self._accept(line.seq, record)

    def _check(self, record: BudgetOpened | Limit | Reserve | Commit) -> None:
        """LocalError for a record that must not come next."""
        first = self._opened is None
        check_local(
            isinstance(record, BudgetOpened) == first, "a budget begins with one budget.opened"
        )
        match record:
            case BudgetOpened(dataset=dataset) if dataset != self.dataset:
                raise LocalError(f"is the budget of data set {dataset!r}, not of {self.dataset!r}")
            # Without a limit nothing could be compared with what is asked for.
            case Reserve() if self._limit is None:
                raise LocalError("something is reserved before there is a limit")
            case Commit(ref=ref, steps=steps):
                reserved = self._open.get(ref)
                if reserved is None:
                    raise LocalError(f"commit of seq {ref}, which is not an open reservation")
                # More steps than were reserved were never compared with the limit.
                most = [each.steps for each in reserved.events]
                within = len(steps) == len(most) and all(map(le, steps, most))
                check_local(within, f"commit of {list(steps)} steps, reserved were {most}")

    def _accept(self, seq: int, record: BudgetOpened | Limit | Reserve | Commit) -> None:
        match record:
            case BudgetOpened():
                self._opened = record
            case Limit():
                self._limit = record
            # All steps count from here on, so a crash leaves them spent.
            case Reserve():
                job = self._jobs.setdefault(record.job_digest, _Job(record.job))
                job.open += 1
                job.sharing = record.sharing
                for each in record.events:
                    job.steps[each.sigma, each.q, each.shared] += each.steps
                self._open[seq] = record
                self._reserved_by[seq] = record.job_digest
            case Commit(ref=ref, steps=steps):
                reserved = self._open.pop(ref)
                job = self._jobs[reserved.job_digest]
                job.open -= 1
                for each, taken in zip(reserved.events, steps, strict=True):
                    # Only steps that were never taken are free again.
                    job.steps[each.sigma, each.q, each.shared] -= each.steps - taken


def check_covered(
    dataset: str,
    what: str,
    most: Ceiling,
    before: Sequence[Event],
    asked: Sequence[Event],
    whose: str | None = None,
) -> None:
    """ExhaustedError where these events together cost more than ``most``.

    ``whose`` names that ceiling; without it, it is the policy's limit.
    """
    delta = float(most.delta)
    # Both at the ceiling's own δ: only at the same δ can two ε be compared.
    now, then = epsilon(spent(before), delta), epsilon(spent([*before, *asked]), delta)
    if covers(most.epsilon, then):
        return
    why = (
        f"data set {dataset!r}: {what} would bring what is spent from epsilon = {shown(now)} to"
        f" {shown(then)} at delta = {most.delta}, over {whose or LIMIT} of {most.epsilon}"
    )
    # Only the policy's limit can be raised by the person who reads this.
    if not whose:
        why += f"; raise epsilon in its [dataset.{dataset}], or ask for cheaper jobs"
    raise ExhaustedError(why)


def rekey_all(
    folder: Path, federation: str, silo: str, old: Ed25519PrivateKey, new: Ed25519PrivateKey
) -> tuple[str, ...]:
    """Continue the budgets below a folder under a new log key; returns their data sets.

    A budget that has the key already stays as it is.
    """
    if not folder.is_dir():
        return ()

    # A crash between two of them leaves some under the new key: the next call passes those over.
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in found:
        origin = ORIGIN.format(federation=federation, silo=silo, dataset=path.name)
        note, key = stored(path), Signer(origin, new).public
        signers = {signature.key_id for signature in note.signatures} if note else set()
        if signers - {key.key_id}:
            with Budget.open(path, path.name, federation, silo, old, known=True) as budget:
                budget.rekey(new)
    return tuple(path.name for path in found)


class Steppers:
    """The steps of a reservation: training takes each before it (algorithms/training/dp_sgd.py)."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self._taken = [0] * len(reservation.events)
        self._over = False
        self._mutex = threading.Lock()

    def take(self, event: int) -> None:
        """One step of the event of this index.

        ExhaustedError where all of its steps were taken, or none may be.
        """
        # Counted under a lock and refused before the step, so that no step goes unpaid.
        most = self.reservation.events[event].steps
        with self._mutex:
            if self._over or self._taken[event] >= most:
                why = "is committed" if self._over else f"had {most} of these, which are taken"
                raise ExhaustedError(
                    f"one more step of reservation {self.reservation.seq}, which {why}; this is a"
                    " bug in Staddle"
                )
            self._taken[event] += 1

    def end(self) -> tuple[int, ...]:
        """No more steps are taken from now on; how many were, event by event."""
        with self._mutex:
            self._over = True
            return tuple(self._taken)
