"""Ledgers to report on, made by the writer itself."""

import hashlib

from support.ledgers import (
    BYTES,
    HASH,
    KEY,
    PEER,
    by_person,
    end_sum,
    intend,
    open_ledger,
    protocol,
    spend,
    write_control_close,
    write_control_open,
    write_digest,
    write_ingress,
    write_job_accept,
    write_job_decline,
    write_outcome,
    write_policy_deny,
    write_start,
    write_stop,
)

from staddle.files.documents import canonical_json
from staddle.security.ledger.records import Applied, MessageDigest, PackageCode, Peer, TensorDigest
from staddle.security.policy.release import Release

POLICY = """version = 1

[limits]
max_bytes_per_round = "8MiB"\t# <b>é</b> & "more"

[control]
max_messages = 10
max_bytes = 10
"""
OTHER = "cd" * 32
SCRIPT = "<script>alert('1')</script>"
QUOTES = "\"'`--> &amp; & </style></td>"
CONTROL = "a\x00b\x1b[2Jc\u202ed\ne\u2028f"
LONG = "x" * 1000
NASTY = (SCRIPT, QUOTES, CONTROL, LONG)
RELEASES = (
    Release("model", "whole_model", "w", "float32", (10, 4), taint="exact"),
    Release("model", "whole_model", "b", "float32", (4,), taint="public"),
    Release("metrics", "metric", "correct", "int64", ()),
)


def contribute(ledger, job="lung-1", round_number=0, releases=RELEASES, status="sent", **changes):
    """One message: ``status`` "cut" has neither digest nor outcome, "silent" a digest alone."""
    receipt = changes.pop("receipt", "5c1f")
    fields = {"job": job, "round_number": round_number, "releases": releases}
    fields |= {"policy": Applied(file=HASH, rule="round-update, metrics", decision="allow")}
    fields |= {"message_bytes": sum(release.nbytes for release in releases), **changes}
    ref = intend(ledger, **fields)
    if status == "cut":
        return ref
    whole = fields["message_bytes"] + fields.get("offset", 0)
    digests = [TensorDigest(part=r.part, name=r.name, sha256=HASH) for r in releases]
    write_digest(ledger, ref, digests, MessageDigest(bytes=whole, sha256=HASH))
    if status != "silent":
        receipt = receipt if status == "sent" else None
        write_outcome(ledger, ref, status, fields["message_bytes"], receipt)
    return ref


def full(path, policy=HASH, roster=OTHER, silo="silo-a", key=KEY, receipt="5c1f"):
    """Three jobs, one of them declined.

    Messages of every outcome, two policies, sessions open and closed.
    """
    with open_ledger(path, silo, key) as ledger:
        write_start(ledger, "staddle 0.1.0", roster, OTHER)
        write_stop(ledger, "asked to stop")
        write_start(ledger, "staddle 0.2.0", roster, policy)
        control = write_control_open(ledger, "s1", PEER, 100, 1000).seq
        write_job_accept(ledger, "lung-1", HASH, "operator-1")
        write_job_decline(ledger, "lung-2", OTHER, "operator-1", ["no rule has part 'labels'"])
        for number in range(4):
            came = {"rpc": "/x", "sender": PEER, "message": MessageDigest(bytes=700, sha256=HASH)}
            of_round = {"job": "lung-1", "round_number": number, "purpose": "delivery"}
            write_ingress(ledger, **of_round, **came)
            contribute(ledger, round_number=number, receipt=receipt)
        contribute(ledger, round_number=6, status="cut")
        contribute(ledger, round_number=6, status="failed")
        contribute(ledger, round_number=7, status="unknown", message_bytes=BYTES + 30)
        contribute(ledger, round_number=7, message_bytes=14, offset=170, receipt=receipt)
        write_control_close(ledger, control, 8, 512)
        write_job_accept(ledger, "lung-3", OTHER, "operator-2", by_person("anna"))
        contribute(
            ledger,
            "lung-3",
            0,
            RELEASES[2:],
            readers=["coordinator", "silo-b"],
            packages=(PackageCode(name="lung", version="0.3", sha256="c1" * 32),),
            status="silent",
        )
        denied = {"job": "lung-3", "round_number": 1, "purpose": "update", "policy": policy}
        write_policy_deny(ledger, **denied, reasons=["too large", "NaN"])
        write_control_open(ledger, "s2", PEER, 50, 400)
    return path


def governed(path, *texts):
    """One start and one message under each of these policies in turn; digests of the policies."""
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    with open_ledger(path) as ledger:
        for digest, text in zip(digests, texts, strict=True):
            write_start(ledger, "staddle 0.1.0", OTHER, digest)
            ledger.put_in_force(digest, text)
            contribute(ledger, policy=Applied(file=digest, rule="round-update", decision="allow"))
    return digests


def nasty(path):
    """Names that would like to be markup, in every place of a ledger that takes a text."""
    with open_ledger(path, SCRIPT) as ledger:
        write_start(ledger, SCRIPT, HASH, HASH)
        for text in NASTY:
            peer = Peer(id=text, spki=HASH)
            spend(ledger, 3, "1.5", text)
            control = write_control_open(ledger, text, peer, 100, 1000).seq
            write_job_accept(ledger, text, HASH, text)
            write_job_decline(ledger, text, HASH, text, [text, text])
            denied = {"job": text, "round_number": 3, "purpose": text, "policy": OTHER}
            write_policy_deny(ledger, **denied, reasons=[text])
            releases = [Release(text, text, text, "float32", (3,)), *RELEASES]
            policy = Applied(file=OTHER, rule=text, decision="allow")
            said = {"recipient": peer, "readers": [text, text], "form": text, "policy": policy}
            said["packages"] = (PackageCode(name=text, version=text, sha256=OTHER),)
            contribute(ledger, text, 0, releases, **said)
            protocol(ledger, "keys", job=text, rpc=text, recipient=peer)
            end_sum(ledger, text, job=text, blame=text)
            write_control_close(ledger, control, 1, 1)
            write_stop(ledger, text)
    return path


def sign(silo, job, samples=1000, **keys):
    """Put a signed job and its report next to a silo's ledger; the digest of the job."""
    document = {"name": job, "silos": ["a", "b", "c", "d"], **keys}
    folder = silo / "jobs" / job
    folder.mkdir(parents=True)
    signed = {"document": document, "signer": "operator-1", "signature": "00"}
    (folder / "job.json").write_bytes(canonical_json(signed))
    counted = {"samples": samples, "rounds": [{"round": 0, "tested": samples // 5}], "final": None}
    (folder / "report.json").write_bytes(canonical_json(counted))
    return hashlib.sha256(canonical_json(document)).hexdigest()


def crowded(path):
    """Thirty jobs with long names, each with every kind of part, for readers with long names."""
    kinds = ("whole_model", "backbone", "prototypes", "counts", "metric", "statistics", "sketch")
    readers = ["coordinator", *(f"{number}-{'silo' * 14}" for number in range(9))]
    with open_ledger(path) as ledger:
        for number in range(4):
            spend(ledger, number + 1, "1.5", f"{'data' * 15}-{number}")
        for number in range(30):
            job = f"{number:02}-{'job' * 20}"
            digest = sign(path.parent, job, purpose="To find what nobody else finds. " * 60)
            write_job_accept(ledger, job, digest, "operator-1")
            releases = [Release(kind, kind, "w", "float32", (10, 4)) for kind in kinds]
            contribute(ledger, job, 0, releases, readers=readers, dataset="data" * 16)
            contribute(ledger, job, 1, releases, "cut", readers=readers, dataset="data" * 16)
    return path
