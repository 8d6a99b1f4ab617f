"""Text with signatures below it, for people and programs alike: c2sp.org/signed-note and
c2sp.org/tlog-cosignature.

The text ends with a newline, a blank line follows, then a line for each signature::

    staddle.example/lung/hospital-a/egress
    4
    037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=

    — staddle.example/lung/hospital-a/egress
        NTLrx/l9vRr3UCZ37rojt5iPmfieDf67mR5Fu6XOZksxlfYTTzsVojtXxtMNuVgK9YdT…
    — staddle.example/lung/coordinator
        1LZPYAAAAABrAfhA9Ok2labajXqKzxhYwPtaSabOPLajM0BF6Hdicbh0wXQ75H+cG9sGdWG3f2rU…

The base64 is 4 bytes of key id and the signature. Two kinds are known: plain Ed25519 over the text,
and a cosignature, 8 bytes of time and an Ed25519 signature over that time and the text, by which a
witness says that the log only grew.

A public key is written ``name+key id+base64 of kind and key``::

    staddle.example/lung/coordinator+d4b64f60+BCmsuuFBvMrwsi4alNNNC8c2HlJtC/4SyJeUvJMilm3X

Neither kind of signature can be taken for one of security/identity/domains.py: those begin with a
zero byte, which no note holds.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ...errors import LocalError, ProofError

MAX_NOTE = 256 * 1024  # bytes: room for 16 post-quantum signatures, which every reader must accept
MAX_SIGNATURES = 64
MAX_TIME = 2**63 - 1
BAD_NAME = "is empty, or holds a space, a '+', a newline or a control character"
DASH = "\N{EM DASH}"
# first line of what a witness signs; no text that is signed plainly may begin so
COSIGNED = "cosignature/v1\n"
KEY_BYTES, TIME_BYTES, ID_BYTES = 32, 8, 4
# all below U+0020 but newline; and what is no UTF-8
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\ud800-\udfff]")
_NAME = re.compile(r"[^\s+\x00-\x1f\ud800-\udfff]+")


class SignatureKind(IntEnum):
    """Signature types of signed-note."""

    ED25519 = 0x01
    COSIGNATURE = 0x04


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A key to trust: a name, a kind of signature and an Ed25519 key, 32 bytes.

    LocalError for a name with a space or a plus sign, which separate fields in the format, or a
    key of another length.
    """

    name: str
    kind: SignatureKind
    public: bytes

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LocalError(f"key name {self.name!r} {BAD_NAME}")
        if len(self.public) != KEY_BYTES:
            raise LocalError(
                f"key of {self.name!r} has {len(self.public)} bytes, an Ed25519 key has {KEY_BYTES}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key that ``str`` wrote.

        LocalError if one character is wrong, since the key id is a checksum.
        """
        name, _, rest = text.partition("+")
        key_id, _, encoded = rest.partition("+")
        try:
            decoded = base64_bytes(encoded)
            # ``SignatureKind`` raises ValueError for an unknown kind, as ``base64_bytes`` does for
            # malformed text.
            kind = SignatureKind(decoded[0]) if decoded else None
        except ValueError:
            kind = None
        if kind is None:
            raise LocalError(
                f"key {text!r} is not name+key id+base64 of an Ed25519 key of kind 1 or 4; copy it"
                " again"
            )
        key = cls(name, kind, decoded[1:])
        if key_id != key.key_id.hex():
            raise LocalError(
                f"key {text!r} has key id {key_id!r}, its content gives {key.key_id.hex()}; copy it"
                " again"
            )
        return key

    def __str__(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{base64_text(bytes([self.kind]) + self.public)}"

    @property
    def key_id(self) -> bytes:
        """4 bytes that tell keys of one name apart; far too short to stand for the key."""
        return hashlib.sha256(
            self.name.encode() + b"\n" + bytes([self.kind]) + self.public
        ).digest()[:ID_BYTES]


@dataclass(frozen=True, slots=True)
class Signature:
    """One line below the text, as it claims to be; ``data`` is what follows the key id.

    Nothing in it is checked: ``name`` and ``key_id`` only tell which key to try.
    """

    name: str
    key_id: bytes
    data: bytes

    def __str__(self) -> str:
        return f"{DASH} {self.name} {base64_text(self.key_id + self.data)}"


@dataclass(frozen=True, slots=True)
class Note:
    """A text and its signatures, well-formed and nothing more: until ``verify`` says who signed it,
    nobody did.
    """

    text: str
    signatures: tuple[Signature, ...]

    def __post_init__(self) -> None:
        fault, count = _text_fault(self.text), len(self.signatures)
        require(not fault, f"note: {fault}")
        require(
            1 <= count <= MAX_SIGNATURES, f"note has {count} signatures, not 1 to {MAX_SIGNATURES}"
        )
        for signature in self.signatures:
            named = _NAME.fullmatch(signature.name)
            require(bool(named), f"note: name {signature.name!r} of a signature {BAD_NAME}")
            require(
                len(signature.key_id) == ID_BYTES and bool(signature.data),
                f"note: what {signature.name!r} wrote is not a key id of {ID_BYTES} bytes and a"
                " signature",
            )

        # No one writes a note that others would refuse to read.
        size = len(bytes(self))
        require(size <= MAX_NOTE, f"note has {size} bytes, more than {MAX_NOTE}")

    def __bytes__(self) -> bytes:
        return "".join(
            [self.text, "\n", *(f"{signature}\n" for signature in self.signatures)]
        ).encode()

    def signed_by(self, *signatures: Signature) -> Self:
        """The note with more signatures below it.

        The text does not change, so the earlier signatures still hold. ProofError if the note
        becomes too long, or has too many signatures.
        """
        return replace(self, signatures=(*self.signatures, *signatures))


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """A key whose signature holds.

    ``time`` is that of a cosignature, in seconds since 1970, by the witness's clock.
    """

    key: VerifierKey
    time: int | None


def parse(data: bytes) -> Note:
    """Read a note; ``bytes`` of the result are ``data``.

    ProofError for everything that is not quite a note.
    """
    # (1) It is not too long to look at, and UTF-8.
    require(len(data) <= MAX_NOTE, f"note has {len(data)} bytes, more than {MAX_NOTE}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ProofError(f"note is not UTF-8: {error.reason} at byte {error.start}") from None

    # (2) Its signatures stand below the last blank line: a text may have blank lines of its own.
    end = text.rfind("\n\n")
    require(
        end >= 0 and text.endswith("\n"),
        "note is not a text, a blank line and signature lines, each with its newline",
    )
    # ``Note`` refuses a text without any signature.
    lines = text[end + 2 : -1].split("\n") if text[end + 2 :] else []

    # (3) Each signature, and the text, is well-formed.
    return Note(text[: end + 1], tuple(map(_parse_signature, lines)))


def _parse_signature(line: str) -> Signature:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    require(
        dash == DASH,
        f"note: {line[:64]!r} is not a signature line: it does not begin with an em dash and a"
        " space",
    )
    try:
        decoded = base64_bytes(encoded)
    except ValueError:
        raise ProofError(
            f"note: signature of {name[:64]!r} is not base64: {encoded[:64]!r}"
        ) from None
    # ``Note`` refuses data that is too short for a key id and a signature.
    return Signature(name, decoded[:ID_BYTES], decoded[ID_BYTES:])


def verify(note: Note, keys: Iterable[VerifierKey]) -> tuple[VerifiedKey, ...]:
    """Who of ``keys`` signed the note, each once.

    At least one did, and no signature of theirs fails.

    Signatures of other keys are ignored, as the format wants it. ProofError otherwise.
    """
    # Key ids have 4 bytes, so two keys may well share one; then a line would be of either.
    known: dict[tuple[str, bytes], VerifierKey] = {}
    for key in keys:
        if known.setdefault((key.name, key.key_id), key) != key:
            raise LocalError(
                f"two keys are {key.name}+{key.key_id.hex()}; remove one, or rename its owner"
            )

    # One signature of a known key that fails spoils the note, as signed-note requires: it is a
    # forgery or damage, and others that hold do not make up for it.
    found: dict[VerifierKey, VerifiedKey] = {}
    for signature in note.signatures:
        signer = known.get((signature.name, signature.key_id))
        if signer:
            found.setdefault(signer, VerifiedKey(signer, _check(signer, note.text, signature.data)))

    if not found:
        names = ", ".join(f"{key.name}+{key.key_id.hex()}" for key in known.values()) or "nobody"
        raise ProofError(f"note is signed by none of the keys that are trusted here ({names})")
    return tuple(found.values())


def _check(key: VerifierKey, text: str, data: bytes) -> int | None:
    """Time of a cosignature that holds; ProofError for a signature that does not."""
    time, signature = None, data
    if key.kind is SignatureKind.COSIGNATURE:
        time, signature = int.from_bytes(data[:TIME_BYTES]), data[TIME_BYTES:]
    try:
        # Eight bytes can hold larger times than the format allows.
        if (time or 0) > MAX_TIME:
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, _message(text, time))
    except InvalidSignature:
        raise ProofError(
            f"signature of {key.name}+{key.key_id.hex()} does not fit the note; one was changed"
        ) from None
    return time


def sign(text: str, name: str, key: Ed25519PrivateKey) -> Signature:
    """Plain Ed25519 signature, kind 1, over a text that ends with a newline.

    LocalError for a text that could pass for a cosignature's message, or that no note may have.
    """
    if text.startswith(COSIGNED):
        raise LocalError(
            f"a text that begins with {COSIGNED!r} would pass for a cosignature; begin it otherwise"
        )
    return _signed(name, SignatureKind.ED25519, key, _message(text))


def cosign(text: str, name: str, key: Ed25519PrivateKey, time: int) -> Signature:
    """Cosignature, kind 4: of all trees of this log that we saw, at ``time`` this is the largest,
    and they agree.

    ``time`` is in seconds since 1970. Check it first (tree_head.verify_growth); one key cosigns
    under one name.
    """
    if not 0 <= time <= MAX_TIME:
        raise LocalError(f"time {time} of a cosignature is not 0 to 2^63 - 1 seconds")
    return _signed(
        name, SignatureKind.COSIGNATURE, key, _message(text, time), time.to_bytes(TIME_BYTES)
    )


def _signed(
    name: str, kind: SignatureKind, key: Ed25519PrivateKey, message: bytes, before: bytes = b""
) -> Signature:
    verifier = VerifierKey(name, kind, key.public_key().public_bytes_raw())
    return Signature(name, verifier.key_id, before + key.sign(message))


def _message(text: str, time: int | None = None) -> bytes:
    """The bytes that are signed below a text, with a time for a cosignature."""
    if fault := _text_fault(text):
        raise LocalError(f"note: {fault}")
    # A cosignature is over the time and the text (c2sp.org/tlog-cosignature).
    return (text if time is None else f"{COSIGNED}time {time}\n{text}").encode()


def _text_fault(text: str) -> str:
    if not text.endswith("\n"):
        return "its text does not end with a newline"
    if control := _CONTROL.search(text):
        return f"its text holds control character {control[0]!a}"
    return ""


def require(holds: bool, why: str) -> None:
    """ProofError unless it holds."""
    if not holds:
        raise ProofError(why)


def base64_text(data: bytes) -> str:
    """Standard base64 with padding (RFC 4648 section 4)."""
    return base64.b64encode(data).decode()


def base64_bytes(text: str) -> bytes:
    """The bytes of which ``text`` is the one base64 spelling; ValueError for any other text.

    Bytes and text correspond one to one, which the standard library's decoder does not ensure.
    """
    data = base64.b64decode(text)
    # It skips foreign characters and unused bits, so one signature would have many spellings.
    if base64_text(data) != text:
        raise ValueError("not the canonical base64 of its bytes")
    return data
