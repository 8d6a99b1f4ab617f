"""What a silo needs for the mixed and compared parts of one job: the key that its silos share, and who they are."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...algorithms.exchange.parts import Part
from ...algorithms.job.job import Job
from ...security.arithmetic.masks import Term
from ...security.blind.directed_mix import sender_pads
from ...security.blind.group_key import Epoch, JobKeys
from ...security.blind.mix_context import Line
from ...security.blind.plan import line_of, use_of
from ...security.identity import roster as rosters
from ...security.identity.keys import Keys
from ...security.identity.roster import Roster
from ...security.identity.signers import Sign, Signers
from ...security.secagg.evidence import Misdealing, proven
from ...security.secagg.spec import RoundSpec
from .mix_memory import MixMemory
from .prekeys import PrekeyFiles


@dataclass(frozen=True)
class Sharing:
    """One keyed job at one silo, under one roster."""

    job: Job
    silo: str
    federation: str
    roster: str  # its digest, hex
    signers: Signers  # the coordinator, and the job's silos
    others: Mapping[str, bytes]  # the first prekeys of the job's other silos
    memory: MixMemory
    prekeys: PrekeyFiles
    sign: Sign = field(repr=False)
    key: bytes = field(repr=False)  # that the job's silos share
    parts: bytes  # of all that made it
    draw: Callable[[int], bytes] = field(default=os.urandom, repr=False)

    @classmethod
    def of(cls, job: Job, roster: Roster, keys: Keys, shared: JobKeys, folder: Path) -> Self:
        """``folder`` is that of the job, ``shared`` are its keys."""
        return cls(
            job,
            keys.entry.id,
            roster.federation,
            rosters.digest(roster),
            Signers.of(roster, job.silos),
            shared.others,
            MixMemory(folder),
            PrekeyFiles(folder, Epoch.of(roster, job.silos, job.digest).context()),
            keys.sign,
            shared.key,
            shared.parts,
        )

    def line(self, part: Part) -> Line:
        """What uploads and rows of a Mix part are bound to."""
        return line_of(self.job, part, self.federation, self.roster)

    def proven(self, proofs: Sequence[Misdealing]) -> frozenset[str]:
        """The silos against which there is evidence; RefusedError for evidence that shows nothing in this job."""
        return proven(proofs, self.federation, self.job.digest, self.signers)

    @property
    def first_prekey(self) -> bytes:
        """The private half of ours: what a directed mix is hidden under, all the job through."""
        return self.prekeys.own()[0]

    def pads(self, spec: RoundSpec) -> dict[int, Term]:
        """Those that hide what one silo alone is to read of a secure sum, by group."""
        if self.job.security.mix != "directed":  # whose first prekey may be erased
            return {}
        return sender_pads(spec, self.silo, self.first_prekey, self.others)

    def rotation(self, part: Part, round_: int) -> bytes:
        """Ctx of the upload of a Gram part in a round."""
        return use_of(self.job, part, round_).context(self.federation, self.roster)
