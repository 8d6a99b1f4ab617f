"""A pFedSim job whose directed rows are for the round's members: a coordinator over TLS, and silos
of raw calls.
"""

import torch
from support.directed_rows import FIVE
from support.raw_mixing_silo import DirectedSilo, in_turn
from support.signed_federation import pfedsim, signed_federation

from staddle.algorithms.exchange.parts import Contribution, Gram
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.tasks.table_counting import RIGHT


def make_world(tmp_path, **security):
    """Three rounds of five silos: the first compares, and the others mix."""
    document = pfedsim(FIVE, security={"mix": "directed", **security})
    world = signed_federation(tmp_path, FIVE, document, beat_seconds=60)
    job = world.job

    def contributions(silo):
        def of(round_):
            rng, found = torch.Generator().manual_seed(100 * round_ + FIVE.index(silo)), {}
            for part in job.up(round_):
                specs = part.tensors if part != RIGHT else ()
                drawn = {each.name: torch.randn(each.shape, generator=rng) for each in specs}
                if isinstance(part.exchange, Gram):  # rows that are alike
                    unit = torch.nn.functional.normalize
                    drawn = {name: unit(3 + each, dim=1) for name, each in drawn.items()}
                whole = lambda spec: torch.full(spec.shape, 7, dtype=torch.int64)
                if part == RIGHT:
                    drawn = {spec.name: whole(spec) for spec in part.tensors}
                found[part.name] = PLAIN.contribute(part, Contribution(drawn))
            return found

        return of

    world.contributions = contributions
    world.folder = world.config.directory / "jobs" / "job"
    world.silo = lambda here, name: DirectedSilo(
        *(here.address, world.keys[name], world.roster, job, contributions(name)),
        tmp_path / "silos" / name,
    )
    return world


async def begin(world, here):
    """All silos, after the first round, which compares and mixes nothing."""
    silos = [world.silo(here, name) for name in FIVE]
    for each in silos:
        await each.accept()
    await play(silos, 0)
    return silos


async def play(silos, round_):
    for each in silos:
        assert (await each.told("round")).round == round_
    await in_turn(silos, lambda each: each.take_part(round_))
