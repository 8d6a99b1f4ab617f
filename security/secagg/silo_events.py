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
    # Each with a proof under the root in its owner's bundle.
    keys: tuple[KeyDelivery, ...]


@dataclass(frozen=True)
class SharesReceived:
    """The coordinator passed on what the members of U2 dealt to us, our own dealing among it.

    The members of U2 are those who dealt; each delivery has its proof under the dealer's root.
    """

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
    # Never sent: a dealer holds a share of its own vectors as any other holder does.
    kept: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class SurvivorsReceived:
    """The coordinator delivered the headers of U3, and shares of vectors sealed to us."""

    headers: tuple[Header, ...]
    # Empty where the round compares nothing by shares.
    shares: tuple[SealedShare, ...] = ()


@dataclass(frozen=True)
class NotesReceived:
    """The coordinator passed on survivors' signatures.

    At least t of U3 must have signed the very sets that this silo signed, or it ends the attempt
    and reveals nothing.
    """

    survivals: tuple[Survival, ...]


@dataclass(frozen=True)
class ResultReceived:
    """The sum is open: SHA-256 of what was delivered, and the survivors' combined tags, if any.

    Nothing is checked here: ``Finish`` has what the shell needs to check the delivered integers.
    """

    sha256: bytes
    tags: bytes = b""


@dataclass(frozen=True)
class AbandonAsked:
    """Give this attempt up for good: the coordinator asks, or this silo has nothing to send.

    It changes nothing once survivors were signed. An ended attempt is abandoned, too.
    """


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
    """Make this durable before any later effect.

    If it fails, no later effect may run: each of them tells others something that this silo must
    still know after a restart.
    """

    memory: Memory


@dataclass(frozen=True)
class SendKeys:
    """To the coordinator, for all; of ``keys`` each dealer gets its own."""

    bundle: KeyBundle
    # One per other member of the cohort, in its order.
    keys: tuple[ReceivingKey, ...]


@dataclass(frozen=True)
class SendShares:
    """To the coordinator, for all.

    It keeps the portions, and passes each holder its own with a proof under the dealing's root.
    """

    dealing: Dealing
    # One per member of U1; our own has commitments alone.
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class SendComplaint:
    """To the coordinator, as evidence.

    It shows the private key for one dealer alone; the attempt ends with it.
    """

    complaint: Complaint


@dataclass(frozen=True)
class UploadWords:
    """Quantise, mask with these terms and stream the values; deal vectors under ``hiding``.

    Then Streamed.
    """

    # Our mask to ourselves, and one for each other member of U2.
    terms: tuple[Term, ...]
    # None where the round compares nothing by shares.
    hiding: GramKeys | None = None


@dataclass(frozen=True)
class SendHeader:
    """To the coordinator, for all; it ends the upload.

    It goes again after a lost connection, with the same bytes.
    """

    header: Header


@dataclass(frozen=True)
class SendSurvival:
    """To the coordinator, for all.

    After it this silo signs no other survivors of the attempt, and never abandons it.
    """

    survival: Survival


@dataclass(frozen=True)
class SendReveal:
    """To the coordinator alone.

    One share of each member of U2, never both; the silo drops its secrets with it.
    """

    reveal: Reveal


@dataclass(frozen=True)
class SendAbandon:
    """To the coordinator, for all.

    Other silos count such notes before they enter another attempt over the same values.
    """

    note: Abandon


@dataclass(frozen=True)
class Finish:
    """The sum is open: the ledger records the digest, and ``Tagger.check`` checks the integers.

    ``tags`` are those of all survivors together, empty in a sum without tags; ``survivors`` are
    in the order of their ids.
    """

    sha256: bytes
    tags: bytes
    # Pads and tags are taken off for exactly these.
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class LeaveAttempt:
    """The attempt is over without a sum: for the ledger, and its code for the coordinator.

    ``blame`` is a silo, or one of the words in security/faults.py. ``why`` stays on this machine.
    """

    # It alone leaves this silo.
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
