"""A silo is lost in a round whose rows are for its members: rows that would lean without it are made anew."""

import pytest
import torch
from coordinating import coordinator
from directed_rows import FIVE
from members_world import begin, make_world
from mix_silo import in_turn

from staddle.algorithms.pfedsim import PFedSim
from staddle.proto import federation_pb2 as pb
from staddle.security import secagg_silo_events as s

A, B, C, D, E = FIVE
LIKENESS = {A: {B: 0.49, C: 0.03, D: 0.24, E: 0.24, A: 1.0}}  # without D more than half of it is B's
WHOLE = 1 << 32


class GoneError(Exception):
    """A silo has stopped in the middle of a round."""


def likeness(_, state, silo):
    return LIKENESS.get(silo, {each: 2.0 if each == silo else 1.0 for each in FIVE})


async def lost(each):
    """It trains, deals keys, and is gone before it uploads."""

    def gone(effect):
        if isinstance(effect, s.Upload):
            raise GoneError
        return effect

    each.hear = gone
    with pytest.raises(GoneError):
        await each.take_part(1)
    await each.answer("FAILED", 1, pb.ERROR_CODE_TRAINING)


def test_the_round_is_summed_again_without_it_and_the_row_that_leans_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(PFedSim, "member_weights", likeness)
    world, came, specs = make_world(tmp_path, weights="public", counts=dict.fromkeys(FIVE, 30)), {}, {}

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
        for name in world.gifts(silo)(1)["extractor"]:
            wanted = sum(world.gifts(each)(1)["extractor"][name].double() for each in others) / 5
            assert torch.allclose(mailed[name].double(), wanted, rtol=0, atol=1e-6)
