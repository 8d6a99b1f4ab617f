"""A coordinator in league with one silo, against vectors that are compared: rotated ones, and ones
that are shared.

Both jobs run over TLS. The coordinator has all that crosses and the friend gives it all that it
knows: the key of the job's silos, its keys of the attempt, and what was sealed to it.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.coordinator_thread import coordinator
from support.raw_mixing_silo import KEY, MixSilo, in_turn
from support.signed_federation import pfedsim, signed_federation

from staddle.algorithms.exchange.parts import DTYPES, Contribution, Gram
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.errors import RefusedError
from staddle.security.arithmetic.field import from_signed, interpolation, product, to_signed
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.rotation import rotate
from staddle.security.identity.pairwise_keys import agree
from staddle.security.secagg import gram_pieces
from staddle.security.secagg import shared_gram as g
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.receiving_keys import receiving_seed

pytestmark = pytest.mark.actor("coordinator and silos")

SILOS = ("north", "east", "south", "west")
FRIEND = SILOS[0]
WIDTH = 640


def rows(silo):
    """A silo's unit vector [1, 640], float32, far from those of others."""
    drawn = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(SILOS.index(silo)))
    return drawn / drawn.norm()


def contribution(part, silo):
    if part.name == RIGHT.name:
        tensors = {spec.name: torch.full(spec.shape, 7, dtype=torch.int64) for spec in part.tensors}
    elif isinstance(part.exchange, Gram):
        tensors = {spec.name: rows(silo) for spec in part.tensors}
    else:
        tensors = {
            spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in part.tensors
        }
    return PLAIN.contribute(part, Contribution(tensors))


class Watched(MixSilo):
    """``uploads`` are the bytes that it sent of each part, as the coordinator has them.

    ``states`` its own.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.uploads, self.states, self.reveals = {}, [], []
        self.hear = self.watch

    def watch(self, effect):
        if isinstance(effect, s.SendSurvival):
            self.states.append(self.state)  # with its secrets, which go when it reveals
        if isinstance(effect, s.SendReveal):
            self.reveals.append(effect.reveal)
        return effect

    def part_frames(self, part, round_, payload, context, /, **changes):
        self.uploads[part.name] = payload
        return super().part_frames(part, round_, payload, context, **changes)


def play(folder, compare):
    """One round of pFedSim that compares.

    The silos afterwards, by name, and the inner products that were opened.
    """
    document = pfedsim(SILOS, rounds=1, security={"compare": compare})
    world = signed_federation(folder, SILOS, document, beat_seconds=60)
    job, config = world.job, world.config
    contributions = lambda silo: (
        lambda round_: {part.name: contribution(part, silo) for part in job.up(round_)}
    )
    opened = []

    async def scenario():
        of = world.roster, job
        silos = [Watched(here.address, world.keys[s], *of, contributions(s)) for s in SILOS]
        for each in silos:
            await each.accept()
        for each in silos:
            await each.told("round")
        await in_turn(silos, lambda each: each.take_part(0))
        path = config.directory / "jobs" / "job" / "0.@sum.safetensors"
        opened.append(load_file(path) if path.exists() else {})
        for each in silos:
            await each.channel.close()
        return silos

    with coordinator(config) as here:
        silos = here.run(scenario(), 120)
    return SimpleNamespace(job=job, silos={each.silo: each for each in silos}, opened=opened[0])


def cosine(one, other):
    return abs(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)))


def exact(silo):
    return rows(silo).double().numpy()[0]


@pytest.mark.succeeds
def test_rotated_vectors_are_read_as_they_stand(tmp_path):
    """The friend has the key, and so the rotation of each use.

    Its rows are the images of the unit vectors.
    """
    done = play(tmp_path, "rotated")
    (part,) = (part for part in done.job.up(0) if isinstance(part.exchange, Gram))
    turning = rotate(np.eye(WIDTH), JobPlan(done.job).use(part, 0, 0).key(KEY))
    worst = 0.0
    for silo in SILOS[1:]:
        uploaded = np.frombuffer(done.silos[silo].uploads[part.name], "<f4")
        found = uploaded.astype(np.float64) @ turning.T
        worst = max(worst, float(np.abs(found - exact(silo)).max()))
        assert cosine(found, exact(silo)) > 1 - 1e-9
    assert worst < 1e-6


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return play(tmp_path_factory.mktemp("shared"), "shared")


def test_shared_vectors_stay_noise(shared):
    """What the friend holds of a victim is like the victim's vector nowhere.

    Tried are its share as it is, and lines through it and through the friend's own vector at the
    places of others.
    """
    friend = shared.silos[FRIEND]
    (state,) = friend.states
    spec = state.spec
    best = 0.0
    for victim in SILOS[1:]:
        held = state.vectors[victim].vectors
        own = from_signed(g.quantise(spec.compared, rows(FRIEND).double().numpy()))
        at = spec.holder(FRIEND)
        others = [spec.holder(silo) for silo in SILOS[1:]]
        both = np.stack([held[0], own[0]])
        lines = [product(interpolation([at, other], [0]), both) for other in others]
        for tried in (held, *lines):
            best = max(best, cosine(to_signed(tried)[0].astype(np.float64), exact(victim)))
    # of vectors of 640 numbers that have nothing in common: 0.04 by chance
    assert best < 0.15, best


def test_nor_does_it_open_what_was_sealed_to_others(shared):
    """With the friend's keys for any dealer, and those of the friend as a dealer, no share for
    another silo opens.
    """
    friend = shared.silos[FRIEND].states[0]
    spec, seals = friend.spec, {bundle.silo: bundle.seal for bundle in friend.bundles}
    for dealer in SILOS[1:]:
        for holder in (silo for silo in SILOS[1:] if silo != dealer):
            at = gram_pieces.place_of(spec, dealer, holder)
            sealed = shared.silos[dealer].words[at : at + gram_pieces.sealed_bytes(spec)]
            for by in SILOS[1:]:
                seed = receiving_seed(friend.seeds.receiving, friend.ctx, FRIEND, by)
                agreed = agree(seed, seals[dealer], dealer)
                key = gram_pieces.share_key(agreed, friend.ctx, dealer, holder)
                with pytest.raises(RefusedError, match="does not open"):
                    gram_pieces.open_share(spec, key, dealer, holder, sealed)


def test_what_it_does_read_are_the_inner_products(shared):
    """Those of the quantised vectors, to the bit, from the reveals of any three silos."""
    state = shared.silos[FRIEND].states[0]
    spec, compared = state.spec, state.spec.compared
    revealed = {
        silo: each.reveals[0].products for silo, each in shared.silos.items() if each.reveals
    }
    told = {spec.holder(silo): g.products_loaded(compared, 4, p) for silo, p in revealed.items()}
    products = g.opened(told, 1).products
    found = g.squares(compared, g.dequantise(compared, products), 4)[0]
    vectors = np.stack([exact(header.silo) for header in state.headers])
    assert np.array_equal(found, g.gram(compared, list(vectors[:, None]))[0])
    assert np.abs(found - vectors @ vectors.T).max() < 4e-7
