"""What the tests of the secure sum share: fixed randomness, fixed keys, one small sum, one attempt
in one process.
"""

import functools
import hashlib
import random
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.errors import RefusedError
from staddle.security.arithmetic.fixedpoint import Group
from staddle.security.identity.domains import SECAGG_DEALING, SECAGG_KEYS, framed
from staddle.security.identity.signers import Signers
from staddle.security.log.merkle import Tree
from staddle.security.secagg import coordinator, gram_pieces, masked_sum
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.linear_tags import Tagger
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.shared_gram import quantise
from staddle.security.secagg.spec import Frame, Terms, specify

GROUP_KEY = b"what the coordinator lacks".ljust(32)


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


@functools.cache
def key_of(member):
    drawn = hashlib.sha256(f"key of {member}".encode()).digest()
    return Ed25519PrivateKey.from_private_bytes(drawn)


def signer(member):
    """``Keys.sign`` of a member with a fixed key."""
    return lambda label, payload: key_of(member).sign(framed(label, payload))


def names(n):
    return tuple(f"silo-{i:02}" for i in range(n))


def signers(silos):
    public = {silo: key_of(silo).public_key().public_bytes_raw() for silo in silos}
    return Signers(key_of("coordinator").public_key().public_bytes_raw(), public)


def signed_dealing(dealing, ctx, portions=None, by=None, **changes):
    """A dealing with changes, or over other portions, that its dealer signed anew."""
    if portions is not None:
        changes["root"] = Tree(portion.leaf() for portion in portions).root()
    dealing = replace(dealing, **changes, signature=b"")
    sign = signer(by or dealing.dealer)
    return replace(dealing, signature=sign(SECAGG_DEALING, dealing.signed_bytes(ctx)))


def signed_bundle(bundle, ctx, **changes):
    """A bundle of keys with changes that its silo signed."""
    bundle = replace(bundle, **changes, signature=b"")
    return replace(bundle, signature=signer(bundle.silo)(SECAGG_KEYS, bundle.signed_bytes(ctx)))


def with_portion(portions, holder, **changes):
    return tuple(replace(each, **changes) if each.holder == holder else each for each in portions)


def group(name="model", elements=20, **fields):
    return Group(name=name, elements=elements, **{"clip_exponent": 3, "weights": "equal", **fields})


def frame(**fields):
    """A frame of one sum of one group of 20 elements, in chunks of 64 bytes, unless ``fields`` say
    otherwise.
    """
    given = {"federation": "lung", "members": "aa" * 32, "job": "j1", "job_digest": "bb" * 32}
    given |= {"round": 3, "exchange": "sum", "purpose": "update", "recipient": "coordinator"}
    given |= {"model_digest": "cc" * 32, "schema_digest": "dd" * 32, "chunk_bytes": 64}
    given |= {"groups": (group(),)}
    return Frame(**{**given, **fields})


class Run:
    """One attempt: a coordinator, silos and their shells in this process, messages delivered in a
    drawn order.

    ``drops``: silo -> the effect that it no longer gets to, by name ("SendKeys", "UploadWords",
    ...); it is silent from then on. ``alter(silo, effect)`` may give another effect in the place of
    one that a silo sends, or None. ``pads(silo)`` are those of groups that the coordinator is not
    to read. ``vectors``, by silo, are what is compared by shares, and ``cut(silo, share)`` may give
    another sealed share in the place of one that a silo is told. ``before[silo, event name]`` is
    (state, event) as they were; ``sent`` all effects, by who had them.
    """

    def __init__(
        self,
        spec,
        given,
        *,
        own=None,
        drops=None,
        seed=0,
        terms=None,
        alter=None,
        memories=None,
        notes=(),
        pads=None,
        vectors=None,
        cut=None,
    ):
        self.spec, self.given, self.drops = spec, given, drops or {}
        self.alter, self.pads = alter or (lambda _, effect: effect), pads or (lambda _: {})
        self.vectors, self.cut = vectors or {}, cut or (lambda _, share: share)
        self.random, self.queue, self.before, self.sent = random.Random(seed), [], {}, []
        self.signers, self.terms = signers(spec.cohort), terms or Terms(colluders=spec.colluders)
        self.frame = own or frame()
        self.memories, self.notes = dict(memories or {}), notes
        self.sealed, self.products = {}, b""
        self.silos, self.silent, self.uploads, self.opened, self.ends = {}, set(), {}, None, {}
        self.draws = {silo: Drawn(f"{seed}/{silo}") for silo in spec.cohort}
        sign = signer("coordinator")
        self.state, effects = coordinator.begin(spec, self.signers, self.terms, sign)
        self.do("coordinator", effects)

    def participant(self, silo):
        return machine.Participant(silo, self.signers, self.terms, signer(silo), self.draws[silo])

    def finish(self):
        """Deliver until nothing is left, and let time run out for what is awaited."""
        while self.state.stage not in ("done", "ended") or self.queue:
            if self.queue:
                to, event = self.queue.pop(self.random.randrange(len(self.queue)))
                self.deliver(to, event)
            else:
                self.deliver("coordinator", c.AttemptDeadline(self.state.stage))
        return self

    def deliver(self, to, event):
        if to in self.silent:
            return
        if to == "coordinator":
            self.before[to, type(event).__name__] = (self.state, event)
            self.state, effects = coordinator.advance(self.state, event)
        elif isinstance(event, c.Ask):
            memory = self.memories.get(to, Memory())
            told = self.frame, event.document, event.signature
            self.silos[to], effects = machine.begin(self.participant(to), *told, memory, self.notes)
        else:
            self.before[to, type(event).__name__] = (self.silos[to], event)
            self.silos[to], effects = machine.advance(self.silos[to], event)
        self.do(to, effects)

    def do(self, who, effects):
        for effect in effects:
            if who in self.silent or self.drops.get(who) == type(effect).__name__:
                self.silent.add(who)
                return
            changed = effect if who == "coordinator" else self.alter(who, effect)
            self.sent.append((who, effect))
            if changed is not None:
                self.act(who, changed)

    def act(self, who, effect):
        match effect:
            case s.Remember(memory):
                self.memories[who] = memory
            case s.UploadWords(terms, hiding):
                masked_sum.check_group_values(self.spec, self.given[who])
                ctx = self.spec.context()
                tagger = Tagger(GROUP_KEY, ctx, len(self.spec.groups)) if self.spec.tagged else None
                pads = self.pads(who)
                of = self.spec, who, self.given[who], terms, tagger, pads
                made = [words.tobytes() for words in masked_sum.masked_chunks(*of)]
                self.uploads[who], kept = made, b""
                if hiding is not None:
                    quantised = quantise(self.spec.compared, self.vectors[who])
                    dealt = gram_pieces.deal_sealed(self.spec, who, quantised, hiding)
                    self.sealed[who], kept = dealt
                own = {index: pad.key for index, pad in pads.items()}
                tags = tagger.padded(GROUP_KEY, ctx, who, own, terms) if tagger else b""
                self.queue.append((who, s.Streamed(*self.told_upload(who), tags, kept)))
            case s.SendHeader(header):
                uploaded = c.WordsUploaded(header, *self.told_upload(who))
                self.queue.append(("coordinator", uploaded))
            case s.LeaveAttempt() if who != "coordinator":
                self.ends[who] = effect
                self.queue.append(("coordinator", c.SiloDropped(who, effect.code)))
            case c.Ask(silos):
                self.queue += [(silo, effect) for silo in silos]
            case c.Tell(silos, s.SurvivorsReceived(headers)):
                for silo in silos:
                    told = s.SurvivorsReceived(headers, self.told_shares(silo, headers))
                    self.queue.append((silo, told))
            case c.Tell(silos, message):
                self.queue += [(silo, message) for silo in silos]
            case c.Open(terms, survivors):
                self.products = effect.products
                self.open(terms, survivors)
            case c.EndAttempt():
                self.ends[who] = effect
            case c.Discard() | c.StartTimer() | c.Refuse() | s.Finish() | s.LeaveAttempt():
                pass
            case message:
                self.queue.append(("coordinator", message))

    def upload(self, silo):
        return b"".join([*self.uploads[silo], *self.sealed.get(silo, [])])

    def told_upload(self, silo):
        """Length and SHA-256 of what it uploaded."""
        data = self.upload(silo)
        return len(data), hashlib.sha256(data).digest()

    def told_shares(self, silo, headers):
        """What the coordinator cuts out of the others' uploads for a silo."""
        if self.spec.compared is None:
            return ()
        found = []
        for dealer in (header.silo for header in headers if header.silo != silo):
            at = gram_pieces.place_of(self.spec, dealer, silo)
            sealed = self.upload(dealer)[at : at + gram_pieces.sealed_bytes(self.spec)]
            found.append(self.cut(silo, gram_pieces.SealedShare(dealer, sealed)))
        return tuple(found)

    def open(self, terms, survivors):
        accumulator = masked_sum.Accumulator(self.spec)
        for silo in survivors:
            accumulator.add(self.uploads[silo])
        try:
            self.opened = accumulator.open(terms, survivors)
            self.numbers = [(index, words.copy()) for index, words in accumulator.numbers()]
        except RefusedError as error:
            self.queue.append(("coordinator", c.OpenFailed(error.why)))
            return
        digest = hashlib.sha256(b"".join(each.total.tobytes() for each in self.opened)).digest()
        self.queue.append(("coordinator", c.SumPublished(digest)))

    def effects(self, kind, who=None):
        found = [effect for by, effect in self.sent if who in (None, by)]
        return [effect for effect in found if isinstance(effect, kind)]

    def tells(self, kind):
        """The coordinator's messages of a kind, each with the silos that it was for."""
        return [tell for tell in self.effects(c.Tell) if isinstance(tell.message, kind)]


def ones(silos, elements=20):
    """The silo of number i gives i + 1, so that each subset has its own sum."""
    given = lambda i: masked_sum.GroupValues(np.full(elements, (i + 1) / 16))
    return {silo: [given(i)] for i, silo in enumerate(silos)}


def attempt(n=4, number=0, **fields):
    """The specification of attempt ``number`` of the small sum, among n silos."""
    return specify(frame(**fields), names(n), number)
