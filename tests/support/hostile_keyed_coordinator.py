"""A coordinator of a job whose silos share a key, against the agent as it ships: its other silos
tag what they give.
"""

import os

from support.hostile_coordinator import SILO, offer, round_of
from support.hostile_sum_coordinator import OTHERS, SILOS, Attempted, Blind, digest_of
from support.open_sums import delivery

from staddle.proto import secure_pb2 as secure
from staddle.proto.convert import group_key as messages
from staddle.proto.convert.open_sum import sum_to_wire
from staddle.security.blind import group_key as g
from staddle.security.blind.open_sum import Claim, tag_of
from staddle.security.blind.sealing import letters
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.signers import Signers
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.linear_tags import Tagger
from staddle.security.secagg.masked_sum import Accumulator, masked_chunks

LIAR, HONEST = OTHERS[0], OTHERS[1]


class Tagged(Attempted):
    """An attempt whose other silos tag what they give, by the key that ``key()`` says.

    ``flip``: the liar lies.
    """

    def __init__(self, world, key, flip, parts):
        self.key, self.flip, self.parts, self.words = key, flip, parts, {}
        super().__init__(world, "first")

    def act(self, who, effect):
        match effect:
            case s.UploadWords(terms):
                ctx, groups = self.spec.context(), self.spec.groups
                tagger = Tagger(self.key(), ctx, len(groups))
                made = [self.contribution(group, who) for group in groups]
                words = masked_chunks(self.spec, who, made, terms, tagger)
                self.uploads[who] = upload = b"".join(each.tobytes() for each in words)
                tags = bytearray(tagger.padded(self.key(), ctx, who, terms=terms))
                tags[7] ^= self.flip and who == LIAR  # of the first group, the model
                self.queue.append((who, s.Streamed(len(upload), digest_of(upload), bytes(tags))))
            case c.Open(terms, survivors):
                accumulator = Accumulator(self.spec)
                for silo in survivors:
                    accumulator.add(self.pieces(self.uploads[silo]))
                self.opened = accumulator.open(terms, survivors)
                first = (words for group, words in accumulator.numbers() if not group)
                self.words = b"".join(words.tobytes() for words in first)
                self.queue.append(("coordinator", c.SumPublished(bytes(32))))
            case c.Tell(_, s.ResultReceived(_, tags)):
                self.tags = tags
                super().act(who, effect)
            case _:
                super().act(who, effect)

    def down(self):
        """The model as it comes down, in the words of its sum."""
        payload = self.spec.signed_bytes()
        signature = self.world.keys.sign(SECAGG_SPEC, payload)
        tag = tag_of(self.tags, 0, len(self.spec.groups))
        claim = Claim(payload, signature, self.state.u3, tag)
        return delivery(self.job, 1, [(sum_to_wire("model", claim), self.words)])


class Keyed(Blind):
    """A coordinator of a job whose silos share a key; the others' parts in it are drawn here.

    It is honest, or as
    ``kind`` of an attempt is.
    """

    def __init__(self, world, flip=False, kind=Tagged):
        self.tagged, self.begin = None, lambda parts: kind(world, lambda: self.key, flip, parts)
        tasks = [offer(world), round_of(world, 0), round_of(world, 1, counted=1)]
        super().__init__(world, tasks, {0: [], 1: []})
        self.script["fetch"] = [lambda: delivery(self.tagged.job, 0, []), self.summed]
        self.calls |= {"group_key": 0}
        self.epoch = g.Epoch.of(world.roster, SILOS, world.jobs["first"].digest)
        self.secrets = {silo: tuple(os.urandom(32) for _ in range(3)) for silo in OTHERS}
        self.key = None

    def summed(self):
        """What comes down in round 1."""
        return self.tagged.down()

    def parts(self):
        signs = {silo: self.world.others[silo].sign for silo in OTHERS}
        made = lambda silo: g.contribute(self.epoch, silo, *self.secrets[silo], signs[silo])
        return {silo: made(silo) for silo in OTHERS}

    async def contribute(self, request, context):
        given = messages.contributed_from_wire(SILO, request)
        parts = {SILO: (given.contribution, given.pieces), **self.parts()}
        made = g.parts_of(contribution for contribution, _ in parts.values())
        own, _ = parts.pop(HONEST)
        relayed = [g.Relayed(part, letters(pieces)[HONEST]) for part, pieces in parts.values()]
        seed = self.world.others[HONEST].exchange.private_bytes_raw()
        signers = Signers.of(self.world.roster)
        self.key = g.make_key(
            self.epoch, HONEST, seed, own, self.secrets[HONEST][0], relayed, signers
        )
        self.tagged = self.begin(made)
        self.sums[0] = [self.tagged]
        return secure.SecureTaken()

    async def group_key(self, request, context):
        self.calls["group_key"] += 1
        parts = self.parts().values()
        relayed = (g.Relayed(given, letters(pieces)[SILO]) for given, pieces in parts)
        return messages.secagg_delivery_to_wire(tuple(relayed))
