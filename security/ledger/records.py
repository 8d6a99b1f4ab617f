"""The records of a silo's egress ledger, each with a literal example.

The log adds ``v``, ``seq``, ``prev``, ``nonce``, ``time`` and ``mono_us`` to each
(security/log/chain.py); ``ref`` is the ``seq`` of an earlier record. fast_decoder.py says how a
record is read, rules.py what may follow what.

``ctx`` names the attempt, and with it job, round, cohort and groups: it is the digest of
security/secagg/spec.py. The context of a contribution to a key is its epoch
(security/blind/group_key.py), that of the word on a padded upload of its version
(security/blind/mix_context.py).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from ...errors import LocalError
from ...files.documents import MAX_SAFE_INTEGER, Strict
from ..faults import Code
from ..identity.keys import Hex32, Hex64
from ..log.chain import FRAME, VerifiedLine
from ..log.note import Note
from ..log.tree_head import TreeHead
from ..policy.policy import MAX_FILE
from ..policy.release import Release

# characters of a reason: of a sum that ended, and of a head that was refused
MOST_WHY, MOST_REFUSED_WHY = 500, 1000
# characters of a roster: escaped, they fit into a line of a ledger; some 500 members
MOST_ROSTER = 700_000

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_SAFE_INTEGER)]
Text = Annotated[str, Field(max_length=1024)]
# Decimals are texts: JSON encoders may write one float in different ways.
Number = Annotated[str, Field(pattern=r"^[0-9]{1,10}(\.[0-9]{1,40})?$")]  # a decimal
RecordT = TypeVar("RecordT", bound=Strict)


def typed(line: VerifiedLine, validate: Callable[[Any], RecordT]) -> RecordT:
    """The typed record of a verified line, by pydantic's ``validate``.

    LocalError names its seq and what is wrong with it.
    """
    # The chain has checked the frame, and the models would refuse its fields as unknown.
    body = {key: value for key, value in line.record.items() if key not in FRAME}
    try:
        return validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "type"
        raise LocalError(f"seq {line.seq}: {where}: {first['msg']}") from None


class Peer(Strict):
    """``{"id":"coordinator","spki":"9f86…"}``: a member and the TLS key that it showed."""

    id: Text
    spki: Hex32


# What early releases wrote for a taint; records that have it are no others, so it is only read.
_EARLY_TAINTS = {"private": "exact", "dp": "noised"}


def taint_of(word: Any) -> Any:
    """The taint that a record's word stands for; anything else as it is."""
    return _EARLY_TAINTS.get(word, word) if isinstance(word, str) else word


class Tensor(Strict):
    """One tensor that leaves; ``bytes`` are those on the wire.

    ``readers`` are those who can open it, where they are not all who can open something of its
    message.

    ``{"bytes":1800,"dtype":"float32","kind":"backbone","name":"features.0.weight","part":"backbone","readers":[],
    "shape":[6,3,5,5],"taint":"exact"}``
    """

    part: Text
    kind: Text
    name: Text
    dtype: Text
    shape: tuple[Count, ...]
    bytes: Count
    # The silo software's own statement, which the bytes cannot confirm (rule 32).
    taint: Annotated[Literal["public", "noised", "exact"], BeforeValidator(taint_of)]
    readers: tuple[Text, ...] = ()  # older records have none

    @classmethod
    def of(cls, release: Release, readers: Sequence[str]) -> Self:
        """The record of a release in a message that ``readers`` can open.

        LocalError for a dtype that cannot cross.
        """
        # Readers that are the message's stand there once, not with each of its tensors.
        own_readers = () if set(release.readers) == set(readers) else release.readers
        return cls(
            part=release.part,
            kind=release.kind,
            name=release.name,
            dtype=release.dtype,
            shape=release.shape,
            bytes=release.nbytes,
            taint=release.taint,
            readers=own_readers,
        )

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class TensorDigest(Strict):
    """``{"name":"features.0.weight","part":"backbone","sha256":"2c26…"}``: over the bytes on the
    wire.
    """

    part: Text
    name: Text
    sha256: Hex32


class Size(Strict):
    """``{"bytes":248112}``: a message; its header is not counted (rule 27)."""

    bytes: Count


class MessageDigest(Size):
    """``{"bytes":248112,"sha256":"fcde…"}``.

    ``bytes`` are those of all tensors and words, without the manifest. ``sha256`` is over the
    digests in the END frame, one after another (proto/stream.py): one per tensor, or one for all
    of a masked or padded upload. For a protocol message it is over the message itself.
    """

    sha256: Hex32


class Applied(Strict):
    """``{"decision":"allow","file":"e3b0…","rule":"round-update"}``: the policy file's digest and
    its rule.
    """

    file: Hex32
    rule: Text
    # A denied message has a ``policy.deny`` record and no intent.
    decision: Literal["allow"]


class Secagg(Strict):
    """The attempt at a secure sum that a masked message is a part of, as the silo knew it when it
    masked.

    ``{"attempt":0,"clipped":0,"colluders":1,"ctx":"5c1f…","members":["hospital-a","hospital-b",…],"threshold":3}``
    """

    ctx: Hex32  # of the attempt's specification: security/secagg/spec.py
    attempt: Count
    members: tuple[Text, ...]  # U2, sorted: with whom it was masked
    threshold: Count  # shares that open it
    colluders: Count  # silos that may side with the coordinator, as the specification assumes
    clipped: Count  # values that were cut to the group's bound


class HiddenBinding(Strict):
    """The binding of a padded or rotated message: ``{"ctx":"5c1f…","number":4}``.

    ``ctx`` is of the version of a padded one (security/blind/mix_context.py), ``number`` counts
    these; of the use of a rotated one (security/blind/rotation.py), and its number is 0.
    """

    ctx: Hex32
    number: Count


Noise: TypeAlias = Literal["local", "shared"]


class Paid(Strict):
    """The reservations that paid for the tensors of a message that are ``dp``:
    ``{"dataset":"cxr-2024","ids":[12,19],"noise":"local"}``.

    ``ids`` are reservations of the data set's privacy budget, by their seq in its log
    (security/dp/budget.py). ``noise`` says whose noise the tensors have. "local": all of it is this
    silo's own. "shared": they have this silo's share, so not they are protected but the sum that
    they go into, by the shares of others.
    """

    dataset: Text
    # All below the size of the data set's last ``privacy.head`` in this ledger.
    ids: tuple[Count, ...]  # in order, each once
    noise: Noise = "local"  # older records have none

    @classmethod
    def of(cls, dataset: str, releases: Sequence[Release], noise: Noise = "local") -> Self | None:
        """The record of what paid for these releases, from this data set; None if nothing did."""
        ids = sorted({paid for release in releases for paid in release.ledger_ids})
        return cls(dataset=dataset, ids=tuple(ids), noise=noise) if ids else None


class PackageCode(Strict):
    """An installed package whose code computed what leaves:
    ``{"name":"lung","sha256":"9b1c…","version":"0.3"}``.

    The digest is over its files (files/packages.py).
    """

    name: Text
    version: Text
    sha256: Hex32


class Start(Strict):
    """``{"policy":"e3b0…","roster":"9f86…","silo":"hospital-a","software":"staddle
    0.1.0","type":"start"}``.
    """

    type: Literal["start"] = "start"
    silo: Text
    software: Text
    roster: Hex32
    policy: Hex32


class StopRecord(Strict):
    """``{"reason":"asked to stop","type":"stop"}``.

    If the last record is another, the agent still runs, or it was killed.
    """

    type: Literal["stop"] = "stop"
    reason: Text


class RecoveryRecord(Strict):
    """``{"dropped_bytes":117,"last_good_seq":41,"type":"recovery"}``: a torn last line was put
    aside.
    """

    type: Literal["recovery"] = "recovery"
    dropped_bytes: Annotated[int, Field(strict=True, ge=1, le=MAX_SAFE_INTEGER)]
    last_good_seq: Annotated[int, Field(strict=True, ge=-1, le=MAX_SAFE_INTEGER)]


class KeyRotate(Strict):
    """``{"new":"staddle.example/…+1f0c…","old":"staddle.example/…+34b4…","type":"key.rotate"}``:
    who signs from now on.

    The old key signs one more checkpoint, which has this record.
    """

    type: Literal["key.rotate"] = "key.rotate"
    # Both as ``str`` of a ``VerifierKey``.
    old: Text
    new: Text


class PersonsDecision(Strict):
    """What one of the silo's own people said, before the silo itself accepted or declined.

    ``by`` is a name by that person's own word, ``signed`` SHA-256 of the signed file that was
    shown. The reason of a refusal is not here: ledgers are shown to others.

    ``{"by":"anna","signed":"ab12…","time":"2026-11-29T08:15:00+00:00"}``
    """

    by: Text
    signed: Hex32
    time: Text


class JobAccept(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","person":null,"signer":"operator-1","type":"job.accept"}``.

    The silo checked the signed document of this digest, and its policy allows the job. The policy
    still decides on each message. ``person`` is null where nobody was asked.
    """

    type: Literal["job.accept"] = "job.accept"
    job: Text
    job_digest: Hex32
    signer: Text
    person: PersonsDecision | None = None  # older records have none


class JobDecline(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","person":null,"reasons":["…"],"signer":"operator-1",
    "type":"job.decline"}``.

    ``reasons`` are all that the checks found, not only the first. ``person`` is null where the
    silo declined by itself.
    """

    type: Literal["job.decline"] = "job.decline"
    job: Text
    job_digest: Hex32
    signer: Text
    reasons: tuple[str, ...]
    person: PersonsDecision | None = None  # older records have none


class RosterChange(Strict):
    r"""The members from here on, with the founders' signatures: an audit needs no file of it.

    ``roster`` is the digest that ``start`` and ``serving`` name, ``text`` the canonical JSON.

    ``{"roster":"9f86…","text":"{\"entries\":[…],…}","type":"roster.change"}``
    """

    type: Literal["roster.change"] = "roster.change"
    roster: Hex32
    text: Annotated[str, Field(max_length=MOST_ROSTER)]


class PolicyChange(Strict):
    """Durable before anything leaves under the policy.

    ``before`` is null where the ledger has none before it.

    ``{"after":"e3b0…","before":null,"text":"version = 1 …","type":"policy.change"}``: digests and
    text of the file.
    """

    type: Literal["policy.change"] = "policy.change"
    before: Hex32 | None
    after: Hex32
    # The whole file, so that an auditor can read the policy from the ledger.
    text: Annotated[str, Field(max_length=MAX_FILE)]


class Intent(Strict):
    """Durable before byte 1 leaves.

    Without an ``egress.digest`` all of it counts as left (rule 27).

    ``tensors`` are the whole message, ``message`` is what goes of it now: all behind its first
    ``offset`` bytes, which the recipient has from an attempt whose connection broke (0: everything
    goes). Of a masked message ``tensors`` are those that are summed, in words on the wire, and the
    rest are canaries among them (security/secagg/masked_sum.py). A padded or rotated one is of one
    part, whose tensors are all of it.

    ``{"attempt":0,"cohort":["hospital-a","hospital-b"],"dataset":"cxr-2024","dp":null,"form":"plain","hidden":null,"job":"lung-3",
    "job_digest":"ab12…","message":{"bytes":1800},"method":"fedavg","offset":0,"packages":[],
    "policy":{"decision":"allow","file":"e3b0…","rule":"round-update"},"purpose":"update","readers":["coordinator"],"recipient":{"id":"coordinator",
    "spki":"9f86…"},"round":17,"rpc":"/staddle.Federation/Upload","secagg":null,"silo":"hospital-a","tensors":[{…}],
    "type":"egress.intent"}``
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
    readers: tuple[Text, ...]  # all who can open the message, and under which collusion (rule 31)
    # Plain, masked, padded or rotated (policy/release.py); rules.py checks what each requires.
    form: Text
    policy: Applied
    tensors: tuple[Tensor, ...]
    message: Size
    offset: Count = 0
    # silos of the round, sorted, as the recipient told it; older records have none
    cohort: tuple[Text, ...] = ()
    secagg: Secagg | None = None  # of a masked message, and of no other; older records have none
    # of a padded or rotated message, and of no other; older records have none
    hidden: HiddenBinding | None = None
    # of a message with tensors that are dp, and of no other; older records have none
    dp: Paid | None = None
    # the job's, where it runs code that is not Staddle's; older records have none
    packages: tuple[PackageCode, ...] = ()
    dataset: Text = ""  # of this silo, whose records the job is on; older records have none

    @property
    def part(self) -> str:
        """Whose upload of its own a padded or rotated message is; empty for any other."""
        return self.tensors[0].part if self.hidden else ""

    def leaving(self, size: int) -> tuple[tuple[Tensor, int], ...]:
        """The tensors of which something is in the first ``size`` bytes that go now, and how many
        bytes of each.

        Where canaries lie among them is not recorded: they count as the first bytes, and so the
        tensors in full.
        """
        whole, stop = self.offset + self.message.bytes, self.offset + size
        found, end = [], whole - sum(tensor.bytes for tensor in self.tensors) if self.secagg else 0
        for tensor in self.tensors:
            start, end = end, end + tensor.bytes
            left = max(0, min(end, stop) - max(start, self.offset))
            # A message from byte 0 has all its tensors without elements, too.
            if left or not (self.offset or tensor.bytes):
                found.append((tensor, left))
        return tuple(found)


class Digest(Strict):
    """Durable before the END frame:
    ``{"message":{…},"ref":412,"tensors":[{…}],"type":"egress.digest"}``.

    Hashes and size are of the whole message, bytes before the intent's offset included. Of a
    masked, padded or rotated message no tensor has a hash: with the hash of a plain tensor guesses
    could be compared.
    """

    type: Literal["egress.digest"] = "egress.digest"
    ref: Count
    tensors: tuple[TensorDigest, ...]
    message: MessageDigest


class OutcomeRecord(Strict):
    """``{"bytes_sent":1800,"receipt":"5c1f…","ref":412,"status":"sent","type":"egress.outcome"}``.

    ``bytes_sent`` counts message bytes handed to the transport; a receipt is what the recipient
    signed, in hex.
    """

    type: Literal["egress.outcome"] = "egress.outcome"
    ref: Count
    status: Literal["sent", "failed", "unknown"]
    bytes_sent: Count
    # Null if no receipt came; receipt_checks.py verifies receipts.
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
    """``{"bytes":5120,"messages":80,"ref":3,"type":"control.close"}``.

    The totals of the session that record ``ref`` opened, within its caps. Without this record the
    caps count.
    """

    type: Literal["control.close"] = "control.close"
    ref: Count
    messages: Count
    bytes: Count


class PrivacyHead(Strict):
    """Head of a data set's privacy budget, durable before anything is done with its records.

    ``size`` and ``root`` are of the budget's own log; who puts an older copy of it back is found by
    them. ``epsilon`` is what was spent and reserved until then at ``delta``, rounded up, and
    ``limit`` what its owner lets be spent.

    ``{"dataset":"cxr-2024","delta":"0.00001","epsilon":"3.4120","limit":"8","root":"4b2f…","size":13,
    "type":"privacy.head"}``
    """

    type: Literal["privacy.head"] = "privacy.head"
    dataset: Text
    size: Count
    root: Hex32
    epsilon: Number
    delta: Number
    limit: Number

    @classmethod
    def of(cls, dataset: str, head: TreeHead, *, epsilon: str, delta: str, limit: str) -> Self:
        """The record of this head of the data set's budget."""
        size, root = head.size, head.root.hex()
        return cls(dataset=dataset, size=size, root=root, epsilon=epsilon, delta=delta, limit=limit)


class WitnessRecord(Strict):
    """Another member holds this head of this ledger:
    ``{"by":"b","root":"4b2f…","size":413,"type":"witness"}``.

    The coordinator says so at each greeting; a silo signs it (rule 30). The ledger has grown from
    there.
    """

    type: Literal["witness"] = "witness"
    by: Text
    size: Count
    root: Hex32

    @classmethod
    def of(cls, by: str, held: TreeHead) -> Self:
        """The record of the head that ``by`` holds."""
        return cls(by=by, size=held.size, root=held.root.hex())


class Ingress(Strict):
    """``{"job":"lung-3","message":{…},"purpose":"deliver","round":17,"rpc":"…","sender":{…},"type":"ingress"}``.

    A delivery to the silo: its size and digest, and the TLS key of its sender.
    """

    type: Literal["ingress"] = "ingress"
    job: Text
    round: Count
    purpose: Text
    rpc: Text
    sender: Peer
    message: MessageDigest


class Deny(Strict):
    """``{"job":"lung-3","policy":"e3b0…","purpose":"update","reasons":["…"],"round":17,"type":"policy.deny"}``.

    A message that did not leave, with all of the policy's reasons. ``policy`` is the digest of the
    file.
    """

    type: Literal["policy.deny"] = "policy.deny"
    job: Text
    round: Count
    purpose: Text
    policy: Hex32
    reasons: tuple[str, ...]


# Of the coordinator's ledger, which has ``stop``, ``recovery`` and ``key.rotate`` besides.


class Serving(Strict):
    """``{"coordinator":"c-1","roster":"9f86…","software":"staddle 0.1.0","type":"serving"}``: it
    has started.

    The counterpart of a silo's ``start``: it names the software and the roster of the records that
    follow.
    """

    type: Literal["serving"] = "serving"
    coordinator: Text
    software: Text
    roster: Hex32


class Received(Strict):
    """Durable before its receipt leaves.

    ``checkpoint`` is what the silo signed of its own ledger (rule 30).

    ``{"checkpoint":"staddle.example/…","job":"lung-3","job_digest":"ab12…","ledger_leaf":"9a0b…","ledger_seq":412,
    "message":{…},"receipt":"5c1f…","round":17,"silo":"hospital-a","type":"received"}``
    """

    type: Literal["received"] = "received"
    silo: Text
    job: Text
    job_digest: Hex32
    round: Count
    message: MessageDigest
    ledger_seq: Count
    ledger_leaf: Hex32
    # Signed by the silo, so the coordinator cannot have made it up.
    checkpoint: Annotated[str, Field(max_length=4096)]
    # As it was sent: reconcile.py compares it with the silo's copy.
    receipt: Hex64


class DeliveredRecord(Strict):
    """``{"job":"lung-3","job_digest":"ab12…","message":{…},"round":17,"silo":"hospital-a","type":"delivered"}``.

    A delivery to a silo. reconcile.py pairs it with the silo's ``ingress`` by job, round, size and
    digest.
    """

    type: Literal["delivered"] = "delivered"
    silo: Text
    job: Text
    job_digest: Hex32
    round: Count
    message: MessageDigest


class HeadRefused(Strict):
    """A silo signed a head that does not extend the one that the coordinator holds: evidence, kept
    whole.

    ``{"checkpoint":"staddle.example/…","silo":"hospital-a","type":"head.refused","why":"…"}``
    """

    type: Literal["head.refused"] = "head.refused"
    silo: Text
    checkpoint: Annotated[str, Field(max_length=4096)]
    why: Text

    @classmethod
    def of(cls, silo: str, checkpoint: Note, why: str) -> Self:
        """The record of a refused checkpoint; a long reason is cut."""
        return cls(silo=silo, checkpoint=bytes(checkpoint).decode(), why=why[:MOST_REFUSED_WHY])


ProtocolKind: TypeAlias = Literal[
    "keys",
    "shares",
    "complaint",
    "header",
    "survival",
    "reveal",
    "abandon",
    "end",
    "contribution",
    "padded",
]


class ProtocolMessage(Strict):
    """A message of the protocol itself, durable before it leaves.

    It counts as left, and no outcome follows.

    ``{"ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","kind":"shares","message":{…},"recipient":{…},"round":17,
    "rpc":"/staddle.v1.Federation/Secure","type":"egress.protocol"}``: size and SHA-256 of the
    message on the wire.
    """

    type: Literal["egress.protocol"] = "egress.protocol"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    kind: ProtocolKind
    rpc: Text
    recipient: Peer
    message: MessageDigest


class SumEnd(Strict):
    """An attempt ended without a sum.

    ``blame`` says what is known, and is empty where nobody is at fault.

    A silo by its id, ``coordinator``, or ``coordinator or a silo of the cohort`` where none can
    tell (security/faults.py).

    ``{"blame":"coordinator","code":"SURVIVORS","ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","round":17,
    "type":"secagg.end","why":"…"}``
    """

    type: Literal["secagg.end"] = "secagg.end"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    code: Code
    blame: Text
    # It stays at this silo: only the code crosses.
    why: Annotated[str, Field(max_length=MOST_WHY)]


class SumSigned(Strict):
    """Durable before this silo signs the survivors of a sum: from here on the sum may be open.

    Written once per job, set and membership of the federation; sum_history.py judges later sets by
    it. ``values`` are fixed where something in the sum is the same in every job, such as counts of
    records.

    ``{"absent":["hospital-e"],"ctx":"5c1f…","dataset":"cxr-2024","job":"lung-3","job_digest":"ab12…","round":0,
    "survivors":["hospital-a",…],"type":"secagg.signed","values":"fixed"}``
    """

    type: Literal["secagg.signed"] = "secagg.signed"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    # sum_history.py judges per data set: sums over other records are another history.
    dataset: Text  # of this silo, whose records are in it
    survivors: tuple[Text, ...]  # U3, sorted
    # the other silos of the roster under which the job was accepted, sorted; of older records, of
    # that under which they signed
    absent: tuple[Text, ...]
    values: Literal["fixed", "varying"]
    # of a job that has several, each its silos, joined by commas: any may be summed
    batches: tuple[Text, ...] = ()


class SumOpened(Strict):
    """A sum was opened; SHA-256 of what came down.

    ``{"ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","round":17,"sha256":"fcde…","survivors":["hospital-a",…],
    "type":"secagg.sum"}``
    """

    type: Literal["secagg.sum"] = "secagg.sum"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    survivors: tuple[Text, ...]  # U3, sorted: whose values are in the sum
    sha256: Hex32


# These reach the disk with the next record; all others are there before ``append`` returns. A crash
# may lose the last of these, and the ledger claims no less without it: a message without an outcome
# counts as left, who holds a head says so again at the next greeting, and reconcile.py takes a
# delivery without a record for a gap.
_DURABLE_WITH_THE_NEXT = (OutcomeRecord, WitnessRecord, DeliveredRecord)


def is_durable(record: Strict) -> bool:
    """True if this record is on the disk before anything follows from it."""
    return not isinstance(record, _DURABLE_WITH_THE_NEXT)
