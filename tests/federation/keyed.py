"""What tests of blind jobs that mix and compare share: a federation, its oracle, and what its silos
keep.
"""

import json
from functools import partial
from unittest.mock import patch

import torch
from federation.conftest import shards
from support.key_watch import keys_watched

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import DTYPES, Contribution, Gram
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.security.blind.plan import simulated

SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
# lost after 30 s: who restarts is not
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}


def seeded(document, holds):
    """The document with the first seed for which its job ``holds``: what is drawn follows from all
    of it.
    """
    jobs = (
        Job.from_file(
            JobFile.model_validate({**document, "seed": seed}), "job.toml"
        ).for_federation()
        for seed in range(2000)
    )
    return {**document, "seed": next(job.seed for job in jobs if holds(job))}


def vectors(spec, rng):
    """Unit vectors, near to those of other silos, with entries of both signs."""
    base = torch.randn(spec.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    own = base + 0.3 * torch.randn(spec.shape, generator=rng, dtype=torch.float64)
    return (own / own.norm(dim=1, keepdim=True)).to(DTYPES[spec.dtype])


def made_up(job, weight=None):
    """What raw silos give, by silo, then by round: numbers at random, and 7 for each metric.

    Each silo has another weight, from ``weight`` on.
    """

    def tensors(part, rng):
        if part.name == RIGHT.name:
            return {each.name: torch.full(each.shape, 7).long() for each in part.tensors}
        if isinstance(part.exchange, Gram):
            return {each.name: vectors(each, rng) for each in part.tensors}
        drawn = {each.name: torch.randn(each.shape, generator=rng) for each in part.tensors}
        return {each.name: drawn[each.name].to(DTYPES[each.dtype]) for each in part.tensors}

    def given(silo, round_):
        found, number = {}, job.silos.index(silo)
        for part in job.up(round_):
            rng = torch.Generator().manual_seed(100 * round_ + number)
            own = None if weight is None or part.wire == part.tensors else weight + number
            found[part.name] = PLAIN.contribute(part, Contribution(tensors(part, rng), own))
        return found

    return lambda silo: partial(given, silo)


def even(running, silos):
    """Give each silo about as many records, so that none outweighs the others in a row."""
    running.data = shards(silos, 3.0, 200)
    for silo in silos:
        running.fix_split(silo)
    running.watch = keys_watched(running.federation, silos)
    running.keys = running.watch.__enter__()


def counts(running, silos):
    """Training records of each silo, as it will split them."""
    return {silo: len(train) for silo, (train, _) in running.shards(silos).items()}


def group_key(running, job, silos):
    """The one that all had while the job ran, behind the context of its epoch."""
    (key,) = {kept[32:64] for silo in silos for kept in running.keys[job.name, silo]}
    return key


def check_result(running, job, silos):
    """Bit for bit what the oracle computes under the job's own key, with those who took part to the
    end of each round.

    Which silos these are is what the coordinator says; it is returned, round by round.
    """
    running.watch.__exit__(None, None, None)
    key = group_key(running, job, silos)
    closed = running.rows(f"SELECT round, members FROM rounds WHERE job = '{job.name}'")
    members = {round_: tuple(json.loads(names)) for round_, names in closed}
    with patch.object(Job, "cohort", lambda _, round_: members[round_]):
        expected = simulate(job, running.shards(job.silos), exchanges=simulated(job, key))
    running.check_models(job, expected, silos)
    return members


def check_ledgers(running, silos):
    """They verify, their own and with the coordinator's.

    Nothing left in the clear, and no two words on a version.
    """
    running.check_ledgers(silos)
    for silo in silos:
        forms = {record["form"] for record in running.records(silo, "egress.intent")}
        assert forms <= {"masked", "padded", "rotated"}
        # nobody broke a rule
        assert {record["blame"] for record in running.records(silo, "secagg.end")} <= {""}


def check_left_over(running):
    """The coordinator keeps no words of what silos gave once the job has ended, and no row
    of them.
    """
    folder = running.kept
    kinds = (".part", ".upload", ".masked", ".rotated", ".padded", ".rows")
    left = [path.name for path in folder.rglob("*") if path.suffix in kinds or "@sum" in path.name]
    assert not left, left
    silos = {silo for job in running.jobs for silo in job.silos}
    words = [path.name for path in folder.rglob("*.words")]
    rows = [name for name in words if any(f".{silo}." in name for silo in silos)]
    assert not rows, rows  # of a directed mix
    assert running.rows("SELECT file FROM hidden") == []
    assert {room for (room,) in running.rows("SELECT room FROM files")} <= {"result", "words"}
