"""Events into the coordinator's ``advance`` in a secure sum, and the effects that come out.

A message has one type on both sides (silo_events.py): the effect of a silo that sends it is the
event here, and the message of a ``Tell`` is the event at each silo that receives it.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ..arithmetic.masks import Term
from ..faults import Code
from .messages import Header
from .silo_events import (
    Delivery,
    SendAbandon,
    SendComplaint,
    SendKeys,
    SendReveal,
    SendShares,
    SendSurvival,
)


@dataclass(frozen=True)
class WordsUploaded:
    """A silo sent its header, and its masked words are spooled whole.

    ``length`` and ``sha256`` are of the bytes that arrived.
    """

    header: Header
    length: int
    # Digest of the words that arrived, not the header's: ``_take_words`` compares the two.
    sha256: bytes


@dataclass(frozen=True)
class SiloDropped:
    """A silo cannot take part any more: it said so, it was lost, or what it sent was malformed."""

    silo: str
    # A ``Code``, or a word of the shell's own, such as "deadline".
    code: str


@dataclass(frozen=True)
class AttemptDeadline:
    """Time is up for a stage; for any other it is stale and changes nothing."""

    stage: str


@dataclass(frozen=True)
class SumPublished:
    """The sum was opened and published; SHA-256 of what the silos will get.

    Published is durable: after it the attempt is done, whatever happens to connections.
    """

    sha256: bytes


@dataclass(frozen=True)
class OpenFailed:
    """The masks came off, and what was left is no sum of values: ``spoiled``.

    Or it could not be opened at all.
    """

    why: str
    # Then nobody is asked to abandon: survivors have signed, and the next attempt needs no notes.
    spoiled: bool = False


Event: TypeAlias = (
    SendKeys
    | SendShares
    | SendComplaint
    | WordsUploaded
    | SendSurvival
    | SendReveal
    | SendAbandon
    | SiloDropped
    | AttemptDeadline
    | SumPublished
    | OpenFailed
)


# Effects.


@dataclass(frozen=True)
class Ask:
    """Send the signed specification to these silos."""

    silos: tuple[str, ...]
    # The very bytes that are signed: silos hash them for the context.
    document: bytes
    signature: bytes


@dataclass(frozen=True)
class Tell:
    """Send a message to each of these silos."""

    silos: tuple[str, ...]
    message: Delivery


@dataclass(frozen=True)
class Discard:
    """Forget a silo's upload: it is not in the sum."""

    silo: str


@dataclass(frozen=True)
class StartTimer:
    """Raise ``AttemptDeadline`` for this stage when its time is over.

    A timer of an earlier stage may fire late; ``advance`` ignores it.
    """

    stage: str


@dataclass(frozen=True)
class Refuse:
    """Refuse a silo's message; it drops out of the attempt unless it is a late or repeated one.

    The shell raises it as a RefusedError that blames the silo.
    """

    silo: str
    code: Code
    why: str


@dataclass(frozen=True)
class Open:
    """Fold the survivors' uploads in this order, take these masks off, check canaries.

    Then SumPublished or OpenFailed.
    """

    # The masks that did not cancel: each survivor's to itself, and a lost silo's with survivors.
    terms: tuple[Term, ...]
    # Whose uploads are added; the order does not change the sum.
    survivors: tuple[str, ...]
    tags: bytes = b""  # of all survivors together, where there are some
    # inner products of the survivors' quantised vectors, 8 bytes each, where they are compared
    products: bytes = b""


@dataclass(frozen=True)
class EndAttempt:
    """The attempt is over without a sum.

    ``blame`` is a silo, or empty where nobody broke a rule.
    """

    code: Code
    # A dealer against whom there is evidence; nothing else names anybody here.
    blame: str
    why: str


Effect: TypeAlias = Ask | Tell | Discard | StartTimer | Refuse | Open | EndAttempt
