"""The setting of a round's sum (secure_sum.py), and the calls that it makes to its runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...algorithms.job.batches import Batches
from ...security.identity.signers import Sign, Signers
from ...security.secagg.coordinator_events import Open
from ...security.secagg.evidence import Misdealing
from ...security.secagg.gram_pieces import SealedShare
from ...security.secagg.messages import Abandon, SurvivorsShown
from ...security.secagg.spec import RoundSpec, Terms
from ..storage.replay_log import Entry


def nothing() -> None:
    """Record nothing next to an entry."""


class Shell(Protocol):
    """The calls of a round's sum to the daemon.

    ``SecureSumRunner`` implements it; tests have their own.
    """

    def keep(
        self,
        attempt: int,
        entry: Entry,
        also: Callable[[], None],
        proofs: Sequence[Misdealing] = (),
    ) -> None:
        """Write an entry durably, in one transaction with what ``also`` writes.

        ``proofs`` are evidence that this entry brought to light; they are kept for the life of the
        job.
        """

    def wake(self) -> None:
        """Wake silos that wait: lists have grown, or who may upload has changed."""

    def watch(self, attempt: int, stage: str) -> None:
        """Call ``deadline`` when the time of this stage is over."""

    def shares(
        self, spec: RoundSpec, silo: str, survivors: Sequence[str]
    ) -> tuple[SealedShare, ...]:
        """The shares that other survivors sealed to a silo behind their masked words.

        RefusedError once these are gone.
        """
        ...

    def discard(self, silo: str) -> None:
        """Remove a silo's masked words."""

    def open(self, attempt: int, spec: RoundSpec, opening: Open) -> None:
        """Start to add up the survivors' words and to take these masks off.

        The caller of ``open`` later gets ``opened`` or ``unopened``.
        """

    def dropped(self, silo: str, code: str) -> None:
        """Hear that a silo has dropped out of the active attempt.

        Called once the row is durable, and again after a restart.
        """

    def summed(self, members: tuple[str, ...]) -> None:
        """Hear that the sum over these silos is open.

        Called once per round, and again after a restart.
        """

    def failed(
        self, attempt: int, why: str, final: bool, spoiled: tuple[str, ...], signed: tuple[str, ...]
    ) -> None:
        """Hear that an attempt is over without a sum; ``final``: another could not succeed.

        ``spoiled``: the silos of a sum that was opened and is none of values. ``signed``: those of
        a sum that some of them may have signed.
        """


@dataclass(frozen=True)
class SumSetting:
    """The round whose sum is made, and the signatures that count in it.

    The same for all attempts of the round. ``sign`` signs as the coordinator.
    """

    job: str
    job_digest: bytes
    round: int
    silos: tuple[str, ...]
    signers: Signers
    terms: Terms
    sign: Sign = field(repr=False)
    together: Batches = ()  # who is in an attempt together or not at all (``Job.together``)
    proofs: tuple[Misdealing, ...] = ()  # evidence of the rounds before this one
    notes: tuple[Abandon, ...] = ()  # of earlier rounds (settled.py)
    shown: tuple[SurvivorsShown, ...] = ()  # survivors of earlier rounds (settled.py)
