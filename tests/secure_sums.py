"""What the tests of the secure sum share: fixed randomness, fixed keys, one small sum."""

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.security.fixedpoint import Group
from staddle.security.labels import framed
from staddle.security.round_spec import Frame
from staddle.security.signers import Signers


class Drawn:
    """Bytes from a fixed seed in place of os.urandom: SHA-256 of the seed and a counter."""

    def __init__(self, seed):
        self.seed, self.count = str(seed).encode(), 0

    def __call__(self, n):
        data = b""
        while len(data) < n:
            data += hashlib.sha256(self.seed + b"/" + str(self.count).encode()).digest()
            self.count += 1
        return data[:n]


def key_of(member):
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"key of {member}".encode()).digest())


def signer(member):
    """``Keys.sign`` of a member with a fixed key."""
    return lambda label, payload: key_of(member).sign(framed(label, payload))


def names(n):
    return tuple(f"silo-{i:02}" for i in range(n))


def signers(silos):
    public = {silo: key_of(silo).public_key().public_bytes_raw() for silo in silos}
    return Signers(key_of("coordinator").public_key().public_bytes_raw(), public)


def group(name="model", elements=20, **fields):
    return Group(name=name, elements=elements, **{"clip_exponent": 3, "weights": "equal", **fields})


def frame(**fields):
    """A frame of one sum of one group of 20 elements, in chunks of 64 bytes, unless ``fields`` say otherwise."""
    given = {
        "federation": "lung",
        "roster": "aa" * 32,
        "job": "j1",
        "job_digest": "bb" * 32,
        "round": 3,
        "exchange": "sum",
        "purpose": "update",
        "recipient": "coordinator",
        "model_digest": "cc" * 32,
        "schema_digest": "dd" * 32,
        "groups": (group(),),
        "chunk_bytes": 64,
    }
    return Frame(**{**given, **fields})
