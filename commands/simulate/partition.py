"""``staddle partition``: which silo of a simulation holds which records."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ...algorithms.partition import file as partition_file
from ...algorithms.partition import picture as pictures
from ...algorithms.partition.file import PartitionFile
from ...algorithms.partition.other_files import form_of
from ...errors import LocalError
from ...files.documents import write_atomic
from ...simulator.experiment.experiment import read
from ...simulator.experiment.plan import Population
from ...simulator.experiment.population import counts, populate
from ..terminal import printer

OF_PARTITIONS = (".json", ".npz", ".csv", ".pkl")  # suffixes
SIDES = ("training", "validation", "test")
MOST_SILOS = 40  # of which each has a row
EACH_END = 10  # rows of the smallest and of the largest, where there are more
MOST_CLASSES = 12  # of which each has a column
MOST_LISTED = 5  # classes of a silo, where there are more
WIDTH = 200  # of what no terminal shows

Counts = NDArray[np.int64]

Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw who holds what: a PNG, one column per silo, one row per class. Only for tasks"
        " with one class per record."
    ),
]


@dataclass(frozen=True, eq=False)
class PartitionCounts:
    """Records of each silo by side [N, 3], and by class [N, C] where labels are known.

    ``classes`` is None where no labels are known, and ``unpictured`` says why there is no picture
    then. ``notes`` are sentences on how it was made.
    """

    silos: tuple[str, ...]
    sides: Counts
    classes: Counts | None
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...]
    unpictured: str


def make(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The simulation's file, such as job.toml.")
    ],
    out: Annotated[
        Path, typer.Option(help="The new file of the partition, such as partition.json.")
    ],
    picture: Picture = None,
) -> None:
    """Write which silo holds which records, on which side, for other runs and other software.

    A simulation reads it with [partition] file = "partition.json".
    """
    # Other runs may use the file: never replace it.
    if out.exists():
        raise LocalError(f"{out}: exists already; move it away or choose another name")
    # A simulation's own code, so that the file has what a run would use.
    population = _populated(file)

    # a partition's file names records of a data set by number, and these are in none
    if population.partition is None:
        raise LocalError(
            f"{file}: synthetic records are drawn silo by silo from a seed, so there is nothing to"
            " write"
        )
    partition_file.save(out, population.partition)
    _show(_of_population(population), picture, every=False)
    printer.show(f"{out}: read it with [partition] file = {json.dumps(out.name)}")


def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A simulation's file, or the .json of a partition, without classes.",
        ),
    ],
    picture: Picture = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every silo, however many there are.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the counts of all silos as JSON.")
    ] = False,
) -> None:
    """Show how many records each silo holds, of which side and of which class."""
    # a partition's file is shown without its data set, which may not be on this machine
    if file.suffix in OF_PARTITIONS:
        form = form_of(file)
        if form != "staddle":
            raise LocalError(
                f"{file}: a partition of another program (format {form!r}), which is only checked"
                " with its records; show a simulation's file that reads it, [partition] file = …"
            )
        held = _of_file(partition_file.read(file))
    else:
        held = _of_population(_populated(file))
    if as_json:
        _draw(held, picture)
        printer.show_json(_document(held))
    else:
        _show(held, picture, every=every)


def _document(held: PartitionCounts) -> dict[str, Any]:
    silos: dict[str, Any] = {}
    for number, silo in enumerate(held.silos):
        own = dict(zip(SIDES, held.sides[number].tolist(), strict=True))
        if held.classes is not None:
            own["by_class"] = held.classes[number].tolist()
        silos[silo] = own
    return {
        "silos": silos,
        "class_names": held.class_names,
        "notes": held.notes,
    }


def _populated(file: Path) -> "Population":
    return populate(read(file))


def _of_population(population: Population) -> PartitionCounts:
    sides = []
    for own in population.records.values():
        validation = 0
        # Not every partition has a validation side.
        if own.validation is not None:
            validation = len(own.validation)
        sides.append((len(own.train), validation, len(own.test)))
    return PartitionCounts(
        silos=tuple(population.records),
        sides=np.array(sides, np.int64),
        classes=counts(population) if population.classes else None,
        class_names=population.class_names,
        notes=population.notes,
        unpictured=(
            "pictures show records by class, and exist only for tasks with one class per record,"
            ' such as task.kind = "classification"; leave it out'
        ),
    )


def _of_file(partition: PartitionFile) -> PartitionCounts:
    clients = partition.clients
    names = tuple(one.name for one in clients)
    rows = [(len(one.train), len(one.validation), len(one.test)) for one in clients]
    sides = np.array(rows, np.int64)

    # the file holds no labels, so nothing is known of classes
    how = json.dumps(partition.how)
    if partition.seed is not None:
        how += f", seed {partition.seed}"
    notes = [f"made from {partition.records:,} records of {partition.data}: {how}"]
    # A partition may leave records out.
    rest = partition.records - int(sides.sum())
    if rest:
        notes.append(f"{rest:,} of them are given to no client")
    return PartitionCounts(
        silos=names,
        sides=sides,
        classes=None,
        class_names=None,
        notes=tuple(notes),
        unpictured=(
            "no classes are known: show a simulation's file that reads it, [partition] file = …,"
            " and whose task has one class per record"
        ),
    )


def _show(held: PartitionCounts, picture: Path | None, *, every: bool) -> None:
    _draw(held, picture)

    # of many silos the extremes say most: a skewed partition shows at its ends
    sizes = held.sides.sum(1)
    order = np.arange(len(sizes))
    ends: tuple[int, ...] = ()
    excerpt = len(sizes) > MOST_SILOS and not every
    if excerpt:
        # A stable sort keeps silos of equal size in their order.
        ranked = np.argsort(sizes, kind="stable")
        order = np.concatenate([ranked[:EACH_END], ranked[-EACH_END:]])
        # The table draws a line where silos are left out.
        ends = (EACH_END - 1,)
    columns, rows = _table(held, order.tolist())
    # All other columns are numbers and are aligned right.
    of_text = {"silo", "most"}
    right = [number for number, column in enumerate(columns) if column not in of_text]
    table = printer.PrintedTable(columns, rows, right, ends, frame="head", width=WIDTH)
    printer.show(table)
    if excerpt:
        printer.show(
            f"the {EACH_END} smallest and the {EACH_END} largest of {len(sizes)} silos; --all shows"
            " every one"
        )
    by_side = _by_side(held.sides)
    printer.show(
        f"{len(sizes)} silos with {sizes.sum():,} records, {_range(sizes)} each: {by_side}"
    )
    if held.classes is not None:
        # Classes per silo, a simple measure of skew.
        present = (held.classes > 0).sum(1)
        printer.show(f"{held.classes.shape[1]} classes, {_range(present)} at each")
    printer.show(*held.notes)


def _table(held: PartitionCounts, order: list[int]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; a side on which no silo has a record has no column."""
    shown = [number for number in range(len(SIDES)) if held.sides[:, number].any()]
    rows = []
    for silo in order:
        sides = held.sides[silo]
        counts = map(str, (sides.sum(), *sides[shown]))
        rows.append([held.silos[silo], *counts, *_class_cells(held, silo)])

    columns = ["silo", "records", *map(SIDES.__getitem__, shown)]
    names = _class_names(held)
    # A column for each of many classes would not fit on a page.
    if len(names) > MOST_CLASSES:
        names = ("classes", "most")
    return [*columns, *names], rows


def _class_names(held: PartitionCounts) -> tuple[str, ...]:
    if held.classes is None:
        return ()
    # Unnamed classes go by their numbers.
    return held.class_names or tuple(map(str, range(held.classes.shape[1])))


def _class_cells(held: PartitionCounts, silo: int) -> list[str]:
    """A count for each class, or where there are many how many and the largest."""
    if held.classes is None:
        return []
    own, names = held.classes[silo], _class_names(held)
    if len(names) > MOST_CLASSES:
        return [str(np.count_nonzero(own)), _most(own, names)]
    return [str(count or "·") for count in own.tolist()]


def _most(counts: Counts, names: tuple[str, ...]) -> str:
    held = np.count_nonzero(counts)
    # The most frequent classes describe a silo best.
    largest = np.argsort(-counts, kind="stable")[: min(MOST_LISTED, held)]
    listed = ", ".join(f"{names[number]}: {counts[number]}" for number in largest)
    rest = held - len(largest)
    if rest:
        listed += f" and {rest} more"
    return listed


def _range(counts: Counts) -> str:
    least, most = counts.min(), counts.max()
    if least == most:
        return f"{least:,}"
    # The median, since a few large silos would move the mean.
    return f"{least:,} to {most:,} (median {np.median(counts):,g})"


def _by_side(sides: Counts) -> str:
    parts = []
    for side, total in zip(SIDES, sides.sum(0).tolist(), strict=True):
        if total:
            parts.append(f"{total:,} {side}")
    return ", ".join(parts)


def _draw(held: PartitionCounts, file: Path | None) -> None:
    if file is None:
        return
    if held.classes is None:
        raise LocalError(f"--picture: {held.unpictured}")
    picture = pictures.picture(held.classes, held.silos, held.class_names or ())
    write_atomic(file, picture, 0o644)
