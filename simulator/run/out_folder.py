"""What one output folder holds: runs of one experiment, on the same silos."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import LocalError, check_local
from ...security.log.lock import held
from ..experiment.plan import Population, Run, Schedule
from . import manifest
from .folder import folder_of
from .manifest import RUN, RunManifest


def check(out: Path, runs: Sequence[Run], population: Population, schedule: Schedule) -> None:
    """LocalError, before anything trains, where other runs or another process use the folder.

    A process that begins later finds the lock in the folder of its run.

    Nothing is written. ``runs`` must not be empty.
    """
    if out.exists() and not out.is_dir():
        raise LocalError(f"{out}: is not a folder; choose another --out")

    begun: dict[Path, RunManifest] = {}
    for path in sorted(out.glob(f"*/seed-*/{RUN}")):
        folder = path.parent
        begun[folder] = manifest.read(folder)

    # all runs before the first trains: the last one's fault would show after hours
    for run in runs:
        folder = folder_of(out, run)
        if held(folder):
            raise LocalError(f"{folder}: another process runs with this folder; stop it first")
        _check_label(begun, run, manifest.identity(run, population, schedule))

    # a report compares all runs in the folder, those of earlier commands too
    for folder, there in begun.items():
        _check_experiment(folder, there, runs[0], population)


def _check_label(begun: Mapping[Path, RunManifest], run: Run, here: RunManifest) -> None:
    """LocalError unless all seeds of this label are of one method.

    Those of fewer rounds can be lengthened.
    """
    for path, there in begun.items():
        if there.label == here.label:
            # Compare with the other's seed: nothing else may differ.
            manifest.check_continues(path, there, run, here)


def _check_experiment(path: Path, there: RunManifest, run: Run, population: Population) -> None:
    name = run.job.name
    if there.job["name"] != name:
        raise LocalError(
            f"{path}: is of experiment {there.job['name']!r}, this is {name!r};"
            " choose another --out"
        )
    check_local(
        there.population == population.digest,
        f"{path}: holds a run on other records, or with another partition or split; choose"
        " another --out, or remove it",
    )
    # Other labels: of its own label it is a changed setting.
    check_local(
        there.who == run.attendance,
        f"{path}: holds a run with another [attendance]; choose another --out, or remove it",
    )
