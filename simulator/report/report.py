"""The comparison in an output folder, from the finished runs that it holds.

::

    summary.md                                  summary.py
    curves.png, spread.png                      curves.py
    partition.json, partition.png               who holds what, where the population is at hand
    <label>/seed-<seed>/heatmap.png             heatmaps.py, where the method compares silos
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ...algorithms.job.job import Job
from ...algorithms.partition import file as partition_file
from ...algorithms.partition import picture
from ...algorithms.partition.file import PartitionFile
from ...errors import LocalError
from ...files.documents import write_atomic
from ..experiment.plan import Population
from ..experiment.population import counts
from . import curves, heatmaps
from .finished_runs import Recorded, load_runs
from .summary import Groups, Link, check_comparable, summary

SUMMARY, CURVES, SPREAD, HEATMAP = "summary.md", "curves.png", "spread.png", "heatmap.png"
PARTITION, PARTITION_PICTURE = "partition.json", "partition.png"


def write_report(
    out: Path, population: Population | None = None, labels: Sequence[str] = ()
) -> tuple[Path, ...]:
    """Write it all; the files, the summary first. The same runs give the same bytes.

    ``labels`` come first, in their order. LocalError where no run is finished, or they cannot be
    compared.
    """
    groups = _groups(load_runs(out), labels)
    if not groups:
        raise LocalError(
            f"{out}: no run in it is finished, so there is nothing to compare; run one to its end"
        )
    check_comparable(groups, population)
    partition = _partition(out, population)
    pictures = _pictures(out, groups, population)
    text = summary(groups, partition, list(pictures))
    files = {SUMMARY: text.encode()} | {str(link.path): data for link, data in pictures.items()}
    for name, data in files.items():
        write_atomic(out / name, data, 0o644)
    written = tuple(out / name for name in files)
    return written if partition is None else (*written, out / PARTITION)


def _pictures(out: Path, groups: Groups, population: Population | None) -> dict[Link, bytes]:
    """In the order of the summary."""
    taken = {label: {run.seed: run.history for run in runs} for label, runs in groups.items()}
    pictures = {
        _link(CURVES, "Accuracy over rounds"): curves.curves(taken),
        _link(SPREAD, "Accuracy silo by silo, after the last round"): curves.spread(taken),
    }
    if population is not None and (held := _drawn(population)):
        pictures[
            _link(PARTITION_PICTURE, "Who holds what: the area of a disc is the number of records")
        ] = held
    for label, runs in groups.items():
        for run in runs:
            if made := _heat_map(run, population):
                place, caption = (
                    run.folder.relative_to(out) / HEATMAP,
                    f"Heat map of {label}, seed {run.seed}",
                )
                pictures[_link(place.as_posix(), caption, run is runs[0])] = made
    return pictures


def _link(name: str, caption: str, shown: bool = True) -> Link:
    return Link(PurePosixPath(name), caption, shown)


def _groups(runs: Sequence[Recorded], labels: Sequence[str]) -> dict[str, list[Recorded]]:
    groups: dict[str, list[Recorded]] = {label: [] for label in labels}
    for run in runs:
        if run.finished:
            groups.setdefault(run.label, []).append(run)
    return {label: own for label, own in groups.items() if own}


def _partition(out: Path, population: Population | None) -> PartitionFile | None:
    """That of the population, written; or the one that was written before."""
    path = out / PARTITION
    if population is None:
        return partition_file.read(path) if path.exists() else None
    if population.partition is not None:
        partition_file.save(path, population.partition)
    return population.partition


def _drawn(population: Population) -> bytes | None:
    """None where there are more silos and classes than a picture takes."""
    held = counts(population)
    if held.size > picture.MOST_CELLS:
        return None
    return picture.picture(held, tuple(population.records), population.class_names or ())


def _heat_map(run: Recorded, population: Population | None) -> bytes | None:
    job = Job.from_document(run.identity.job, str(run.folder), federated=False)
    found = heatmaps.heat_map(job, run.coordinator(), run.model)
    if found is None:
        return None
    if population is None:
        return heatmaps.png(found)
    return heatmaps.png(found, counts(population), population.class_names or ())
