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
    # each with a proof under the root in its owner's bundle
    keys: tuple[KeyDelivery, ...]


@dataclass(frozen=True)
class SharesReceived:
    """The coordinator passed on what the members of U2 dealt to us, our own dealing among it.

    Each delivery has a proof under its dealer's signed root.
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
    # Never sent: a dealer holds a share of its own vectors, like every other holder.
    kept: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class SurvivorsReceived:
    """The coordinator delivered the headers of U3, and shares of vectors sealed to us."""

    headers: tuple[Header, ...]
    # empty if the round compares nothing by shares
    shares: tuple[SealedShare, ...] = ()


@dataclass(frozen=True)
class NotesReceived:
    """The coordinator passed on survivors' signatures.

    Unless at least t of U3 signed the very sets that this silo signed, it ends the attempt and
    reveals nothing.
    """

    survivals: tuple[Survival, ...]


@dataclass(frozen=True)
class ResultReceived:
    """The sum is open: SHA-256 of what was delivered, and the survivors' combined tags, if any.

    The state machine does not check the sum; the shell does, with the fields of ``Finish``.
    """

    sha256: bytes
    tags: bytes = b""


@dataclass(frozen=True)
class AbandonAsked:
    """Give this attempt up for good: the coordinator asks, or this silo has nothing to send.

    It has no effect once this silo signed survivors. An attempt that ended without a signature can
    still be abandoned.
    """


@dataclass(frozen=True)
class AttemptStopped:
    """The coordinator ended it, this process stops, or (POLICY) this silo holds it back."""

    why: str
    code: Code = Code.STOPPED


# messages of the coordinator
Delivery: TypeAlias = (
    KeysReceived
    | SharesReceived
    | SurvivorsReceived
    | NotesReceived
    | ResultReceived
    | AbandonAsked
)
Event: TypeAlias = Delivery | Streamed | AttemptStopped


# Effects.


@dataclass(frozen=True)
class Remember:
    """Make this durable before any later effect.

    If that fails, no later effect may run: each of them tells others something that this silo must
    remember after a restart.
    """

    memory: Memory


@dataclass(frozen=True)
class SendKeys:
    """To the coordinator, for all; of ``keys`` each dealer gets its own."""

    bundle: KeyBundle
    # one per other member of the cohort, in its order
    keys: tuple[ReceivingKey, ...]


@dataclass(frozen=True)
class SendShares:
    """To the coordinator, for all.

    The coordinator keeps all portions, and passes each holder its own with a proof under the
    dealing's root.
    """

    dealing: Dealing
    # one per member of U1; our own has only commitments
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class SendComplaint:
    """To the coordinator, as evidence.

    It reveals the private key for this one dealer only, and ends the attempt for this silo.
    """

    complaint: Complaint


@dataclass(frozen=True)
class UploadWords:
    """Quantise, mask with these terms and stream the values; deal vectors under ``hiding``.

    Then Streamed.
    """

    # our self mask, and a mask for each other member of U2
    terms: tuple[Term, ...]
    # None if the round compares nothing by shares
    hiding: GramKeys | None = None


@dataclass(frozen=True)
class SendHeader:
    """To the coordinator, for all; it ends the upload.

    After a lost connection it is sent again, with the same bytes.
    """

    header: Header


@dataclass(frozen=True)
class SendSurvival:
    """To the coordinator, for all.

    From then on this silo signs no other survivors of the attempt, and never abandons it. The
    coordinator accepts it while shares are awaited, too: a late signer may reveal in another's
    place.
    """

    survival: Survival


@dataclass(frozen=True)
class SendReveal:
    """To the coordinator alone.

    It has one share of each member of U2, never both. The silo forgets its secrets with it.
    """

    reveal: Reveal


@dataclass(frozen=True)
class SendAbandon:
    """To the coordinator, for all.

    The silo drops out of an attempt that still runs. Other silos count such notes before they enter
    another attempt over the same values.
    """

    note: Abandon


@dataclass(frozen=True)
class Finish:
    """The sum is open: the ledger records the digest, and ``Tagger.check`` checks the integers.

    ``tags`` are the combined tags of all survivors, empty in a sum without tags. ``survivors`` are
    in the order of their ids.
    """

    sha256: bytes
    tags: bytes
    # whose pads are removed from words and tags
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class LeaveAttempt:
    """The attempt is over without a sum: for the ledger, and its code for the coordinator.

    ``blame`` is a silo, or one of the words in security/faults.py. ``why`` stays on this machine.
    """

    # only the code leaves this silo
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
