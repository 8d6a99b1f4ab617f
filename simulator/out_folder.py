"""What one output folder holds: runs of one experiment, on the same silos."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import LocalError
from ..security.lock import held
from . import identity
from .identity import RUN
from .plan import Population, Run, Schedule
from .run_folder import folder_of


def check(out: Path, runs: Sequence[Run], population: Population, schedule: Schedule) -> None:
    """LocalError, before anything is trained, where the folder is of other runs or another process is at these.

    What another process begins later is told by the folder of its run.
    """
    if out.exists() and not out.is_dir():
        raise LocalError(f"{out}: is no folder; choose another --out")
    for run in runs:
        folder = folder_of(out, run)
        if held(folder):
            raise LocalError(f"{folder}: another process runs with this folder; stop it first")
        if (folder / RUN).exists():
            identity.check_same(folder, identity.read(folder), identity.identity(run, population, schedule))
    for path in sorted(out.glob(f"*/seed-*/{RUN}")):
        there = identity.read(path.parent)
        if there.job["name"] != runs[0].job.name:
            raise LocalError(
                f"{out}: holds experiment {there.job['name']!r}, this is {runs[0].job.name!r}; choose another --out"
            )
        if there.population != population.digest:
            raise LocalError(
                f"{out}: holds runs on other records, or with another partition or split; choose another --out, or "
                "remove it"
            )
