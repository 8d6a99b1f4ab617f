"""The stand-alone verifier in an isolated interpreter, and ledgers written by other code than the
package's.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import staddle

# CI names an interpreter that has the distribution staddle-verify and none of staddle.
PYTHON = os.environ.get("STADDLE_LONE_PYTHON", sys.executable)

# Runs one command line a line of standard input; answers with status, output, errors and what it
# imported of staddle.
DRIVER = """
import contextlib, importlib.util, io, json, sys, traceback
spec = importlib.util.spec_from_file_location("lone", sys.argv[1])
module = sys.modules["lone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for line in sys.stdin:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = module.main(json.loads(line))
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    ours = [name for name in sys.modules if name.partition(".")[0] == "staddle"]
    print(json.dumps([status, out.getvalue(), errors.getvalue(), ours]), flush=True)
"""


def file():
    """The one file, as it is installed where ``PYTHON`` looks."""
    if sys.executable == PYTHON:
        return Path(str(staddle.__file__)).parent / "staddle_verify.py"
    asked = "import staddle_verify; print(staddle_verify.__file__)"
    found = subprocess.run([PYTHON, "-I", "-c", asked], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


class Tool:
    """A copy of the one file in a folder of its own, and a process that has nothing else of
    Staddle.
    """

    def __init__(self, folder):
        self.file = shutil.copy(file(), folder / "copied.py")
        command, pipe = [PYTHON, "-I", "-c", DRIVER, self.file], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=folder)

    def __call__(self, *arguments):
        """Exit status and what it printed."""
        self._process.stdin.write(json.dumps([str(each) for each in arguments]).encode() + b"\n")
        self._process.stdin.flush()
        status, out, errors, ours = json.loads(self._process.stdout.readline())
        assert status in (0, 1, 2), status
        assert ours == []
        return status, out + errors

    def json(self, *arguments):
        """Exit status and the document that ``--json`` prints."""
        status, out = self(*arguments, "--json")
        return status, json.loads(out)

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(10) == 0
        self._process.stdout.close()


def load(path):
    """A module from its file, under no name that others import."""
    spec = importlib.util.spec_from_file_location(f"lone_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HASH = "ab" * 32
ORIGIN = "staddle.example/lung/hospital-a/egress"
PEER = {"id": "coordinator", "spki": HASH}
TENSORS = [
    {"part": part, "kind": kind, "name": name, "dtype": dtype, "shape": shape, "bytes": size}
    for part, kind, name, dtype, shape, size in (
        ("model", "whole_model", "w", "float32", [10, 4], 160),
        ("model", "whole_model", "b", "float32", [4], 16),
        ("metric", "metric", "correct", "int64", [], 8),
    )
]
TENSORS = [{**tensor, "taint": "exact"} for tensor in TENSORS]
SIZE = 184


def start(**changes):
    record = {"type": "start", "silo": "hospital-a", "software": "s 1"}
    return {**record, "roster": HASH, "policy": HASH, **changes}


def change(text="version = 1\n", before=None, **changes):
    after = hashlib.sha256(text.encode()).hexdigest()
    return {"type": "policy.change", "before": before, "after": after, "text": text, **changes}


def denied(policy):
    record = {"type": "policy.deny", "job": "j1", "round": 3, "purpose": "update"}
    return {**record, "policy": policy, "reasons": ["no"]}


def applied(record):
    """What an intent under the policy of a ``policy.change`` says."""
    return {"file": record["after"], "rule": "update", "decision": "allow"}


def intent(**changes):
    record = {"type": "egress.intent", "silo": "hospital-a", "job": "j1", "job_digest": HASH}
    record |= {"method": "fedavg", "round": 3, "attempt": 0, "purpose": "update", "offset": 0}
    record |= {"rpc": "/staddle/Upload", "recipient": PEER, "readers": ["coordinator"]}
    record |= {"form": "plain", "tensors": TENSORS, "message": {"bytes": SIZE}}
    return {**record, "policy": {"file": HASH, "rule": "update", "decision": "allow"}, **changes}


SECAGG = {"ctx": HASH, "attempt": 0, "members": ["hospital-a", "hospital-b"], "threshold": 2}
SECAGG |= {"colluders": 1, "clipped": 0}
WORDS = [
    {**tensor, "dtype": tensor["dtype"].replace("float", "uint").replace("int64", "uint64")}
    for tensor in TENSORS
]
MASKED = SIZE + 40


def masked(secagg=SECAGG, **changes):
    record = {"form": "masked", "secagg": secagg, "tensors": WORDS, "message": {"bytes": MASKED}}
    return intent(**{**record, **changes})


HIDDEN = {"ctx": HASH, "number": 0}
PADDED = [{**tensor, "dtype": "uint64"} for tensor in TENSORS[:2]]
PADDED = [{**PADDED[0], "bytes": 320}, {**PADDED[1], "bytes": 32}]


def padded(ctx=HASH, number=0, **changes):
    """One part, in words of 8 bytes."""
    record = {"form": "padded", "hidden": {"ctx": ctx, "number": number}}
    return intent(**{**record, "tensors": PADDED, "message": {"bytes": 352}, **changes})


def rotated(ctx=HASH, **changes):
    """One part, as it would be in the clear."""
    record = {"form": "rotated", "hidden": {"ctx": ctx, "number": 0}}
    return intent(**{**record, "tensors": TENSORS[:2], "message": {"bytes": 176}, **changes})


MESSAGE = {"bytes": 9, "sha256": HASH}
BLAMED = "coordinator or a silo of the cohort"
SURVIVORS = ["hospital-a", "hospital-b"]
BATCHES = ["hospital-a,hospital-b", "hospital-c,hospital-d"]
OF_SUM = {
    "egress.protocol": {"kind": "keys", "rpc": "/x", "recipient": PEER, "message": MESSAGE},
    "secagg.end": {"code": "SHARES", "blame": BLAMED, "why": "no"},
    "secagg.sum": {"survivors": SURVIVORS, "sha256": HASH},
    "secagg.signed": {"dataset": "data", "survivors": SURVIVORS, "absent": ["hospital-c"]}
    | {"values": "fixed", "batches": BATCHES},
}


def of_sum(name, /, **changes):
    """A record of a secure sum beside the masked message."""
    record = {"type": name, "job": "j1", "job_digest": HASH, "round": 3, "ctx": HASH}
    return {**record, **OF_SUM[name], **changes}


DP = [{**tensor, "taint": "noised"} for tensor in TENSORS[:2]] + TENSORS[2:]


def head(size=9, root=HASH, dataset="data", **changes):
    record = {"type": "privacy.head", "dataset": dataset, "size": size, "root": root}
    return {**record, "epsilon": "3.4120", "delta": "0.00001", "limit": "8", **changes}


def private(*ids, dataset="data", **changes):
    """A message with tensors that are noised, paid by these reservations."""
    return intent(**{"tensors": DP, "dp": {"dataset": dataset, "ids": list(ids)}, **changes})


def digest(ref, **changes):
    named = [{"part": each["part"], "name": each["name"], "sha256": HASH} for each in TENSORS]
    record = {"type": "egress.digest", "ref": ref, "tensors": named}
    return {**record, "message": {"bytes": SIZE, "sha256": HASH}, **changes}


def outcome(ref, **changes):
    record = {"type": "egress.outcome", "ref": ref, "status": "sent"}
    return {**record, "bytes_sent": SIZE, "receipt": None, **changes}


def opening(**changes):
    record = {"type": "control.open", "session": "s1", "recipient": PEER}
    return {**record, "max_messages": 100, "max_bytes": 1000, **changes}


def closing(ref, **changes):
    return {"type": "control.close", "ref": ref, "messages": 8, "bytes": 512, **changes}


def spelt(record):
    """Canonical JSON of what these tests write, in two lines."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def leaf(line):
    return hashlib.sha256(b"\x00" + line).digest()


def root(leaves):
    """RFC 6962 section 2.1, word for word."""
    if len(leaves) < 2:
        return leaves[0] if leaves else hashlib.sha256(b"").digest()
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + root(leaves[:split]) + root(leaves[split:])).digest()


def chained(records, lines=()):
    """The lines of records, behind other lines, each with its frame."""
    lines = list(lines)
    for record in records:
        number = len(lines)
        prev = leaf(lines[-1]).hex() if lines else "0" * 64
        frame = {"v": 1, "seq": number, "prev": prev, "nonce": f"{number:032x}"}
        frame["mono_us"] = 1000 * number
        lines.append(spelt({**frame, "time": "2026-11-20T21:30:05.123456Z", **record}))
    return lines


def signed(lines, key, origin=ORIGIN, more=""):
    """A checkpoint of lines as a note."""
    tree = b64encode(root([leaf(line) for line in lines])).decode()
    text = f"{origin}\n{len(lines)}\n{tree}\n{more}"
    public = key.public_key().public_bytes_raw()
    key_id = hashlib.sha256(origin.encode() + b"\n\x01" + public).digest()[:4]
    return f"{text}\n— {origin} {b64encode(key_id + key.sign(text.encode())).decode()}\n".encode()


def store(folder, segments, note=None):
    """Write a ledger's folder anew: each segment a list of lines, or its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, content in enumerate(segments, 1):
        data = content if isinstance(content, bytes) else b"".join(line + b"\n" for line in content)
        (folder / f"seg-{number:08d}.jsonl").write_bytes(data)
    if note is not None:
        (folder / "checkpoint").write_bytes(note)
    return folder
