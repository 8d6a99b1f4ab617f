"""The key of a job's silos in protobuf: what a silo contributes, and what the others did.

Each message is a table (shape.py); signatures, proofs and seals are for security/blind/group_key.py
and security/blind/sealing.py to check. Among n silos a ``Contributed`` has at most 322 + 118 n
bytes, a ``KeyPoll`` 166, fit for a control message (silo/egress/session.py), and a ``KeyReply``
738 (n - 1): below the 4 MiB of a message (proto/channel.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...files.documents import MAX_SAFE_INTEGER
from ...security.blind.group_key import KeyContribution, Relayed
from ...security.blind.sealing import SEALED_BYTES, Letter, SealedSecret, Sealing
from ...security.faults import COORDINATOR, Code
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from ..field_limits import FieldLimit, check_fields
from .secagg_sent import JOB, JOB_DIGEST, MALFORMED, SESSION
from .shape import (
    MOST_HASHES,
    SIGNATURE_BYTES,
    Sender,
    Shape,
    each,
    member,
    one,
    proof,
    sized,
    within,
)

SEALING = Shape(  # the part of a sealed secret that its sender signs
    Sealing,
    pb.Sealing,
    Code.SHARES,
    sender=member("a secret sealed by"),
    ephemeral=sized(KEY_BYTES, "the ephemeral key of {sender!r}"),
    commitment=sized(HASH_BYTES, "the commitment of {sender!r}"),
    root=sized(HASH_BYTES, "the root of {sender!r}"),
)
SEALED = Shape(  # the secret for one recipient
    SealedSecret,
    pb.Sealed,
    Code.SHARES,
    recipient=member("a secret sealed for"),
    sealed=sized(SEALED_BYTES, "what is sealed for {recipient!r}"),
    generation=within(
        0,
        MAX_SAFE_INTEGER,
        "what is sealed for {recipient!r} is sealed to prekey {found}, which there cannot be",
    ),
)
# Sorted by recipient, like the leaves under the root that the sender signed.
PIECES = each(SEALED, "recipient", "sealed pieces", code=Code.SHARES)


def _letter(proof: tuple[bytes, ...], sealed: SealedSecret) -> Letter:
    return Letter(sealed, proof)


LETTER = Shape(
    _letter,
    pb.Letter,
    Code.SHARES,
    proof=proof("a hash of a proof"),
    sealed=one(SEALED),
)
CONTRIBUTION = Shape(
    KeyContribution,
    pb.Contribution,
    Code.KEYS,
    sealing=one(SEALING),
    prekey=sized(KEY_BYTES, "the prekey of {sealing.sender!r}"),
    signature=sized(
        SIGNATURE_BYTES, "the signature of {sealing.sender!r} over what it gives to a key"
    ),
)

MOST_FIELDS = 8  # of a message, its entries aside
# A contribution and a letter are a few hundred bytes; this is well above both.
MOST_BYTES = 1024  # of an entry in an entry


@dataclass(frozen=True, slots=True)
class Contributed:
    """A silo's contribution to a job's key, and its secret sealed to each other silo, by id.

    ``session`` authenticates the sender, so ``repr`` leaves it out. ``pieces`` are sorted by
    recipient.
    """

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes
    contribution: KeyContribution
    pieces: tuple[SealedSecret, ...]


@dataclass(frozen=True, slots=True)
class KeyPoll:
    """A silo's request for the others' contributions.

    The answer is empty while a silo of the job has not contributed yet.
    """

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes


def read_contributed(data: bytes, silos: int) -> pb.Contributed:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos.

    ``contributed_from_wire`` checks the sizes of its fields.
    """
    # Counted in the bytes: protobuf creates all entries before anybody can count them.
    check_fields(data, silos + MOST_FIELDS, {})
    return pb.Contributed.FromString(data)


def read_reply(data: bytes, silos: int) -> pb.KeyReply:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos.

    The bounds keep a hostile coordinator from filling a silo's memory.
    """
    # Only the hashes of its proof repeat in a letter.
    letter = FieldLimit(MOST_HASHES + MOST_FIELDS, MOST_BYTES)
    check_fields(data, silos, {1: FieldLimit(MOST_FIELDS, MOST_BYTES, {2: letter})})
    return pb.KeyReply.FromString(data)


# Session and job come first, so a message without them is refused before its keys are read.
CONTRIBUTED = Shape(
    Contributed,
    pb.Contributed,
    MALFORMED,
    session=SESSION,
    job=JOB,
    job_digest=JOB_DIGEST,
    contribution=one(
        CONTRIBUTION, own="sealing.sender", why="gives to a key in the name of {named!r}"
    ),
    pieces=PIECES,
)
POLL = Shape(KeyPoll, pb.KeyPoll, MALFORMED, session=SESSION, job=JOB, job_digest=JOB_DIGEST)
RELAYED = each(
    Shape(
        Relayed,
        pb.Relayed,
        Code.KEYS,
        # Without ``own``: it comes from the coordinator, and ``make_key`` checks who signed.
        contribution=one(CONTRIBUTION),
        letter=one(LETTER),
    ),
    "contribution.sealing.sender",
    "contributions",
)


def contributed_to_wire(contributed: Contributed) -> pb.Contributed:
    """At the silo: the message of a contribution.

    Nothing is checked here: the coordinator reads it by the same table.
    """
    made: pb.Contributed = CONTRIBUTED.to_wire(contributed)
    return made


def contributed_from_wire(silo: str, message: pb.Contributed) -> Contributed:
    """At the coordinator, from the silo whose session it is; RefusedError blames it.

    Code MANIFEST for session and job, KEYS or SHARES for the contribution. Signatures and sealed
    pieces are still to be checked (security/blind/group_key.py).
    """
    return CONTRIBUTED.whole_from_wire(silo, message)


def poll_to_wire(poll: KeyPoll) -> pb.KeyPoll:
    """At the silo: the message of a poll."""
    made: pb.KeyPoll = POLL.to_wire(poll)
    return made


def poll_from_wire(silo: str, message: pb.KeyPoll) -> KeyPoll:
    """At the coordinator; RefusedError blames the silo."""
    return POLL.whole_from_wire(silo, message)


def secagg_delivery_to_wire(relayed: Sequence[Relayed]) -> pb.KeyReply:
    """At the coordinator, ascending by silo; empty while some are missing."""
    return pb.KeyReply(relayed=RELAYED.write(relayed))


def secagg_delivery_from_wire(message: pb.KeyReply, most: int = MOST_SILOS) -> tuple[Relayed, ...]:
    """At the silo: no more than ``most``, each silo once; RefusedError blames the coordinator."""
    # Counted before any of them is read: each costs a signature to check.
    sent = Sender(COORDINATOR, Code.KEYS)
    sent.few(message.relayed, most, "contributions")
    relayed: tuple[Relayed, ...] = RELAYED.read(sent, message.relayed, {})
    # A field that the table does not know would pass without being checked.
    sent.check_whole(message)
    return relayed
