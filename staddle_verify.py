#!/usr/bin/env python3
"""Verify what a Staddle silo says has left it, without Staddle: this one file, Python 3.9 or later,
`cryptography`.

::

    python3 staddle_verify.py keys     FOLDER --founder SHA256:47DE…       the keys of the silos,
                                                                           for --key below
    python3 staddle_verify.py ledger   FOLDER --key KEY --checkpoint NOTE  records, signed heads,
                                                                           what left
    python3 staddle_verify.py receipts FOLDER --founder SHA256:47DE…       what the coordinator says
                                                                           it received
    python3 staddle_verify.py proof    FILE --key KEY --record FILE        that one record stands in
                                                                           a ledger
    python3 staddle_verify.py growth   OLD NEW PROOF --key KEY             that a ledger only grew

Exit status: 0 every check holds, 1 one does not, 2 called wrongly or a file cannot be read. It
reads files and does nothing else. Checks run in the order of their numbers; the first that fails
ends the run.

A ledger is a folder of segments, ``seg-00000001.jsonl`` and so on, of canonical JSON, one record a
line::

    {"mono_us":83123,"nonce":"5f0c…","prev":"0000…","seq":0,"time":"2026-11-20T21:30:05.123456Z","type":"stop",…,"v":1}

The hash of a line is SHA-256(0x00 || line without newline); ``prev`` is that of the line before, in
the segment before where need be. These hashes are the leaves of a Merkle tree (RFC 6962), whose
root the silo signs in ``checkpoint``, a note (c2sp.org/signed-note, c2sp.org/tlog-checkpoint) named
``staddle.example/<federation>/<silo>/egress``.

One message is up to three records: ``egress.intent`` is on the disk before its first byte leaves,
``egress.digest`` before the message counts at the recipient, ``egress.outcome`` says how it ended.
A message in the form ``masked`` is a part of a secure sum: nobody reads it but as a sum with those
of other silos. One in the form ``padded`` is mixed: other silos read it as a part of their weighted
mean. Of one in the form ``rotated`` the coordinator reads inner products with those of other silos.
Of the last two this holds while the coordinator and no silo collude. The messages of these
protocols themselves have one record each, ``egress.protocol``; ``secagg.signed`` says over which
silos a sum may be open from then on, ``secagg.end`` and ``secagg.sum`` how an attempt at one ended.
Tensors that are ``noised``, differentially private, name reservations of a data set's privacy
budget, a log of its own at the silo; ``privacy.head`` has the head of that log, and what was spent
until then, before anything was done with the records.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAX_LINE = 1024 * 1024  # bytes of a record, newline included
MAX_NOTE = 256 * 1024  # bytes, as of the next two
MAX_PROOF = MAX_NOTE + 64 * 1024
MAX_ROSTER = 16 * 1024 * 1024
MAX_SHOWN = 10  # broken rules that are shown; all are counted
ORIGIN = "staddle.example/{}/{}/egress"
EMPTY_ROOT = hashlib.sha256(b"").digest()


class FaultError(Exception):
    """A check that does not hold: exit status 1.

    Its text is printed after the name of the check that failed.
    """


class MisuseError(Exception):
    """Called wrongly, or a file cannot be read: exit status 2.

    It is no finding about the ledger.
    """


def cannot_read(path: Path, error: OSError) -> MisuseError:
    """The error to raise if the disk fails to return a file or a folder."""
    return MisuseError(f"{path}: cannot read it: {error.strerror or error}")


def first_fault(*rules: tuple[object, str]) -> str:
    """The text of the first rule that is broken; empty where all hold.

    A rule is a condition that must not be true, and a text. The caller has evaluated all
    conditions, so none may rely on an earlier one.
    """
    return next((why for broken, why in rules if broken), "")


def check_all(*rules: tuple[object, str]) -> None:
    """FaultError for the first rule that is broken."""
    if why := first_fault(*rules):
        raise FaultError(why)


def read(path: Path, limit: int) -> bytes:
    """A file of at most ``limit`` bytes.

    FaultError for a longer one, which has none of the formats here. MisuseError if it cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            # One byte more shows that a file is too large, without reading all of it.
            data = file.read(limit + 1)
    except OSError as error:
        raise cannot_read(path, error) from error
    if len(data) > limit:
        raise FaultError(f"{path}: has more than {limit} bytes")
    return data


# Canonical JSON, a subset of RFC 8785: what Staddle signs and hashes has one spelling. So each form
# is one regular expression: sorted keys, each once, no space, shortest escapes, whole numbers.

PLAIN = r'[^"\\\x00-\x1f]'
ESCAPED = r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]))'


def string(most: int | str) -> str:
    """A text of bounded length; the second branch is for texts with escapes alone."""
    return rf'"(?:{PLAIN}{{0,{most}}}"|(?=[^"\\]*\\)(?:{PLAIN}|{ESCAPED}){{0,{most}}}")'


# beyond it numbers lose bits in other readers; below it in 16 digits: a smaller one somewhere
MOST = str(2**53 - 1)
SMALLER = (
    f"{MOST[:at]}[{0 if at else 1}-{int(MOST[at]) - 1}][0-9]{{{15 - at}}}"
    for at in range(16)
    if MOST[at] > "0"
)
POSITIVE = "|".join(["[1-9][0-9]{0,14}", *SMALLER, MOST])
VALUES = {
    "count": f"(?:0|{POSITIVE})",
    "positive": f"(?:{POSITIVE})",
    "place": f"(?:-1|0|{POSITIVE})",
    "one": "1",
    "text": string(1024),
    "policy_text": string(256 * 1024),
    "roster_text": string(700_000),
    "maybe_hash": '(?:null|"[0-9a-f]{64}")',
    "words": string(""),
    "receipt": f"(?:null|{string(4096)})",
    "note": string(4096),
    "hash": '"[0-9a-f]{64}"',
    "nonce": '"[0-9a-f]{32}"',
    "time": r'"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z"',
    # Early releases wrote "private" for exact, and "dp" for noised.
    "taint": '"(?:public|noised|exact|private|dp)"',
    "status": '"(?:sent|failed|unknown)"',
    "step": '"(?:keys|shares|complaint|header|survival|reveal|abandon|end|contribution|padded)"',
    "fault": (
        '"(?:SPEC|POLICY|ATTEMPT|ABANDON|KEYS|SHARES|COMPLAINT|MISDEALT|UPLOAD|SURVIVORS|NOTES|REVEAL|SUM|ORDER'
        '|EQUIVOCATION|TOO_FEW|STOPPED)"'
    ),
    "reason": string(500),
    "values": '"(?:fixed|varying)"',
    "number": r'"[0-9]{1,10}(?:\.[0-9]{1,40})?"',
    "allow": '"allow"',
    "noise": '"(?:local|shared)"',
    "id": '"[a-z0-9-]{1,64}"',
    "role": '"(?:coordinator|silo|operator|founder)"',
    # A title has at least one character.
    "title": f'(?!""){string(128)}',
    "pem": string(8192),
    "signature": '"[0-9a-f]{128}"',
    # A comma may follow each entry; the look-behind refuses one before the brace.
    "signatures": r'\{(?:"[a-z0-9-]{1,64}":"[0-9a-f]{128}",?)*(?<!,)\}',
}
FRAME = "v:one seq:count prev:hash nonce:nonce time:time mono_us:count type:text "
# Fields of each object, and what stands in them; of several with a star; with a question mark where
# it may lack, behind the name, or be null, behind the form.
FORMS = {
    "peer": "id:text spki:hash",
    "size": "bytes:count",
    "message_digest": "bytes:count sha256:hash",
    "policy": "file:hash rule:text decision:allow",
    "tensor": (
        "part:text kind:text name:text dtype:text shape:count* bytes:count taint:taint"
        " readers?:text*"
    ),
    "secagg": "ctx:hash attempt:count members:text* threshold:count colluders:count clipped:count",
    "hidden": "ctx:hash number:count",
    "paid": "dataset:text ids:count* noise?:noise",
    "code": "name:text version:text sha256:hash",
    "tensor_digest": "part:text name:text sha256:hash",
    "start": FRAME + "silo:text software:text roster:hash policy:hash",
    "stop": FRAME + "reason:text",
    "recovery": FRAME + "dropped_bytes:positive last_good_seq:place",
    "key.rotate": FRAME + "old:text new:text",
    "person": "by:text signed:hash time:text",
    "job.accept": FRAME + "job:text job_digest:hash signer:text person?:person?",
    "job.decline": (FRAME + "job:text job_digest:hash signer:text reasons:words* person?:person?"),
    "policy.change": FRAME + "before:maybe_hash after:hash text:policy_text",
    "roster.change": FRAME + "roster:hash text:roster_text",
    "egress.intent": (
        FRAME
        + "silo:text job:text job_digest:hash method:text round:count attempt:count purpose:text"
        " rpc:text recipient:peer readers:text* form:text policy:policy tensors:tensor*"
        " message:size offset:count cohort?:text* secagg?:secagg? hidden?:hidden? dp?:paid?"
        " packages?:code* dataset?:text"
    ),
    "egress.digest": FRAME + "ref:count tensors:tensor_digest* message:message_digest",
    "egress.outcome": FRAME + "ref:count status:status bytes_sent:count receipt:receipt",
    "egress.protocol": (
        FRAME + "job:text job_digest:hash round:count ctx:hash kind:step rpc:text recipient:peer"
        " message:message_digest"
    ),
    "secagg.end": (
        FRAME + "job:text job_digest:hash round:count ctx:hash code:fault blame:text why:reason"
    ),
    "secagg.signed": (
        FRAME
        + "job:text job_digest:hash round:count ctx:hash dataset:text survivors:text* absent:text* "
        "values:values batches:text*"
    ),
    "secagg.sum": (
        FRAME + "job:text job_digest:hash round:count ctx:hash survivors:text* sha256:hash"
    ),
    "control.open": FRAME + "session:text recipient:peer max_messages:count max_bytes:count",
    "control.close": FRAME + "ref:count messages:count bytes:count",
    "ingress": FRAME
    + "job:text round:count purpose:text rpc:text sender:peer message:message_digest",
    "witness": FRAME + "by:text size:count root:hash",
    "privacy.head": (
        FRAME + "dataset:text size:count root:hash epsilon:number delta:number limit:number"
    ),
    "serving": FRAME + "coordinator:text software:text roster:hash",
    "received": (
        FRAME
        + "silo:text job:text job_digest:hash round:count message:message_digest ledger_seq:count "
        "ledger_leaf:hash checkpoint:note receipt:signature"
    ),
    "delivered": FRAME + "silo:text job:text job_digest:hash round:count message:message_digest",
    "head.refused": FRAME + "silo:text checkpoint:note why:text",
    "policy.deny": FRAME + "job:text round:count purpose:text policy:hash reasons:words*",
    "entry": (
        "id:id role:role organisation:title host_operator:title certificate:pem spki_sha256:hash "
        "protocol_key:hash log_key:hash exchange_key:hash signature:signature"
    ),
    "roster": (
        "federation:id version:positive threshold:positive entries:entry* signatures:signatures"
    ),
}


def grammar(form: str) -> str:
    """The regular expression of a form of the tables above."""
    if form.endswith("*"):
        item = grammar(form[:-1])
        return rf"\[(?:{item}(?:,{item})*)?\]"
    if form.endswith("?"):
        return f"(?:null|{grammar(form[:-1])})"
    if form in VALUES:
        return VALUES[form]
    # Canonical JSON has its keys in order.
    fields = sorted(field.split(":") for field in FORMS[form].split())
    written = ""
    for name, inner in fields:
        text = f',"{name.rstrip("?")}":{grammar(inner)}'
        written += f"(?:{text})?" if name.endswith("?") else text
    # No comma before the first field, which may not lack.
    return r"\{" + written[1:] + r"\}"


GRAMMARS = {
    form: re.compile(grammar(form)) for form, fields in FORMS.items() if fields.startswith(FRAME)
}
GRAMMARS["roster"] = re.compile(grammar("roster"))


def parse(data: bytes, form: str = "") -> dict[str, Any]:
    """The value of canonical JSON of a form, by default of the record's own type.

    FaultError for any other bytes.
    """
    try:
        written = data.decode()
    except UnicodeDecodeError as error:
        raise FaultError(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    # Inside of a string the quotes would be escaped, so this finds a key.
    kind = form or written.rpartition('"type":"')[2].partition('"')[0]
    known = kind in GRAMMARS
    if not form and kind == "roster":  # no record: it stands in no ledger
        known = False
    if not known:
        raise FaultError(f"is not a record: {kind[:40]!r} is not a type of one")
    if not GRAMMARS[kind].fullmatch(written):
        raise FaultError(
            f"is no {kind} in its one spelling: a field is missing, added, malformed, or in another"
            " place"
        )
    # Parsed only now, since the grammar bounds numbers and depth.
    value: dict[str, Any] = json.loads(written)
    return value


def canonical(value: Any) -> bytes:
    """The one spelling of a value: the bytes from which ``parse`` made it.

    It is exact only for values without floats and with ASCII keys, as all forms here have.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# The Merkle tree of RFC 6962; the verifiers are those of RFC 9162, step by step.


def leaf_hash(record: bytes) -> bytes:
    """Hash of a record as a leaf."""
    # RFC 6962 section 2.1: the first byte keeps a leaf from passing for a node.
    return hashlib.sha256(b"\x00" + record).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class RightEdgeTree:
    """A growing tree; it keeps only the roots of the complete subtrees at its right edge.

    It has at most one hash per bit of the size, so a ledger of any length takes a few kilobytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self.edge: list[bytes] = []  # the largest subtree first

    def append(self, leaf: bytes) -> None:
        """Add a leaf's hash; two subtrees of one size become one."""
        size, self.size = self.size, self.size + 1
        # Each 1 in the binary size is a complete subtree at the edge; a carry joins two of them.
        while size & 1:
            leaf, size = node_hash(self.edge.pop(), leaf), size >> 1
        self.edge.append(leaf)

    def root(self) -> bytes:
        """Root of all leaves so far."""
        if not self.edge:
            return EMPTY_ROOT
        *others, root = self.edge
        # From right to left: a smaller subtree is always the right child of its parent.
        for left in reversed(others):
            root = node_hash(left, root)
        return root


def verify_inclusion(
    leaf: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162 section 2.1.3.2: the leaf stands at ``index`` of the tree under ``root``.

    ``size`` and ``root`` are from the checkpoint that the log signed. FaultError if leaf, index or
    hashes do not fit them.
    """
    if not 0 <= index < size:
        raise FaultError(f"record {index} is not in a tree of {size}")
    check_hashes(leaf, root, *proof)
    at, last, computed = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise FaultError("the proof is too long")
        # For a right child, or the last node of its level, the next hash is on the left.
        if at & 1 or at == last:
            computed = node_hash(sibling, computed)
            at, last = to_right_child(at, last)
        else:
            computed = node_hash(computed, sibling)
        at, last = at >> 1, last >> 1
    if last or computed != root:
        raise FaultError(
            f"the proof leads from leaf {leaf.hex()} to {computed.hex()}, the root is {root.hex()}"
        )


def to_left_child(at: int, last: int) -> tuple[int, int]:
    """Climb while the node is the right one of two: what stands below is complete.

    A proof starts at the root of the complete subtree in which the old tree ends.
    """
    while at & 1:
        at, last = at >> 1, last >> 1
    return at, last


def to_right_child(at: int, last: int) -> tuple[int, int]:
    """Climb over levels at which the node has no sibling: the proof has no hash for them."""
    while at and not at & 1:
        at, last = at >> 1, last >> 1
    return at, last


def verify_consistency(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162 section 2.1.4.2: the tree of ``size`` leaves begins with those of the old one.

    Sizes and roots are from checkpoints that the log signed. FaultError if the hashes do not lead
    to both roots.
    """
    if not 0 <= old_size <= size:
        raise FaultError(
            f"a tree of {size} records cannot extend one of {old_size}: records were cut off"
        )
    check_hashes(old_root, root, *proof)
    if old_size in (0, size):
        verify_same_size(old_size, old_root, size, root, proof)
        return
    complete = old_size & (old_size - 1) == 0  # then the old tree is a node of the new one
    path = [old_root, *proof] if complete else list(proof)
    if not path:
        raise FaultError("the proof is too short")

    # One walk computes both roots; it starts at the last complete subtree of the old tree.
    at, last = to_left_child(old_size - 1, size - 1)
    old_computed = computed = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise FaultError("the proof is too long")
        if at & 1 or at == last:
            old_computed, computed = node_hash(sibling, old_computed), node_hash(sibling, computed)
            at, last = to_right_child(at, last)
        else:
            computed = node_hash(computed, sibling)
        at, last = at >> 1, last >> 1
    if (last, old_computed, computed) != (0, old_root, root):
        raise FaultError(
            f"the proof does not lead from {old_root.hex()} to {root.hex()}: the log did not just"
            " grow"
        )


def verify_same_size(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """Every tree extends the empty one, and each size has one root: neither needs a hash."""
    expected = root if old_size else EMPTY_ROOT
    another = old_root != expected or impossible(size, root)
    check_all(
        (proof, "the proof is too long"),
        (
            another,
            f"two roots of one size, {old_size}: {old_root.hex()} is another; the log was forked",
        ),
    )


def impossible(size: int, root: bytes) -> bool:
    """True if no tree of this size has this root: there is one empty tree.

    At any other size every root is possible.
    """
    return size == 0 and root != EMPTY_ROOT


def check_hashes(*hashes: bytes) -> None:
    """FaultError unless each is as long as a SHA-256 hash.

    An empty root would fit an empty leaf.
    """
    for each in hashes:
        if len(each) != 32:
            raise FaultError(f"a hash has 32 bytes, this one {len(each)}: {each.hex()[:64]}")


# Signed notes and checkpoints of C2SP.

LOG_KEY, WITNESS_KEY = 1, 4  # kinds of signature: plain Ed25519, and a cosignature with its time
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")
NAME = re.compile(r"[^+\s\x00-\x1f]+")  # of a key


def base64_bytes(written: str) -> bytes:
    """The bytes of which this is the one base64 spelling; ValueError for any other text."""
    data = base64.b64decode(written)
    if base64.b64encode(data).decode() != written:
        raise ValueError(f"{written[:64]!r} is not the base64 of anything")
    return data


def decimal(written: str) -> int:
    """A number below 2^63 in its one spelling; ValueError for any other text."""
    if not re.fullmatch("0|[1-9][0-9]{0,18}", written) or int(written) >= 2**63:
        raise ValueError(f"{written[:32]!r} is not a number from 0 to 2^63 - 1")
    return int(written)


def base64_or_nothing(written: str) -> bytes:
    """Like ``base64_bytes``, but no bytes for any other text.

    The text is from an untrusted file; no bytes fail a later check.
    """
    try:
        return base64_bytes(written)
    except ValueError:
        return b""


class Key(NamedTuple):
    """Whom to trust with what; written ``name+key id+base64 of kind and key``.

    The key id is a checksum.
    """

    name: str
    kind: int
    public: bytes

    @classmethod
    def parse(cls, written: str) -> Key:
        """The key that ``str`` wrote.

        FaultError for any other text: one changed character changes the key id.
        """
        name, _, rest = written.partition("+")
        decoded = base64_or_nothing(rest.partition("+")[2])
        key = cls(name, int.from_bytes(decoded[:1], "big"), decoded[1:])
        known = NAME.fullmatch(name) and key.kind in (LOG_KEY, WITNESS_KEY)
        # Compared with its spelling, which covers the key id.
        if not known or len(key.public) != 32 or str(key) != written:
            raise FaultError(
                f"{written!r} is not a key, or not all of it; `keys` prints them from a roster"
            )
        return key

    def __str__(self) -> str:
        key = base64.b64encode(bytes([self.kind]) + self.public).decode()
        return f"{self.name}+{self.id.hex()}+{key}"

    @property
    def id(self) -> bytes:
        """4 bytes that tell keys of one name apart."""
        return hashlib.sha256(
            self.name.encode() + b"\n" + bytes([self.kind]) + self.public
        ).digest()[:4]

    def check(self, signed: str, signature: bytes) -> None:
        """FaultError unless ``signature`` is of this key over a note's text.

        ``signature`` is the bytes after the key id. A cosignature begins with its time, 8 bytes, in
        seconds since 1970.
        """
        if self.kind == WITNESS_KEY:
            time, signature = int.from_bytes(signature[:8], "big"), signature[8:]
            # With a time that the format does not allow, no message is left that could be signed.
            signed = f"cosignature/v1\ntime {time}\n{signed}" if time < 2**63 else ""
        if not signed or not has_signed(self.public.hex(), signed.encode(), signature):
            raise FaultError(
                f"the signature of {self.name}+{self.id.hex()} does not fit the note: one was"
                " changed"
            )


def has_signed(public: str, message: bytes, signature: bytes) -> bool:
    """True if this is the Ed25519 signature of a key, in hex, over a message.

    False also if the key or the signature is malformed.
    """
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_argument(kind: int) -> Callable[[str], Key]:
    """Reads a key of one kind from the command line."""

    def parsed(written: str) -> Key:
        try:
            key = Key.parse(written)
        except FaultError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if key.kind != kind:
            raise argparse.ArgumentTypeError(f"{written!r} is a key of kind {key.kind}, not {kind}")
        return key

    return parsed


class SignedHead(NamedTuple):
    """A log's signed statement: its first ``size`` records have this root, 32 bytes."""

    origin: str
    size: int
    root: bytes


def open_note(data: bytes, keys: Iterable[Key]) -> str:
    """The text of a note that all ``keys`` signed.

    Signatures of other keys are ignored, as the format wants it.
    """
    # (1) A text, a blank line, and signature lines of a dash, a name and base64 of key id and
    # signature.
    signed, lines = split_note(data)
    signatures: dict[tuple[str, bytes], list[bytes]] = {}
    for line in lines:
        name, key_id, signature = signature_line(line)
        # A key may have signed several times; then all of its signatures have to hold.
        signatures.setdefault((name, key_id), []).append(signature)

    # (2) Each key signed, and no signature of theirs fails.
    for key in keys:
        own = signatures.get((key.name, key.id))
        if not own:
            raise FaultError(f"the note is not signed by {key}")
        for signature in own:
            key.check(signed, signature)
    return signed


def split_note(data: bytes) -> tuple[str, list[str]]:
    """The text of a note that is signed, and the lines below it.

    FaultError for control characters in the text, more than 64 lines below it, or more than
    MAX_NOTE bytes.
    """
    if len(data) > MAX_NOTE:
        raise FaultError(f"the note has more than {MAX_NOTE} bytes")
    try:
        written = data.decode()
    except UnicodeDecodeError as error:
        raise FaultError(f"the note is not UTF-8: {error}") from None
    # The last blank line, since the text may have blank lines.
    end = written.rfind("\n\n")
    signed, lines = written[: end + 1], written[end + 2 : -1].split("\n")
    malformed = end < 0 or not written.endswith("\n") or CONTROL.search(signed)
    if malformed or len(lines) > 64:
        raise FaultError("the note is not text, blank line and 1 to 64 signature lines")
    return signed, lines


def signature_line(line: str) -> tuple[str, bytes, bytes]:
    """Name, key id and signature in a line of a note."""
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    decoded = base64_or_nothing(encoded)
    # Four bytes of key id, and at least one of a signature.
    if dash != "\N{EM DASH}" or not NAME.fullmatch(name) or len(decoded) < 5:
        raise FaultError(f"the note has a malformed signature line: {line[:80]!r}")
    return name, decoded[:4], decoded[4:]


def open_checkpoint(data: bytes, log: Key, witnesses: Sequence[Key] = ()) -> SignedHead:
    """The checkpoint in a note that the log signed and all ``witnesses`` cosigned.

    FaultError for the checkpoint of another log, or if one of these keys did not sign.
    """
    signed = open_note(data, (log, *witnesses))
    lines = signed.split("\n")[:-1]
    # Lines after the third are extensions, which the format allows.
    if len(lines) < 3 or not all(lines):
        raise FaultError("the note is not a checkpoint: it has not the lines origin, size and root")
    try:
        found = SignedHead(lines[0], decimal(lines[1]), base64_bytes(lines[2]))
    except ValueError as error:
        raise FaultError(f"the note is not a checkpoint: {error}") from None
    check_all(
        (
            len(found.root) != 32 or impossible(found.size, found.root),
            f"the checkpoint of {found.size} records has the impossible root {found.root.hex()}",
        ),
        (
            # A silo's log key signs its budgets, too, each with an origin of its own.
            found.origin != log.name,
            f"the checkpoint is of {found.origin!r}, the key is for {log.name!r}",
        ),
    )
    return found


# A ledger's folder: the chain, and what its records say.

SEGMENT = re.compile(r"seg-[0-9]{8}\.jsonl")
SINGLE = "egress.jsonl"  # what a ledger was before it had segments


def segments(folder: Path) -> list[Path]:
    """Paths of the segments in order.

    FaultError if one is missing, or for what looks like another.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise cannot_read(folder, error) from error
    found = []
    for name in names:
        if SEGMENT.fullmatch(name):
            found.append(name)
        # Not ignored: records could be hidden by renaming their segment.
        elif name.startswith("seg-") or name == SINGLE:
            check_put_aside(name)
    for number, name in enumerate(found, 1):
        if name != f"seg-{number:08d}.jsonl":
            raise FaultError(f"segment {number} is missing, while {found[-1]} is there")
    return [folder / name for name in found]


def check_put_aside(name: str) -> None:
    """FaultError unless a file holds what a crash left behind a segment.

    Its bytes were in no checkpoint and no receipt, so they are not read.
    """
    if not re.fullmatch(r"seg-[0-9]{8}\.torn", name):
        raise FaultError(f"{name!r} is not a segment of a ledger of this format")


class RecordChain:
    """Reads the records of a ledger once, in order.

    FaultError names the first line that breaks the chain.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.tree = RightEdgeTree()
        self.head = "0" * 64  # hash of the last line, which the next must name
        # bytes of a last line without newline: a crash, or a writer at work; it counts as nothing
        self.torn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self.paths:
            yield from self.segment(path, last=path == self.paths[-1])

    def segment(self, path: Path, *, last: bool) -> Iterator[dict[str, Any]]:
        """The records of one segment; only the last may be empty, or end within a line."""
        number = 0
        try:
            with path.open("rb") as file:
                # Bounded, so that a file without newlines does not fill the memory.
                while line := file.readline(MAX_LINE):
                    number += 1
                    # A crash, or a writer at work, leaves an unfinished line only at the very end.
                    unfinished = not line.endswith(b"\n") and len(line) < MAX_LINE
                    if unfinished and last:
                        self.torn = len(line)
                        return
                    yield self.follow(line)
            if not number and not last:
                raise FaultError("is empty, and another segment follows")
        except FaultError as error:
            raise FaultError(f"{path.name} line {number} (seq {self.tree.size}) {error}") from None
        except OSError as error:
            raise cannot_read(path, error) from error

    def follow(self, line: bytes) -> dict[str, Any]:
        """The record of the next line."""
        # (1) It is a whole line of canonical JSON, with exactly the fields of its type.
        if not line.endswith(b"\n"):
            raise FaultError(
                f"is longer than {MAX_LINE} bytes, or has no newline before another segment"
            )
        record = parse(line[:-1])
        # (2) It stands in its place, and follows the line before.
        check_all(
            (record["seq"] != self.tree.size, f"has seq {record['seq']}"),
            (
                record["prev"] != self.head,
                "does not follow the line before: one of the two was changed, removed or inserted",
            ),
        )
        # The hash is over the stored bytes; nothing is encoded again.
        leaf = leaf_hash(line[:-1])
        self.tree.append(leaf)
        self.head = leaf.hex()
        return record

    @property
    def found(self) -> str:
        """How much was read, in words."""
        found = f"{self.tree.size} records, each after the one before"
        if not self.torn:
            return found
        return f"{found}; {self.torn} bytes of an unfinished last line count as nothing"


@dataclass
class Numbers:
    """The amounts that left.

    ``elements`` counts the numbers in the tensors, ``bytes`` what crosses. ``assumed`` bytes are
    not among these: so many more may have left at most, by records that do not tell. Several
    tensors of a part count as one message.
    """

    messages: int = 0
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    assumed: int = 0


@dataclass
class OpenMessage:
    """A message that has no outcome so far.

    ``root`` is computed only for receipts: for each digest it takes a hash per bit of the ledger's
    size.
    """

    intent: dict[str, Any]
    names: list[tuple[str, str]]  # part and name of each tensor
    digest: dict[str, Any] | None = None
    leaf: str = ""  # hash of the digest's line
    roster: str = ""  # digest of the roster that the last start before the digest names
    root: str = ""  # of the records up to it, where it is asked for

    @property
    def whole(self) -> int:
        """Bytes of the whole message: those before the offset, which the recipient has, too."""
        return int(self.intent["offset"] + self.intent["message"]["bytes"])

    @property
    def masked(self) -> bool:
        """True if it is a part of a secure sum."""
        return self.intent.get("secagg") is not None

    @property
    def hidden(self) -> dict[str, Any] | None:
        """Context and number to which a padded or rotated message is bound; None for any other."""
        return self.intent.get("hidden")

    @property
    def stream(self) -> str:
        """Name of the byte stream in which its offset counts.

        A round has one, and so has an attempt at a sum, a version of a part, a use of a rotation.
        """
        bound = self.intent.get("secagg") or self.hidden
        if bound:
            return str(bound["ctx"])
        return str(self.intent["round"])

    @property
    def hashed(self) -> list[tuple[str, str]]:
        """The tensors that its digest names: none of what is masked, padded or rotated."""
        if self.masked or self.hidden:
            return []
        return self.names

    @cached_property
    def declared(self) -> dict[str, Numbers]:
        """Like ``leaving``, of all bytes that it declares."""
        return self.leaving(self.intent["message"]["bytes"])

    def leaving(self, size: int) -> dict[str, Numbers]:
        """Numbers of what leaves with its next ``size`` bytes, by part: those behind the offset.

        "(message)" is of no tensor.

        Canaries lie among masked tensors: they count as the first bytes, and so the tensors in
        full.
        """
        tensors, offset = self.intent["tensors"], self.intent["offset"]
        end = 0
        if self.masked:
            end = self.whole - size_of(tensors)
        rest = size
        parts: dict[str, Numbers] = {}
        for tensor in tensors:
            start, end = end, end + tensor["bytes"]
            left = max(0, min(end, offset + size) - max(start, offset))
            if left or not (offset or tensor["bytes"]):
                part = parts.setdefault(tensor["part"], Numbers(messages=1))
                part.tensors += 1
                part.elements += math.prod(tensor["shape"])
                part.bytes += left
                rest -= left
        if rest or not tensors:
            parts["(message)"] = Numbers(messages=1, bytes=rest)
        return parts


def named(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Part and name of each tensor.

    Names repeat from part to part, so only both together identify a tensor.
    """
    return [(tensor["part"], tensor["name"]) for tensor in record["tensors"]]


# bytes of an element by dtype, in the forms that are mixed or compared
HIDDEN_SIZES = {"padded": {"uint64": 8}, "rotated": {"float32": 4, "float64": 8}}
# in the clear, the last ones as a job's codec makes them
PLAIN_SIZES = {"float32": 4, "float64": 8, "int64": 8, "bfloat16": 2, "int8": 1, "int32": 4}


def size_of(tensors: Sequence[dict[str, Any]]) -> int:
    """Bytes of all of them together."""
    return sum(tensor["bytes"] for tensor in tensors)


def astray(silos: Sequence[str], silo: str) -> bool:
    """True if these are not some silos in order, each once, and this one among them.

    ``silo`` is empty until a record names it.
    """
    if silos != sorted(set(silos)):
        return True
    return bool(silo) and silo not in silos


def masked_fault(record: dict[str, Any]) -> str:
    """The fault of an intent in all that has to do with masks; empty if there is none.

    Members must be sorted, from the cohort, with this silo among them, and at least as many as the
    threshold.
    """
    secagg, form = record.get("secagg"), record["form"]
    # In a report, a message that is only called masked would pass for a hidden one.
    if (secagg is not None) != (form == "masked"):
        an = "an" if secagg else "no"
        return f"has form {form!r} and names {an} attempt at a secure sum"
    if secagg is None:
        return ""
    members, threshold = secagg["members"], secagg["threshold"]
    # Older records have no cohort, so nothing is compared with it.
    cohort = record.get("cohort") or members
    return first_fault(
        (
            astray(members, record["silo"]),
            "is masked with members that are not sorted, are there twice, or lack this silo",
        ),
        (
            not set(members) <= set(cohort),
            "is masked with members that are not of its cohort",
        ),
        (
            threshold > len(members),
            f"is masked with {len(members)} members, fewer than its threshold of {threshold}",
        ),
    ) or words_fault(record, {"uint32": 4, "uint64": 8})


def hidden_fault(record: dict[str, Any]) -> str:
    """The fault of an intent that is not masked in its bytes, or in what hides it; else empty.

    A padded or rotated part is a message of its own, whose bytes are those of its tensors.
    """
    hidden, form = record.get("hidden"), record["form"]
    if (hidden is not None) != (form in HIDDEN_SIZES):
        a = "a" if hidden else "no"
        return f"has form {form!r} and names {a} version of a part or use of a rotation"
    if hidden is None:
        return words_fault(record, PLAIN_SIZES) if form == "plain" else ""
    tensors, number = record["tensors"], hidden["number"]
    return first_fault(
        (len(set(map(part_of, tensors))) != 1, f"is {form} and not of one part"),
        (
            size_of(tensors) != record["offset"] + record["message"]["bytes"],
            f"is {form} and has other bytes than its tensors",
        ),
        (
            form == "rotated" and number,
            f"is rotated and has number {number}; only versions of a padded part are counted",
        ),
    ) or words_fault(record, HIDDEN_SIZES[form])


def part_of(tensor: dict[str, Any]) -> str:
    """Name of the part that a tensor belongs to."""
    part: str = tensor["part"]
    return part


def words_fault(record: dict[str, Any], sizes: dict[str, int]) -> str:
    """The fault in the bytes of tensors, of which an element takes ``sizes`` by dtype."""
    for tensor in record["tensors"]:
        # With more bytes than its shape needs, a tensor would carry undeclared numbers.
        size = sizes.get(tensor["dtype"])
        if size is None or tensor["bytes"] != math.prod(tensor["shape"]) * size:
            found = f"{tensor['bytes']} bytes of {tensor['dtype']!r}"
            return f"is {record['form']}, and a tensor has {found}"
    return ""


def shape_fault(message: OpenMessage) -> str:
    """The fault in the tensors of an intent, or in those who can read it; empty if it has none."""
    record, names = message.intent, message.names
    tensors, size = record["tensors"], record["message"]["bytes"]
    readers, of_tensors = set(record["readers"]), set()
    for tensor in tensors:
        of_tensors.update(tensor.get("readers", ()))
    cohort = record.get("cohort")
    return first_fault(
        (len(set(names)) != len(names), "names a tensor twice"),
        (
            size_of(tensors) > message.whole,
            f"has tensors that do not fit into its message of {size} bytes",
        ),
        (not readers, "names no reader"),
        (of_tensors - readers, "has a tensor with a reader that the message has not"),
        (
            cohort and astray(cohort, record["silo"]),
            "has a cohort that is not sorted, has a silo twice, or lacks this one",
        ),
    )


# types of a coordinator's ledger, about every silo
OF_COORDINATOR = ("received", "delivered", "head.refused")


class Account:
    """Follows the records of a ledger: whether each may come where it comes, and what left.

    Its memory grows with open messages, parts and rounds, not with records.
    """

    def __init__(self, silo: str = "") -> None:
        self.silo = silo  # whose ledger it is; else the first that it names
        self.roster = ""  # digest, as the last start named it
        # digest of the policy in force; None before the first record of one
        self.policy: str | None = None
        self.open: dict[int, OpenMessage] = {}
        self.tree: RightEdgeTree | None = None  # of the records, to note roots
        self.settled: Callable[[OpenMessage, dict[str, Any]], None] | None = (
            None  # told of each message and its outcome
        )
        self.kept: Callable[[VerifiedRoster], None] | None = None  # told of each roster in it
        self.totals: dict[tuple[str, str, str], Numbers] = {}  # by job, part and recipient
        # job digest → Message.stream → bytes declared so far
        self._declared: dict[str, dict[str, int]] = {}
        # job digest and padded part → its last version
        self._versions: dict[tuple[str, str], dict[str, Any]] = {}
        # data set → the last head of its privacy budget
        self.budgets: dict[str, dict[str, Any]] = {}
        self._session: dict[str, Any] | None = None  # the open control session
        self._counts: Counter[str] = Counter()
        self._broken: list[str] = []
        self._leaf = ""  # hash of the line that is taken
        # What each type of record is checked by; the others may come anywhere.
        self._rules: dict[str, Callable[[dict[str, Any]], str]] = {
            "start": self._start,
            "policy.change": self._change,
            "roster.change": self._roster,
            "policy.deny": self._denied,
            "egress.intent": self._intent,
            "egress.digest": self._digest,
            "egress.outcome": self._outcome,
            "egress.protocol": self._protocol,
            "control.open": self._open_control,
            "control.close": self._close_control,
            "secagg.signed": self._survivors,
            "secagg.sum": self._survivors,
            "privacy.head": self._budget,
        }

    def take(self, record: dict[str, Any], leaf: str) -> None:
        """The next record; a broken rule is noted, and the record left out of account."""
        if record["type"] in OF_COORDINATOR:
            return
        self.silo = self.silo or record.get("silo", "")
        self._leaf = leaf
        rule = self._rules.get(record["type"])
        why = ""
        if record.get("silo", self.silo) != self.silo:
            why = f"is of silo {record['silo']!r}, the ledger of {self.silo!r}"
        elif rule:
            why = rule(record)
        if why:
            self._counts["broken"] += 1
            # Further ones are only counted, so that a ledger full of faults does not fill memory.
            if len(self._broken) < MAX_SHOWN:
                self._broken.append(f"seq {record['seq']} {why}")

    def _start(self, record: dict[str, Any]) -> str:
        self.roster = record["roster"]
        # An agent that died with a session open cannot close it any more.
        self._abandon()
        return ""

    def _protocol(self, record: dict[str, Any]) -> str:
        # A protocol message has no outcome; it counts as left.
        self._add(record, "(protocol)", Numbers(1, bytes=record["message"]["bytes"]))
        return ""

    def _survivors(self, record: dict[str, Any]) -> str:
        """The silos of a sum, this one among them, and those that did not survive."""
        survivors, absent = record["survivors"], record.get("absent", [])
        return first_fault(
            (
                astray(survivors, self.silo),
                "has survivors that are not sorted, are there twice, or lack this silo",
            ),
            (
                absent != sorted(set(absent) - set(survivors)),
                "has absent silos that are not sorted, are there twice, or survived",
            ),
        )

    def _budget(self, record: dict[str, Any]) -> str:
        """A head of a privacy budget, which only grows."""
        last = self.budgets.get(record["dataset"], {"size": -1, "root": ""})
        same = (record["size"], record["root"]) == (last["size"], last["root"])
        if record["size"] <= last["size"] and not same:
            return (
                f"is a head of {record['size']} records of a privacy budget that had"
                f" {last['size']}, or other ones"
            )
        self.budgets[record["dataset"]] = record
        return ""

    def _change(self, record: dict[str, Any]) -> str:
        # (0) A policy follows the one in force, and is in force until the next.
        after = record["after"]
        before, in_force = record["before"] or "none", self.policy or "none"
        why = first_fault(
            (
                before != in_force,
                f"puts a policy in the place of {before}, in force is {in_force}",
            ),
            (
                hashlib.sha256(record["text"].encode()).hexdigest() != after,
                f"has a text that is not that of policy {after}",
            ),
        )
        if not why:
            self.policy = after
        return why

    def _roster(self, record: dict[str, Any]) -> str:
        try:
            roster = VerifiedRoster(record["text"].encode())
        except FaultError as fault:
            return f"holds no roster: it {fault}"
        if roster.digest != record["roster"]:
            return f"has a text that is not that of roster {record['roster']}"
        if self.kept:
            self.kept(roster)
        return ""

    def _denied(self, record: dict[str, Any]) -> str:
        return self._decided(record["policy"])

    def _decided(self, digest: str) -> str:
        # None in a ledger from before policies were recorded, which accepts any.
        if self.policy in (None, digest):
            return ""
        return f"is decided by policy {digest}, in force is {self.policy}"

    def _intent(self, record: dict[str, Any]) -> str:
        message = OpenMessage(record, named(record))
        rounds = self._declared.setdefault(record["job_digest"], {})
        before = rounds.get(message.stream, 0)
        # (1) It declares each tensor once, room for all, who can read them, with whom the silo
        # takes part, and that it is what its form asks for.
        why = self._decided(record["policy"]["file"]) or shape_fault(message)
        why = why or masked_fault(record) or hidden_fault(record)
        why = why or self._version(record) or self._paid(record)
        if why:
            return why

        # (2) It leaves out only bytes that earlier messages of its round declared.
        if record["offset"] > before:
            return (
                f"resumes at byte {record['offset']}, of which earlier intents of its round"
                f" declared {before}"
            )
        # The furthest byte counts: resuming from an earlier one takes nothing back.
        rounds[message.stream] = max(before, message.whole)
        if record["form"] == "padded":
            self._versions[record["job_digest"], record["tensors"][0]["part"]] = record["hidden"]
        self.open[record["seq"]] = message

        # Nobody knows how much of it left, so all its bytes are assumed until a record tells.
        self._counts["messages"] += 1
        self._counts["undigested"] += 1
        self._assume(message, 1)
        return ""

    def _version(self, record: dict[str, Any]) -> str:
        """A version of a padded part has a number of its own, higher than all before."""
        if record["form"] != "padded":
            return ""
        own, part = record["hidden"], (record["job_digest"], record["tensors"][0]["part"])
        last = self._versions.get(part, {"number": -1, "ctx": ""})
        newer = own["number"] > last["number"] and own["ctx"] != last["ctx"]
        if newer or own == last:
            return ""
        return (
            f"is version {own['number']} of a padded part, ctx {own['ctx']}, after"
            f" {last['number']}, {last['ctx']}"
        )

    def _paid(self, record: dict[str, Any]) -> str:
        """Tensors that are noised name reservations that an earlier head of that budget has."""
        paid = record.get("dp")
        noised = any(tensor["taint"] in ("noised", "dp") for tensor in record["tensors"])
        if noised != (paid is not None):
            a = "a" if noised else "no"
            what = "what" if paid else "nothing that"
            return f"has {a} tensor that is noised, and names {what} paid"
        if paid is None:
            return ""
        of = record.get("dataset", "")
        if of not in ("", paid["dataset"]):
            return f"is of data set {of!r}, paid by data set {paid['dataset']!r}"
        ids, size = paid["ids"], self.budgets.get(paid["dataset"], {"size": 0})["size"]
        # ``default`` makes an empty list of reservations a fault, too.
        if ids != sorted(set(ids)) or max(ids, default=size) >= size:
            return (
                f"is paid by {ids} of data set {paid['dataset']!r}, whose last head has {size}"
                " records"
            )
        return ""

    def _digest(self, record: dict[str, Any]) -> str:
        message = self.open.get(record["ref"])
        # (3) A digest is the only one of an open message, and of its bytes and those tensors that
        # have a hash.
        if message is None or message.digest:
            return (
                f"is a digest of seq {record['ref']}, which is not an intent, or has a digest or an"
                " outcome already"
            )
        if named(record) != message.hashed or record["message"]["bytes"] != message.whole:
            return f"has other tensors or bytes than its intent, seq {record['ref']}"
        message.digest, message.leaf, message.roster = record, self._leaf, self.roster
        if self.tree:
            message.root = self.tree.root().hex()
        self._counts["undigested"] -= 1
        self._measured(message, message.intent["message"]["bytes"])
        return ""

    def _outcome(self, record: dict[str, Any]) -> str:
        message = self.open.get(record["ref"])
        # (4) An outcome is the only one of its message, and says "sent" only of all its bytes,
        # behind a digest.
        if message is None:
            return (
                f"is an outcome of seq {record['ref']}, which is not an intent, or has an outcome"
                " already"
            )
        size, sent = message.intent["message"]["bytes"], record["bytes_sent"]
        whole = sent == size and message.digest
        if sent > size or (record["status"] == "sent" and not whole):
            digested = "digested" if message.digest else "not digested"
            return f"says {record['status']!r} with {sent} bytes of {size}, {digested}"
        del self.open[record["ref"]]
        # An agent that started again does not know, and says "unknown" with all of it.
        if not message.digest and (record["status"], sent) != ("unknown", size):
            self._measured(message, sent)
        if self.settled:
            self.settled(message, record)
        return ""

    # (5) Polls and heartbeats have one session at a time, which is closed within its caps, or
    # left by a crash.

    def _open_control(self, record: dict[str, Any]) -> str:
        if self._session:
            return f"opens a control session while that of seq {self._session['seq']} is open"
        self._session = record
        return ""

    def _close_control(self, record: dict[str, Any]) -> str:
        session = self._session
        if session is None or session["seq"] != record["ref"]:
            return f"closes seq {record['ref']}, which is not an open control session"
        messages, size = record["messages"], record["bytes"]
        # The caps are from the record that opened it, so polls are no way around the policy.
        if messages > session["max_messages"] or size > session["max_bytes"]:
            return f"closes a control session beyond its caps: {messages} messages, {size} bytes"
        self._add({**session, "job": "(control)"}, "(control)", Numbers(messages, bytes=size))
        self._session = None
        return ""

    def _abandon(self) -> None:
        """The cap of a control session that nobody closed is assumed."""
        if cap := self._session:
            self._add({**cap, "job": "(control)"}, "(control)", Numbers(assumed=cap["max_bytes"]))
            self._session = None

    def _assume(self, message: OpenMessage, sign: int) -> None:
        """Count all bytes of a message as assumed; with -1, take that back."""
        for part, numbers in message.declared.items():
            self._add(message.intent, part, Numbers(assumed=sign * numbers.bytes))

    def _measured(self, message: OpenMessage, sent: int) -> None:
        """So many bytes of a message left, and no more are assumed."""
        self._assume(message, -1)
        if sent or message.digest:
            whole = sent == message.intent["message"]["bytes"]
            left = message.declared if whole else message.leaving(sent)
            for part, numbers in left.items():
                self._add(message.intent, part, numbers)

    def _add(self, record: dict[str, Any], part: str, more: Numbers) -> None:
        total = self.totals.setdefault((record["job"], part, record["recipient"]["id"]), Numbers())
        total.messages += more.messages
        total.tensors += more.tensors
        total.elements += more.elements
        total.bytes += more.bytes
        total.assumed += more.assumed

    def close(self) -> str:
        """End of the records: a summary in words; FaultError if any rule was broken.

        The cap of a session that is still open is assumed.
        """
        self._abandon()
        if more := self._counts["broken"]:
            shown = list(self._broken)
            if more > len(shown):
                shown.append(f"{more} in all")
            raise FaultError("; ".join(shown))
        undigested = self._counts["undigested"]
        return (
            f"{self._counts['messages']} messages; {undigested} have no digest: bytes that no"
            " record counts are assumed to have left"
        )

    def left(self) -> list[dict[str, Any]]:
        """The amounts that left, by job, part and recipient, sorted; for the report."""
        found = []
        for job, part, recipient in sorted(self.totals):
            numbers = asdict(self.totals[job, part, recipient])
            if any(numbers.values()):
                found.append({"job": job, "part": part, "recipient": recipient, **numbers})
        return found

    def spent(self) -> list[dict[str, Any]]:
        """The last head of each privacy budget, by data set."""
        names = ("dataset", "epsilon", "delta", "limit", "size", "root")
        found = []
        for dataset in sorted(self.budgets):
            record = self.budgets[dataset]
            found.append({name: record[name] for name in names})
        return found


# A roster: the members, signed by the founders.


def framed(label: str, *fields: bytes) -> bytes:
    """The bytes that protocol keys sign: a label and fields, each behind its length.

    The label keeps a signature for one purpose from holding for another.
    """
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in (label.encode(), *fields))


def fingerprint(key: str) -> str:
    """The fingerprint of a key in hex, as people compare it.

    SHA-256 of the raw key, in base64 without padding, as OpenSSH writes it.
    """
    digest = base64.b64encode(hashlib.sha256(bytes.fromhex(key)).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


class VerifiedRoster:
    """A roster, checked except for who vouches for it.

    TLS certificates are not looked at: they sign no record.
    """

    def __init__(self, data: bytes) -> None:
        # (1) It has one spelling and the form of a roster.
        data = data.removesuffix(b"\n")
        document = parse(data, "roster")
        # The grammar accepts signatures in any order; the one spelling has them sorted.
        if canonical(document) != data:
            raise FaultError("has signatures twice, or not in the order of their ids")
        self.federation: str = document["federation"]
        self.threshold: int = document["threshold"]
        self.version: int = document["version"]
        self.found = f"version {document['version']} of {self.federation!r}"
        self.signers = document.pop("signatures")
        self.signed_bytes = framed("staddle/roster/1", canonical(document))
        # Without the signatures: another signature does not make another roster.
        self.digest = hashlib.sha256(self.signed_bytes).hexdigest()
        ids = [entry["id"] for entry in document["entries"]]
        self.entries: dict[str, dict[str, Any]] = dict(zip(ids, document["entries"]))
        # The dictionary has each id once, so an id that is listed twice shows as well.
        if ids != sorted(self.entries):
            raise FaultError("has members twice, or not in the order of their ids")
        self._check_distinct()
        self.coordinator = self._find_coordinator()
        self._check_entries()

    def _check_distinct(self) -> None:
        # (2) Its members are distinct, in order, and one of them is the coordinator.
        entries = self.entries.values()
        for name in ("spki_sha256", "protocol_key", "log_key", "exchange_key"):
            if len({entry[name] for entry in entries}) != len(entries):
                raise FaultError(f"has members with the same {name}")
        for entry in entries:
            if entry["protocol_key"] == entry["log_key"]:
                raise FaultError("has a member with one key for two uses")

    def _find_coordinator(self) -> dict[str, Any]:
        found = [entry for entry in self.entries.values() if entry["role"] == "coordinator"]
        if len(found) != 1:
            raise FaultError(f"has {len(found)} coordinators")
        return found[0]

    def _check_entries(self) -> None:
        # (3) Each member signed its own entry.
        for member, entry in self.entries.items():
            own = dict(entry)
            signature = bytes.fromhex(own.pop("signature"))
            message = framed("staddle/entry/1", canonical(own))
            if not has_signed(entry["protocol_key"], message, signature):
                raise FaultError(f"has an entry of {member!r} whose own signature does not fit it")

    def vouched(self, founders: Sequence[str], least: int) -> str:
        """Who vouches for it, in words.

        FaultError if a signature fails, or too few of ``founders`` signed.
        """
        pinned = []
        # (4) Every signature is of a founder in it and holds.
        for member, signature in self.signers.items():
            if not self._is_founders(member, bytes.fromhex(signature)):
                raise FaultError(
                    f"has a signature of {member!r} that does not fit: it was changed after it was"
                    " signed"
                )
            if fingerprint(self.entries[member]["protocol_key"]) in founders:
                pinned.append(member)

        # (5) Enough of them are founders whose fingerprints came from elsewhere.
        names = ", ".join(pinned)
        # Never fewer than the roster itself requires.
        least = max(least or len(founders), self.threshold)
        if founders and len(pinned) < least:
            raise FaultError(
                f"is signed by {names or 'none'} of the founders named here; {least} must. Compare"
                " --founder with what the founders say by telephone. If it is mistyped, correct it;"
                f" if not, this roster is not theirs. In it {self._founders()}"
            )
        if not pinned:
            return "NOTHING VOUCHES FOR IT: no --founder was named"
        return f"signed by {names}"

    def _founders(self) -> str:
        found = []
        for member, entry in self.entries.items():
            if entry["role"] == "founder":
                found.append(f"{member} has {fingerprint(entry['protocol_key'])}")
        return ", ".join(found)

    def _is_founders(self, member: str, signature: bytes) -> bool:
        entry = self.entries.get(member, {})
        if entry.get("role") != "founder":
            return False
        return has_signed(entry["protocol_key"], self.signed_bytes, signature)

    def members(self, silo: str) -> str:
        """SHA-256 of who the coordinator and a silo are: what its receipts are bound to."""
        members = []
        for entry in self.entries.values():
            pair = entry["role"] == "coordinator" or (entry["role"], entry["id"]) == ("silo", silo)
            if pair:
                own = dict(entry)
                for name in ("certificate", "spki_sha256", "signature"):
                    del own[name]
                members.append(own)
        document = {"federation": self.federation, "members": members}
        return hashlib.sha256(framed("staddle/members/1", canonical(document))).hexdigest()

    def keys(self) -> dict[str, Key]:
        """The key of each silo's ledger, and that of the coordinator as a witness, by id.

        The coordinator's is of kind 4: its cosignature says that it saw a checkpoint, and vouches
        for no record.
        """
        found = {}
        for member, entry in self.entries.items():
            public = bytes.fromhex(entry["log_key"])
            if entry["role"] == "silo":
                found[member] = Key(ORIGIN.format(self.federation, member), LOG_KEY, public)
            elif entry["role"] == "coordinator":
                found[member] = Key(
                    f"staddle.example/{self.federation}/{member}", WITNESS_KEY, public
                )
        return found


# The commands: each yields what its checks found, in the order of CHECKS, and returns what they
# show together.

CHECKS = {
    "keys": ("roster", "founders"),
    "ledger": ("files", "checkpoint", "held by others", "lines", "tree", "rules"),
    "receipts": ("roster", "founders", "lines", "rules", "receipts"),
    "proof": ("form", "checkpoint", "record"),
    "growth": ("old checkpoint", "new checkpoint", "form", "growth"),
}
NOT_SHOWN = (
    "what the tensors mean (their names, and that nothing else left by other ways, are the"
    " statement of the silo's own software)"
)


@dataclass
class Result:
    """The sentences on what a run showed and did not show, and the facts that it found."""

    shown: str
    not_shown: str
    facts: dict[str, Any] = field(default_factory=dict)


Run = Generator[str, None, Result]


def roster_bytes(path: Path) -> bytes:
    """A roster file, or the newest of the rosters that a ledger's folder keeps.

    Newest is the highest version: who put an older file back wrote it last.
    """
    if not path.is_dir():
        return read(path, MAX_ROSTER)
    records = RecordChain(segments(path))
    kept: list[bytes] = [
        record["text"].encode() for record in records if record["type"] == "roster.change"
    ]
    if not kept:
        raise FaultError("is of a ledger that keeps no roster; give the file")
    return max(kept, key=lambda text: VerifiedRoster(text).version)


def run_keys(args: argparse.Namespace) -> Run:
    """The keys that ``--key`` and ``--witness`` take, from a roster."""
    roster = VerifiedRoster(roster_bytes(args.roster))
    yield f"{roster.found}: each member signed its own entry"
    yield roster.vouched(args.founder, args.threshold)
    shown = "that the file is whole."
    not_shown = "that the members are who they are called, nor that any founder knows of them."
    if args.founder:
        shown = "the founders named here signed a roster with these keys."
        not_shown = "that the members are who they are called."
    return Result(
        shown,
        not_shown,
        {
            "digest": roster.digest,
            "keys": {member: str(key) for member, key in roster.keys().items()},
        },
    )


def cosigned(args: argparse.Namespace) -> str:
    """The witnesses whose cosignatures hold, in words."""
    return "".join(f", cosigned by {key}" for key in args.witness)


def run_ledger(args: argparse.Namespace) -> Run:
    """The records of a silo, under its signed checkpoint and those that others hold."""
    origin = re.fullmatch(ORIGIN.format(*["([a-z0-9-]{1,64})"] * 2), args.key.name)
    if not origin:
        raise MisuseError(
            f"--key is of {args.key.name!r}; that of a ledger is"
            f" {ORIGIN.format('FEDERATION', 'SILO')}"
        )
    # (1) Segments from 1 on without a gap. The checkpoint is read before the records, which only
    # grow.
    paths = segments(args.folder)
    note = read(args.folder / "checkpoint", MAX_NOTE)
    yield f"{len(paths)} segments and a checkpoint"
    # (2) The folder's checkpoint is signed by this key, and has nothing that a log does not write.
    own = open_checkpoint(note, args.key)
    # Five lines: origin, size, root, a blank line and one signature.
    if note.count(b"\n") != 5:
        raise FaultError("the checkpoint holds more than origin, size, root and one signature")
    yield f"of {own.size} records, signed by {args.key}"
    # (3) So are those that others hold, and each witness cosigned them.
    held = {
        path: open_checkpoint(read(path, MAX_NOTE), args.key, args.witness)
        for path in args.checkpoint
    }
    sizes = ", ".join(str(each.size) for each in held.values())
    found = f"of {sizes} records" if held else "none given"
    yield f"{found}{cosigned(args)}"
    # (4) Every line is a record, and follows the line before.
    chain, account = RecordChain(paths), Account(origin[2])
    roots = roots_at({each.size for each in (own, *held.values())}, chain, account)
    yield chain.found
    # (5) They are the records of each checkpoint.
    records = chain.tree.size
    check_head("the folder's own checkpoint", own, records, roots)
    for path, head in held.items():
        check_head(path, head, records, roots)
    yield f"the first {own.size} records have the root {own.root.hex()}"
    # (6) Each may come where it comes.
    yield account.close()
    fixed = max((each.size for each in held.values()), default=0)
    also, where = "", "anywhere, since no other party's checkpoint was given"
    if fixed:
        also = f", and the first {fixed} are those of checkpoints that others hold"
        where = f"behind the first {fixed}"
    return Result(
        f"the first {own.size} of {records} records are those that the holder of the key signed, in"
        f" order{also}.",
        f"that the holder of the key cut no records off and rewrote none {where}; nor {NOT_SHOWN}.",
        {
            "records": records,
            "signed": own.size,
            "held": fixed,
            "left": account.left(),
            "budgets": account.spent(),
        },
    )


def roots_at(sizes: Iterable[int], chain: RecordChain, account: Account) -> dict[int, bytes]:
    """Read all records; roots of the tree at these sizes, in one pass over a ledger of any size.

    For a size that the ledger does not reach, the root is meaningless; ``check_head`` does not look
    at it.
    """
    roots = dict.fromkeys(sizes, EMPTY_ROOT)
    for record in chain:
        account.take(record, chain.head)
        if chain.tree.size in roots:
            roots[chain.tree.size] = chain.tree.root()
    return roots


def check_head(holder: object, head: SignedHead, records: int, roots: dict[int, bytes]) -> None:
    """FaultError unless the ledger has the records of a tree head, and these very ones.

    ``holder`` names who has the head, for the error. ``roots`` is from ``roots_at``.
    """
    if head.size > records:
        raise FaultError(
            f"records were cut off: {holder} is of {head.size}, the folder has {records}"
        )
    if head.root != roots[head.size]:
        raise FaultError(f"records were rewritten: the first {head.size} are not those of {holder}")


def run_receipts(args: argparse.Namespace) -> Run:
    """What the coordinator signed that it received, against the records that say what was sent."""
    rosters = {}
    for path in args.roster:
        roster = VerifiedRoster(read(path, MAX_ROSTER))
        rosters[roster.digest] = roster
    found = ", ".join(each.found for each in rosters.values())
    yield found or "those that the ledger keeps"
    vouched = "; ".join(each.vouched(args.founder, args.threshold) for each in rosters.values())
    if not rosters and not args.founder:
        raise MisuseError("name the founders with --founder, or give a --roster")
    yield vouched or "those of the ledger that the founders named here signed"
    chain, account = RecordChain(segments(args.folder)), Account()

    def keep(roster: VerifiedRoster) -> None:
        # A forger could name founders of their own: only those from elsewhere count.
        with contextlib.suppress(FaultError):
            if args.founder and roster.vouched(args.founder, args.threshold):
                rosters[roster.digest] = roster

    account.kept = keep
    counts: Counter[str] = Counter(last=-1)
    wrong: list[str] = []

    def settled(message: OpenMessage, outcome: dict[str, Any]) -> None:
        if outcome["receipt"] is None:
            counts["without"] += outcome["status"] == "sent"
        elif why := receipt_fault(message, outcome["receipt"], rosters.get(message.roster)):
            counts["wrong"] += 1
            # All are counted, but only the first are shown.
            wrong.extend([f"the receipt of seq {outcome['seq']} {why}"][: MAX_SHOWN - len(wrong)])
        elif message.digest:
            counts["good"] += 1
            counts["last"] = max(counts["last"], message.digest["seq"])

    # A receipt names the root of all records up to its digest, so roots are noted while reading.
    account.settled, account.tree = settled, chain.tree
    for record in chain:
        account.take(record, chain.head)
    yield chain.found
    yield account.close()
    if wrong:
        raise FaultError(f"{'; '.join(wrong)}; {counts['wrong']} in all")
    yield f"{counts['good']} hold; {counts['without']} messages that were sent have none"
    return Result(
        f"the coordinator signed that it received {counts['good']} messages of this silo with just"
        f" these bytes, and so fixed the records up to seq {counts['last']}.",
        "what became of messages without a receipt, or that no records were cut off behind; nor"
        f" {NOT_SHOWN}.",
        {
            "receipts": counts["good"],
            "without": counts["without"],
            "last": counts["last"],
            "left": account.left(),
        },
    )


def receipt_fault(message: OpenMessage, receipt: str, roster: VerifiedRoster | None) -> str:
    """The fault of a receipt; empty if it holds.

    The coordinator signed it as a member of the message's roster.
    """
    intent, digest = message.intent, message.digest
    if not digest:
        return "is for a message without digest, of which nobody can have received all"
    if not roster:
        return "is under another roster; give it with a --roster more"
    coordinator = roster.coordinator
    if intent["recipient"] != {"id": coordinator["id"], "spki": coordinator["spki_sha256"]}:
        return (
            f"is for a message to {intent['recipient']['id']!r}, who is not the coordinator with"
            " its TLS key"
        )

    # It binds the digest's record and the root of all records up to it, so whoever holds it also
    # fixes this part of the ledger.
    fields = {
        "federation": roster.federation,
        "members": roster.members(intent["silo"]),
        "silo": intent["silo"],
        "job": intent["job_digest"],
        "round": intent["round"],
        "size": digest["message"]["bytes"],
        "sha256": digest["message"]["sha256"],
        "ledger_seq": digest["seq"],
        "ledger_leaf": message.leaf,
        "ledger_root": message.root,
    }
    signed = framed("staddle/receipt/1", canonical(fields))
    if not re.fullmatch("[0-9a-f]{128}", receipt) or not has_signed(
        coordinator["protocol_key"], signed, bytes.fromhex(receipt)
    ):
        return f"is not what the coordinator signs for the digest at seq {digest['seq']}"
    return ""


def run_proof(args: argparse.Namespace) -> Run:
    """That one record stands in a ledger: c2sp.org/tlog-proof."""
    # A final newline is not part of the leaf.
    record = read(args.record, MAX_LINE).removesuffix(b"\n")
    # (1) Header, somebody's extra line if any, index, hashes, an empty line and the checkpoint.
    head, _, note = read(args.file, MAX_PROOF).partition(b"\n\n")
    lines = head.split(b"\n")
    if lines.pop(0) != b"c2sp.org/tlog-proof@v1":
        raise FaultError("the proof does not begin with the line c2sp.org/tlog-proof@v1")
    if lines and lines[0].startswith(b"extra "):
        extra = lines.pop(0)[6:].decode(errors="replace")
        if not base64_or_nothing(extra):
            raise FaultError("the proof has an extra line that is not base64")
    index, hashes = numbered(lines, b"index ")
    yield f"of record {index}, with {len(hashes)} hashes"
    # (2) The log signed the checkpoint.
    tree = open_checkpoint(note, args.key, args.witness)
    yield f"of {tree.size} records, signed by {args.key}{cosigned(args)}"
    # (3) The record is in the tree of that checkpoint.
    leaf = leaf_hash(record)
    verify_inclusion(leaf, index, tree.size, tree.root, hashes)
    yield f"leaf {leaf.hex()}"
    return Result(
        f"this record is number {index} (from 0) of {tree.size} in the ledger {tree.origin}, as the"
        " holder of its key signed.",
        f"that what it says is true, nor anything of the other records; nor {NOT_SHOWN}.",
        {"index": index, "leaf": leaf.hex(), "size": tree.size, "origin": tree.origin},
    )


def run_growth(args: argparse.Namespace) -> Run:
    """That a ledger only grew: the body of add-checkpoint of c2sp.org/tlog-witness."""
    # (1) and (2) The log signed both checkpoints.
    old = open_checkpoint(read(args.old, MAX_NOTE), args.key)
    yield f"of {old.size} records, signed by {args.key}"
    new = open_checkpoint(read(args.new, MAX_NOTE), args.key, args.witness)
    yield f"of {new.size} records, signed by {args.key}{cosigned(args)}"
    # (3) The proof is between just these.
    head, _, note = read(args.proof, MAX_PROOF).partition(b"\n\n")
    size, hashes = numbered(head.split(b"\n"), b"old ")
    # The old size in the file is not signed, and the checkpoint may be another: both are compared.
    if size != old.size or open_checkpoint(note, args.key) != new:
        raise FaultError(
            f"the proof is from {size} records, or to another checkpoint than the new one"
        )
    yield f"{len(hashes)} hashes"
    # (4) The new tree begins with the old one.
    verify_consistency(old.size, old.root, new.size, new.root, hashes)
    yield f"from {old.size} to {new.size}"
    return Result(
        f"the ledger {new.origin} of {new.size} records begins with the same {old.size} as before.",
        f"that any record is true or well-formed (`ledger` reads them); nor {NOT_SHOWN}.",
        {"old": old.size, "new": new.size, "origin": new.origin},
    )


def numbered(lines: Sequence[bytes], first: bytes) -> tuple[int, list[bytes]]:
    """The number in the first line of a proof, and the hashes below it."""
    head, *rest = lines or [b""]
    try:
        if not head.startswith(first):
            raise ValueError(
                f"it has no line {first.decode()!r} with a number where it should stand"
            )
        number = decimal(head[len(first) :].decode())
        hashes = [base64_bytes(line.decode()) for line in rest]
    except ValueError as error:
        raise FaultError(f"the proof is malformed: {error}") from None
    # 63 is the most that a witness accepts (c2sp.org/tlog-witness).
    if len(hashes) > 63 or any(len(each) != 32 for each in hashes):
        raise FaultError("the proof has more than 63 hashes, or one that is not 32 bytes long")
    return number, hashes


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="staddle-verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(run: Callable[[argparse.Namespace], Run], *files: str) -> Callable[..., Any]:
        command = commands.add_parser(
            run.__name__[len("run_") :], help=run.__doc__, description=run.__doc__
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print one JSON document instead")
        for file in files:
            command.add_argument(file, type=Path)
        return command.add_argument

    key, named = "KEY", "repeat it for more"
    # Receipts are signed with a roster's keys, so its founders are asked for there as well.
    for option in (add(run_keys, "roster"), receipts := add(run_receipts, "folder")):
        option(
            "--founder",
            action="append",
            default=[],
            help=f"fingerprint of a founder's key, SHA256:…; {named}",
        )
        option(
            "--threshold",
            type=int,
            default=0,
            metavar="K",
            help="how many of them must have signed (default: all)",
        )
    receipts(
        "--roster",
        action="append",
        default=[],
        type=Path,
        help=f"roster.json of the time, if the ledger does not keep it; {named}",
    )
    ledger, proof, growth = (
        add(run_ledger, "folder"),
        add(run_proof, "file"),
        add(run_growth, "old", "new", "proof"),
    )
    for option in (ledger, proof, growth):
        option(
            "--key",
            required=True,
            type=key_argument(LOG_KEY),
            metavar=key,
            help="of the ledger, as `keys` prints it",
        )
        option(
            "--witness",
            action="append",
            default=[],
            type=key_argument(WITNESS_KEY),
            metavar=key,
            help=f"must have cosigned; {named}",
        )
    ledger(
        "--checkpoint",
        action="append",
        default=[],
        type=Path,
        help=f"one that another party holds; {named}",
    )
    proof("--record", required=True, type=Path, help="file of the record: its line of the ledger")
    return parser


def printable(written: str) -> str:
    """Text that moves no cursor and colours nothing, whoever wrote it.

    Terminal escape sequences in a file are printed as escapes, so they have no effect.
    """
    return "".join(map(harmless, written))


def harmless(character: str) -> str:
    """A character, or its escape where it would not be seen."""
    return character if character.isprintable() else ascii(character)[1:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status.

    0 if every check holds, 1 if one does not, 2 if it was called wrongly or a file cannot be read.
    """
    args = arguments().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    checks: list[dict[str, Any]] = []
    result = None
    run = args.run(args)
    try:
        # FAIL stands until a check is through: whatever ends the run, its check is the one to name
        for number, name in enumerate(CHECKS[args.command], 1):
            checks.append({"number": number, "name": name, "verdict": "FAIL"})
            checks[-1].update(found=next(run), verdict="PASS")
        next(run)
    except StopIteration as end:
        result = end.value
    except FaultError as error:
        checks[-1]["found"] = str(error)
    except MisuseError as error:
        print(f"staddle-verify: {printable(str(error))}", file=sys.stderr)
        return 2
    try:
        report(args, checks, result)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it has seen enough, as `head` has; what was found stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if result else 1


def report(
    args: argparse.Namespace, checks: Sequence[dict[str, Any]], result: Result | None
) -> None:
    """Print what was found.

    As lines of text, or with ``--json`` as one document with the same facts.
    """
    shown = result or Result(
        f"that it does not hold: check {checks[-1]['number']} failed.",
        "whether the checks behind it would hold; they were not run.",
    )
    if args.json:
        document = {
            "command": args.command,
            "holds": bool(result),
            "checks": checks,
            **shown.facts,
            "shown": shown.shown,
            "not_shown": shown.not_shown,
        }
        print(json.dumps(document, indent=1))
        return
    for check in checks:
        print(f"{check['number']} {check['verdict']}  {check['name']}: {printable(check['found'])}")
    print_facts(shown.facts)
    print(f"Shown: {printable(shown.shown)}\nNot shown: {printable(shown.not_shown)}")


def print_facts(facts: dict[str, Any]) -> None:
    """Print keys, what left and budgets, of which each command has some."""
    for member, key in facts.get("keys", {}).items():
        print(f"{member}  {key}")
    for row in facts.get("left", ()):
        counts = []
        for name, value in row.items():
            if isinstance(value, int):
                counts.append(f"{value:,} {name}")
        # Names are from the file; escaped, they cannot imitate other output.
        message = f"job {row['job']!a}, part {row['part']!a}, to {row['recipient']!a}"
        print(f"left: {message}: {', '.join(counts)}")
    for row in facts.get("budgets", ()):
        spent = f"epsilon {row['epsilon']} at delta {row['delta']}, of {row['limit']}"
        size = f"its budget had {row['size']:,} records then"
        print(f"privacy: data set {row['dataset']!a}: {spent}; {size}")


if __name__ == "__main__":
    sys.exit(main())
