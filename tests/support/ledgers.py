"""Ledgers for tests: one key, one federation, and the folder's files by name."""

import json
import re
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.errors import LocalError
from staddle.security.faults import Code
from staddle.security.ledger import audit
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.records import (
    MOST_WHY,
    Applied,
    ControlClose,
    ControlOpen,
    DeliveredRecord,
    Deny,
    Digest,
    HeadRefused,
    HiddenBinding,
    Ingress,
    Intent,
    JobAccept,
    JobDecline,
    MessageDigest,
    OutcomeRecord,
    Paid,
    Peer,
    PersonsDecision,
    PrivacyHead,
    ProtocolMessage,
    Secagg,
    Serving,
    Size,
    Start,
    StopRecord,
    SumEnd,
    SumOpened,
    Tensor,
    TensorDigest,
    WitnessRecord,
)
from staddle.security.log.append_log import AppendLog
from staddle.security.log.chain import leaf_hash
from staddle.security.log.head import Signer
from staddle.security.log.segments import segment
from staddle.security.log.tree_head import TreeHead
from staddle.security.policy.release import Release

FEDERATION = "lung"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))


def signer(silo="silo-a", key=KEY):
    return Signer.of(FEDERATION, silo, key)


def public(silo="silo-a"):
    """The key that others check this silo's checkpoints with."""
    return signer(silo).public


def open_ledger(folder, silo="silo-a", key=KEY):
    return Ledger.open(Path(folder), silo, FEDERATION, key)


FRAME = ("v", "seq", "prev", "nonce", "time", "mono_us")


def body(record):
    """What the record says, without the fields that chain it."""
    return {key: value for key, value in record.items() if key not in FRAME}


def raw(folder, *records):
    """Append records past the writer's rules, with a right chain: only the verifier can object."""
    with open_log(folder) as log:
        for record in records:
            log.append(record)


def found_with(folder, wrong):
    """What the verifier finds of a ledger with each list of wrong records behind it, by its key.

    There must be one problem, in the words of the key.
    """
    before = copied(folder)
    for said, records in wrong.items():
        put_back(folder, before)
        raw(folder, *records)
        found = audit.verify(folder)
        assert len(found.problems) == 1, (said, found.problems)
        assert re.search(said, found.problems[0]), (said, found.problems)
        yield said


def open_log(folder, **options):
    """A log of records of any type."""
    return AppendLog.open(Path(folder), signer(), **options)


def first(folder):
    """The first segment, all there is of a small ledger."""
    return segment(Path(folder), 1)


def stored(folder, *types):
    """All records as they stand in the files, or those of these types."""
    paths = sorted(Path(folder).glob("seg-*.jsonl"))
    found = [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]
    return [record for record in found if not types or record["type"] in types]


def copied(folder):
    """The folder's files by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def put_back(folder, files):
    """The folder as it was copied, and nothing else in it."""
    for path in Path(folder).iterdir():
        path.unlink()
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)


def forge(folder, *records, cut=0):
    """Write records behind the last but ``cut``, as somebody without the log key can: in their
    place in the chain.
    """
    lines = first(folder).read_bytes().splitlines()[: -cut or None]
    for record in records:
        last = json.loads(lines[-1])
        frame = {"v": 1, "seq": last["seq"] + 1, "prev": leaf_hash(lines[-1]), "nonce": "5f" * 16}
        made = {"time": last["time"], "mono_us": last["mono_us"] + 1, **record, **frame}
        spelt = json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        lines.append(spelt.encode())
    first(folder).write_bytes(b"\n".join(lines) + b"\n")


# One of each record.

HASH = "ab" * 32
PEER = Peer(id="coordinator", spki=HASH)
RELEASES = (
    Release("model", "whole_model", "w", "float32", (10, 4)),
    Release("model", "whole_model", "b", "float32", (4,)),
    Release("metric", "metric", "correct", "int64", ()),
)
BYTES = 160 + 16 + 8
DIGESTS = tuple(TensorDigest(part=r.part, name=r.name, sha256=HASH) for r in RELEASES)


def write_start(ledger, software, roster, policy):
    return ledger.append(Start(silo=ledger.silo, software=software, roster=roster, policy=policy))


def write_stop(ledger, reason):
    return ledger.append(StopRecord(reason=reason))


def by_person(by):
    return PersonsDecision(by=by, signed=HASH, time="2026-11-20T21:29:00+00:00")


def write_job_accept(ledger, job, job_digest, signer, person=None):
    fields = {"job": job, "job_digest": job_digest, "signer": signer, "person": person}
    return ledger.append(JobAccept(**fields))


def write_job_decline(ledger, job, job_digest, signer, reasons, person=None):
    fields = {"job": job, "job_digest": job_digest, "signer": signer, "person": person}
    return ledger.append(JobDecline(**fields, reasons=tuple(reasons)))


def write_intent(
    ledger,
    *,
    round_number,
    releases,
    readers,
    message_bytes,
    dataset="",
    noise="local",
    **fields,
):
    """An intent of these releases; the other fields are those of the record."""
    fields |= {"silo": ledger.silo, "round": round_number, "readers": tuple(readers)}
    fields |= {"tensors": tuple(Tensor.of(release, readers) for release in releases)}
    fields |= {"message": Size(bytes=message_bytes)}
    paid = {"dp": Paid.of(dataset, releases, noise), "dataset": dataset}
    return ledger.append(Intent(**paid | fields))


def write_digest(ledger, ref, tensors, message):
    return ledger.seal(Digest(ref=ref, tensors=tuple(tensors), message=message))


def write_outcome(ledger, ref, status, bytes_sent, receipt=None):
    fields = {"status": status, "bytes_sent": bytes_sent, "receipt": receipt}
    return ledger.append(OutcomeRecord(ref=ref, **fields))


def write_control_open(ledger, session, recipient, max_messages, max_bytes):
    caps = {"max_messages": max_messages, "max_bytes": max_bytes}
    return ledger.append(ControlOpen(session=session, recipient=recipient, **caps))


def write_control_close(ledger, ref, messages, size):
    return ledger.append(ControlClose(ref=ref, messages=messages, bytes=size))


def write_ingress(ledger, *, round_number, **fields):
    return ledger.append(Ingress(round=round_number, **fields))


def write_policy_deny(ledger, *, round_number, reasons, **fields):
    return ledger.append(Deny(round=round_number, reasons=tuple(reasons), **fields))


def write_privacy_head(ledger, dataset, head, **spent):
    return ledger.append(PrivacyHead.of(dataset, head, **spent))


def write_witness(ledger, by, held):
    return ledger.append(WitnessRecord.of(by, held))


# Those of the coordinator's ledger.


def write_serving(ledger, coordinator, software, roster):
    return ledger.append(Serving(coordinator=coordinator, software=software, roster=roster))


def write_delivered(ledger, silo, job, job_digest, round_number, message):
    fields = {"job": job, "job_digest": job_digest, "round": round_number, "message": message}
    return ledger.append(DeliveredRecord(silo=silo, **fields))


def write_refused(ledger, silo, checkpoint, why):
    return ledger.append(HeadRefused.of(silo, checkpoint, why))


# Messages with fields that fit together; a test changes some.


def intend(ledger, **changes):
    fields = {"job": "j1", "job_digest": HASH, "method": "fedavg", "round_number": 3, "attempt": 0}
    fields |= {"purpose": "update", "rpc": "/staddle/Upload", "recipient": PEER, "form": "plain"}
    fields |= {"policy": Applied(file=HASH, rule="update", decision="allow")}
    fields |= {"readers": ["coordinator"], "releases": RELEASES, "message_bytes": BYTES}
    return write_intent(ledger, **{**fields, **changes}).seq


def message_digest(size=BYTES):
    return MessageDigest(bytes=size, sha256=HASH)


def send(ledger, **changes):
    ref = intend(ledger, **changes)
    write_digest(ledger, ref, DIGESTS, message_digest())
    write_outcome(ledger, ref, "sent", BYTES, "5c1f")
    return ref


def full(path, key=KEY):
    """One of each record."""
    with open_ledger(path, key=key) as ledger:
        write_start(ledger, "staddle 0.1.0", HASH, HASH)
        write_job_accept(ledger, "j1", HASH, "operator-1", by_person("anna"))
        write_job_decline(ledger, "j2", HASH, "operator-1", ["no rule"])
        control = write_control_open(ledger, "s1", PEER, 100, 1000).seq
        of_round = {"job": "j1", "round_number": 3}
        came = {"purpose": "deliver", "rpc": "/x", "sender": PEER, "message": message_digest()}
        write_ingress(ledger, **of_round, **came)
        send(ledger)
        write_policy_deny(ledger, **of_round, purpose="update", policy=HASH, reasons=["no"])
        write_control_close(ledger, control, 8, 512)
        return write_stop(ledger, "asked to stop")


# Secure sums.

CTX = "c7" * 32
SUM = {"job": "j1", "job_digest": HASH, "round_number": 3, "ctx": CTX}


def of_sum(changes):
    """The fields of a record of a secure sum."""
    fields = {**SUM, **changes}
    return {"round": fields.pop("round_number"), **fields}


MEMBERS = ("silo-a", "silo-b", "silo-c", "silo-d")
WORDS = (
    Release("model", "whole_model", "w", "uint32", (10, 4), "masked"),
    Release("model", "whole_model", "b", "uint32", (4,), "masked"),
    Release("metric", "metric", "correct", "uint64", (), "masked"),
)
CANARIES = 40
MASKED_BYTES = BYTES + CANARIES


def secagg(**changes):
    fields = {"ctx": CTX, "attempt": 0, "members": MEMBERS}
    fields |= {"threshold": 3, "colluders": 1, "clipped": 2}
    return Secagg(**{**fields, **changes})


def intend_masked(ledger, **changes):
    masked = {"form": "masked", "readers": ["sum"]}
    masked |= {"releases": WORDS, "message_bytes": MASKED_BYTES}
    return intend(ledger, **{**masked, "cohort": MEMBERS, "secagg": secagg(), **changes})


def protocol(ledger, kind, size=100, **changes):
    fields = {
        "rpc": "/staddle.v1.Federation/Secure",
        "recipient": PEER,
        "message": message_digest(size),
    }
    return ledger.append(ProtocolMessage(**of_sum({**fields, "kind": kind, **changes}))).seq


def end_sum(ledger, why="U3 has 2 members", **changes):
    fields = {"code": Code.SURVIVORS, "blame": "coordinator", "why": why[:MOST_WHY], **changes}
    return ledger.append(SumEnd(**of_sum(fields))).seq


def open_sum(ledger, survivors=("silo-a", "silo-b", "silo-d"), **changes):
    fields = {"survivors": survivors, "sha256": HASH, **changes}
    return ledger.append(SumOpened(**of_sum(fields))).seq


def give_blindly(ledger, receipt="5c1f", job="j1"):
    """One secure sum, from its keys to its result; where its masked intent stands."""
    for number, kind in enumerate(("keys", "shares")):
        protocol(ledger, kind, 100 + number, job=job)
    ref = intend_masked(ledger, job=job)
    write_digest(ledger, ref, (), message_digest(MASKED_BYTES))
    protocol(ledger, "header", 102, job=job)
    write_outcome(ledger, ref, "sent", MASKED_BYTES, receipt)
    for number, kind in enumerate(("survival", "reveal"), 103):
        protocol(ledger, kind, number, job=job)
    open_sum(ledger, job=job)
    return ref


def summed(path, key=KEY):
    """A secure sum that was opened, and one that was not."""
    with open_ledger(path, key=key) as ledger:
        write_start(ledger, "staddle 0.1.0", HASH, HASH)
        give_blindly(ledger)
        ctx = "d8" * 32
        protocol(ledger, "keys", 200, round_number=4, ctx=ctx)
        end_sum(ledger, round_number=4, ctx=ctx)
        protocol(ledger, "abandon", 201, round_number=4, ctx=ctx)
        protocol(ledger, "end", 202, round_number=4, ctx=ctx)
        return write_stop(ledger, "asked to stop")


# Mixes and comparisons.

VERSION, USE, EPOCH = "a1" * 32, "b2" * 32, "e0" * 32
PADDED_WORDS = (
    Release("extractor", "backbone", "w", "uint64", (10, 4), "padded"),
    Release("extractor", "backbone", "b", "uint64", (4,), "padded"),
)
PADDED_BYTES = 8 * 44
VECTORS = (Release("heads", "classifier_rows", "rows", "float32", (3, 5), "rotated"),)
ROTATED_BYTES = 4 * 15


def intend_padded(ledger, ctx=VERSION, number=0, **changes):
    padded = {"form": "padded", "readers": ["mix"], "cohort": MEMBERS}
    padded |= {"releases": PADDED_WORDS, "message_bytes": PADDED_BYTES}
    padded |= {"hidden": HiddenBinding(ctx=ctx, number=number)}
    return intend(ledger, **{**padded, **changes})


def intend_rotated(ledger, ctx=USE, number=0, **changes):
    rotated = {"form": "rotated", "readers": ["gram"], "releases": VECTORS}
    return intend_padded(
        ledger, ctx, number, **{**rotated, "message_bytes": ROTATED_BYTES, **changes}
    )


def settle(ledger, ref, size, receipt="5c1f"):
    """All of a message without hashes of tensors left, and is there."""
    write_digest(ledger, ref, (), message_digest(size))
    write_outcome(ledger, ref, "sent", size, receipt)


def keyed(path, key=KEY):
    """Two rounds of a job whose parts cross by a Mix, a Gram and a secure sum.

    One padded upload broke and went on.
    """
    with open_ledger(path, key=key) as ledger:
        write_start(ledger, "staddle 0.1.0", HASH, HASH)
        rpc = "/staddle.v1.Federation/"
        protocol(ledger, "contribution", 300, round_number=0, ctx=EPOCH, rpc=f"{rpc}Contribute")
        for number in range(2):
            ctx = f"{number:02x}" * 32
            ref = intend_padded(ledger, ctx, number, round_number=number)
            if number:
                write_outcome(ledger, ref, "unknown", 64)
                rest = {"message_bytes": PADDED_BYTES - 64, "offset": 64}
                ref = intend_padded(ledger, ctx, 1, round_number=1, **rest)
            write_digest(ledger, ref, (), message_digest(PADDED_BYTES))
            write_outcome(ledger, ref, "sent", PADDED_BYTES - 64 * number, "5c1f")
            protocol(ledger, "padded", 400, round_number=number, ctx=ctx, rpc=f"{rpc}Padded")
            use = f"{number + 16:02x}" * 32
            settle(ledger, intend_rotated(ledger, use, round_number=number), ROTATED_BYTES)
            attempt = f"{number + 32:02x}" * 32
            protocol(ledger, "keys", 100, round_number=number, ctx=attempt)
            ref = intend_masked(ledger, secagg=secagg(ctx=attempt), round_number=number)
            settle(ledger, ref, MASKED_BYTES)
            open_sum(ledger, round_number=number, ctx=attempt)
        return write_stop(ledger, "asked to stop")


# Private jobs.

DP = (
    replace(RELEASES[0], taint="noised", ledger_ids=(2, 4)),
    replace(RELEASES[1], taint="noised", ledger_ids=(4,)),
    replace(RELEASES[2], taint="public"),
)


def spend(ledger, size, epsilon, dataset="data", limit="8", root=None):
    """A head of a data set's privacy budget."""
    root = root or bytes([size % 256]) * 32
    head = TreeHead("staddle.example/lung/silo-a/privacy/data", size, root)
    return write_privacy_head(ledger, dataset, head, epsilon=epsilon, delta="0.00001", limit=limit)


def private(path, key=KEY, noise="local"):
    """Two rounds of a private job, and what they cost; and another job of which all is private."""
    with open_ledger(path, key=key) as ledger:
        write_start(ledger, "staddle 0.1.0", HASH, HASH)
        spend(ledger, 3, "0.2500")
        spend(ledger, 5, "1.2500")
        send(ledger, releases=DP, dataset="data", noise=noise)
        spend(ledger, 7, "1.7500")
        releases = (replace(DP[0], ledger_ids=(2, 6)), *DP[1:])
        send(ledger, releases=releases, dataset="data", round_number=4, noise=noise)
        spend(ledger, 3, "0.5000", "scans", limit="1.5")
        send(ledger, job="j2", job_digest="cd" * 32)
        return write_stop(ledger, "asked to stop")


def failing(monkeypatch, kind):
    """From now on the log refuses records of this type, as a full disk does."""
    real = AppendLog._append

    def append(self, record, *, durable):
        if record["type"] == kind:
            raise LocalError("takes no more records: the disk is full")
        return real(self, record, durable=durable)

    monkeypatch.setattr(AppendLog, "_append", append)
