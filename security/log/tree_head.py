"""The head of a ledger, signed (c2sp.org/tlog-checkpoint).

A note (note.py) of origin, size and root::

    staddle.example/lung/hospital-a/egress
    4
    037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=

    — staddle.example/lung/hospital-a/egress
        NTLrx/l9vRr3UCZ37rojt5iPmfieDf67mR5Fu6XOZksxlfYTTzsVojtXxtMNuVgK9YdT…

The origin names the log and is the name of its key. Whoever holds a checkpoint can tell each later
one that does not extend it. Extension lines may follow the root; we write none, since nobody audits
them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import LocalError, ProofError
from . import note as notes
from .merkle import EMPTY_ROOT, HASH_BYTES, verify_consistency
from .note import (
    Note,
    SignatureKind,
    VerifiedKey,
    VerifierKey,
    base64_bytes,
    base64_text,
    require,
)

ORIGIN = "staddle.example/{federation}/{silo}/egress"
MAX_SIZE = 2**63 - 1
_ID = "([a-z0-9-]{1,64})"
_ORIGIN = re.compile(re.escape(ORIGIN).replace(r"\{federation\}", _ID).replace(r"\{silo\}", _ID))
_DECIMAL = re.compile("0|[1-9][0-9]{0,18}")


def origin(federation: str, silo: str) -> str:
    """Origin of the egress ledger of a silo; both are roster ids.

    It names the log in its checkpoints, and its key. So a head of one silo's log does not verify
    as another's.
    """
    return ORIGIN.format(federation=federation, silo=silo)


def owner(text: str) -> tuple[str, str]:
    """Federation and silo that an origin names.

    ProofError for the origin of another kind of log.
    """
    match = _ORIGIN.fullmatch(text)
    if match is None:
        raise ProofError(f"checkpoint is of {text[:200]!r}, which is not a silo's egress ledger")
    return match[1], match[2]


@dataclass(frozen=True, slots=True)
class TreeHead:
    """A log's statement: the first ``size`` records of ``origin`` have this root, 32 bytes."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        broken = any(not line or "\n" in line for line in (self.origin, *self.extensions))
        require(
            not broken, "checkpoint: an empty or broken line stands for its origin or an extension"
        )
        what = f"checkpoint of {self.origin!r}"
        require(0 <= self.size <= MAX_SIZE, f"{what}: size {self.size} is not 0 to 2^63 - 1")
        length = len(self.root)
        require(length == HASH_BYTES, f"{what}: root has {length} bytes, not {HASH_BYTES}")

        # Whoever holds a head of no records checks growth from this root.
        require(
            self.size > 0 or self.root == EMPTY_ROOT,
            f"{what}: root {self.root.hex()} is not that of an empty tree",
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a note, signed by whomever; ``text`` of the result is this text."""
        lines = text.split("\n")
        # After the final newline ``split`` leaves an empty string.
        whole = len(lines) >= 4 and not lines.pop()
        require(whole, "checkpoint has not the lines origin, size and root, each with its newline")
        try:
            return cls(lines[0], decimal(lines[1]), base64_bytes(lines[2]), tuple(lines[3:]))
        except ValueError as error:
            raise ProofError(
                f"checkpoint of {lines[0]!r}: size or root is malformed: {error}"
            ) from None

    @property
    def text(self) -> str:
        """The text that is signed: a line each for origin, size, root and extensions."""
        return "\n".join(
            [self.origin, str(self.size), base64_text(self.root), *self.extensions, ""]
        )


@dataclass(frozen=True, slots=True)
class WitnessedHead:
    """A checkpoint that its log signed, and the witnesses who cosigned it.

    ``witnesses`` are some of the keys that the caller trusts, each with the time that it
    cosigned.
    """

    checkpoint: TreeHead
    witnesses: tuple[VerifiedKey, ...]


def issue(checkpoint: TreeHead, key: Ed25519PrivateKey) -> Note:
    """Sign the head of our own log.

    Never sign one that does not extend all that were signed before.
    """
    return Note(checkpoint.text, (notes.sign(checkpoint.text, checkpoint.origin, key),))


def verify(
    signed: Note, log: VerifierKey, witnesses: Sequence[VerifierKey] = (), required: int = 0
) -> WitnessedHead:
    """Check who signed a checkpoint, in order.

    ``log`` is named as the origin, ``required`` counts cosignatures.

    ProofError if the log did not sign it, if a signature of a key given here fails, or if too few
    witnesses cosigned.
    """
    # (1) These keys can make such signatures, and each witness counts once: a log that is its own
    # witness would vouch for itself.
    publics = {key.public for key in (log, *witnesses)}
    if log.kind is not SignatureKind.ED25519 or any(
        witness.kind is not SignatureKind.COSIGNATURE for witness in witnesses
    ):
        raise LocalError("a log's key is of kind 1 and a witness's of kind 4; these are others")
    if len(publics) != 1 + len(witnesses):
        raise LocalError(
            "the keys of the log and its witnesses are not all different; name each once"
        )
    if required > len(witnesses):
        raise LocalError(
            f"{required} witnesses are required and {len(witnesses)} are known; name more, or"
            " require less"
        )

    # (2) The log signed it, and no signature of these keys fails.
    verified = notes.verify(signed, (log, *witnesses))
    signers = {each.key for each in verified}
    require(log in signers, f"checkpoint is not signed by its log, {log}")

    # (3) It is a checkpoint of that log.
    checkpoint = TreeHead.parse(signed.text)
    # One log key signs several logs, a silo's ledger and its budgets, each with its own origin.
    own = checkpoint.origin == log.name
    require(own, f"checkpoint is of {checkpoint.origin!r}, the key is for {log.name!r}")

    # (4) Enough witnesses saw it.
    cosigned = tuple(each for each in verified if each.key != log)
    if len(cosigned) < required:
        names = ", ".join(each.key.name for each in cosigned) or "nobody"
        raise ProofError(
            f"checkpoint of {log.name} is cosigned by {names}; {required} of {len(witnesses)} must"
        )
    return WitnessedHead(checkpoint, cosigned)


def verify_growth(old: TreeHead, new: TreeHead, proof: Sequence[bytes]) -> None:
    """ProofError unless ``new`` is of the same log and the proof shows that it begins with all that
    ``old`` has.
    """
    same = old.origin == new.origin
    require(same, f"checkpoints are of different logs: {old.origin!r} and {new.origin!r}")
    verify_consistency(old.size, old.root, new.size, new.root, proof)


def decimal(text: str) -> int:
    """A number from 0 to 2^63 - 1 in its one ASCII spelling; ValueError for any other text."""
    if not _DECIMAL.fullmatch(text) or int(text) > MAX_SIZE:
        raise ValueError(
            f"{text[:32]!r} is not a decimal number from 0 to 2^63 - 1 without leading zeros"
        )
    return int(text)
