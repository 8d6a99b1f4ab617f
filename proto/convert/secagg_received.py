"""What a silo is told in a secure sum: ``SecureDelivery``.

It is told the events of its machine, the signed specification before, or that the attempt is over:
a code. The longest each gets, in bytes, among n silos: ids of 64 characters, the largest numbers, p
= ceil(log2 n) hashes in a proof, g tagged groups (0 in the columns, where there are no tags), s
bytes of a share of compared vectors (none in the columns: there are none where nothing is compared
by shares), a specification of d bytes (2 MiB at most, in the columns 0) with m abandon notes (4000
at most, in the columns n), the survivors of earlier rounds (a MiB at most, in the columns none) and
evidence against one dealer, of t = floor(2n/3) + 1 shares; against all dealers evidence has
``MOST_PROOF_BYTES``, 1 MiB, at most, and carries the specifications of its attempts (in the columns
one of 1 byte)::

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

from ...errors import RefusedError
from ...security.faults import COORDINATOR, Code
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.evidence import Misdealing
from ...security.secagg.messages import Abandon, SurvivorsShown
from ...security.secagg.silo_events import (
    AbandonAsked,
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
    MOST_HASHES,
    MOST_PROOF_BYTES,
    MOST_SPEC_BYTES,
    SIGNATURE_BYTES,
    Sender,
    abandon_from_wire,
    abandon_to_wire,
    bundle_from_wire,
    bundle_to_wire,
    delivery_from_wire,
    delivery_to_wire,
    header_from_wire,
    header_to_wire,
    key_delivery_from_wire,
    key_delivery_to_wire,
    proofs_from_wire,
    proofs_to_wire,
    sealed_share_from_wire,
    sealed_share_to_wire,
    shown_from_wire,
    shown_to_wire,
    survival_from_wire,
    survival_to_wire,
)
from .secagg_sent import (
    ENVELOPE,
    MOST_FIELDS,
    Attempt,
    Over,
    attempt_from_wire,
    attempt_to_wire,
    over_from_wire,
    over_to_wire,
)

BODIES = range(1, 11)  # fields of SecureDelivery that are messages
SPEC, KEYS, SHARES, SURVIVORS = 3, 4, 5, 6
PROOFS, SHOWN = 4, 5  # of a SignedSpec
MOST_DELIVERY_BYTES = 560 + 34 * MOST_HASHES  # with its proof
MOST_NOTES = 4 * MOST_SILOS  # notes of several attempts may be due
MOST_SHOWN = 16  # rounds; more silos are hardly away at once
MOST_SHOWN_BYTES = 1 << 20  # of them together; the newest come first


@dataclass(frozen=True, slots=True)
class SignedSpec:
    """What a silo is asked into, and abandon notes of earlier attempts, ascending by silo and
    signature.

    ``proofs`` are evidence against dealers of the job, ascending by dealer: silos without which
    there may be sums. ``shown``: who survived in earlier rounds, ascending by context, for silos
    that were away since.
    """

    document: bytes
    signature: bytes
    notes: tuple[Abandon, ...] = ()
    proofs: tuple[Misdealing, ...] = ()
    shown: tuple[SurvivorsShown, ...] = ()


DeliveryBody: TypeAlias = (
    SignedSpec
    | KeysReceived
    | SharesReceived
    | SurvivorsReceived
    | NotesReceived
    | ResultReceived
    | AbandonAsked
    | Over
)


@dataclass(frozen=True, slots=True)
class SecaggDelivery:
    """What one silo is told."""

    attempt: Attempt
    body: DeliveryBody


def secagg_delivery_to_wire(told: SecaggDelivery | None) -> pb.SecureDelivery:
    """At the coordinator; None where nothing came before the hold time was over."""
    if told is None:
        return pb.SecureDelivery(nothing=pb.SecureNothing())
    made = pb.SecureDelivery(attempt=attempt_to_wire(told.attempt))
    match told.body:
        case SignedSpec():
            made.spec.CopyFrom(spec_to_wire(told.body))
        case KeysReceived(bundles, keys):
            given = [key_delivery_to_wire(key) for key in keys]
            made.keys.CopyFrom(
                pb.DeliveredKeys(bundles=[bundle_to_wire(bundle) for bundle in bundles], keys=given)
            )
        case SharesReceived(deliveries):
            made.shares.CopyFrom(
                pb.DeliveredShares(deliveries=[delivery_to_wire(each) for each in deliveries])
            )
        case SurvivorsReceived(headers, shares):
            sealed = [sealed_share_to_wire(share) for share in shares]
            made.survivors.CopyFrom(
                pb.DeliveredSurvivors(
                    headers=[header_to_wire(each) for each in headers], shares=sealed
                )
            )
        case NotesReceived(survivals):
            made.notes.CopyFrom(
                pb.DeliveredNotes(survivals=[survival_to_wire(each) for each in survivals])
            )
        case ResultReceived(sha256, tags):
            made.result.CopyFrom(pb.DeliveredResult(sha256=sha256, tags=tags))
        case AbandonAsked():
            made.abandon.SetInParent()
        case Over():
            made.end.CopyFrom(over_to_wire(told.body))
    return made


def spec_to_wire(told: SignedSpec) -> pb.SignedSpec:
    """What a silo is asked into, and what is brought beside it."""
    return pb.SignedSpec(
        document=told.document,
        signature=told.signature,
        notes=[abandon_to_wire(note) for note in told.notes],
        proofs=proofs_to_wire(told.proofs),
        shown=[shown_to_wire(each) for each in told.shown],
    )


def read_told(data: bytes, silos: int) -> pb.SecureDelivery:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos."""
    bounds = {
        **dict.fromkeys(BODIES, FieldLimit(silos + MOST_FIELDS, MAX_MESSAGE_BYTES)),
        SPEC: FieldLimit(
            MOST_NOTES + MOST_SHOWN + silos + MOST_FIELDS,
            MAX_MESSAGE_BYTES,
            {
                PROOFS: FieldLimit(2 * silos + MOST_FIELDS, MOST_PROOF_BYTES),
                SHOWN: FieldLimit(2 * silos + MOST_FIELDS, MOST_SHOWN_BYTES),
            },
        ),
        KEYS: FieldLimit(2 * silos + MOST_FIELDS, MOST_DELIVERY_BYTES),
        SHARES: FieldLimit(silos + MOST_FIELDS, MOST_DELIVERY_BYTES),
        SURVIVORS: FieldLimit(2 * silos + MOST_FIELDS, MAX_MESSAGE_BYTES),
    }
    check_fields(data, MOST_FIELDS, bounds)
    return pb.SecureDelivery.FromString(data)


def secagg_delivery_from_wire(message: pb.SecureDelivery) -> SecaggDelivery | None:
    """At a silo; RefusedError blames the coordinator, also for what it passed on and could have
    seen itself.
    """
    sent = Sender(COORDINATOR, ENVELOPE)
    told = None
    if message.WhichOneof("body") != "nothing":
        told = SecaggDelivery(attempt_from_wire(sent, message.attempt), _told_body(message))
    sent.check(
        message == secagg_delivery_to_wire(told),
        "has fields that its protocol version does not know",
    )
    return told


def _told_body(message: pb.SecureDelivery) -> DeliveryBody:
    match message.WhichOneof("body"):
        case "spec":
            return spec_from_wire(message.spec)
        case "keys":
            sent = Sender(COORDINATOR, Code.KEYS)
            bundles = sent.every(message.keys.bundles, bundle_from_wire, lambda b: b.silo, "keys")
            keys = sent.every(
                message.keys.keys, key_delivery_from_wire, lambda key: key.silo, "receiving keys"
            )
            return KeysReceived(bundles, keys)
        case "shares":
            shares, dealt = Sender(COORDINATOR, Code.SHARES), message.shares.deliveries
            return SharesReceived(
                shares.every(dealt, delivery_from_wire, lambda d: d.dealing.dealer, "deliveries")
            )
        case "survivors":
            survivors, headers = Sender(COORDINATOR, Code.SURVIVORS), message.survivors.headers
            named = survivors.every(headers, header_from_wire, lambda h: h.silo, "headers")
            sealed = message.survivors.shares
            sealed_to_us = survivors.every(
                sealed, sealed_share_from_wire, lambda share: share.dealer, "shares of vectors"
            )
            return SurvivorsReceived(named, sealed_to_us)
        case "notes":
            notes, signed = Sender(COORDINATOR, Code.NOTES), message.notes.survivals
            return NotesReceived(
                notes.every(signed, survival_from_wire, lambda s: s.silo, "survivors' signatures")
            )
        case "result":
            result = Sender(COORDINATOR, Code.SUM)
            digest = result.sized(message.result.sha256, HASH_BYTES, "the digest of the result")
            return ResultReceived(digest, result.tags(message.result.tags, "the result"))
        case "abandon":
            return AbandonAsked()
        case "end":
            return over_from_wire(COORDINATOR, message.end)
        case _:
            raise RefusedError(
                COORDINATOR, ENVELOPE, "tells nothing in its message of a secure sum"
            )


def spec_from_wire(message: pb.SignedSpec) -> SignedSpec:
    """SPEC, or ABANDON for its notes and survivors; ``round_spec.receive`` reads the document."""
    sent, size = Sender(COORDINATOR, Code.SPEC), len(message.document)
    sent.check(
        0 < size <= MOST_SPEC_BYTES,
        f"a specification of {size} bytes, 1 to {MOST_SPEC_BYTES} it can have",
    )
    signature = sent.sized(
        message.signature, SIGNATURE_BYTES, "the signature over the specification"
    )
    noted = Sender(COORDINATOR, Code.ABANDON)
    notes = noted.every(
        message.notes,
        abandon_from_wire,
        lambda n: (n.silo, n.signature),
        "abandon notes",
        most=MOST_NOTES,
    )
    shown = noted.every(
        message.shown,
        shown_from_wire,
        lambda s: s.ctx,
        "survivors of earlier rounds",
        most=MOST_SHOWN,
    )
    return SignedSpec(
        message.document, signature, notes, proofs_from_wire(COORDINATOR, message.proofs), shown
    )
