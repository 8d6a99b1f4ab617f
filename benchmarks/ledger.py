"""Measures the cost of checking a ledger.

``python benchmarks/ledger.py [--records 1000000] [--keep FOLDER]``

Writes a ledger of the records that a silo of a FedAvg job with LeNet-5 writes, in the same mix:
each round a delivery (ingress), an intent and a digest of 11 tensors, and an outcome with the
coordinator's receipt, every 50 rounds a new control session; only the random parts differ from
record to record. Then checks it as ``staddle ledger verify`` does with ``--roster``. Prints seconds
of wall clock and of this process's CPU, µs a record and MB/s, all on one core.

The records go past the writer, which syncs each to the disk; the chain, the tree and the checkpoint
are right.
"""

import argparse
import hashlib
import math
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.files.documents import canonical_json
from staddle.security.ledger.audit import verify
from staddle.security.log.append_log import SEGMENT_BYTES
from staddle.security.log.chain import FIRST_PREV
from staddle.security.log.head import Signer
from staddle.security.log.merkle import Tree
from staddle.security.log.segments import CHECKPOINT, segment

SHAPES = {
    "conv1.weight": (6, 3, 5, 5),
    "conv1.bias": (6,),
    "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
    "@weight": (),
}
BYTES = sum(4 * math.prod(shape) for shape in SHAPES.values())
TENSORS = [
    {
        "part": "model",
        "kind": "whole_model",
        "name": name,
        "dtype": "float32",
        "shape": list(shape),
        "bytes": 4 * math.prod(shape),
        "taint": "exact",
    }
    for name, shape in SHAPES.items()
]
JOB = {"job": "lung-3"}
ROUNDS_A_SESSION = 50


def records() -> Iterator[dict[str, Any]]:
    """Bodies of records for ever, each but the first knowing where those before it stand."""
    digest, peer = secrets.token_hex(32), {"id": "coordinator", "spki": secrets.token_hex(32)}
    seq = session = 0
    for round_ in range(2**31):
        if round_ % ROUNDS_A_SESSION == 0:
            if round_:
                yield {"type": "control.close", "ref": session, "messages": 80, "bytes": 5120}
                seq += 1
            session = seq
            caps = {"max_messages": 10000, "max_bytes": 65536}
            yield {
                "type": "control.open",
                "session": f"hospital-a-{seq}",
                "recipient": peer,
                **caps,
            }
            seq += 1
        message = {"bytes": BYTES, "sha256": secrets.token_hex(32)}
        fetch = "/staddle.Federation/Fetch"
        delivery = {
            **JOB,
            "round": round_,
            "purpose": "delivery",
            "rpc": fetch,
            "sender": peer,
            "message": message,
        }
        yield {"type": "ingress", **delivery}
        yield {
            "type": "egress.intent",
            "silo": "hospital-a",
            **JOB,
            "job_digest": digest,
            "method": "fedavg",
            "round": round_,
            "attempt": 0,
            "purpose": "update",
            "rpc": "/staddle.Federation/Upload",
            "recipient": peer,
            "readers": ["coordinator"],
            "form": "plain",
            "policy": {"file": digest, "rule": "round-update", "decision": "allow"},
            "tensors": TENSORS,
            "message": {"bytes": BYTES},
            "offset": 0,
        }
        hashes = [
            {"part": "model", "name": name, "sha256": secrets.token_hex(32)} for name in SHAPES
        ]
        yield {"type": "egress.digest", "ref": seq + 1, "tensors": hashes, "message": message}
        receipt = secrets.token_hex(64)
        yield {
            "type": "egress.outcome",
            "ref": seq + 1,
            "status": "sent",
            "bytes_sent": BYTES,
            "receipt": receipt,
        }
        seq += 4


def write(folder: Path, count: int, key: bytes) -> int:
    """A ledger of so many records, signed with this Ed25519 private key; its bytes."""
    signer = Signer.of("lung", "hospital-a", Ed25519PrivateKey.from_private_bytes(key))
    tree, head, number, size, total = Tree(), FIRST_PREV, 1, 0, 0
    file = segment(folder, number).open("wb")
    for seq, body in zip(range(count), records(), strict=False):
        frame = {
            "v": 1,
            "seq": seq,
            "prev": head,
            "nonce": secrets.token_hex(16),
            "mono_us": 83123 + 1000 * seq,
        }
        line = canonical_json({**body, **frame, "time": "2026-11-20T21:30:05.123456Z"})
        leaf = hashlib.sha256(b"\x00" + line).digest()
        tree.append(leaf)
        head = leaf.hex()
        if size >= SEGMENT_BYTES:
            file.close()
            number, size = number + 1, 0
            file = segment(folder, number).open("wb")
        size += file.write(line + b"\n")
        total += len(line) + 1
    file.close()
    (folder / CHECKPOINT).write_bytes(bytes(signer.sign(count, tree.root())))
    return total


def main() -> None:
    """Parse the arguments, write, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument(
        "--keep", type=Path, help="write the ledger here, into an empty folder, and leave it"
    )
    options = parser.parse_args()
    key = Ed25519PrivateKey.generate()
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place)
        folder.mkdir(exist_ok=True)
        # In a process of its own: whoever verifies a ledger has not written a million records into
        # its heap before.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            size = other.submit(write, folder, options.records, key.private_bytes_raw()).result()
        wall, cpu = time.perf_counter(), time.process_time()
        found = verify(folder, key=Signer.of("lung", "hospital-a", key).public)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if not found.ok or found.records != options.records:
        raise SystemExit(f"the ledger does not hold: {found.problems}")
    print(  # noqa: T201 its output is its purpose
        f"{found.records:,} records, {size / 1e6:,.0f} MB ({size / found.records:.0f} B each):"
        f" {wall:.2f} s, {cpu:.2f} s of CPU; {cpu / found.records * 1e6:.2f} µs a record,"
        f" {size / 1e6 / cpu:.0f} MB/s"
    )


if __name__ == "__main__":
    main()
