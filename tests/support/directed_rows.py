"""Directed rows in one process: a sum of metrics and of one row for each of two silos that are
away, and its pads.
"""

from functools import partial

import numpy as np
from support.blind_mixes import seed_of
from support.secure_sums import GROUP_KEY, Run, frame, group, names, signer

from staddle.algorithms.exchange.parts import integer_weights
from staddle.security.blind import directed_mix as d
from staddle.security.blind.open_sum import Claim, tag_of
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.masked_sum import GroupValues
from staddle.security.secagg.spec import specify

ALL = names(7)
FIVE, AWAY = ALL[:5], ALL[5:]
RAW = [3, 2, 4, 2, 3]


def own_frame(raw=RAW, elements=200, away=AWAY, **fields):
    rows = [group(f"theta.{silo}", elements, weights="public", reader=silo) for silo in away]
    weights = {
        f"theta.{silo}": dict(zip(FIVE, np.roll(raw, at), strict=True))
        for at, silo in enumerate(away)
    }
    weights |= {f"theta.{silo}": {} for silo in away if "rows" in fields} | fields.pop("rows", {})
    groups = (group("metrics", 3, ring=64), *rows)
    given = {"groups": groups, "rows": weights, "chunk_bytes": 256, "tagged": True}
    return frame(**{**given, **fields})


def prekeys(silo):
    return {other: public_key(seed_of(other)) for other in ALL if other != silo}


def sender_pads(spec, silo):
    return d.sender_pads(spec, silo, seed_of(silo), prekeys(silo))


def recipient_pads(spec, index):
    silo = spec.groups[index].reader
    return d.recipient_pads(spec, spec.groups[index], seed_of(silo), prekeys(silo))


class Directed:
    """One such sum, to its end; ``held`` is what each silo gives, ``survivors`` who did."""

    def __init__(self, own=None, drops=None):
        own = own or own_frame()
        self.spec = spec = specify(own, FIVE, 0)
        random, elements = np.random.default_rng(5), spec.groups[1].elements
        self.held = {silo: random.uniform(-8, 8, elements) for silo in FIVE}
        given = {silo: [GroupValues(np.ones(3))] for silo in FIVE}
        for silo in FIVE:
            given[silo] += [GroupValues(self.held[silo]) for _ in spec.groups[1:]]
        pads = partial(sender_pads, spec)
        self.run = Run(spec, given, own=own, drops=drops, pads=pads).finish()
        assert self.run.state.stage == "done"
        self.survivors = self.run.effects(c.Open)[0].survivors
        self.tags = self.run.tells(s.ResultReceived)[0].message.tags
        self.hidden = [
            np.concatenate([words for at, words in self.run.numbers if at == index])
            for index in range(len(spec.groups))
        ]

    def claim(self, index, **changes):
        payload = self.spec.signed_bytes()
        fields = {"document": payload, "survivors": tuple(sorted(self.survivors))}
        fields |= {"signature": signer("coordinator")(SECAGG_SPEC, payload)}
        fields |= {"tag": tag_of(self.tags, index, len(self.spec.groups))}
        return Claim(**{**fields, **changes})

    def open(self, index=1, words=None, pads=None, **changes):
        own = self.hidden[index] if words is None else words
        pads = pads or recipient_pads(self.spec, index)
        claim = self.claim(index, **changes)
        return d.open_row(self.spec, index, claim, GROUP_KEY, pads, own.copy())

    def exact(self, index=1, raw=RAW):
        """The row by hand, over the survivors."""
        weights = dict(zip(FIVE, integer_weights(list(np.roll(raw, index - 1))), strict=True))
        whole = sum(weights[silo] for silo in self.survivors)
        return sum(weights[silo] * self.held[silo] for silo in self.survivors) / whole
