"""Events into the coordinator's ``advance`` in a secure sum, and the effects that come out."""

from dataclasses import dataclass
from typing import TypeAlias

from ..arithmetic.masks import Term
from ..faults import Code
from .dealing import Dealing, KeyBundle, Portion, PortionDelivery
from .evidence import Complaint
from .messages import Abandon, Header, Reveal, Survival
from .receiving_keys import KeyDelivery, ReceivingKey


@dataclass(frozen=True)
class KeysUploaded:
    """A silo gave its keys.

    ``keys`` are those that others seal to, one for each other member of the cohort, in its order.
    """

    bundle: KeyBundle
    keys: tuple[ReceivingKey, ...]


@dataclass(frozen=True)
class SharesUploaded:
    """A silo dealt its shares.

    ``portions`` are one per member of U1, in its order; its own holds commitments only.
    """

    dealing: Dealing
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class ComplaintUploaded:
    """A silo shows that a dealer sealed rubbish to it.

    One that holds ends the attempt and names the dealer; any other costs its sender the sum.
    """

    complaint: Complaint


@dataclass(frozen=True)
class WordsUploaded:
    """A silo's upload is spooled whole; ``length`` and ``sha256`` are of the bytes that arrived."""

    header: Header
    length: int
    # Of what arrived, not of what the header says: ``_take_words`` compares the two.
    sha256: bytes


@dataclass(frozen=True)
class SurvivalUploaded:
    """A survivor signed.

    Accepted while shares are awaited, since a late signer may reveal in another's place.
    """

    survival: Survival


@dataclass(frozen=True)
class RevealUploaded:
    """A survivor revealed its shares.

    Only those whose signature came before are heard; t of them open the sum.
    """

    reveal: Reveal


@dataclass(frozen=True)
class AbandonUploaded:
    """A silo gave this attempt up for good.

    It drops out of an attempt that still runs. Its note counts towards the next one either way.
    """

    note: Abandon


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
    KeysUploaded
    | SharesUploaded
    | ComplaintUploaded
    | WordsUploaded
    | SurvivalUploaded
    | RevealUploaded
    | AbandonUploaded
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
class DeliverKeys:
    """Send one member of U1 the keys of all, and those to which it seals.

    ``bundles`` have the signatures of all of U1; ``keys`` are one of each other member, with its
    proof.
    """

    silo: str
    bundles: tuple[KeyBundle, ...]
    keys: tuple[KeyDelivery, ...]


@dataclass(frozen=True)
class DeliverShares:
    """Send one member of U2 what was dealt to it."""

    silo: str
    deliveries: tuple[PortionDelivery, ...]


@dataclass(frozen=True)
class DeliverSurvivors:
    """Send the headers of U3 to its members."""

    silos: tuple[str, ...]
    headers: tuple[Header, ...]


@dataclass(frozen=True)
class DeliverNotes:
    """Send survivors' signatures to these survivors, who have signed themselves.

    They are t of those that came, the first by id: as many as a silo needs before it reveals.
    """

    silos: tuple[str, ...]
    survivals: tuple[Survival, ...]


@dataclass(frozen=True)
class DeliverResult:
    """Send the digest of the result, and the survivors' tags together, to the survivors."""

    silos: tuple[str, ...]
    sha256: bytes
    tags: bytes


@dataclass(frozen=True)
class AskAbandon:
    """Ask these silos to give the attempt up for good, so that another can follow.

    They are all of U1; ``CoordinatorState.notes_missing`` says how many answers are still needed.
    """

    silos: tuple[str, ...]


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


Effect: TypeAlias = (
    Ask
    | DeliverKeys
    | DeliverShares
    | DeliverSurvivors
    | DeliverNotes
    | DeliverResult
    | AskAbandon
    | Discard
    | StartTimer
    | Refuse
    | Open
    | EndAttempt
)
