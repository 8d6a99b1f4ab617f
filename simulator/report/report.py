"""The comparison in an output folder, from the finished runs that it holds.

::

    summary.md                                  summary.py
    results.csv                                 results_csv.py
    sweep.csv                                   ranking.py, where the experiment sweeps settings
    curves.png, bytes.png, seconds.png, spread.png    curves.py; simulated.png with a clock
    partition.json, partition.png               who holds what, where the population is at hand
    <label>/seed-<seed>/heatmap.png             heatmaps.py, where the method compares silos
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import isnan, nan
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.partition import file as partition_file
from ...algorithms.partition import picture
from ...algorithms.partition.file import PartitionFile
from ...algorithms.tasks.counting import ScoreForm
from ...errors import LocalError
from ...files.documents import write_atomic
from ...files.program_code import is_imported
from ..experiment.plan import Population
from ..experiment.population import counts
from ..experiment.sweep import Variant
from .finished_runs import Recorded, by_label, finished_runs
from .ranking import Ranking, rank, section, sweep_csv
from .results_csv import Spent, results_csv, spent
from .style import can_draw
from .summary import Groups, Link, check_comparable, summary

SUMMARY, CURVES, SPREAD, HEATMAP = "summary.md", "curves.png", "spread.png", "heatmap.png"
RESULTS, SWEEP = "results.csv", "sweep.csv"
PARTITION, PARTITION_PICTURE = "partition.json", "partition.png"


def write_report(
    out: Path,
    population: Population | None = None,
    labels: Sequence[str] = (),
    variants: Sequence[Variant] = (),
) -> tuple[Path, ...]:
    """Write the report; returns its files, the summary first.

    The same runs make the same bytes. ``labels`` come first, in their order. Of the ``variants`` of
    a sweep all are ranked, and the best of each method is compared. LocalError where no run is
    finished, or where the runs cannot be compared.
    """
    # Includes runs of earlier commands.
    groups = by_label(finished_runs(out), labels)
    if not groups:
        raise LocalError(
            f"{out}: no run in it is finished, so there is nothing to compare; run one to its end"
        )
    # Before anything is drawn: scores on different records cannot be compared.
    check_comparable(groups, population)
    partition = _partition(out, population)
    ranking = rank(groups, variants)
    # Tables and pictures of dozens of variants would show nothing.
    shown = compared(groups, ranking)
    pictures = _pictures(out, shown, population)
    ranked = section(ranking, _form(groups)) if ranking else ""
    text = summary(shown, partition, list(pictures), ranked)

    # all is drawn by now: what fails to be drawn leaves the last report as it was
    files = {SUMMARY: text.encode(), RESULTS: results_csv(groups).encode()}
    if ranking:
        files[SWEEP] = sweep_csv(ranking).encode()
    else:
        # Of a file that had a sweep before.
        (out / SWEEP).unlink(missing_ok=True)
    for link, data in pictures.items():
        files[str(link.path)] = data
    written = []
    for name, data in files.items():
        written.append(out / name)
        write_atomic(out / name, data, 0o644)
    if partition is not None:
        written.append(out / PARTITION)
    return tuple(written)


def compared(groups: Groups, ranking: Ranking | None) -> dict[str, Sequence[Recorded]]:
    """The runs by label without variants that another of their method outranks."""
    outranked = ranking.outranked if ranking else set()
    return {label: runs for label, runs in groups.items() if label not in outranked}


def _form(groups: Groups) -> ScoreForm:
    # All runs of a folder are of one task.
    return next(iter(groups.values()))[0].form


def _pictures(out: Path, groups: Groups, population: Population | None) -> dict[Link, bytes]:
    """PNG by link, in the order of the summary."""
    # None for pictures that cannot be drawn; they are left out at the end.
    pictures: dict[Link, bytes | None] = {}
    if can_draw():
        pictures |= _curves(groups)

    # labels are not in the runs' files: only whoever has the population can draw it
    if population is not None and population.classes:
        few = len(population.records) <= picture.MOST_DISCS
        shows = "the area of a disc" if few else "the darkness of a stripe"
        caption = f"Who holds what: {shows} is the number of records"
        pictures[_link(PARTITION_PICTURE, caption)] = _drawn(population)

    for run in chain.from_iterable(groups.values()):
        path = run.folder.relative_to(out) / HEATMAP
        caption = f"Heat map of {run.title}"
        # one seed per method is enough to look at; the summary links to the others
        link = _link(path.as_posix(), caption, run is groups[run.label][0])
        pictures[link] = _heat_map(run, population)
    return {link: png for link, png in pictures.items() if png is not None}


def _paced(groups: Groups, histories: Any, form: ScoreForm) -> dict[Link, bytes | None]:
    """The curves over bytes and seconds, real and simulated, where all runs have counted them."""
    from . import curves  # noqa: PLC0415 - as in ``_curves``

    taken = {label: list(map(spent, runs)) for label, runs in groups.items()}
    axes: tuple[tuple[curves.Axis, Callable[[Spent], float]], ...] = (
        (curves.MEGABYTES, attrgetter("megabytes")),
        (curves.SECONDS, attrgetter("seconds")),
        (curves.SIMULATED, attrgetter("simulated")),
    )
    pictures: dict[Link, bytes | None] = {}
    for axis, of in axes:
        paces = {}
        for label, seeds in taken.items():
            paces[label] = curves.pace(
                [{rounds: of(own) for rounds, own in one.items()} for one in seeds]
            )
        ends = (max(own.values(), default=nan) for own in paces.values())
        # A run whose seconds.csv is missing has no place on the axis, nor one without a clock.
        if not any(map(isnan, ends)):
            link = _link(axis.file, f"{form.title} {axis.over}")
            pictures[link] = curves.curves(histories, form=form, axis=axis, paces=paces)
    return pictures


def _curves(groups: Groups) -> dict[Link, bytes | None]:
    from . import curves  # noqa: PLC0415 - it imports matplotlib, which is an extra

    form = _form(groups)
    histories = {}
    for label, runs in groups.items():
        histories[label] = {run.seed: run.history for run in runs}
    spread = _link(SPREAD, f"{form.title} silo by silo, after the last round")
    return {
        _link(CURVES, f"{form.title} over rounds"): curves.curves(histories, form=form),
        **_paced(groups, histories, form),
        spread: curves.spread(histories, form=form),
    }


def _link(name: str, caption: str, shown: bool = True) -> Link:
    return Link(PurePosixPath(name), caption, shown)


def _partition(out: Path, population: Population | None) -> PartitionFile | None:
    """The population's partition, which is written; without one, what was written before."""
    path = out / PARTITION
    if population is not None:
        partition = population.partition
        if partition is not None:
            partition_file.save(path, partition)
        return partition

    # a report written later has the runs alone; it says the same as the first one
    if path.exists():
        return partition_file.read(path)
    return None


def _drawn(population: Population) -> bytes:
    held = counts(population)
    silos = tuple(population.records)
    names = population.class_names or ()
    return picture.picture(held, silos, names)


def _heat_map(run: Recorded, population: Population | None) -> bytes | None:
    # A picture is worth no code that only the run's folder names.
    if not can_draw() or not is_imported(dict(run.identity.job)):
        return None
    from . import heatmaps  # noqa: PLC0415 - it imports matplotlib, which is an extra

    # Not federated: a simulation's draws follow from its seed.
    job = Job.from_document(run.identity.job, str(run.folder), None, federated=False)
    states = run.model if run.kept_models else None
    found = heatmaps.heat_map(job, run.coordinator(), states)
    if found is None:
        return None
    if population is None or not population.classes:
        return heatmaps.png(found)
    names = population.class_names or ()
    return heatmaps.png(found, counts(population), names)
