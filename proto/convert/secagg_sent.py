"""The messages of a silo in a secure sum, and its polls: ``SecureUpload``, ``SecurePoll``.

It sends the effects of its machine (security/secagg/silo_events.py), or that the attempt is over
for it: a code, never a text. The table has the largest size of each ``SecureUpload``, in bytes,
among n silos: ids of 64 characters, a session of 64 bytes, the largest numbers, g tagged groups and
p bytes of inner products (the columns have none of either)::

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
than 73 tags are longer than a control message may be (1024 bytes, silo/egress/session.py); all are
below the 4 MiB of a message (proto/channel.py). Of a message with more entries than there are silos
nothing is made (proto/field_limits.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
    ABANDON,
    BUNDLE,
    COMPLAINT,
    DEALING,
    HEADER,
    PORTIONS,
    RECEIVING_KEY,
    REVEAL,
    SURVIVAL,
)
from .shape import (
    OneOf,
    Sender,
    Shape,
    coded,
    each,
    length_within,
    member,
    one,
    plain,
    sized,
)

BODIES = range(2, 11)  # fields of SecureUpload that are messages
MOST_FIELDS = 8  # of SecureUpload, which has three; and of what is in a body besides its entries
# the ErrorCode of what is no message of a secure sum; what its body holds has the step's Code
MALFORMED = "MANIFEST"
MOST_SESSION_BYTES = 64


@contextmanager
def step_codes() -> Iterator[None]:
    """RefusedError SECURE, with the step's ``Code`` in its text; MALFORMED stays as it is."""
    try:
        yield
    except RefusedError as error:
        # MALFORMED is a code of the RPC already; codes of steps are not.
        if error.code == MALFORMED:
            raise
        # The RPC has one code for all steps; the text names the step's own.
        raise RefusedError(error.peer, "SECURE", f"{error.code}: {error.why}") from error


# By name: a ``Code`` that the schema lacks fails at import.
CODES = {code: pb.SecureCode.Value(f"SECURE_CODE_{code.name}") for code in Code}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at one sum.

    ``ctx`` is of the specification as it was delivered, so a malformed one has one too.
    """

    job: str
    job_digest: bytes
    round: int
    attempt: int
    ctx: bytes


@dataclass(frozen=True, slots=True)
class Over:
    """The attempt is over for its sender; ``code`` says why, and no text crosses."""

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
    """One message of a silo.

    ``session`` authenticates the sender, so ``repr`` leaves it out. ``body`` is in the silo's own
    name.
    """

    session: bytes = field(repr=False)
    attempt: Attempt
    body: UploadBody


@dataclass(frozen=True, slots=True)
class SecaggPoll:
    """A silo waits for the next message of a round's sums, of which it has taken in ``had``.

    ``had`` counts messages, so a message lost with its connection is delivered again.
    """

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes
    round: int
    had: int


def most_contributed(silos: int, groups: int, products: int = 0) -> int:
    """Bytes of all that one of so many silos sends in one attempt, masked words aside.

    The sum of the table.
    """
    # The coefficients are the sums of the table's columns. A field of products takes 4 bytes more
    # than the products, and an empty one none.
    return 2781 + 562 * silos + 8 * groups + (products and products + 4)


# Only the length is checked here; the server compares it with the open session.
SESSION = length_within(
    1, MOST_SESSION_BYTES, "a session of {length} bytes, {low} to {high} it can have"
)
JOB = member("the job")
JOB_DIGEST = sized(HASH_BYTES, "the digest of the job")


def _attempt(context: bytes, **others: Any) -> Attempt:
    # ``context`` in the schema is ``ctx`` in the state machines.
    return Attempt(ctx=context, **others)


ATTEMPT = Shape(  # the shell judges whether it is still running
    _attempt,
    pb.SecureAttempt,
    MALFORMED,
    job=JOB,
    job_digest=JOB_DIGEST,
    round=plain(),
    attempt=plain(),
    context=sized(HASH_BYTES, "the context of the attempt", path="ctx"),
)
OVER = Shape(
    Over,
    pb.SecureEnd,
    MALFORMED,
    code=coded(CODES, "ends an attempt with code {found}, which there is not"),
)
KEYS = Shape(
    SendKeys,
    pb.UploadedKeys,
    Code.KEYS,
    bundle=one(BUNDLE, own="silo"),
    keys=each(RECEIVING_KEY, "dealer", "receiving keys"),
)
DEALT = Shape(
    SendShares,
    pb.Dealt,
    Code.SHARES,
    dealing=one(DEALING, own="dealer"),
    portions=PORTIONS,
)
BODY = OneOf(
    "gives nothing in its message of a secure sum",
    keys=(SendKeys, one(KEYS)),
    shares=(SendShares, one(DEALT)),
    complaint=(SendComplaint, one(COMPLAINT, own="silo", path="complaint")),
    header=(SendHeader, one(HEADER, own="silo", path="header")),
    survival=(SendSurvival, one(SURVIVAL, own="silo", path="survival")),
    reveal=(SendReveal, one(REVEAL, own="silo", path="reveal")),
    abandon=(SendAbandon, one(ABANDON, own="silo", path="note")),
    end=(Over, one(OVER)),
)
POLL = Shape(
    SecaggPoll,
    pb.SecurePoll,
    MALFORMED,
    session=SESSION,
    job=JOB,
    job_digest=JOB_DIGEST,
    round=plain(),
    had=plain(),
)


def attempt_to_wire(attempt: Attempt) -> pb.SecureAttempt:
    """The attempt that a message belongs to; used in both directions."""
    made: pb.SecureAttempt = ATTEMPT.to_wire(attempt)
    return made


def secagg_upload_to_wire(upload: SecaggUpload) -> pb.SecureUpload:
    """At the silo: the message with one body, chosen by the type of ``upload.body``."""
    attempt = attempt_to_wire(upload.attempt)
    return pb.SecureUpload(session=upload.session, attempt=attempt, **BODY.to_wire(upload.body))


def read_contribution(data: bytes, silos: int) -> pb.SecureUpload:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos.

    An honest body has at most one entry per silo, and a few fields more.
    """
    # Keys, shares and reveals have entries per silo; the other bodies have none.
    check_fields(
        data, MOST_FIELDS, dict.fromkeys(BODIES, FieldLimit(silos + MOST_FIELDS, MAX_MESSAGE_BYTES))
    )
    return pb.SecureUpload.FromString(data)


def secagg_upload_from_wire(silo: str, message: pb.SecureUpload) -> SecaggUpload:
    """At the coordinator, from the silo whose session it is; RefusedError blames it.

    Code MANIFEST for session and attempt, else the code of the step. The state machine checks the
    signatures.
    """
    sent = Sender(silo, MALFORMED)
    # (1) It names a session and an attempt.
    session = SESSION.read(sent, message.session, {})
    attempt = ATTEMPT.from_wire(silo, message.attempt)

    # (2) What it holds is well formed, and in the silo's own name.
    upload = SecaggUpload(session, attempt, BODY.from_wire(sent, message))

    # (3) It holds nothing else.
    sent.check_whole(message)
    return upload


def poll_to_wire(poll: SecaggPoll) -> pb.SecurePoll:
    """At the silo."""
    made: pb.SecurePoll = POLL.to_wire(poll)
    return made


def poll_from_wire(silo: str, message: pb.SecurePoll) -> SecaggPoll:
    """At the coordinator; RefusedError blames the silo."""
    return POLL.whole_from_wire(silo, message)
