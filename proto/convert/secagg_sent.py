"""What a silo gives in a secure sum, and how it asks for more: ``SecureUpload`` and ``SecurePoll``.

It gives the effects of its machine (security/secagg/silo_events.py), or that the attempt is over
for it: a code, never a text. The longest each ``SecureUpload`` gets, in bytes, among n silos: ids
of 64 characters, a session of 64 bytes, the largest numbers, g tagged groups (0 in the columns,
where there are no tags), p bytes of inner products (none in the columns: there are none where
nothing is compared by shares)::

    body       at most          n = 4       10      100     1000
    keys       354 + 102*n        761     1373    10553   102354
    shares     273 + 320*n       1552     3472    32273   320273
    complaint  450                450      450      450      450
    header     434 + 8*g          429      429      429      429
    survival   350                350      350      350      350
    reveal     351 + 140*n        910     1750    14350   140351
               and p + 4
    abandon    350                350      350      350      350
    end        219                219      219      219      219

``SecurePoll`` has at most 178. So a silo's keys, its shares, what it reveals and the header of more
than 73 tags are longer than a control message may be (1024 bytes, silo/egress/control.py); all are
below the 4 MiB of a message (proto/channel.py). Of a message with more entries than there are silos
nothing is made (proto/field_limits.py).
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from ...errors import RefusedError
from ...security.faults import Code
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.silo_events import (
    SendAbandon,
    SendComplaint,
    SendHeader,
    SendKeys,
    SendReveal,
    SendShares,
    SendSurvival,
)
from .. import secure_pb2 as pb
from ..channel import MAX_MESSAGE_BYTES
from ..field_limits import FieldLimit, check_fields
from .secagg_messages import (
    Sender,
    abandon_from_wire,
    abandon_to_wire,
    bundle_from_wire,
    bundle_to_wire,
    complaint_from_wire,
    complaint_to_wire,
    dealing_from_wire,
    dealing_to_wire,
    header_from_wire,
    header_to_wire,
    portion_from_wire,
    portion_to_wire,
    receiving_from_wire,
    receiving_to_wire,
    reveal_from_wire,
    reveal_to_wire,
    survival_from_wire,
    survival_to_wire,
)

BODIES = range(2, 11)  # fields of SecureUpload that are messages
MOST_FIELDS = 8  # of SecureUpload, which has three; and of what is in a body beside its entries
# the ErrorCode of what is no message of a secure sum; what its body holds has the step's Code
ENVELOPE = "MANIFEST"
MOST_SESSION_BYTES = 64

CODES = {pb.SecureCode.Value(f"SECURE_CODE_{code.name}"): code for code in Code}


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt at which sum.

    ``ctx`` is of the specification as it was told, so a malformed one has one too.
    """

    job: str
    job_digest: bytes
    round: int
    attempt: int
    ctx: bytes


@dataclass(frozen=True, slots=True)
class Over:
    """The attempt is over for who says so."""

    code: Code


UploadBody: TypeAlias = (
    SendKeys
    | SendShares
    | SendComplaint
    | SendHeader
    | SendSurvival
    | SendReveal
    | SendAbandon
    | Over
)


@dataclass(frozen=True, slots=True)
class SecaggUpload:
    """What one silo gives."""

    session: bytes = field(repr=False)
    attempt: Attempt
    body: UploadBody


@dataclass(frozen=True, slots=True)
class SecaggPoll:
    """A silo waits for the next message of a round's sums, of which it has taken in ``had``."""

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes
    round: int
    had: int


def most_contributed(silos: int, groups: int, products: int = 0) -> int:
    """Bytes of all that one of so many silos gives in one attempt, masked words aside.

    The sum of the table.
    """
    return 2781 + 562 * silos + 8 * groups + (products and products + 4)


def attempt_to_wire(attempt: Attempt) -> pb.SecureAttempt:
    """Either way."""
    return pb.SecureAttempt(
        job=attempt.job,
        job_digest=attempt.job_digest,
        round=attempt.round,
        attempt=attempt.attempt,
        context=attempt.ctx,
    )


def attempt_from_wire(sent: Sender, message: pb.SecureAttempt) -> Attempt:
    """Names it; whether it is one that goes on is for the shell to say."""
    return Attempt(
        sent.member(message.job, "the job"),
        sent.sized(message.job_digest, HASH_BYTES, "the digest of the job"),
        message.round,
        message.attempt,
        sent.sized(message.context, HASH_BYTES, "the context of the attempt"),
    )


def over_to_wire(over: Over) -> pb.SecureEnd:
    """Either way."""
    return pb.SecureEnd(code=f"SECURE_CODE_{over.code.name}")


def over_from_wire(peer: str, message: pb.SecureEnd) -> Over:
    """RefusedError blames ``peer``, who sent it here."""
    code = CODES.get(message.code)
    if code is None:
        raise RefusedError(
            peer, ENVELOPE, f"ends an attempt with code {message.code}, which there is not"
        )
    return Over(code)


def secagg_upload_to_wire(given: SecaggUpload) -> pb.SecureUpload:
    """At the silo."""
    made = pb.SecureUpload(session=given.session, attempt=attempt_to_wire(given.attempt))
    match given.body:
        case SendKeys(bundle, keys):
            receiving = [receiving_to_wire(key) for key in keys]
            made.keys.CopyFrom(pb.UploadedKeys(bundle=bundle_to_wire(bundle), keys=receiving))
        case SendShares(dealing, portions):
            dealt = [portion_to_wire(portion) for portion in portions]
            made.shares.CopyFrom(pb.Dealt(dealing=dealing_to_wire(dealing), portions=dealt))
        case SendComplaint(complaint):
            made.complaint.CopyFrom(complaint_to_wire(complaint))
        case SendHeader(header):
            made.header.CopyFrom(header_to_wire(header))
        case SendSurvival(survival):
            made.survival.CopyFrom(survival_to_wire(survival))
        case SendReveal(reveal):
            made.reveal.CopyFrom(reveal_to_wire(reveal))
        case SendAbandon(note):
            made.abandon.CopyFrom(abandon_to_wire(note))
        case Over():
            made.end.CopyFrom(over_to_wire(given.body))
    return made


def read_contribution(data: bytes, silos: int) -> pb.SecureUpload:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos."""
    check_fields(
        data, MOST_FIELDS, dict.fromkeys(BODIES, FieldLimit(silos + MOST_FIELDS, MAX_MESSAGE_BYTES))
    )
    return pb.SecureUpload.FromString(data)


def secagg_upload_from_wire(silo: str, message: pb.SecureUpload) -> SecaggUpload:
    """At the coordinator, from the silo whose session it is; RefusedError blames it."""
    sent = Sender(silo, ENVELOPE)
    # (1) It names a session and an attempt.
    _check_session(sent, message.session)
    attempt = attempt_from_wire(sent, message.attempt)
    # (2) What it holds is well formed, and in the silo's own name.
    body = _given_body(silo, message)
    given = SecaggUpload(message.session, attempt, body)
    # (3) It holds nothing else.
    sent.check(
        message == secagg_upload_to_wire(given),
        "has fields that its protocol version does not know",
    )
    return given


def _given_body(silo: str, message: pb.SecureUpload) -> UploadBody:
    match message.WhichOneof("body"):
        case "keys":
            bundle = bundle_from_wire(silo, message.keys.bundle)
            _check_own(silo, Code.KEYS, bundle.silo)
            given = Sender(silo, Code.KEYS)
            keys = given.every(
                message.keys.keys, receiving_from_wire, lambda key: key.dealer, "receiving keys"
            )
            return SendKeys(bundle, keys)
        case "shares":
            dealing = dealing_from_wire(silo, message.shares.dealing)
            _check_own(silo, Code.SHARES, dealing.dealer)
            sent, dealt = Sender(silo, Code.SHARES), message.shares.portions
            portions = sent.every(
                dealt,
                lambda peer, m: portion_from_wire(peer, m, dealing.dealer),
                lambda p: p.holder,
                "portions",
            )
            return SendShares(dealing, portions)
        case "complaint":
            complaint = complaint_from_wire(silo, message.complaint)
            _check_own(silo, Code.COMPLAINT, complaint.silo)
            return SendComplaint(complaint)
        case "header":
            header = header_from_wire(silo, message.header)
            _check_own(silo, Code.UPLOAD, header.silo)
            return SendHeader(header)
        case "survival":
            survival = survival_from_wire(silo, message.survival)
            _check_own(silo, Code.NOTES, survival.silo)
            return SendSurvival(survival)
        case "reveal":
            reveal = reveal_from_wire(silo, message.reveal)
            _check_own(silo, Code.REVEAL, reveal.silo)
            return SendReveal(reveal)
        case "abandon":
            note = abandon_from_wire(silo, message.abandon)
            _check_own(silo, Code.ABANDON, note.silo)
            return SendAbandon(note)
        case "end":
            return over_from_wire(silo, message.end)
        case _:
            raise RefusedError(silo, ENVELOPE, "gives nothing in its message of a secure sum")


def poll_to_wire(asked: SecaggPoll) -> pb.SecurePoll:
    """At the silo."""
    return pb.SecurePoll(
        session=asked.session,
        job=asked.job,
        job_digest=asked.job_digest,
        round=asked.round,
        had=asked.had,
    )


def poll_from_wire(silo: str, message: pb.SecurePoll) -> SecaggPoll:
    """At the coordinator; RefusedError blames the silo."""
    sent = Sender(silo, ENVELOPE)
    _check_session(sent, message.session)
    job = sent.member(message.job, "the job")
    digest = sent.sized(message.job_digest, HASH_BYTES, "the digest of the job")
    asked = SecaggPoll(message.session, job, digest, message.round, message.had)
    sent.check(message == poll_to_wire(asked), "has fields that its protocol version does not know")
    return asked


def _check_session(sent: Sender, session: bytes) -> None:
    size = len(session)
    sent.check(
        0 < size <= MOST_SESSION_BYTES,
        f"a session of {size} bytes, 1 to {MOST_SESSION_BYTES} it can have",
    )


def _check_own(silo: str, code: Code, named: str) -> None:
    """A silo speaks for itself: a message that does not hold drops whom it names out of the
    attempt.
    """
    Sender(silo, code).check(named == silo, f"gives a message in the name of {named!r}")
