"""What the tests of one-upload mixes share: silos with fixed keys, their uploads, and rows opened
in one process.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from support.secure_sums import Drawn, names, signer, signers

from staddle.security.blind import mix_row, sealing
from staddle.security.blind import padded_mix as o
from staddle.security.blind.mix_context import MixContext, Version, mix_group
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import linear_tags

KEY = b"what the coordinator lacks".ljust(32)
PIECE = 1 << 10  # bytes of a row that come down at a time


def seed_of(silo):
    """A silo's raw X25519 key of the roster."""
    return hashlib.sha256(f"exchange key of {silo}".encode()).digest()


def line(elements=20, clip_exponent=3, **fields):
    given = {"federation": "lung", "members": "aa" * 32, "key_epoch": 2, "job": "j1"}
    given |= {"job_digest": "bb" * 32, "schema_digest": "dd" * 32}
    given |= {"group": mix_group("extractor", elements, clip_exponent)}
    return MixContext(**{**given, **fields})


@dataclass
class Stored:
    """What the coordinator has of one upload, and what only silos have."""

    upload: o.PaddedUpload
    hidden: bytes
    pieces: tuple
    seed: bytes
    values: np.ndarray


class Mixing:
    """Silos, and a coordinator that stores the newest upload of each."""

    def __init__(self, n=4, seed=0, **fields):
        self.silos, self.line, self.draw = names(n), line(**fields), Drawn(seed)
        self.signers, self.stored = signers(self.silos), {}

    def others(self, silo):
        return {other: public_key(seed_of(other)) for other in self.silos if other != silo}

    def contribute(self, silo, values, number=0, *, seed=None, key=KEY):
        """One whole upload, stored."""
        version = Version(silo=silo, round=number, attempt=0, number=number)
        seed, tagger = seed or self.draw(32), o.tagger_of(self.line, key)
        pieces = o.hidden_pieces(self.line, version, seed, values, tagger)
        hidden = b"".join(words.tobytes() for words in pieces)
        padded = tagger.padded(key, version.context(self.line), silo)
        sha256 = hashlib.sha256(hidden).digest()
        made = o.make_upload(
            self.line, version, sha256, padded, seed, self.draw(32), self.others(silo), signer(silo)
        )
        o.check_upload(self.line, *made, hashlib.sha256(hidden).digest(), self.signers)
        self.stored[silo] = Stored(made[0], hidden, made[1], seed, values)
        return self.stored[silo]

    def row(self, recipient, weights):
        """The coordinator's row and signature, of integer weights by silo."""
        given = [(s, weight) for s, weight in weights.items() if s != recipient and weight]
        version = lambda silo: self.stored[silo].upload.version
        shares = [mix_row.Share(version=version(s), weight=weight) for s, weight in given]
        own, sign = weights.get(recipient, 0), signer("coordinator")
        return mix_row.make_row(self.line, recipient, own, shares, sign)

    def mixed(self, row):
        """What comes down: Y and its tag."""
        weights = row.sent()
        read = lambda silo, at, size: memoryview(self.stored[silo].hidden)[at : at + size]
        made = b"".join(words.tobytes() for words in o.mixed_pieces(self.line, weights, read))
        tags = {silo: self.stored[silo].upload.tag for silo in weights}
        return made, linear_tags.combine(tags, 1, weights)

    def opening(self, row, key=KEY, dtype=np.float64):
        uploads = [self.stored[share.version.silo].upload for share in row.shares]
        mix_row.check_uploads(row, uploads)
        summands = []
        for share, upload in zip(row.shares, uploads, strict=True):
            letter = sealing.letters(self.stored[share.version.silo].pieces)[row.recipient]
            own = {0: seed_of(row.recipient)}
            seed = o.open_seed(self.line, upload, letter, row.recipient, own, self.signers)
            summands.append(o.Summand(upload, share.weight, seed))
        own = self.stored[row.recipient].values if row.recipient in self.stored else None
        return o.Opening(self.line, key, summands, row.own_weight, own, dtype)

    def open(self, row, mixed=None, key=KEY):
        """The recipient's row, of what came down or of what the coordinator has."""
        hidden, tag = mixed or self.mixed(row)
        opening = self.opening(row, key)
        for at in range(0, len(hidden), PIECE):
            opening.add(hidden[at : at + PIECE])
        return opening.finish(tag)
