"""A silo is lost in a round whose rows are for its members: they are over the rest, or made anew
where one leans.
"""

import asyncio
from dataclasses import replace

import pytest
import torch
from support.coordinator_thread import coordinator
from support.directed_members import begin, make_world
from support.directed_rows import FIVE
from support.raw_mixing_silo import in_turn

from staddle.algorithms.methods.pfedsim import CODE_SELF_WEIGHT, PFedSim
from staddle.proto import federation_pb2 as pb
from staddle.security.identity.domains import SECAGG_DEALING
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import seed_commitment
from staddle.security.secagg.spec import kept

A, B, C, D, E = FIVE
# without D more than half of it is B's
LIKENESS = {A: {B: 0.49, C: 0.03, D: 0.24, E: 0.24, A: 1.0}}


class GoneError(Exception):
    """A silo has stopped in the middle of a round."""


def likeness(_, state, silo):
    return LIKENESS.get(silo, {each: 2.0 if each == silo else 1.0 for each in FIVE})


async def lost(each):
    """It trains, deals keys, and is gone before it uploads."""

    def gone(effect):
        if isinstance(effect, s.UploadWords):
            raise GoneError
        return effect

    each.hear = gone
    with pytest.raises(GoneError):
        await each.take_part(1)
    await each.answer("FAILED", 1, pb.ERROR_CODE_TRAINING)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """What a round without D comes to, by weights of the coordinator's: the world, specifications
    and mail by silo.
    """

    def play(weights):
        monkeypatch.setattr(PFedSim, "member_weights", weights)
        world, came, specs = (
            make_world(tmp_path, weights="public", dropouts="any", counts=dict.fromkeys(FIVE, 30)),
            {},
            {},
        )

        async def rounds(here):
            silos = await begin(world, here)
            for each in silos:
                await each.told("round")
            await in_turn(silos, lambda each: lost(each) if each.silo == D else each.take_part(1))
            for each in silos:
                specs[each.silo] = each.state.spec
                await each.told("round")
                if each.silo != D:
                    came[each.silo], _ = await each.mail(2)

        with coordinator(world.config) as here:
            here.run(rounds(here), 150)
            assert here.broken == []
        return world, specs, came

    return play


def test_rows_that_do_not_lean_are_over_the_others_who_survived(played):
    raw = dict(zip(FIVE, (1.1, 0.9, 1.3, 0.7, 1.7), strict=True))
    world, specs, came = played(lambda _method, _state, silo: {**raw, silo: CODE_SELF_WEIGHT})
    assert {(spec.attempt, spec.cohort) for spec in specs.values()} == {(0, FIVE)}
    assert came.keys() == {A, B, C, E}
    for silo, mailed in came.items():
        whole = CODE_SELF_WEIGHT + sum(raw[each] for each in came if each != silo)
        row = next(row for row in specs[silo].groups if row.reader == silo)
        assert (
            float(mailed["@keep"])
            == kept(specs[silo], row, tuple(came))
            == pytest.approx(CODE_SELF_WEIGHT / whole)
        )
        for name in world.contributions(silo)(1)["extractor"]:
            gave = {
                each: raw[each] * world.contributions(each)(1)["extractor"][name].double()
                for each in came
                if each != silo
            }
            assert torch.allclose(
                mailed[name].double(), sum(gave.values()) / whole, rtol=0, atol=1e-6
            )


def test_the_round_is_summed_again_without_it_and_the_row_that_leans_is_not_made(played):
    world, specs, came = played(likeness)
    assert (specs[D].attempt, specs[D].cohort) == (0, FIVE)
    again = specs[A]
    assert (again.attempt, again.cohort) == (1, (A, B, C, E))
    rows = {row.reader: row for row in again.groups[1:]}
    assert rows.keys() == set(FIVE)  # as the job draws them; of two there is none
    assert [silo for silo, row in rows.items() if not any(row.counts)] == [A, D]
    assert came.pop(A) is None
    for silo, mailed in came.items():
        others = [each for each in again.cohort if each != silo]
        assert float(mailed["@keep"]) == pytest.approx(2 / 5, abs=2**-31)
        for name in world.contributions(silo)(1)["extractor"]:
            wanted = (
                sum(world.contributions(each)(1)["extractor"][name].double() for each in others) / 5
            )
            assert torch.allclose(mailed[name].double(), wanted, rtol=0, atol=1e-6)


def unjoined(each):
    """What it does with shares: they are of another secret than it commits to."""

    def hear(effect):
        if not isinstance(effect, s.SendShares):
            return effect
        seed = seed_commitment(each.state.ctx, each.silo, b"w" * 32)
        unsigned = replace(effect.dealing, seed=seed, signature=b"")
        signed = replace(
            unsigned,
            signature=each.keys.sign(SECAGG_DEALING, unsigned.signed_bytes(each.state.ctx)),
        )
        each.state = replace(each.state, dealing=signed)
        return s.SendShares(signed, effect.portions)

    return hear


def test_a_sum_that_a_dealer_kept_from_opening_is_repeated_with_the_same_rows(
    tmp_path, monkeypatch
):
    """Silos signed survivors: they take part in that very sum once more, weights included, and in
    no other.
    """
    monkeypatch.setattr(
        PFedSim,
        "member_weights",
        lambda _method, _state, silo: {**dict.fromkeys(FIVE, 1.0), silo: 2.0},
    )
    world, specs = (
        make_world(tmp_path, weights="public", dropouts="any", counts=dict.fromkeys(FIVE, 30)),
        [],
    )

    async def rounds(here):
        silos = await begin(world, here)
        for each in silos:
            await each.told("round")
        (dealer,) = (each for each in silos if each.silo == D)
        dealer.hear = unjoined(dealer)
        alone = asyncio.ensure_future(dealer.take_part(1))
        await in_turn(
            [each for each in silos if each is not dealer], lambda each: each.take_part(1)
        )
        alone.cancel()
        await asyncio.wait({alone})
        specs.extend(each.state.spec for each in silos)

    with coordinator(world.config) as here:
        here.run(rounds(here), 150)
        assert here.broken == []
    (first,) = (spec for spec in specs if spec.attempt == 0)  # the dealer's
    assert {spec.attempt for spec in specs if spec is not first} == {1}
    assert all(spec == first.model_copy(update={"attempt": spec.attempt}) for spec in specs)
