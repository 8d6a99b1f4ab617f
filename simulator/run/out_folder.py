"""What one output folder holds: runs of one experiment, on the same silos."""

from collections.abc import Sequence
from pathlib import Path

from ...errors import LocalError
from ...security.log.lock import held
from ..experiment.plan import Population, Run, Schedule
from . import manifest
from .folder import folder_of
from .manifest import RUN


def check(out: Path, runs: Sequence[Run], population: Population, schedule: Schedule) -> None:
    """LocalError, before anything is trained, where the folder is of other runs or another process
    is at these.

    What another process begins later is told by the folder of its run.
    """
    if out.exists() and not out.is_dir():
        raise LocalError(f"{out}: is not a folder; choose another --out")
    begun = {
        path.parent: manifest.read(path.parent) for path in sorted(out.glob(f"*/seed-*/{RUN}"))
    }
    for run in runs:
        folder, here = folder_of(out, run), manifest.identity(run, population, schedule)
        if held(folder):
            raise LocalError(f"{folder}: another process runs with this folder; stop it first")
        for path, there in begun.items():
            if there.label == run.label:  # all seeds of one label are one method
                manifest.check_same(path, there, here.with_seed(there.seed))
    for path, there in begun.items():
        if there.job["name"] != runs[0].job.name:
            raise LocalError(
                f"{path}: is of experiment {there.job['name']!r}, this is {runs[0].job.name!r};"
                " choose another --out"
            )
        if there.population != population.digest:
            raise LocalError(
                f"{path}: holds a run on other records, or with another partition or split; choose"
                " another --out, or remove it"
            )
