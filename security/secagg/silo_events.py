"""Events into a silo's ``advance`` in a secure sum, and the effects that come out."""

from dataclasses import dataclass, field
from typing import TypeAlias

from ..arithmetic.masks import Term
from ..faults import Code
from .dealing import Dealing, KeyBundle, Portion, PortionDelivery
from .evidence import Complaint
from .gram_pieces import GramKeys, SealedShare
from .memory import Memory
from .messages import Abandon, Header, Reveal, Survival
from .receiving_keys import KeyDelivery, ReceivingKey


@dataclass(frozen=True)
class KeysReceived:
    """The coordinator delivered the keys of U1, and the keys to which we seal, one per member."""

    bundles: tuple[KeyBundle, ...]
    keys: tuple[KeyDelivery, ...]


@dataclass(frozen=True)
class SharesReceived:
    """The coordinator passed on what the members of U2 dealt to us, our own dealing among it."""

    deliveries: tuple[PortionDelivery, ...]


@dataclass(frozen=True)
class Streamed:
    """The whole upload was made: its length, its SHA-256, and padded linear tags if any.

    ``kept`` is the share of its own compared vectors that this silo keeps, where it dealt some
    (gram_pieces.py).
    """

    length: int
    sha256: bytes
    tags: bytes = b""
    kept: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class SurvivorsReceived:
    """The coordinator delivered the headers of U3, and shares of vectors sealed to us."""

    headers: tuple[Header, ...]
    shares: tuple[SealedShare, ...] = ()


@dataclass(frozen=True)
class NotesReceived:
    """The coordinator passed on survivors' signatures."""

    survivals: tuple[Survival, ...]


@dataclass(frozen=True)
class ResultReceived:
    """The sum is open: SHA-256 of what was delivered, and the survivors' combined tags, if any."""

    sha256: bytes
    tags: bytes = b""


@dataclass(frozen=True)
class AbandonAsked:
    """Give this attempt up for good: the coordinator asks, or this silo has nothing to send."""


@dataclass(frozen=True)
class AttemptStopped:
    """The coordinator ended it, this process stops, or (POLICY) this silo holds it back."""

    why: str
    code: Code = Code.STOPPED


Event: TypeAlias = (
    KeysReceived
    | SharesReceived
    | Streamed
    | SurvivorsReceived
    | NotesReceived
    | ResultReceived
    | AbandonAsked
    | AttemptStopped
)


# Effects.


@dataclass(frozen=True)
class Remember:
    """Make this durable before any later effect."""

    memory: Memory


@dataclass(frozen=True)
class SendKeys:
    """To the coordinator, for all; of ``keys`` each dealer gets its own."""

    bundle: KeyBundle
    keys: tuple[ReceivingKey, ...]


@dataclass(frozen=True)
class SendShares:
    """To the coordinator, for all."""

    dealing: Dealing
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class SendComplaint:
    """To the coordinator, as evidence."""

    complaint: Complaint


@dataclass(frozen=True)
class UploadWords:
    """Quantise, mask with these terms and stream the values; deal vectors under ``hiding``.

    Then Streamed.
    """

    terms: tuple[Term, ...]
    hiding: GramKeys | None = None


@dataclass(frozen=True)
class SendHeader:
    """To the coordinator, for all; it ends the upload."""

    header: Header


@dataclass(frozen=True)
class SendSurvival:
    """To the coordinator, for all."""

    survival: Survival


@dataclass(frozen=True)
class SendReveal:
    """To the coordinator alone."""

    reveal: Reveal


@dataclass(frozen=True)
class SendAbandon:
    """To the coordinator, for all."""

    note: Abandon


@dataclass(frozen=True)
class Finish:
    """The sum is open: the ledger records the digest, and ``Tagger.check`` checks the integers."""

    sha256: bytes
    tags: bytes
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class LeaveAttempt:
    """The attempt is over without a sum: for the ledger, and its code for the coordinator."""

    code: Code
    blame: str
    why: str


Effect: TypeAlias = (
    Remember
    | SendKeys
    | SendShares
    | SendComplaint
    | UploadWords
    | SendHeader
    | SendSurvival
    | SendReveal
    | SendAbandon
    | Finish
    | LeaveAttempt
)
