"""The key that the silos of one job share for its mixed and compared parts, and their names.

A silo's prekeys of one job on its disk, and what it knows of the others':
security/blind/prekeys.py.

Two files in the job's folder, 0600, with their digests (files/checked_file.py)::

    group.prekeys  the context of the epoch of the job's key, 32 bytes; then by generation,
                   ascending, 8 bytes that say which, and the private half, 32 bytes. Gone when the
                   job has ended
    prekeys.json   what was heard of the prekeys of the other silos, and which of ours they seal to:
                   ``Known``

A new generation is durable before its public half leaves; one that a process made and did not give,
since it died, is never given. A directed mix takes the first one all the job through, and makes no
others. Those that nothing is sealed to any more are erased: the file is rewritten without them.
What the disk keeps of the one before is the disk's affair.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...algorithms.exchange.parts import Part
from ...algorithms.job.job import Job
from ...errors import LocalError
from ...files import checked_file
from ...security.arithmetic.masks import Term
from ...security.blind.directed_mix import sender_pads
from ...security.blind.group_key import Epoch, JobKeys
from ...security.blind.mix_context import MixContext, Version
from ...security.blind.plan import JobPlan
from ...security.blind.prekeys import Known, Prekey, publish
from ...security.identity import roster as rosters
from ...security.identity.keys import Keys
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.identity.roster import Roster
from ...security.identity.signers import Sign, Signers
from ...security.secagg.evidence import Misdealing, proven
from ...security.secagg.spec import RoundSpec
from .mix_memory import MixMemory

OWN, KNOWN = "group.prekeys", "prekeys.json"
CONTEXT_BYTES, GENERATION_BYTES = 32, 8
EACH = GENERATION_BYTES + KEY_BYTES


@dataclass(frozen=True)
class PrekeyFiles:
    """The prekey files of one job; ``context`` is that of the epoch of its key."""

    folder: Path
    context: bytes

    def begin(self, first: bytes, known: Known) -> None:
        """Begin with our first prekey and the others', once the key of the job is made.

        It is durable before it returns, as is all below.
        """
        self.save(known)
        self._write({0: first})

    def known(self) -> Known:
        """The prekeys of the others that this silo knows.

        LocalError where they are gone: seeds would be sealed to prekeys that were erased.
        """
        path = self.folder / KNOWN
        if not path.exists():
            raise LocalError(
                f"{path}: gone, and with it what this silo knows of the prekeys of the others;"
                " restore its folder, or have the job signed under a new name"
            )
        return checked_file.read_json(path, Known)

    def save(self, known: Known) -> None:
        """Write what is known of the others' prekeys.

        Call it before a seed is sealed to a new one, and before ``erase_before`` erases any.
        """
        checked_file.write_json(self.folder / KNOWN, known)

    def own(self) -> dict[int, bytes]:
        """The private halves that are kept, by generation.

        A LocalError tells the file's length alone.
        """
        path = self.folder / OWN
        kept = checked_file.read_bytes(path)
        # At least one entry: the newest is never erased.
        if len(kept) < CONTEXT_BYTES + EACH or (len(kept) - CONTEXT_BYTES) % EACH:
            raise LocalError(
                f"{path}: {len(kept)} bytes, not {CONTEXT_BYTES} and some times {EACH}; restore the"
                " silo's folder from a backup"
            )

        # Other members are another epoch, whose seeds are sealed to other prekeys.
        if kept[:CONTEXT_BYTES] != self.context:
            raise LocalError(
                f"{path}: of another job, or of silos with other keys; have the job signed under a"
                " new name"
            )
        entries = [kept[at : at + EACH] for at in range(CONTEXT_BYTES, len(kept), EACH)]
        return {
            int.from_bytes(each[:GENERATION_BYTES]): each[GENERATION_BYTES:] for each in entries
        }

    def publish(
        self, line: MixContext, version: Version, root: bytes, seed: bytes, sign: Sign
    ) -> Prekey:
        """The next generation, from a fresh seed, to leave with this upload.

        Its private half is durable when it returns.
        """
        # On the disk before it is published: seeds that are sealed to it must open after a restart.
        own = self.own()
        # Never a number of an earlier process: its prekey is on the disk.
        generation = max(own) + 1
        self._write({**own, generation: seed})
        return publish(line, version, root, generation, seed, sign)

    def erase_before(self, floor: int) -> None:
        """Keep the generations from this one on, the newest in any case."""
        # The newest stays whatever the others are known to use: they may seal to it any time.
        own = self.own()
        kept = {
            generation: seed
            for generation, seed in own.items()
            if generation >= min(floor, max(own))
        }
        if kept != own:
            self._write(kept)

    def _write(self, own: dict[int, bytes]) -> None:
        entries = (
            generation.to_bytes(GENERATION_BYTES) + seed for generation, seed in sorted(own.items())
        )
        checked_file.write_bytes(self.folder / OWN, b"".join((self.context, *entries)))


@dataclass(frozen=True)
class Sharing:
    """One keyed job at one silo, among the same members."""

    plan: JobPlan
    silo: str
    federation: str
    members: str  # ``rosters.members_digest`` of the job's silos
    signers: Signers  # the coordinator, and the job's silos
    others: Mapping[str, bytes]  # the first prekeys of the job's other silos
    memory: MixMemory
    prekeys: PrekeyFiles
    sign: Sign = field(repr=False)
    key: bytes = field(repr=False)  # that the job's silos share
    parts: bytes  # of all that made it
    draw: Callable[[int], bytes] = field(default=os.urandom, repr=False)

    @classmethod
    def of(cls, plan: JobPlan, roster: Roster, keys: Keys, shared: JobKeys, folder: Path) -> Self:
        """``folder`` is that of the job, ``shared`` are its keys."""
        job = plan.job
        return cls(
            plan,
            keys.entry.id,
            roster.federation,
            rosters.members_digest(roster, job.silos),
            Signers.of(roster, job.silos),
            shared.others,
            MixMemory(folder),
            PrekeyFiles(folder, Epoch.of(roster, job.silos, job.digest).context()),
            keys.sign,
            shared.key,
            shared.parts,
        )

    @property
    def job(self) -> Job:
        """The job itself."""
        return self.plan.job

    def line(self, part: Part) -> MixContext:
        """The line to which uploads and rows of a Mix part are bound."""
        return self.plan.line(part, self.federation, self.members)

    def proven(self, proofs: Sequence[Misdealing]) -> frozenset[str]:
        """The silos against which there is evidence.

        RefusedError for evidence that shows nothing in this job.
        """
        return proven(proofs, self.federation, self.job.digest, self.signers)

    @property
    def first_prekey(self) -> bytes:
        """The private half of our first prekey, under which all mixes of a directed job are hidden.

        Such a job publishes no other prekey and erases none.
        """
        return self.prekeys.own()[0]

    def pads(self, spec: RoundSpec) -> dict[int, Term]:
        """The pads that hide what one silo alone is to read of a secure sum, by group.

        Empty unless the job mixes by directed sums.
        """
        if self.job.security.mix != "directed":  # whose first prekey may be erased
            return {}
        return sender_pads(spec, self.silo, self.first_prekey, self.others)

    def rotation(self, part: Part, round_: int) -> bytes:
        """The ctx of the upload of a Gram part in a round."""
        return self.plan.use(part, round_).context(self.federation, self.members)
