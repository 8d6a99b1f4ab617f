"""Messages that a silo receives in a secure sum: ``SecureDelivery``.

It receives the events of its machine, the signed specification before, or that the attempt is over:
a code. The table has the largest size of each, in bytes, among n silos: ids of 64 characters, the
largest numbers, p = ceil(log2 n) hashes in a proof, g tagged groups (0 in the columns), s bytes of
a share of compared vectors (0 in the columns), a specification of d bytes (2 MiB at most, 0 in the
columns) with m abandon notes (4000 at most, n in the columns), the survivors of earlier rounds (a
MiB at most, none in the columns) and evidence against one dealer, of t = floor(2n/3) + 1 shares.
Evidence against all dealers has at most ``MOST_PROOF_BYTES``, 1 MiB, with the specifications of its
attempts (one of 1 byte in the columns)::

    body        at most                               n = 4       10      100     1000
    spec        530 + d + 135*m + 320*n + 138*t        2751     6033    55265   547565
    keys        408*n + 34*p*(n - 1) - 18              1817     5285    64344   747642
    shares      4 + n*(560 + 34*p)                      2481     6929    79770   899970
    survivors   154 + n*(219 + 8*g)                    1008     2292    21553   214153
                and (n - 1)*(76 + s)
    notes       153 + 135*n                             692     1502    13652   135153
    result      191 + 8*g                               185      185      185      185
    abandon     151                                     151      151      151      151
    end         153                                     153      153      153      153

All are below the 4 MiB of a message (proto/channel.py) but one: the survivors of a sum with tags
for more than 496 groups, where they are 1000; of 100 survivors any sum's tags fit.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ...security.faults import COORDINATOR, Code
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.evidence import Misdealing
from ...security.secagg.messages import Abandon, SurvivorsShown
from ...security.secagg.silo_events import (
    AbandonAsked,
    Delivery,
    KeysReceived,
    NotesReceived,
    ResultReceived,
    SharesReceived,
    SurvivorsReceived,
)
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from ..channel import MAX_MESSAGE_BYTES
from ..field_limits import FieldLimit, check_fields
from .secagg_messages import (
    ABANDON,
    BUNDLE,
    DELIVERY,
    HEADER,
    KEY_DELIVERY,
    MOST_PROOF_BYTES,
    MOST_SPEC_BYTES,
    SEALED_SHARE,
    SHOWN,
    SURVIVAL,
    proofs_from_wire,
    proofs_to_wire,
)
from .secagg_sent import (
    ATTEMPT,
    MALFORMED,
    MOST_FIELDS,
    OVER,
    Attempt,
    Over,
    attempt_to_wire,
)
from .shape import (
    MOST_HASHES,
    SIGNATURE_BYTES,
    OneOf,
    Sender,
    Shape,
    WireField,
    each,
    length_within,
    one,
    sized,
    tags,
)

BODIES = range(1, 11)  # fields of SecureDelivery that are messages
SPEC_FIELD, KEYS_FIELD, SHARES_FIELD, SURVIVORS_FIELD = 3, 4, 5, 6
PROOFS_FIELD, SHOWN_FIELD = 4, 5  # of a SignedSpec
MOST_DELIVERY_BYTES = 560 + 34 * MOST_HASHES  # with its proof
MOST_NOTES = 4 * MOST_SILOS  # notes of several attempts may be due
MOST_SHOWN = 16  # rounds; more silos are hardly away at once
MOST_SHOWN_BYTES = 1 << 20  # of them together; the newest come first


@dataclass(frozen=True, slots=True)
class SignedSpec:
    """The signed specification of an attempt, and what a silo needs to enter it.

    ``notes`` are abandon notes of earlier attempts, ascending by silo and signature. ``proofs`` are
    evidence against dealers of the job, ascending by dealer: sums may lack these silos. ``shown``
    are the survivors of earlier rounds, ascending by context, for silos that were away since.
    """

    document: bytes
    signature: bytes
    notes: tuple[Abandon, ...] = ()
    proofs: tuple[Misdealing, ...] = ()
    shown: tuple[SurvivorsShown, ...] = ()


DeliveryBody: TypeAlias = SignedSpec | Delivery | Over


@dataclass(frozen=True, slots=True)
class SecaggDelivery:
    """One message to a silo.

    ``attempt`` tells a late message of an earlier attempt from one of the current attempt.
    """

    attempt: Attempt
    body: DeliveryBody


SPEC = Shape(  # SPEC, or ABANDON for its notes and survivors; the machine reads the document
    SignedSpec,
    pb.SignedSpec,
    Code.SPEC,
    document=length_within(
        1, MOST_SPEC_BYTES, "a specification of {length} bytes, {low} to {high} it can have"
    ),
    signature=sized(SIGNATURE_BYTES, "the signature over the specification"),
    # Sorted by silo and signature: one silo may have signed notes on several attempts.
    notes=each(ABANDON, "silo signature", "abandon notes", MOST_NOTES, Code.ABANDON),
    shown=each(SHOWN, "ctx", "survivors of earlier rounds", MOST_SHOWN, Code.ABANDON),
    # Evidence has two kinds, so functions convert it and not a table (secagg_messages.py).
    proofs=WireField(lambda sent, found, _: proofs_from_wire(sent.peer, found), proofs_to_wire),
)
KEYS = Shape(
    KeysReceived,
    pb.DeliveredKeys,
    Code.KEYS,
    bundles=each(BUNDLE, "silo", "keys"),
    keys=each(KEY_DELIVERY, "silo", "receiving keys"),
)
SHARES = Shape(
    SharesReceived,
    pb.DeliveredShares,
    Code.SHARES,
    deliveries=each(DELIVERY, "dealing.dealer", "deliveries"),
)
SURVIVORS = Shape(
    SurvivorsReceived,
    pb.DeliveredSurvivors,
    Code.SURVIVORS,
    headers=each(HEADER, "silo", "headers"),
    shares=each(SEALED_SHARE, "dealer", "shares of vectors"),
)
NOTES = Shape(
    NotesReceived,
    pb.DeliveredNotes,
    Code.NOTES,
    survivals=each(SURVIVAL, "silo", "survivors' signatures"),
)
RESULT = Shape(
    ResultReceived,
    pb.DeliveredResult,
    Code.SUM,
    sha256=sized(HASH_BYTES, "the digest of the result"),
    tags=tags("the result"),
)
BODY = OneOf(
    "tells nothing in its message of a secure sum",
    spec=(SignedSpec, one(SPEC)),
    keys=(KeysReceived, one(KEYS)),
    shares=(SharesReceived, one(SHARES)),
    survivors=(SurvivorsReceived, one(SURVIVORS)),
    notes=(NotesReceived, one(NOTES)),
    result=(ResultReceived, one(RESULT)),
    abandon=(AbandonAsked, one(Shape(AbandonAsked, pb.AbandonAsked, MALFORMED))),
    end=(Over, one(OVER)),
)


def secagg_delivery_to_wire(delivery: SecaggDelivery | None) -> pb.SecureDelivery:
    """At the coordinator: the message with one body, chosen by the type of ``delivery.body``.

    None stands for an answer without a message, where none came before the hold time was over.
    """
    if delivery is None:
        return pb.SecureDelivery(nothing=pb.SecureNothing())
    attempt = attempt_to_wire(delivery.attempt)
    return pb.SecureDelivery(attempt=attempt, **BODY.to_wire(delivery.body))


def spec_to_wire(spec: SignedSpec) -> pb.SignedSpec:
    """At the coordinator, which also stores the specification in this form.

    The coordinator's signature covers only the document, not the notes or the evidence.
    """
    made: pb.SignedSpec = SPEC.to_wire(spec)
    return made


def spec_from_wire(message: pb.SignedSpec) -> SignedSpec:
    """A signed specification, with the notes and evidence that a silo needs to enter the attempt.

    RefusedError SPEC, or ABANDON for notes and survivors. The state machine parses the document.
    """
    return SPEC.from_wire(COORDINATOR, message)


def read_delivery(data: bytes, silos: int) -> pb.SecureDelivery:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos.

    No body has more fields than its longest honest form.
    """
    # A malicious coordinator must not exhaust a silo's memory either.
    bounds = {
        **dict.fromkeys(BODIES, FieldLimit(silos + MOST_FIELDS, MAX_MESSAGE_BYTES)),
        SPEC_FIELD: FieldLimit(
            MOST_NOTES + MOST_SHOWN + silos + MOST_FIELDS,
            MAX_MESSAGE_BYTES,
            {
                # One portion per silo, and shares of at most as many.
                PROOFS_FIELD: FieldLimit(2 * silos + MOST_FIELDS, MOST_PROOF_BYTES),
                SHOWN_FIELD: FieldLimit(2 * silos + MOST_FIELDS, MOST_SHOWN_BYTES),
            },
        ),
        # A bundle and a receiving key per silo.
        KEYS_FIELD: FieldLimit(2 * silos + MOST_FIELDS, MOST_DELIVERY_BYTES),
        # One portion per dealer.
        SHARES_FIELD: FieldLimit(silos + MOST_FIELDS, MOST_DELIVERY_BYTES),
        # A header and a share of compared vectors per survivor; a share is as long as a vector.
        SURVIVORS_FIELD: FieldLimit(2 * silos + MOST_FIELDS, MAX_MESSAGE_BYTES),
    }
    check_fields(data, MOST_FIELDS, bounds)
    return pb.SecureDelivery.FromString(data)


def secagg_delivery_from_wire(message: pb.SecureDelivery) -> SecaggDelivery | None:
    """At a silo; RefusedError blames the coordinator, also for what it only passed on.

    None where nothing came before the hold time was over. Code MANIFEST for the attempt, else the
    code of the step.
    """
    sent = Sender(COORDINATOR, MALFORMED)
    delivery = None
    # An answer without a message ends this poll, not the attempt.
    if message.WhichOneof("body") == "nothing":
        sent.check(not message.HasField("attempt"), "names an attempt, and has no message of it")
    else:
        attempt = ATTEMPT.from_wire(COORDINATOR, message.attempt)
        delivery = SecaggDelivery(attempt, BODY.from_wire(sent, message))
    # A field that the tables do not know would pass without being checked.
    sent.check_whole(message)
    return delivery
