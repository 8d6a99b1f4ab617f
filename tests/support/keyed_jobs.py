"""Jobs that mix and compare, their silos, and a coordinator in the test's hand that stores and
mixes what they gave.
"""

import hashlib
from dataclasses import dataclass

import torch
from support.framed import framed
from support.recording_gate import Made

from staddle.algorithms.exchange.parts import delivered_items
from staddle.commands.federation import local_federation
from staddle.proto.convert.mix import Mixed, WireSummand, mixed_to_wire
from staddle.proto.wire import tensor_bytes
from staddle.security.blind import sealing
from staddle.security.blind.group_key import JobKeys
from staddle.security.blind.mix_context import Version
from staddle.security.blind.mix_row import Share, make_row
from staddle.security.blind.padded_mix import (
    PaddedUpload,
    hidden_pieces,
    make_upload,
    mixed_pieces,
    tagger_of,
)
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.prekeys import Known, Prekey, Word
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import linear_tags
from staddle.silo.ingress.keyed_job import Sharing
from staddle.silo.parts.tensors import flat

SILOS = tuple(f"silo-{letter}" for letter in "abcde")
KEY = b"what the coordinator lacks".ljust(32)
PARTS = hashlib.sha256(b"what made it").digest()
WHOLE = 1 << 32  # what the integer weights of a row add up to
BLIND = {"secure_aggregation": "required", "clip_exponent": 6}
COUNTED = {**BLIND, "weights": "public", "dropouts": "any", "counts": dict.fromkeys(SILOS, 30)}


def make_keyed(folder) -> Made:
    """Five silos, a job whose recipients get a row a round, and one that puts rows aside for who is
    away.
    """
    files = local_federation.make(folder / "local", SILOS)
    roster = rosters.load(files.folder / "roster.json")
    made = Made(files, roster, load_keys(files.folder / "coordinator" / "keys"))
    made.job("rows", "pfedsim", SILOS, {"rho": 0}, min_cohort=3, security=BLIND)
    options = {"similarity": "samples"}
    made.job("mail", "fedsimsup", SILOS, options, min_cohort=3, participation=0.8, security=COUNTED)
    return made


def keys_of(made, silo):
    return load_keys(made.files.folder / silo / "keys")


def sharing_of(made, job, silo, folder, key=KEY):
    folder.mkdir(parents=True, exist_ok=True)
    sharing = Sharing.of(
        JobPlan(job), made.roster, keys_of(made, silo), job_keys(job, silo, key), folder
    )
    sharing.memory.begin(job)  # as before the silo gives to the job's key
    sharing.prekeys.begin(first_prekey(silo), Known.first(sharing.others))
    return sharing


def first_prekey(silo):
    """The private half of a fixed one."""
    return hashlib.sha256(f"prekey of {silo}".encode()).digest()


def job_keys(job, silo, key=KEY):
    """What a silo would have of the keys of the job, of fixed prekeys."""
    others = [each for each in sorted(job.silos) if each != silo]
    return JobKeys(key, PARTS, {each: public_key(first_prekey(each)) for each in others})


@dataclass
class Stored:
    """One upload as the coordinator has it."""

    upload: PaddedUpload
    hidden: bytes
    pieces: tuple
    prekey: Prekey


def letter_for(stored, silo):
    """The silo's letter; where it has none, as its own upload has none for it, that of another."""
    found = sealing.letters(stored.pieces)
    return found.get(silo) or next(iter(found.values()))


class Coordinator:
    """Uploads of the job's silos by (silo, number), and rows and deliveries over them, right or
    wrong.
    """

    def __init__(self, made, job, part, folder):
        self.made, self.job, self.part = made, job, part
        self.silos = {
            silo: sharing_of(made, job, silo, folder / f"of-{silo}") for silo in job.silos
        }
        self.line = self.silos[job.silos[0]].line(part)
        self.stored = {}
        self.newest = {}

    def values(self, silo, number):
        """What a silo gives of the part: other numbers for each."""
        rng = torch.Generator().manual_seed(1000 * number + list(self.silos).index(silo))
        return {spec.name: torch.randn(spec.shape, generator=rng) for spec in self.part.tensors}

    def contribute(self, silo, number, round_=None):
        """One whole upload, stored."""
        own = self.silos[silo]
        version = Version(
            silo=silo, round=number if round_ is None else round_, attempt=0, number=number
        )
        seed, tagger = own.draw(32), tagger_of(self.line, KEY)
        values = flat(list(self.values(silo, number).values()))
        hidden = b"".join(
            w.tobytes() for w in hidden_pieces(self.line, version, seed, values, tagger)
        )
        tag = tagger.padded(KEY, version.context(self.line), silo)
        sha256 = hashlib.sha256(hidden).digest()
        known = own.prekeys.known()
        sealed = seed, own.draw(32), known.keys(), own.sign, known.generations()
        upload, pieces = make_upload(self.line, version, sha256, tag, *sealed)
        prekey = own.prekeys.publish(
            self.line, version, upload.sealing.root, own.draw(32), own.sign
        )
        self.stored[silo, number] = Stored(upload, hidden, pieces, prekey)
        self.newest[silo] = number

    def give_all(self, number, silos=None):
        for silo in silos or self.silos:
            self.contribute(silo, number)

    def word(self, recipient, silo, number, part=None):
        """What goes down to a recipient of the prekey beside an upload."""
        stored = self.stored[silo, number]
        upload = stored.upload
        word = Word(
            upload.version, upload.sealing.root, stored.prekey, letter_for(stored, recipient)
        )
        return part or self.part.name, word

    def row(self, recipient, weights, own_weight=0, keep=0.0, **changes):
        """A row over versions (silo, number) with integer weights.

        ``changes`` spoil what the recipient gets of it.

        As (message, words). There are ``line``, ``sign``, ``document``, ``summands``,
        ``letters_of`` and ``words``.
        """
        line, sign = changes.get("line", self.line), changes.get("sign", self.made.coordinator.sign)
        found = {version: self.stored[version] for version in sorted(weights)}
        shares = [
            Share(version=found[v].upload.version, weight=w) for v, w in sorted(weights.items())
        ]
        row, signature = make_row(line, recipient, own_weight, shares, sign)
        document = changes.get("document", lambda same: same)(row.signed_bytes())
        of = changes.get("letters_of", recipient)
        summands = tuple(WireSummand(each.upload, letter_for(each, of)) for each in found.values())
        by_name = {version[0]: version for version in found}
        integers = {silo: weights[version] for silo, version in by_name.items()}
        read = lambda silo, at, size: memoryview(found[by_name[silo]].hidden)[at : at + size]
        words = b"".join(each.tobytes() for each in mixed_pieces(line, integers, read))
        tag = linear_tags.combine(
            {silo: found[version].upload.tag for silo, version in by_name.items()}, 1, integers
        )
        summands = changes.get("summands", lambda same: same)(summands)
        mixed = Mixed(self.part.name, document, signature, summands, tag, keep)
        return mixed_to_wire(mixed), changes.get("words", lambda same: same)(words)

    def wanted(self, weights, own_weight=0, own=None):
        """The row by hand, in float64, by tensor."""
        found = {}
        for spec in self.part.tensors:
            total = torch.zeros(spec.shape, dtype=torch.float64)
            for version, weight in weights.items():
                total += self.values(*version)[spec.name].double() * (weight / WHOLE)
            if own_weight:
                total += own[spec.name].double() * (own_weight / WHOLE)
            found[spec.name] = total
        return found

    def delivery(self, round_, rows, plain=None, chunk=1 << 20, **manifest):
        """Frames with these rows behind the plain tensors of ``plain`` (values by part and
        name).
        """
        plain = plain or {}
        items = delivered_items([part for part in self.job.down(round_) if part.name in plain])
        pieces = [tensor_bytes(plain[item.part][item.spec.name]) for item in items]
        pieces += [memoryview(words) for _, words in rows]
        messages = [message for message, _ in rows]
        return framed(self.job, round_, pieces, items, chunk, rows=messages, **manifest)


def even(versions, own=0):
    """Integer weights over versions, equal but for rounding, that add up to 2^32 with ``own``."""
    left = WHOLE - own
    weights = dict.fromkeys(versions, left // len(versions))
    weights[versions[0]] += left - sum(weights.values())
    return weights
