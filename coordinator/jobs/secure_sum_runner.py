"""Makes the sum of one blind round: the disk, clock and threads of blind/secure_sum.py."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ...algorithms.exchange.parts import Item, delivered_items
from ...errors import LocalError, RefusedError
from ...proto.wire import tensor_bytes
from ...security.identity import roster as rosters
from ...security.identity.domains import SECAGG_SPEC
from ...security.identity.keys import Keys
from ...security.identity.selection import without
from ...security.identity.signers import Signers
from ...security.secagg.coordinator_events import Open
from ...security.secagg.evidence import Misdealing
from ...security.secagg.gram_pieces import SealedShare, place_of, sealed_bytes
from ...security.secagg.spec import RoundSpec, specify
from ..blind import settled
from ..blind.secure_sum import SecureSum
from ..blind.secure_sum_shell import SumSetting
from ..blind.unmask import Keeping, open_sum
from ..config import Timing
from ..rounds.events import Gather, SiloFailed, SumFailed, Summed
from ..storage.database import Database
from ..storage.key_contributions import KeyContributions
from ..storage.replay_log import Entry, dumped
from .job_run import DaemonCalls, JobRun, SiloDelivery

# Seconds before an attempt, after so many in vain: whoever was away may be back by then.
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
WHOLE_ROUND = ("keys", "masked")  # stages that last while silos train and send

Hashed = dict[tuple[str, str], tuple[Tensor, bytes]]  # what was hashed last, by part and name


@dataclass(frozen=True)
class SumResources:
    """Resources of the daemon that all sums of all jobs share."""

    timing: Timing
    roster: rosters.Roster
    keys: Keys
    database: Database
    contributions: KeyContributions


class SecureSumRunner:
    """The shell of one round's ``SecureSum``, which it makes from what is kept of it."""

    def __init__(self, daemon: DaemonCalls, resources: SumResources, run: JobRun) -> None:
        job = run.job
        self.round = run.state.round
        self._plan = run.plan.round(self.round)
        notes, shown = settled.brought(
            [settled.loaded(row) for _, row in resources.database.settled_rows(job.name)]
        )
        self._daemon, self._resources, self._run = daemon, resources, run

        # Evidence of this very round is left out: the rows of its sum bring it to light again.
        setting = SumSetting(
            job=job.name,
            job_digest=bytes.fromhex(job.digest),
            round=self.round,
            silos=job.silos,
            signers=Signers.of(resources.roster, job.silos),
            terms=run.plan.terms,
            sign=resources.keys.sign,
            together=job.together,
            proofs=tuple(
                each
                for each in resources.database.misdealings(job.name)
                if each.spec.round < self.round
            ),
            notes=notes,
            shown=shown,
        )
        self.summing = SecureSum(
            setting, self, resources.database.secure_rows(job.name, self.round)
        )

    # An attempt begins.

    def gather(self, effect: Gather) -> None:
        """Begin an attempt, unless it was begun.

        The pause before it grows with ``fruitless``, up to a minute.
        """
        # A restart runs the state's effects again, so the attempt may have begun already.
        if self.summing.attempt < effect.attempt:
            pause = PAUSES[min(effect.fruitless, len(PAUSES) - 1)]
            self._daemon.later(pause, self._start, effect)

    def _start(self, effect: Gather) -> None:
        self._daemon.start(self._begin(effect), partial(self._begun, effect))

    async def _begin(self, effect: Gather) -> None:
        """Ask the cohort."""
        roster, job = self._resources.roster, self._run.job
        # The specification holds the model's digest, made from the deliveries to the whole cohort.
        parts, model = self._resources.contributions.parts(job), await self._model(effect)
        digest = rosters.members_digest(roster, job.silos)
        weights = self._run.member_weights
        frame = self._plan.frame(roster.federation, digest, model, parts, weights)
        # Survivors who signed an attempt that could not be opened repeat it: only with the same
        # cohort do their signatures count.
        spec = specify(frame, self.summing.repeats or effect.cohort, effect.attempt)
        # The job may have been stopped meanwhile, and resumed.
        state = self._run.state
        wanted = (state.stage, state.round, state.attempt) == ("round", self.round, effect.attempt)
        if wanted and self.summing.attempt < effect.attempt:
            self.summing.begin(spec)
            # Silos that dropped out while the specification was made.
            for silo, code in state.failed.items():
                self.summing.drop(silo, code)

    def _begun(self, effect: Gather, task: "asyncio.Task[None]") -> None:
        if (error := task.exception()) is not None:
            # Final: the next attempt would have the same deliveries, and fail in the same way.
            self._daemon.apply(
                self._run, SumFailed(self.round, effect.attempt, _reason(error), final=True)
            )

    async def _model(self, effect: Gather) -> str:
        """Digest of what each of the cohort receives.

        LocalError where they receive different values.
        """
        plan, found, hashed = self._plan, set[str](), Hashed()
        # Where no model is summed, whatever comes down is no part of the sum.
        if plan.sums_no_model:
            return plan.model_digest((), ())
        # One digest for the whole cohort is in every mask key (security rule 16): masks of silos
        # that received different models do not cancel.
        for silo in effect.cohort:
            sums = [(each.part, each.sha256) for each in self._run.sums(self.round, silo)]
            delivery = await self._run.delivery(self.round, silo)
            items = delivered_items([part for part in plan.down if part.name in delivery.tensors])
            digests = await asyncio.to_thread(_digests, items, delivery, hashed)
            found.add(plan.model_digest(items, digests, sums))
            if len(found) > 1:
                raise LocalError(
                    f"method {plan.job.method_name!r} delivers different values to silos in round"
                    f" {self.round}; it cannot be blind yet: choose another method, or sign the job"
                    " without secure_aggregation"
                )
        return found.pop()

    # What its Summing asks for.

    def keep(
        self,
        attempt: int,
        entry: Entry,
        also: Callable[[], None],
        proofs: Sequence[Misdealing] = (),
    ) -> None:
        """Write an entry durably, in one transaction with ``also`` and new evidence.

        The daemon stops if the disk fails.
        """
        with self._daemon.writing():
            self._resources.database.add_secure(
                self._run.job.name, self.round, dumped(attempt, entry)
            )
            for proof in proofs:
                self._resources.database.add_misdealing(self._run.job.name, proof)
            also()

    def wake(self) -> None:
        """Wake those who wait."""
        self._daemon.tidy()

    def watch(self, attempt: int, stage: str) -> None:
        """Call ``deadline`` when the time of this stage is over.

        Keys and masked words get all of the job's ``round_timeout``, since silos train meanwhile;
        other stages at most ``secure_seconds``.
        """
        whole = self._run.job.round_timeout
        # No step may take longer than the whole round.
        seconds = (
            whole if stage in WHOLE_ROUND else min(whole, self._resources.timing.secure_seconds)
        )
        self._daemon.later(seconds, self.summing.deadline, attempt, stage)

    def shares(
        self, spec: RoundSpec, silo: str, survivors: Sequence[str]
    ) -> tuple[SealedShare, ...]:
        """What the other survivors sealed to a silo.

        RefusedError ROUND_CLOSED once their uploads are gone.

        Each dealer's share is read from behind its masked words.
        """
        found = []
        for dealer in without(survivors, (silo,)):
            try:
                with self._run.store.masked(self.round, dealer).open("rb") as file:
                    file.seek(place_of(spec, dealer, silo))
                    found.append(SealedShare(dealer, file.read(sealed_bytes(spec))))
            except FileNotFoundError:
                why = (
                    f"job {self._run.job.name!r}: round {self.round} is over, and what silos dealt"
                    " in it is gone"
                )
                raise RefusedError(silo, "ROUND_CLOSED", why) from None
        return tuple(found)

    def discard(self, silo: str) -> None:
        """Remove a silo's masked words."""
        self._run.store.discard(self.round, silo)

    def open(self, attempt: int, spec: RoundSpec, opening: Open) -> None:
        """Add up the survivors' words and take these masks off.

        It returns at once; ``opened`` or ``unopened`` of the sum follow in the event loop.
        """
        run, plan = self._run, self._plan
        signature = self._resources.keys.sign(SECAGG_SPEC, spec.signed_bytes())
        keep = Keeping(plan.published, signature)

        # Copied here, in the event loop, which changes them.
        digests = self.summing.digests

        def work() -> bytes:
            run.make_room()
            return open_sum(run.store, plan.sums, spec, opening, digests, keep)

        # In the thread of the folds, so that a sum and a fold are not in memory together.
        self._daemon.start(
            self._daemon.in_turn(run, self.round, work), partial(self._opened, attempt)
        )

    def _opened(self, attempt: int, task: "asyncio.Task[bytes]") -> None:
        if (error := task.exception()) is not None:
            # RefusedError: the sum holds no valid values. Any other error is this machine's.
            self.summing.unopened(attempt, _reason(error), spoiled=isinstance(error, RefusedError))
        else:
            self.summing.opened(attempt, task.result())

    def dropped(self, silo: str, code: str) -> None:
        """Tell the job that a silo has dropped out of the active attempt."""
        self._daemon.apply(self._run, SiloFailed(silo, self.round, code))

    def summed(self, members: tuple[str, ...]) -> None:
        """Tell the job that the sum over these silos is open; it then folds the round."""
        self._daemon.apply(self._run, Summed(self.round, members))

    def failed(
        self, attempt: int, why: str, final: bool, spoiled: tuple[str, ...], signed: tuple[str, ...]
    ) -> None:
        """An attempt is over without a sum."""
        self._daemon.apply(self._run, SumFailed(self.round, attempt, why, final, spoiled, signed))


def _digests(items: Sequence[Item], delivery: SiloDelivery, hashed: Hashed) -> list[bytes]:
    """SHA-256 of each tensor; one that all silos get is hashed once."""
    found = []
    for item in items:
        place = item.part, item.spec.name
        tensor = delivery.tensors[item.part][item.spec.name]
        digest = delivery.digests.get(place)
        # Compared by identity: two silos may get different values under one name.
        if digest is None and place in hashed and hashed[place][0] is tensor:
            digest = hashed[place][1]
        if digest is None:
            digest = hashlib.sha256(tensor_bytes(tensor)).digest()
            hashed[place] = tensor, digest
        found.append(digest)
    return found


def _reason(error: BaseException) -> str:
    """Why, for the job's reason."""
    if isinstance(error, RefusedError):
        return error.why
    return str(error) if isinstance(error, LocalError) else f"{type(error).__name__}: {error}"
