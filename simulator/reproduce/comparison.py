"""A published table next to the finished runs of its reproduction: rows, Markdown and CSV.

``published`` is the value as printed, in percent. ``ours`` is the mean over seeds with the
deviation of a sample. Where the paper prints a deviation over silos, the deviation over our silos
stands next to it: the mean over all seeds.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from ...algorithms.job.job import Job
from ..report.finished_runs import Recorded, by_label
from ..report.markdown import NONE, escaped
from ..report.markdown import MarkdownColumn as Heading
from ..report.markdown import table as markdown_table
from ..run.history import Measured
from ..run.scores import Spread, scores, spread
from .published import PaperColumn, PaperRow, PaperTable, PaperValue

HEADINGS = ("setting", "method", "published", "ours", "seeds", "difference")
CSV = (
    "table",
    "column",
    "method",
    "label",
    "measure",
    "average",
    "choice",
    "published",
    "published_deviation",
    "ours",
    "ours_deviation",
    "ours_over_silos",
    "seeds",
    "difference",
    "silos",
    "drawn",
    "rounds",
)


@dataclass(frozen=True)
class Ran:
    """The score of one method's finished runs.

    ``over_silos`` is the deviation over silos, the mean of all seeds. ``drawn`` is the number of
    silos in a round.
    """

    score: Spread
    over_silos: float
    silos: int
    drawn: int
    rounds: int


@dataclass(frozen=True)
class Cell:
    """A published value and our score; ``ours`` is None where no run is finished.

    ``label`` is None if our catalogue lacks the method.
    """

    column: PaperColumn
    row: PaperRow
    value: PaperValue
    label: str | None
    ours: Ran | None

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's, in 0…1; None where one of the two is missing."""
        if self.ours is None or self.value.mean is None:
            return None
        return self.ours.score.mean - self.value.mean


def compared(table: PaperTable, recorded: Mapping[str, Sequence[Recorded]]) -> tuple[Cell, ...]:
    """The cells, column by column, of each setting that has finished runs.

    ``recorded`` has the finished runs by name of setting.
    """
    cells: list[Cell] = []
    for index, column in enumerate(table.columns):
        # The column cannot be run here: nothing to compare.
        if column.setting is None:
            continue
        setting = column.setting.name
        runs = recorded.get(setting)
        if runs:
            cells += _column_cells(table, index, setting, runs)
    return tuple(cells)


def _column_cells(
    table: PaperTable, index: int, setting: str, runs: Sequence[Recorded]
) -> Iterator[Cell]:
    """A cell per row that has a published value or finished runs in this column."""
    column = table.columns[index]
    # Runs of one label differ only in their seeds and make one cell.
    groups = by_label(runs)

    # a row that is neither published nor run here would say nothing
    for row in table.all_rows:
        value = row.values[index]
        label, ours = None, None
        method = row.methods.get(setting)
        if method is not None:
            label = method.title
            ours = _ran(row, column, groups.get(label, ()))
        if value.text or ours is not None:
            yield Cell(
                column=column,
                row=row,
                value=value,
                label=label,
                ours=ours,
            )


def table_rows(cells: Sequence[Cell], *, over_silos: bool) -> list[list[str]]:
    """Rows of HEADINGS.

    ``over_silos`` adds our deviation over silos, for tables that print one.
    """
    return [_table_row(cell, over_silos=over_silos) for cell in cells]


def _table_row(cell: Cell, *, over_silos: bool) -> list[str]:
    # A missing value is a dash, not a zero.
    ours, seeds, difference = NONE, NONE, NONE
    if cell.ours is not None:
        ours, seeds = _ours(cell.ours, over_silos=over_silos), str(cell.ours.score.seeds)
    if cell.difference is not None:
        difference = f"{100 * cell.difference:+.2f}"
    return [
        cell.column.title,
        cell.row.title,
        _published(cell.value),
        ours,
        seeds,
        difference,
    ]


def to_markdown(table: PaperTable, cells: Sequence[Cell], smaller: Sequence[str]) -> str:
    """The table, setting by setting; ``smaller`` lists what was less than in the paper.

    Titles from papers are escaped.
    """
    text = f"# {escaped(table.path)}\n\n{escaped(table.title)}.\n\n{escaped(table.citation)}\n\n"
    if smaller:
        text += f"**{escaped(warning(smaller))}**\n\n"
    text += f"Accuracies in percent. {meaning(table)}\n"

    # a paper's table compares methods within a setting, so a setting is a section
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_column[cell.column.name].append(cell)
    for own in by_column.values():
        text += _setting_section(own, over_silos=table.deviation == "silos")

    notes = "".join(f"- {escaped(note)}\n" for note in table.notes)
    return f"{text}\n## Notes\n\n{notes}"


def _setting_section(cells: Sequence[Cell], *, over_silos: bool) -> str:
    """The cells of one column under a heading, with the scale at which ours ran."""
    text = f"\n## {escaped(cells[0].column.title)}\n\n"

    # all runs of a setting have one scale, so any of them says it
    for ran in filter(None, (cell.ours for cell in cells)):
        text += f"{ran.silos} silos, {ran.drawn} drawn for a round, {ran.rounds} rounds.\n\n"
        break

    numbers = [Heading(name, numbers=True) for name in HEADINGS[2:]]
    headings = [Heading("method"), *numbers, Heading("our measure")]
    rows = []
    for cell in cells:
        # The first column, the setting, is the section's heading.
        _, title, *values = _table_row(cell, over_silos=over_silos)
        measure = " ".join(cell.row.score) if cell.ours else NONE
        rows.append([escaped(title), *values, measure])
    return text + markdown_table(headings, rows)


def to_csv(table: PaperTable, cells: Sequence[Cell]) -> str:
    """The same as CSV, accuracies in 0…1 with every digit.

    Missing values are empty. Lines end with LF.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_row(table, cell) for cell in cells)
    return out.getvalue()


def _csv_row(table: PaperTable, cell: Cell) -> dict[str, object]:
    """The values by column of CSV; a column that is absent stays empty."""
    # Rows of one table may be scored in different ways.
    measure, average, choice = cell.row.score
    row: dict[str, object] = {
        "table": table.path,
        "column": cell.column.name,
        "method": cell.row.title,
        "label": cell.label,
        "measure": measure,
        "average": average,
        "choice": choice,
        "published": cell.value.mean,
        "published_deviation": cell.value.deviation,
        "difference": cell.difference,
    }

    # a method that has not run yet still shows what the paper published
    if cell.ours is not None:
        row |= {
            "ours": cell.ours.score.mean,
            "ours_deviation": cell.ours.score.deviation,
            "ours_over_silos": cell.ours.over_silos,
            "seeds": cell.ours.score.seeds,
            "silos": cell.ours.silos,
            "drawn": cell.ours.drawn,
            "rounds": cell.ours.rounds,
        }
    return row


def warning(smaller: Sequence[str]) -> str:
    """The warning above every reproduction at a smaller scale (``experiments.reduced``)."""
    return f"Reduced: {', '.join(smaller)}. These values do not compare with the published ones."


def meaning(table: PaperTable) -> str:
    """The sentence that says what ± stands for."""
    ours = "Ours: mean ± deviation over seeds."
    if table.deviation == "silos":
        return (
            f"Published: mean ± deviation over clients. {ours} Behind it, in brackets, the"
            " deviation over silos."
        )
    return f"Published: mean ± deviation. {ours}"


def _ran(row: PaperRow, column: PaperColumn, runs: Sequence[Recorded]) -> Ran | None:
    measure, *_ = row.score
    scored: list[Recorded] = []
    values: list[float] = []
    over_silos: list[float] = []

    # column and row may be of some silos alone: measures are made again from theirs
    place, choices = row.dealt
    for run in runs:
        own = set(map(attrgetter("name"), run.silos[place - 1 :: choices]))
        history = within(run.history, column.silos, own)
        score = scores(history).get(row.score)
        if score is None:
            continue
        scored.append(run)
        values.append(score.value)
        measured = {(one.measure, one.rounds): one for one in history}
        # From the same round as the score.
        over_silos.append(measured[measure, score.rounds].spread)
    if not scored:
        return None

    # runs of a label differ in the seed alone
    first = scored[0]
    job = Job.from_document(first.identity.job, str(first.folder), None, federated=False)
    return Ran(
        score=spread(values),
        over_silos=fmean(over_silos),
        silos=len(first.silos),
        drawn=job.cohort_size,
        rounds=job.rounds,
    )


def within(history: Sequence[Measured], start: str, own: Collection[str]) -> tuple[Measured, ...]:
    """The measures, each reduced to those of ``own`` whose names begin with ``start``.

    A measure that had none of these silos is left out.
    """
    reduced = []
    for one in history:
        # the names of a source's silos begin alike, so a column may be one source
        kept = filter(own.__contains__, one.records)
        silos = [silo for silo in kept if silo.startswith(start)]
        if silos:
            reduced.append(one.of(silos))
    return tuple(reduced)


def _published(value: PaperValue) -> str:
    # The value is lost, or the method did not converge.
    if value.mean is None:
        return value.text or NONE
    # With as many digits as the paper prints.
    return _percent(value.mean, value.deviation, value.digits)


def _ours(ran: Ran, *, over_silos: bool) -> str:
    text = _percent(ran.score.mean, ran.score.deviation, 2)
    if over_silos:
        text += f" ({100 * ran.over_silos:.2f})"
    return text


def _percent(mean: float, deviation: float | None, digits: int) -> str:
    text = f"{100 * mean:.{digits}f}"
    if deviation is not None:
        text += f" ± {100 * deviation:.{digits}f}"
    return text
