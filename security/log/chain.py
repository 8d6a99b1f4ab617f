"""A hash chain of canonical JSON lines, and how to check one line after another.

One record a line; each names the hash of the line before::

    {"mono_us":83123,"nonce":"5f0c…","prev":"0000…","seq":0,"time":"2026-11-20T21:30:05.123456Z","type":"start","v":1}
    {"mono_us":91007,"nonce":"c2aa…","prev":"e3b0…","seq":1,"time":"2026-11-20T21:30:05.131340Z","type":"stop","v":1}

The hash of a line is RFC 6962's leaf hash, SHA-256(0x00 || line without its newline), over the
stored bytes; ``seq`` is the leaf's index. The nonce keeps a published leaf hash from being guessed,
and shows whoever has the log key that the record was written with it::

    nonce = first 16 bytes of HMAC-SHA256(HKDF(log key), the line with a nonce of 32 zeros)
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import LocalError
from ...files.documents import canonical_json, parse_json
from ..identity.domains import LEAF

MAX_LINE = 1024 * 1024  # bytes, newline included
FIRST_PREV = "0" * 64
FRAME = {  # what the log itself adds to a record, and how it is written
    "v": "1",
    "seq": "[0-9]+",
    "prev": '"[0-9a-f]{64}"',
    "nonce": '"[0-9a-f]{32}"',
    "time": r'"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z"',
    "mono_us": "[0-9]+",
}
# all of it at once, since a ledger has many lines
_FRAME = re.compile(rf"\[{', '.join(FRAME.values())}\]")

Form = Callable[[bytes], dict[str, Any] | None]  # fast_decoder.well_formed, or none


@dataclass(slots=True)
class VerifiedLine:
    """One verified record as read.

    ``typed`` where its form has been checked as well (ledger/fast_decoder.py).
    """

    seq: int
    hash: bytes
    record: dict[str, Any]
    typed: bool = False

    @property
    def leaf(self) -> str:
        """Hex of its leaf hash."""
        return self.hash.hex()


def leaf_hash(line: bytes) -> str:
    """Hex of the RFC 6962 leaf hash of a line without its newline.

    RFC 6962 section 2.1: the byte 0x00 before it keeps a leaf from passing for a node.
    """
    return hashlib.sha256(LEAF + line).hexdigest()


def nonce_of(key: bytes, record: Mapping[str, Any]) -> str:
    """The nonce of a framed record, hex; ``key`` is that of the log (head.py).

    What nonce it has is not looked at.
    """
    line = canonical_json({**record, "nonce": "0" * 32})
    return hmac.digest(key, line, "sha256")[:16].hex()


class Chain:
    """The links of a log so far: how many lines, and the hash of the last."""

    def __init__(self, form: Form | None = None) -> None:
        self.count = 0
        self.head = FIRST_PREV
        self._form = form

    def follow(self, line: bytes) -> VerifiedLine:
        """Check the next line, without its newline, and take it in.

        LocalError says what is wrong with it.
        """
        # (1) It is JSON, an object, in the one canonical spelling, with a type; (2) it has all
        # fields of the frame.
        record = self._form(line) if self._form else None
        typed = record is not None
        if record is None:
            record = _framed_object(line)

        # (3) It stands in its place.
        # Proofs are by index, so a line's ``seq`` must be its position.
        if record["seq"] != self.count:
            raise LocalError(f"has seq {record['seq']}, not {self.count}")

        # (4) It follows the line before.
        if record["prev"] != self.head:
            raise LocalError(
                "does not follow the line before: one of the two was changed, removed or inserted"
            )

        # Over the bytes as they are stored: a verifier needs no encoder of ours.
        digest = hashlib.sha256(LEAF + line).digest()
        self.head = digest.hex()
        self.count += 1
        return VerifiedLine(record["seq"], digest, record, typed)


def _framed_object(line: bytes) -> dict[str, Any]:
    """Checks (1) and (2) of any line at all.

    Records of known types have a faster way (ledger/fast_decoder.py).
    """
    record = parse_json(line, "line")
    # A record has one spelling: two lines with the same content cannot have two leaf hashes.
    if (
        not isinstance(record, dict)
        or canonical_json(record) != line
        or not isinstance(record.get("type"), str)
    ):
        raise LocalError("is not a canonical JSON object with a type")
    if not _FRAME.fullmatch(json.dumps([record.get(name) for name in FRAME])):
        raise LocalError(f"lacks a well-formed frame of {', '.join(FRAME)}")
    return record
