"""Events into ``machine.advance``, effects out of it, and codes of silos that drop out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...security.faults import Code

Stage: TypeAlias = Literal[
    "queued", "admitting", "drawing", "round", "folding", "finishing", "ended", "stopped"
]


@dataclass(frozen=True)
class Began:
    """It is this job's turn (queue.py); one that pends lets others begin."""


@dataclass(frozen=True)
class Overtaken:
    """Another job is to begin while this one pends; it then waits for its turn once more.

    ``silent`` are silos whose answer is no longer waited for: they are away, or had time enough.
    """

    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answered:
    """A silo accepted the job (code None) or declined it with a code.

    The code is a name of ``ErrorCode`` without its prefix.
    """

    silo: str
    code: str | None


@dataclass(frozen=True)
class Greeted:
    """A silo opened a session: a job that it declined is offered to it once more."""

    silo: str


@dataclass(frozen=True)
class Drawn:
    """The cohort of a round: the drawn silos that are admitted, in job order.

    ``lost``: those known to be away.
    """

    round: int
    cohort: tuple[str, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class UploadStored:
    """A silo's upload was checked and stored.

    ``digest`` is the SHA-256 over the digests of its tensors, in hex; the fold compares the file
    with it. In a blind job the event changes nothing.
    """

    silo: str
    round: int
    digest: str


@dataclass(frozen=True)
class Summed:
    """The sum of a blind round is open, over these silos.

    ``members`` are in job order. The open sum is durable.
    """

    round: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class SumFailed:
    """An attempt at the sum of a blind round is over without one.

    ``final``: another could not succeed.

    ``spoiled``: the silos of a sum that was opened and is none of values. ``signed``: those of a
    sum that some of them may have signed.
    """

    round: int
    attempt: int
    reason: str
    final: bool = False
    spoiled: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiloFailed:
    """A silo cannot take part in this round any more: its own report, or a bad upload."""

    silo: str
    round: int
    code: str


@dataclass(frozen=True)
class SiloLost:
    """A silo was not heard of for some beats; it may come back.

    The round continues without it, and the end of the job does not wait for it.
    """

    silo: str


@dataclass(frozen=True)
class Folded:
    """The round's results are published.

    Applied in the transaction that stores the results.
    """

    round: int


@dataclass(frozen=True)
class FoldFailed:
    """The round could not be folded.

    The job ends, since the same fold would fail again. For damaged uploads see ``Damaged``.
    """

    round: int
    reason: str


@dataclass(frozen=True)
class Damaged:
    """The disk changed these silos' contributions to a round that is to be folded.

    Only in a plain job, where silos still have their uploads and can repeat them.
    """

    round: int
    silos: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Done:
    """A silo confirmed the end of the job."""

    silo: str


@dataclass(frozen=True)
class RoundDeadline:
    """Time is up for a stage of a round; for any other it is stale and changes nothing."""

    stage: Stage
    round: int


@dataclass(frozen=True)
class Unkeyed:
    """The key that the silos of a keyed job share fits no more.

    One of its members has other keys, or is gone: a new key epoch (security rule 13).
    """

    reason: str


@dataclass(frozen=True)
class Broken:
    """Files that the job needs are damaged, or gone, so the job ends."""

    reason: str


@dataclass(frozen=True)
class OperatorStopped:
    """An operator stops the job until it is resumed.

    A running fold is finished first, and so is a secure sum that survivors may have signed.
    """

    by: str = "an operator"  # in words


@dataclass(frozen=True)
class Resumed:
    """An operator resumes the job, when its turn comes again."""


@dataclass(frozen=True)
class Withdrawn:
    """An operator ends the job, which has not begun its first round."""


Event: TypeAlias = (
    OperatorStopped
    | Resumed
    | Withdrawn
    | Greeted
    | Began
    | Overtaken
    | Answered
    | Drawn
    | UploadStored
    | Summed
    | SumFailed
    | SiloFailed
    | SiloLost
    | Folded
    | FoldFailed
    | Damaged
    | Done
    | RoundDeadline
    | Unkeyed
    | Broken
)


# Effects.


@dataclass(frozen=True)
class DrawCohort:
    """Draw the cohort of this round from the admitted silos; answered by Drawn."""

    round: int


@dataclass(frozen=True)
class Fold:
    """Fold the uploads of these silos, in this order.

    Job order: folding a round again gives the same bytes.
    """

    round: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class StartRoundTimer:
    """Raise RoundDeadline(stage, round) when the time of this stage is over.

    It replaces the job's earlier timer.
    """

    stage: Stage
    round: int


@dataclass(frozen=True)
class Gather:
    """Make the sum of a blind round with this cohort, unless this attempt was begun already.

    Answered by Summed or SumFailed.
    """

    round: int
    cohort: tuple[str, ...]
    attempt: int
    # attempts before it that ended for silos which may be away still: the more, the longer it waits
    fruitless: int


@dataclass(frozen=True)
class Drop:
    """A silo cannot take part in the active attempt any more.

    Only in a blind job, whose secure sum keeps its own state (coordinator/blind/secure_sum.py).
    """

    silo: str
    code: str


@dataclass(frozen=True)
class Halt:
    """End the active attempt, unless its survivors are known already: then finish it."""

    round: int


@dataclass(frozen=True)
class LogEvent:
    """Tell the operator: a name of an event and its fields.

    Fields never hold values of tensors.
    """

    event: str
    fields: Mapping[str, str | int | tuple[str, ...]]


Effect: TypeAlias = DrawCohort | Fold | StartRoundTimer | Gather | Drop | Halt | LogEvent


# a silo's answer while its people have not decided yet: its policy has no rule, or asks a person.
# It is no answer to the offer
WAITING = "WAITING"
NOT_APPROVED = "NOT_APPROVED"
# of a batch without which sums are of values, and with which they are not: it takes no more part
BATCH = "BATCH"
BUDGET = "BUDGET"  # the round is over for the silo: asked again, it answers the same
# what it signed shows that the silo broke the rules: it takes no more part
GUILTY = (Code.MISDEALT, Code.COMPLAINT)
# by evidence that the other silos of its batch are shown: sums of the batch continue without it
PROVEN = Code.MISDEALT
WORDS = {
    NOT_APPROVED: "a person there declined",
    WAITING: "its people have not decided yet",
    BATCH: "with its batch a sum was beyond what silos may give",
    BUDGET: "its privacy budget is spent",
    Code.MISDEALT: "it dealt shares that do not open or do not join",
    Code.COMPLAINT: "it complained of a dealer without a reason",
}


def in_words(code: str) -> str:
    """A code, with what it means."""
    return f"{code}, {WORDS[code]}" if code in WORDS else code
