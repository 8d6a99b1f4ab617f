"""Ledgers for tests: one key, one federation, and the folder's files by name."""

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.security.appendlog import AppendLog
from staddle.security.head import Signer
from staddle.security.ledger import Ledger
from staddle.security.segments import segment

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


def open_log(folder, **options):
    """A log of records of any type."""
    return AppendLog.open(Path(folder), signer(), **options)


def first(folder):
    """The first segment, all there is of a small ledger."""
    return segment(Path(folder), 1)


def stored(folder):
    """All records as they stand in the files."""
    paths = sorted(Path(folder).glob("seg-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def copied(folder):
    """The folder's files by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def put_back(folder, files):
    """The folder as it was copied, and nothing else in it."""
    for path in Path(folder).iterdir():
        path.unlink()
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)
