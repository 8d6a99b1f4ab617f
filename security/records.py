"""The records of a silo's egress ledger, each with a literal example.

The log adds ``v``, ``seq``, ``prev``, ``nonce``, ``time`` and ``mono_us`` to each (chain.py); ``ref`` is the ``seq``
of an earlier record. What may follow what stands in ledger_rules.py.
"""

from collections.abc import Callable
from math import prod
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from ..errors import LocalError
from ..files import MAX_SAFE_INTEGER, Strict
from .chain import FRAME, Line
from .identity import Hex32, Hex64
from .policy import MAX_FILE

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_SAFE_INTEGER)]
Text = Annotated[str, Field(max_length=1024)]


class Peer(Strict):
    """``{"id":"coordinator","spki":"9f86…"}``: a member and the TLS key that it showed."""

    id: Text
    spki: Hex32


class Tensor(Strict):
    """One tensor that leaves; ``bytes`` are those on the wire.

    ``{"bytes":1800,"dtype":"float32","kind":"backbone","name":"features.0.weight","part":"backbone",
    "shape":[6,3,5,5],"taint":"private"}``
    """

    part: Text
    kind: Text
    name: Text
    dtype: Text
    shape: tuple[Count, ...]
    bytes: Count
    taint: Literal["public", "dp", "private"]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class TensorDigest(Strict):
    """``{"name":"features.0.weight","part":"backbone","sha256":"2c26…"}``: over the bytes on the wire."""

    part: Text
    name: Text
    sha256: Hex32


class Size(Strict):
    """``{"bytes":248112}``: a payload; its header is not counted (rule 27)."""

    bytes: Count


class Payload(Size):
    """``{"bytes":248112,"sha256":"fcde…"}``."""

    sha256: Hex32


class Applied(Strict):
    """``{"decision":"allow","file":"e3b0…","rule":"round-update"}``: the policy file's digest and its rule."""

    file: Hex32
    rule: Text
    decision: Literal["allow"]


class Start(Strict):
    """``{"policy":"e3b0…","roster":"9f86…","silo":"hospital-a","software":"staddle 0.1.0","type":"start"}``."""

    type: Literal["start"] = "start"
    silo: Text
    software: Text
    roster: Hex32
    policy: Hex32


class Stop(Strict):
    """``{"reason":"asked to stop","type":"stop"}``."""

    type: Literal["stop"] = "stop"
    reason: Text


class Recovery(Strict):
    """``{"dropped_bytes":117,"last_good_seq":41,"type":"recovery"}``: a torn last line was put aside."""

    type: Literal["recovery"] = "recovery"
    dropped_bytes: Annotated[int, Field(strict=True, ge=1, le=MAX_SAFE_INTEGER)]
    last_good_seq: Annotated[int, Field(strict=True, ge=-1, le=MAX_SAFE_INTEGER)]


class KeyRotate(Strict):
    """``{"new":"staddle.example/…+1f0c…","old":"staddle.example/…+34b4…","type":"key.rotate"}``: who signs from now on.

    The old key signs one more checkpoint, which has this record.
    """

    type: Literal["key.rotate"] = "key.rotate"
    old: Text
    new: Text


class JobAccept(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","signer":"operator-1","type":"job.accept"}``."""

    type: Literal["job.accept"] = "job.accept"
    job: Text
    job_digest: Hex32
    signer: Text


class JobDecline(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","reasons":["…"],"signer":"operator-1","type":"job.decline"}``."""

    type: Literal["job.decline"] = "job.decline"
    job: Text
    job_digest: Hex32
    signer: Text
    reasons: tuple[str, ...]


class PolicyChange(Strict):
    """Durable before anything leaves under the policy; ``before`` is null where the ledger has none before it.

    ``{"after":"e3b0…","before":null,"text":"version = 1 …","type":"policy.change"}``: digests and text of the file.
    """

    type: Literal["policy.change"] = "policy.change"
    before: Hex32 | None
    after: Hex32
    text: Annotated[str, Field(max_length=MAX_FILE)]


class Intent(Strict):
    """Durable before byte 1 leaves; without an ``egress.digest`` all of it counts as left (rule 27).

    ``tensors`` are the whole payload, ``message`` is what goes of it now: all behind its first ``offset`` bytes, which
    the recipient has from an attempt whose connection broke (0: everything goes).

    ``{"attempt":0,"cohort":["hospital-a","hospital-b"],"form":"plain","job":"lung-3","job_digest":"ab12…","message":{"bytes":1800},
    "method":"fedavg","offset":0,"policy":{"decision":"allow","file":"e3b0…","rule":"round-update"},"purpose":"update",
    "readers":["coordinator"],"recipient":{"id":"coordinator","spki":"9f86…"},"round":17,
    "rpc":"/staddle.Federation/Upload","silo":"hospital-a","tensors":[{…}],"type":"egress.intent"}``
    """

    type: Literal["egress.intent"] = "egress.intent"
    silo: Text
    job: Text
    job_digest: Hex32
    method: Text
    round: Count
    attempt: Count
    purpose: Text
    rpc: Text
    recipient: Peer
    readers: tuple[Text, ...]  # all who can open the payload, and under which collusion (rule 31)
    form: Text
    policy: Applied
    tensors: tuple[Tensor, ...]
    message: Size
    offset: Count = 0
    cohort: tuple[Text, ...] = ()  # silos of the round, sorted, as the recipient told it; older records have none

    @property
    def leaving(self) -> tuple[tuple[Tensor, int], ...]:
        """The tensors of which something goes now, and how many bytes of each."""
        found, end = [], 0
        for tensor in self.tensors:
            end += tensor.bytes
            left = min(tensor.bytes, max(0, end - self.offset))
            if left or not self.offset:
                found.append((tensor, left))
        return tuple(found)


class Digest(Strict):
    """Durable before the END frame: ``{"message":{…},"ref":412,"tensors":[{…}],"type":"egress.digest"}``.

    Hashes and size are of the whole payload, bytes before the intent's offset included.
    """

    type: Literal["egress.digest"] = "egress.digest"
    ref: Count
    tensors: tuple[TensorDigest, ...]
    message: Payload


class Outcome(Strict):
    """``{"bytes_sent":1800,"receipt":"5c1f…","ref":412,"status":"sent","type":"egress.outcome"}``.

    ``bytes_sent`` counts payload bytes handed to the transport; a receipt is what the recipient signed, in hex.
    """

    type: Literal["egress.outcome"] = "egress.outcome"
    ref: Count
    status: Literal["sent", "failed", "unknown"]
    bytes_sent: Count
    receipt: Annotated[str, Field(max_length=4096)] | None


class ControlOpen(Strict):
    """Polls and heartbeats of one session under one cap (rule 32).

    ``{"max_bytes":65536,"max_messages":10000,"recipient":{…},"session":"7f3a…","type":"control.open"}``
    """

    type: Literal["control.open"] = "control.open"
    session: Text
    recipient: Peer
    max_messages: Count
    max_bytes: Count


class ControlClose(Strict):
    """``{"bytes":5120,"messages":80,"ref":3,"type":"control.close"}``."""

    type: Literal["control.close"] = "control.close"
    ref: Count
    messages: Count
    bytes: Count


class Witness(Strict):
    """Another member holds this head of this ledger: ``{"by":"b","root":"4b2f…","size":413,"type":"witness"}``.

    The coordinator says so at each greeting; a silo signs it (rule 30). The ledger has grown from there.
    """

    type: Literal["witness"] = "witness"
    by: Text
    size: Count
    root: Hex32


class Ingress(Strict):
    """``{"job":"lung-3","message":{…},"purpose":"deliver","round":17,"rpc":"…","sender":{…},"type":"ingress"}``."""

    type: Literal["ingress"] = "ingress"
    job: Text
    round: Count
    purpose: Text
    rpc: Text
    sender: Peer
    message: Payload


class Deny(Strict):
    """``{"job":"lung-3","policy":"e3b0…","purpose":"update","reasons":["…"],"round":17,"type":"policy.deny"}``."""

    type: Literal["policy.deny"] = "policy.deny"
    job: Text
    round: Count
    purpose: Text
    policy: Hex32
    reasons: tuple[str, ...]


# Of the coordinator's ledger, which has ``stop``, ``recovery`` and ``key.rotate`` besides.


class Serving(Strict):
    """``{"coordinator":"c-1","roster":"9f86…","software":"staddle 0.1.0","type":"serving"}``: it has started."""

    type: Literal["serving"] = "serving"
    coordinator: Text
    software: Text
    roster: Hex32


class Received(Strict):
    """Durable before its receipt leaves; ``checkpoint`` is what the silo signed of its own ledger (rule 30).

    ``{"checkpoint":"staddle.example/…","job":"lung-3","job_digest":"ab12…","ledger_leaf":"9a0b…","ledger_seq":412,
    "message":{…},"receipt":"5c1f…","round":17,"silo":"hospital-a","type":"received"}``
    """

    type: Literal["received"] = "received"
    silo: Text
    job: Text
    job_digest: Hex32
    round: Count
    message: Payload
    ledger_seq: Count
    ledger_leaf: Hex32
    checkpoint: Annotated[str, Field(max_length=4096)]
    receipt: Hex64


class Delivered(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","message":{…},"round":17,"silo":"hospital-a","type":"delivered"}``."""

    type: Literal["delivered"] = "delivered"
    silo: Text
    job: Text
    job_digest: Hex32
    round: Count
    message: Payload


class HeadRefused(Strict):
    """A silo signed a head that does not extend the one that the coordinator holds: evidence, kept whole.

    ``{"checkpoint":"staddle.example/…","silo":"hospital-a","type":"head.refused","why":"…"}``
    """

    type: Literal["head.refused"] = "head.refused"
    silo: Text
    checkpoint: Annotated[str, Field(max_length=4096)]
    why: Text


Record = (
    Start
    | Stop
    | Recovery
    | KeyRotate
    | JobAccept
    | JobDecline
    | PolicyChange
    | Intent
    | Digest
    | Outcome
    | ControlOpen
    | ControlClose
    | Witness
    | Ingress
    | Deny
    | Serving
    | Received
    | Delivered
    | HeadRefused
)
_RECORDS: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(Annotated[Record, Field(discriminator="type")])
RecordT = TypeVar("RecordT", bound=Strict)


def checked(line: Line) -> dict[str, Any]:
    """The record of a verified line, whose form is right; LocalError names its seq and what is wrong with it."""
    if not line.typed:
        _validated(line, _RECORDS.validate_python)
    return line.record


def parse_record(line: Line, model: type[RecordT]) -> RecordT:
    """The typed record of a verified line of this type; LocalError names its seq and what is wrong with it."""
    return _validated(line, model.model_validate)


def parse_any(line: Line) -> Record:
    """The typed record of a verified line, whatever its type."""
    return _validated(line, _RECORDS.validate_python)


def _validated(line: Line, validate: Callable[[Any], RecordT]) -> RecordT:
    body = {key: value for key, value in line.record.items() if key not in FRAME}
    try:
        return validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "type"
        raise LocalError(f"seq {line.seq}: {where}: {first['msg']}") from None
