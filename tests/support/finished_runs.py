"""Finished runs whose histories are a few numbers, as they are read back from a folder."""

from pathlib import Path

from support.simulated_jobs import SCHEDULE, make_population

from staddle.simulator.report.finished_runs import Recorded
from staddle.simulator.run.manifest import identity

POPULATION = make_population()


def finished(run, history, kind=Recorded, **fields):
    """The run with these measures; ``fields`` are further ones of ``Recorded``."""
    found = identity(run, POPULATION, SCHEDULE)
    own = {
        "folder": Path("out") / run.label / f"seed-{run.seed}",
        "label": run.label,
        "seed": run.seed,
        "method": run.job.method_name,
        "rounds": run.job.rounds,
        "silos": found.silos,
        "history": tuple(history),
        "finished": True,
        "identity": found,
        "seconds": None,
    }
    return kind(**{**own, **fields})
