"""What tags can be used for by a silo that lies, and by a coordinator with one silo: against the agent as it ships.

One silo flips a bit of its tag, and all others are honest: the sum does not open at any silo, and none can tell by
whose doing. The attack's measure is whom the real silo's ledger names: a name that can be read as the coordinator's
guilt is what the attacker is after. Coordinator and one silo take the pads off another silo's tag: their measure is how
many guesses at its test counts are left.
"""

import os
from itertools import product

import numpy as np
import pytest
from hostile import SILO, offer, play, records, round_of
from hostile_sums import OTHERS, SILOS, Attempted, Blind, digest_of, make_world
from open_sums import delivery

from staddle.proto import group_messages as messages
from staddle.proto import secure_pb2 as secure
from staddle.proto.sum_messages import sum_to_wire
from staddle.security import group_key as g
from staddle.security import secagg_coordinator_events as c
from staddle.security import secagg_silo_events as s
from staddle.security.labels import SECAGG_SPEC
from staddle.security.masked_sum import Accumulator, masked_chunks
from staddle.security.open_sum import Claim, tag_of
from staddle.security.sealing import letters
from staddle.security.secagg_fault import COORDINATOR_OR_SILO
from staddle.security.tags import PRIME, Tagger, decoded

pytestmark = [pytest.mark.actor("silo"), pytest.mark.usefixtures("hurried")]

LIAR, HONEST = OTHERS[0], OTHERS[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    security = {"secure_aggregation": "required", "weight_most": 2000, "tags": True}
    return make_world(tmp_path_factory.mktemp("attacked"), {"first": security})


class Tagged(Attempted):
    """An attempt whose other silos tag what they give, by the key that ``key()`` says; ``flip``: the liar lies."""

    def __init__(self, world, key, flip):
        self.key, self.flip, self.words = key, flip, {}
        super().__init__(world, "first")

    def act(self, who, effect):
        match effect:
            case s.Upload(terms):
                ctx, groups = self.spec.context(), self.spec.groups
                tagger = Tagger(self.key(), ctx, len(groups))
                made = [self.gift(group, who) for group in groups]
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
                self.words = b"".join(words.tobytes() for group, words in accumulator.numbers() if not group)
                self.queue.append(("coordinator", c.Opened(bytes(32))))
            case c.TellResult(_, _, tags):
                self.tags = tags
                super().act(who, effect)
            case _:
                super().act(who, effect)

    def down(self):
        """The model as it comes down, in the words of its sum."""
        payload = self.spec.payload()
        signature = self.world.keys.sign(SECAGG_SPEC, payload)
        claim = Claim(payload, signature, self.state.u3, tag_of(self.tags, 0, len(self.spec.groups)))
        return delivery(self.job, 1, [(sum_to_wire("model", claim), self.words)])


class Keyed(Blind):
    """An honest coordinator of a job whose silos share a key; the others' parts in it are drawn here."""

    def __init__(self, world, flip):
        self.tagged = Tagged(world, lambda: self.key, flip)
        super().__init__(world, [offer(world), round_of(world, 0), round_of(world, 1, counted=1)], {0: [], 1: []})
        self.sums[0] = [self.tagged]
        self.script["fetch"] = [lambda: delivery(self.tagged.job, 0, []), self.tagged.down]
        self.calls |= {"group_key": 0}
        self.epoch = g.Epoch.of(world.roster, SILOS, world.jobs["first"].digest)
        self.secrets = {silo: tuple(os.urandom(32) for _ in range(3)) for silo in OTHERS}
        self.key = None

    def parts(self):
        signs = {silo: self.world.others[silo].sign for silo in OTHERS}
        return {silo: g.contribute(self.epoch, silo, *self.secrets[silo], signs[silo]) for silo in OTHERS}

    async def contribute(self, request, context):
        given = messages.contributed_from_wire(SILO, request)
        parts = {SILO: (given.contribution, given.pieces), **self.parts()}
        own, _ = parts.pop(HONEST)
        relayed = [g.Relayed(contribution, letters(pieces)[HONEST]) for contribution, pieces in parts.values()]
        seed, signers = self.world.others[HONEST].exchange.private_bytes_raw(), self.tagged.signers
        self.key = g.make_key(self.epoch, HONEST, seed, own, self.secrets[HONEST][0], relayed, signers)
        return secure.SecureTaken()

    async def group_key(self, request, context):
        self.calls["group_key"] += 1
        return messages.told_to_wire(
            tuple(g.Relayed(contribution, letters(pieces)[SILO]) for contribution, pieces in self.parts().values())
        )


@pytest.mark.parametrize("flip", [False, True], ids=["honest", "flipped"])
def test_a_flipped_tag_names_only_what_is_known(world, tmp_path, flip):
    """Before: one record of one named the coordinator, which had done nothing."""
    hostile = play(Keyed(world, flip), tmp_path)
    found = records(tmp_path)
    assert [each["survivors"] for each in found if each["type"] == "secagg.sum"] == [sorted(SILOS)]
    assert np.isfinite(hostile.tagged.opened[0].total).all()  # canaries came out: the coordinator sees nothing
    ended = [(each["round"], each["code"], each["blame"]) for each in found if each["type"] == "secagg.end"]
    taken = [each["round"] for each in found if each["type"] == "ingress"]
    if not flip:
        assert (ended, taken) == ([], [1])
        return
    assert taken == []
    assert [(round_, code) for round_, code, _ in ended] == [(0, "SUM")]
    named = [blame for _, _, blame in ended if blame != COORDINATOR_OR_SILO]
    assert named == [], f"{len(named)} of {len(ended)} records name {named}"
    assert COORDINATOR_OR_SILO == "coordinator or a silo of the cohort"


@pytest.mark.actor("coordinator and silos")
def test_the_tag_of_a_silo_tells_nothing_of_its_own_numbers(world, tmp_path):
    """Before: one guess of 29,791 fitted, the right one, for each silo and round; tags had no masks."""
    made = play(Keyed(world, flip=False), tmp_path).tagged
    spec, ctx, at = made.spec, made.spec.context(), 1  # the metrics
    group, key, groups = spec.groups[at], made.key(), len(spec.groups)
    others = sum(made.gift(group, silo).values for silo in OTHERS)
    true = tuple(int(number) for number in np.rint(made.opened[at].total - others))
    most = 30
    assert all(0 <= number <= most for number in true)
    assert true[2] > 0  # tested
    pad = decoded(Tagger(key, ctx, groups).padded(key, ctx, SILO), groups)[at]
    tag = (decoded(made.state.headers[SILO].tags, groups)[at] - pad) % PRIME
    of_one = []
    for each in range(3):  # the tag of 1 in the place of one of the three counts
        tagger = Tagger(key, ctx, groups)
        tagger.add(at, (np.eye(3, dtype=np.int64)[each] << group.scale_exponent).view(np.uint64))
        of_one.append(tagger.sums[at])
    guesses = product(range(most + 1), repeat=3)
    fits = [guess for guess in guesses if sum(n * by for n, by in zip(guess, of_one, strict=True)) % PRIME == tag]
    assert fits == [], f"the right guess is {true}, and those that fit are {fits}"
