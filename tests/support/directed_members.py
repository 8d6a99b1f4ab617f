"""A pFedSim job whose directed rows are for the round's members: a coordinator over TLS, and silos
of raw calls.
"""

from types import SimpleNamespace

import torch
from support.directed_rows import FIVE
from support.raw_mixing_silo import DirectedSilo, in_turn

from staddle.algorithms.exchange.parts import Contribution, Gram
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import METRICS
from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys


def make_world(tmp_path, **security):
    """Three rounds of five silos: the first compares, and the others mix."""
    federation = local_federation.make(tmp_path / "federation", FIVE)
    document = {
        "version": 1,
        "name": "job",
        "seed": 11,
        "rounds": 3,
        "silos": list(FIVE),
        "min_cohort": 3,
        "round_timeout": 60,
        "method": {"name": "pfedsim", "options": {"rho": 0.0}},
        "model": {"name": "cnn-digits", "classes": 10},
        "training": {"lr": 0.05},
        "security": {"secure_aggregation": "required", "mix": "directed", **security},
    }
    job = local_federation.sign_job(federation, document)
    timing = {"admission_seconds": 20, "beat_seconds": 60, "hold_seconds": 1}
    local_federation.write_coordinator(federation, ["job"], timing)
    roster = rosters.load(federation.folder / "roster.json")
    keys = {silo: load_keys(federation.folder / silo / "keys") for silo in FIVE}

    def contributions(silo):
        def of(round_):
            rng, found = torch.Generator().manual_seed(100 * round_ + FIVE.index(silo)), {}
            for part in job.up(round_):
                drawn = {
                    spec.name: torch.randn(spec.shape, generator=rng)
                    for spec in part.tensors
                    if part != METRICS
                }
                if isinstance(part.exchange, Gram):  # rows that are alike
                    drawn = {
                        name: torch.nn.functional.normalize(3 + each, dim=1)
                        for name, each in drawn.items()
                    }
                seven = {
                    spec.name: torch.full(spec.shape, 7, dtype=torch.int64) for spec in part.tensors
                }
                found[part.name] = PLAIN.give(
                    part, Contribution(seven if part == METRICS else drawn)
                )
            return found

        return of

    return SimpleNamespace(
        job=job, config=configs.load(federation.coordinator_config), contributions=contributions,
        keys=keys,
        folder=configs.load(federation.coordinator_config).directory / "jobs" / "job",
        silo=lambda here, name: DirectedSilo(
            here.address, keys[name], roster, job, contributions(name), tmp_path / "silos" / name
        ),
    )  # fmt: skip


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
