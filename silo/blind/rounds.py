"""The blind rounds that this silo is in, kept while its connection is lost and found again.

The silo's memory of a job's secure sums lies in the job's folder, as
``secagg-<exchange>-<purpose>-<recipient>.json``. It is durable before the message that it is about
leaves, so that neither a crash nor a restart leads to a second answer (security/secagg/memory.py).
It carries its digest (files/checked_file.py), and holds no secret.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ...algorithms.job.job import Job
from ...errors import LocalError, RefusedError
from ...files import checked_file
from ...security.blind.plan import JobPlan, RoundPlan
from ...security.faults import COORDINATOR, Code
from ...security.identity import roster as rosters
from ...security.identity.keys import Keys
from ...security.identity.roster import Roster
from ...security.identity.signers import Signers
from ...security.policy.policy import SiloPolicy
from ...security.secagg.memory import NO_STATE, Memory
from ...security.secagg.silo import Participant
from ...security.secagg.spec import context_of
from ..admission.checks import asked_of_rows
from ..egress.gate import Gate
from ..egress.outcomes import SettledUpload
from ..egress.session import TurnedAwayError, UnreachableError
from ..ingress.delivery import ReceivedDelivery
from ..ingress.directed_rows import AnyRows, DirectedRows
from ..ingress.keyed_job import Sharing
from ..ingress.mix_rows import IncomingRows, Own, expected_rows
from ..ingress.open_sums import IncomingSums, Refusal
from ..parts.contributions import Contributions
from ..parts.declared import Declared
from .group_keys import GroupKeys
from .hidden_uploads import HiddenUploads
from .round import BlindRound, Pads, no_pads


class MemoryFiles:
    """The memory of one job's secure sums on disk: a ``MemoryStore``.

    Each file carries its digest and holds no secret.
    """

    def __init__(self, folder: Path, entered: Callable[[], bool]) -> None:
        """``entered``: whether, by the ledger, this silo uploaded keys into a sum of the job."""
        self._folder = folder
        self._entered = entered

    def load(self, instance: str) -> Memory:
        """The newest memory of an instance; LocalError where its file was changed, or is gone."""
        path = self._path(instance)
        if not path.exists():
            if self._entered():  # without it, an attempt could be entered twice
                raise LocalError(
                    f"{path}: gone; the ledger says that this silo took part in the job's secure"
                    " sums: restore its folder, or have the job signed under a new name"
                )
            return Memory()
        return checked_file.read_json(path, Memory)

    def save(self, instance: str, memory: Memory) -> None:
        """Write the memory of an instance; durable before it returns."""
        checked_file.write_json(self._path(instance), memory)

    def _path(self, instance: str) -> Path:
        """An instance is ``job/exchange/purpose/recipient``, each an id."""
        # Without the job, whose folder it is in.
        return self._folder / f"secagg-{'-'.join(instance.split('/')[1:])}.json"


Train = Callable[[ReceivedDelivery], Coroutine[Any, Any, Contributions]]


def _reusing(kept: Contributions | None, train: Train) -> Train:
    async def contributions(delivered: ReceivedDelivery) -> Contributions:
        return await train(delivered) if kept is None else kept

    return contributions


@dataclass(frozen=True)
class OwnValues:
    """The silo's side of a delivery: its job's folder, and the values that it mixes in itself.

    ``counted`` is one more than the last round of this silo that counts, as the coordinator says.
    """

    folder: Path
    counted: int
    own: Own


class BlindRounds:
    """The blind rounds of this silo, one of each job.

    A round stays in memory while the connection is lost.
    """

    def __init__(
        self, roster: Roster, policy: SiloPolicy, gate: Gate, keys: Keys, group_keys: GroupKeys
    ) -> None:
        """``keys`` are the silo's own."""
        self._silo = keys.entry.id
        self._roster = roster
        self._policy = policy
        self._gate = gate
        self._keys = keys
        self._group_keys = group_keys
        self._rounds: dict[str, BlindRound] = {}  # by job
        # (job, round): contexts of uploads that are there
        self._accepted: dict[tuple[str, int], set[bytes]] = {}

    def goes_on(self, job_digest: str, round_: int) -> bool:
        """True while the round and its training are in memory; ``job_digest`` is in hex."""
        now = ((each.job.digest, each.round) for each in self._rounds.values())
        return (job_digest, round_) in now

    async def take_part(
        self,
        declared: Declared,
        plan: RoundPlan,
        cohort: tuple[str, ...],
        local: OwnValues,
        kept: Contributions | None,
        train: Train,
    ) -> None:
        """Take part until the round's sum is open; ``kept`` contributions are not trained again."""
        # One that is in memory resumes with the secrets of its attempt.
        job = plan.job.name
        if not self.goes_on(plan.job.digest, plan.round):
            await self.leave(job)
            entered = await self._enter(declared, plan, cohort, local, _reusing(kept, train))
            self._rounds[job] = entered

        # Whatever else ends it, the round is over for this process: its secrets and training go.
        goes_on = False
        try:
            await self._rounds[job].run()
        except UnreachableError:
            goes_on = True
            raise
        except TurnedAwayError as error:
            goes_on = error.passes
            raise
        finally:
            if not goes_on:
                await self.leave(job)

    async def fetch(self, plan: RoundPlan, local: OwnValues) -> ReceivedDelivery:
        """Download the delivery for a round of a blind job, the final one too.

        Sums are checked, and rows are opened. RefusedError for a coordinator that sets this silo
        back, or that hides a sum which was opened (rule 34).
        """
        job, folder = plan.job, local.folder
        memory = await self._remembered(plan, local)
        rows = await self._rows(plan, local)
        sums = None
        if plan.sums_down:
            sums = IncomingSums(await self._sharing(plan.whole, folder), plan, memory)
        delivered = await self._gate.session.fetch(plan, rows, sums)

        # Without the sum this silo would train from an older state once more, and its values would
        # enter a second sum.
        missing = [name for name in plan.summed_before if name not in delivered.tensors]
        if missing:
            why = (
                f"delivers round {plan.round} without {', '.join(missing)}, of which an earlier"
                " round opened a sum"
            )
            await self._refuse(job, plan.round, RefusedError(COORDINATOR, Code.SUM, why))

        # Saved once all of the delivery holds: a sum that was refused settles no attempt.
        if sums is not None and sums.memory != memory:
            await asyncio.to_thread(
                self._memory_store(job, folder).save, plan.whole.instance, sums.memory
            )
        return delivered

    async def _rows(self, plan: RoundPlan, local: OwnValues) -> AnyRows | None:
        if not expected_rows(plan):
            return None
        sharing = await self._sharing(plan.whole, local.folder)
        terms = asked_of_rows(plan.whole.terms, self._policy)
        if plan.job.security.mix == "directed":
            return DirectedRows(sharing, plan, terms, local.counted)
        return IncomingRows(sharing, plan, terms, local.own)

    async def _remembered(self, plan: RoundPlan, local: OwnValues) -> Memory:
        """The memory of the job's sums; RefusedError where the coordinator sets this silo back."""
        memory = await asyncio.to_thread(
            self._memory_store(plan.job, local.folder).load, plan.whole.instance
        )
        # it resumes after an interruption, and no second sum of it is entered
        if memory.signed_round == plan.round:
            return memory
        try:
            return memory.starting(local.counted)
        except RefusedError as error:
            await self._refuse(plan.job, memory.signed_round, error)

    async def _refuse(self, job: Job, round_: int, error: RefusedError) -> NoReturn:
        """Record who is to blame, then reject."""
        no_attempt = context_of(b"")  # it is refused before an attempt has a specification
        refusal = Refusal(round_, no_attempt, error)
        await self._gate.sum_records.refused(job.name, job.digest, refusal)
        raise error

    def _memory_store(self, job: Job, folder: Path) -> MemoryFiles:
        return MemoryFiles(folder, lambda: self._gate.protocol.entered(job))

    async def _enter(
        self,
        declared: Declared,
        plan: RoundPlan,
        cohort: tuple[str, ...],
        local: OwnValues,
        train: Train,
    ) -> BlindRound:
        # The coordinator lacks the key of a keyed job: it can neither forge the tags of a sum, nor
        # read what is padded.
        job = plan.job
        before, key, parts = None, b"", b""
        pads: Pads = no_pads
        if job.keyed:
            sharing = await self._sharing(plan.whole, local.folder)
            key, parts, pads = sharing.key, sharing.parts, sharing.pads
            if plan.uploads:
                accepted = self._accepted_in(job.name, plan.round)
                before = HiddenUploads(self._gate, sharing, declared, plan.round, cohort, accepted)

        # what came down is part of the frame: silos that received different models are in no sum
        # together
        delivered = await self.fetch(plan, local)
        model = plan.model_digest(delivered.items, delivered.digests, delivered.sums)
        members = rosters.members_digest(self._roster, job.silos)
        frame = plan.frame(self._roster.federation, members, model, parts)
        # The policy says how many silos a sum needs, the job which batches there are.
        terms = replace(self._policy.terms, batches=job.batches)
        # Silos outside this cohort may have signed notes on earlier rounds.
        signers, others = (Signers.of(self._roster, silos) for silos in (cohort, job.silos))
        participant = Participant(self._silo, signers, terms, self._keys.sign, os.urandom, others)
        # Steps 0 and 1 of the sum need no values, so training runs alongside them.
        training = asyncio.create_task(train(delivered))
        return BlindRound(
            self._gate,
            participant,
            frame,
            self._memory_store(job, local.folder),
            job,
            declared,
            training,
            before,
            key,
            pads,
            NO_STATE if plan.sums_metrics_alone else local.counted,
        )

    async def _sharing(self, plan: JobPlan, folder: Path) -> Sharing:
        return Sharing.of(
            plan, self._roster, self._keys, await self._group_keys.keys(plan.job), folder
        )

    def settled(self, upload: SettledUpload) -> None:
        """Take note of what became of an upload whose connection broke.

        Call it after a greeting, before the round resumes.
        """
        # A plain upload has no context and does not matter here.
        if upload.status != "sent" or not upload.ctx:
            return
        ctx, now = bytes.fromhex(upload.ctx), self._rounds.get(upload.job)
        of = (upload.job, upload.round)
        self._accepted.setdefault(of, set()).add(ctx)
        if now is not None and upload.round == now.round:
            now.accepted(ctx)

    def _accepted_in(self, job: str, round_: int) -> set[bytes]:
        """The contexts of a round's uploads that the coordinator has; the set may grow.

        Those of other rounds of the job are forgotten.
        """
        of = job, round_
        own = self._accepted.get(of, set())
        self._accepted = {each: ctx for each, ctx in self._accepted.items() if each[0] != job}
        self._accepted[of] = own
        return own

    async def leave(self, *jobs: str) -> None:
        """Cancel the training of these jobs' rounds, and forget the rounds with their secrets."""
        for now in filter(None, [self._rounds.pop(job, None) for job in jobs]):
            await now.close()

    async def leave_all(self, but: Collection[str] = (), most: int = 0) -> None:
        """Leave all rounds; the youngest stay, so that there are ``most`` with those of ``but``."""
        idle = [job for job in self._rounds if job not in but]
        await self.leave(*idle[: max(0, len(idle) + len(but) - most)])
