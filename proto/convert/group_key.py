"""The key of a job's silos in protobuf: what a silo gives to it, and what the others gave, as it is
passed on.

They are written and refused as the messages of a secure sum are (secagg_messages.py); signatures,
proofs and seals are for security/blind/group_key.py to check. Among n silos a ``Contributed`` has
at most 322 + 118 n bytes, a ``KeyPoll`` 166, fit for a control message (silo/egress/control.py),
and a ``KeyReply`` 738 (n - 1): below the 4 MiB of a message (proto/channel.py).

Sealed secrets in protobuf: of the group key and of a Mix, as security/blind/sealing.py has them.

Written and refused as the messages of a secure sum are (secagg_messages.py): counts and lengths are
checked before anything is made of them, and signatures, proofs and seals are for
security/blind/sealing.py to check.
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
from .secagg_messages import MOST_HASHES, SIGNATURE_BYTES, Sender
from .secagg_sent import ENVELOPE, MOST_SESSION_BYTES


def sealing_to_wire(sealing: Sealing) -> pb.Sealing:
    """What the sender signs of its secret."""
    return pb.Sealing(
        sender=sealing.sender,
        ephemeral=sealing.ephemeral,
        commitment=sealing.commitment,
        root=sealing.root,
    )


def sealing_from_wire(peer: str, message: pb.Sealing) -> Sealing:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    sender = sent.member(message.sender, "a secret sealed by")
    return Sealing(
        sender,
        sent.sized(message.ephemeral, KEY_BYTES, f"the ephemeral key of {sender!r}"),
        sent.sized(message.commitment, HASH_BYTES, f"the commitment of {sender!r}"),
        sent.sized(message.root, HASH_BYTES, f"the root of {sender!r}"),
    )


def sealed_to_wire(piece: SealedSecret) -> pb.Sealed:
    """The secret for one recipient."""
    return pb.Sealed(recipient=piece.recipient, sealed=piece.sealed, generation=piece.generation)


def sealed_from_wire(peer: str, message: pb.Sealed) -> SealedSecret:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    recipient = sent.member(message.recipient, "a secret sealed for")
    sealed = sent.sized(message.sealed, SEALED_BYTES, f"what is sealed for {recipient!r}")
    why = (
        f"what is sealed for {recipient!r} is sealed to prekey {message.generation}, which there"
        " cannot be"
    )
    sent.check(message.generation <= MAX_SAFE_INTEGER, why)
    return SealedSecret(recipient, sealed, message.generation)


def pieces_from_wire(peer: str, messages: Sequence[pb.Sealed]) -> tuple[SealedSecret, ...]:
    """SHARES; ascending by recipient, each once."""
    return Sender(peer, Code.SHARES).every(
        messages, sealed_from_wire, lambda piece: piece.recipient, "sealed pieces"
    )


def letter_to_wire(letter: Letter) -> pb.Letter:
    """A piece with its proof."""
    return pb.Letter(sealed=sealed_to_wire(letter.sealed), proof=letter.proof)


def letter_from_wire(peer: str, message: pb.Letter) -> Letter:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    sent.few(message.proof, MOST_HASHES, "hashes of a proof")
    proof = tuple(sent.sized(each, HASH_BYTES, "a hash of a proof") for each in message.proof)
    return Letter(sealed_from_wire(peer, message.sealed), proof)


MOST_FIELDS = 8  # of a message, its entries aside
MOST_BYTES = 1024  # of an entry in an entry


@dataclass(frozen=True, slots=True)
class Contributed:
    """What a silo gives to a job's key, and its secret sealed to each other silo of the
    job, by id.
    """

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes
    contribution: KeyContribution
    pieces: tuple[SealedSecret, ...]


@dataclass(frozen=True, slots=True)
class KeyPoll:
    """A silo asks for what the others gave."""

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes


def read_contributed(data: bytes, silos: int) -> pb.Contributed:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos."""
    check_fields(data, silos + MOST_FIELDS, {})
    return pb.Contributed.FromString(data)


def read_told(data: bytes, silos: int) -> pb.KeyReply:
    """The same."""
    letter = FieldLimit(MOST_HASHES + MOST_FIELDS, MOST_BYTES)
    check_fields(data, silos, {1: FieldLimit(MOST_FIELDS, MOST_BYTES, {2: letter})})
    return pb.KeyReply.FromString(data)


def contribution_to_wire(contribution: KeyContribution) -> pb.Contribution:
    """What a silo signs of it."""
    sealing = sealing_to_wire(contribution.sealing)
    return pb.Contribution(
        sealing=sealing, prekey=contribution.prekey, signature=contribution.signature
    )


def contribution_from_wire(peer: str, message: pb.Contribution) -> KeyContribution:
    """KEYS, or SHARES for its sealing."""
    sealing = sealing_from_wire(peer, message.sealing)
    sent = Sender(peer, Code.KEYS)
    prekey = sent.sized(message.prekey, KEY_BYTES, f"the prekey of {sealing.sender!r}")
    what = f"the signature of {sealing.sender!r} over what it gives to a key"
    return KeyContribution(sealing, prekey, sent.sized(message.signature, SIGNATURE_BYTES, what))


def contributed_to_wire(contributed: Contributed) -> pb.Contributed:
    """At the silo."""
    return pb.Contributed(
        session=contributed.session,
        job=contributed.job,
        job_digest=contributed.job_digest,
        contribution=contribution_to_wire(contributed.contribution),
        pieces=[sealed_to_wire(piece) for piece in contributed.pieces],
    )


def contributed_from_wire(silo: str, message: pb.Contributed) -> Contributed:
    """At the coordinator, from the silo whose session it is; RefusedError blames it."""
    sent = Sender(silo, ENVELOPE)
    # (1) It names a session and a job.
    job, digest = _named(sent, message)
    # (2) What it holds is well formed, and in the silo's own name.
    contribution = contribution_from_wire(silo, message.contribution)
    sender = contribution.sealing.sender
    Sender(silo, Code.KEYS).check(sender == silo, f"gives to a key in the name of {sender!r}")
    made = Contributed(
        message.session, job, digest, contribution, pieces_from_wire(silo, message.pieces)
    )
    # (3) It holds nothing else.
    sent.check(
        message == contributed_to_wire(made), "has fields that its protocol version does not know"
    )
    return made


def poll_to_wire(asked: KeyPoll) -> pb.KeyPoll:
    """At the silo."""
    return pb.KeyPoll(session=asked.session, job=asked.job, job_digest=asked.job_digest)


def poll_from_wire(silo: str, message: pb.KeyPoll) -> KeyPoll:
    """At the coordinator; RefusedError blames the silo."""
    sent = Sender(silo, ENVELOPE)
    asked = KeyPoll(message.session, *_named(sent, message))
    sent.check(message == poll_to_wire(asked), "has fields that its protocol version does not know")
    return asked


def secagg_delivery_to_wire(relayed: Sequence[Relayed]) -> pb.KeyReply:
    """At the coordinator, ascending by silo; empty while some are missing."""
    return pb.KeyReply(
        relayed=[
            pb.Relayed(
                contribution=contribution_to_wire(each.contribution),
                letter=letter_to_wire(each.letter),
            )
            for each in relayed
        ]
    )


def secagg_delivery_from_wire(message: pb.KeyReply, most: int = MOST_SILOS) -> tuple[Relayed, ...]:
    """At the silo: no more than ``most``, each silo once; RefusedError blames the coordinator."""
    sent = Sender(COORDINATOR, Code.KEYS)
    relayed = sent.every(
        message.relayed,
        _relayed_from_wire,
        lambda each: each.contribution.sealing.sender,
        "contributions",
        most,
    )
    sent.check(
        message == secagg_delivery_to_wire(relayed),
        "has fields that its protocol version does not know",
    )
    return relayed


def _relayed_from_wire(peer: str, message: pb.Relayed) -> Relayed:
    return Relayed(
        contribution_from_wire(peer, message.contribution), letter_from_wire(peer, message.letter)
    )


def _named(sent: Sender, message: pb.Contributed | pb.KeyPoll) -> tuple[str, bytes]:
    size = len(message.session)
    sent.check(
        0 < size <= MOST_SESSION_BYTES,
        f"a session of {size} bytes, 1 to {MOST_SESSION_BYTES} it can have",
    )
    job = sent.member(message.job, "the job")
    return job, sent.sized(message.job_digest, HASH_BYTES, "the digest of the job")
