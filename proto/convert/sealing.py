"""Sealed secrets in protobuf: of the group key and of a Mix, as security/blind/sealing.py has them.

Written and refused as the messages of a secure sum are (secagg_messages.py): counts and lengths are checked before
anything is made of them, and signatures, proofs and seals are for security/blind/sealing.py to check.
"""

from collections.abc import Sequence

from ...files.documents import MAX_SAFE_INTEGER
from ...security.blind.sealing import SEALED_BYTES, Letter, Sealed, Sealing
from ...security.faults import Code
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from .. import secure_pb2 as pb
from .secagg_messages import MOST_HASHES, Sender


def sealing_to_wire(sealing: Sealing) -> pb.Sealing:
    """What the sender signs of its secret."""
    return pb.Sealing(
        sender=sealing.sender, ephemeral=sealing.ephemeral, commitment=sealing.commitment, root=sealing.root
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


def sealed_to_wire(piece: Sealed) -> pb.Sealed:
    """The secret for one recipient."""
    return pb.Sealed(recipient=piece.recipient, sealed=piece.sealed, generation=piece.generation)


def sealed_from_wire(peer: str, message: pb.Sealed) -> Sealed:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    recipient = sent.member(message.recipient, "a secret sealed for")
    sealed = sent.sized(message.sealed, SEALED_BYTES, f"what is sealed for {recipient!r}")
    why = f"what is sealed for {recipient!r} is sealed to prekey {message.generation}, which there cannot be"
    sent.check(message.generation <= MAX_SAFE_INTEGER, why)
    return Sealed(recipient, sealed, message.generation)


def pieces_from_wire(peer: str, messages: Sequence[pb.Sealed]) -> tuple[Sealed, ...]:
    """SHARES; ascending by recipient, each once."""
    return Sender(peer, Code.SHARES).every(messages, sealed_from_wire, lambda piece: piece.recipient, "sealed pieces")


def letter_to_wire(letter: Letter) -> pb.Letter:
    """A piece with its proof."""
    return pb.Letter(sealed=sealed_to_wire(letter.sealed), proof=letter.proof)


def letter_from_wire(peer: str, message: pb.Letter) -> Letter:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    sent.few(message.proof, MOST_HASHES, "hashes of a proof")
    proof = tuple(sent.sized(each, HASH_BYTES, "a hash of a proof") for each in message.proof)
    return Letter(sealed_from_wire(peer, message.sealed), proof)
