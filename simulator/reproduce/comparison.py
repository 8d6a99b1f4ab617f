"""A published table beside the finished runs of its reproduction: as rows, as Markdown and as CSV.

``published`` is as printed, in percent; ``ours`` the mean over seeds with the deviation of a
sample. What stands beside a value that is a deviation over silos is that of our silos, the mean of
all seeds.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ...algorithms.job.job import Job
from ..report.finished_runs import Recorded
from ..report.markdown import MarkdownColumn as Heading
from ..report.markdown import escaped
from ..report.markdown import table as markdown_table
from ..run.history import Measured
from ..run.scores import Spread, scores, spread
from .published import PaperColumn, PaperRow, PaperTable, PaperValue

NONE = "–"
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
    """What finished runs of one method came to.

    ``over_silos`` is the deviation over these, the mean of all seeds.
    """

    score: Spread
    over_silos: float
    silos: int
    drawn: int
    rounds: int


@dataclass(frozen=True)
class Cell:
    """A published value and what ours came to; ``ours`` is None where no run is finished."""

    column: PaperColumn
    row: PaperRow
    value: PaperValue
    label: str | None
    ours: Ran | None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return (
            None
            if self.ours is None or self.value.mean is None
            else self.ours.score.mean - self.value.mean
        )


def compared(table: PaperTable, recorded: Mapping[str, Sequence[Recorded]]) -> tuple[Cell, ...]:
    """Column by column, of the settings whose finished runs are given.

    Those without any are left out.
    """
    found = []
    for place, column in enumerate(table.columns):
        runs = recorded.get(column.setting.name, ()) if column.setting is not None else ()
        for row in table.all_rows if runs else ():
            value = row.values[place]
            method = None if column.setting is None else row.methods.get(column.setting.name)
            label = None if method is None else method.title
            ours = _ran(row, column, [run for run in runs if run.label == label])
            if value.text or ours is not None:
                found.append(Cell(column, row, value, label, ours))
    return tuple(found)


def told(cells: Sequence[Cell], *, over_silos: bool) -> list[list[str]]:
    """Rows of HEADINGS."""
    return [
        [
            cell.column.title,
            cell.row.title,
            _published(cell.value),
            *(_ours(cell.ours, over_silos=over_silos) if cell.ours else (NONE, NONE)),
            NONE if cell.difference is None else f"{100 * cell.difference:+.2f}",
        ]
        for cell in cells
    ]


def to_markdown(table: PaperTable, cells: Sequence[Cell], smaller: Sequence[str]) -> str:
    """The table, setting by setting; ``smaller`` is what was less than in the paper."""
    over_silos = table.deviation == "silos"
    text = f"# {escaped(table.path)}\n\n{escaped(table.title)}.\n\n{escaped(table.citation)}\n\n"
    if smaller:
        text += f"**{escaped(warning(smaller))}**\n\n"
    text += f"Accuracies in percent. {meaning(table)}\n"
    for column in dict.fromkeys(cell.column.name for cell in cells):
        own = [cell for cell in cells if cell.column.name == column]
        ran = next((cell.ours for cell in own if cell.ours), None)
        text += f"\n## {escaped(own[0].column.title)}\n\n"
        if ran is not None:
            text += f"{ran.silos} silos, {ran.drawn} drawn for a round, {ran.rounds} rounds.\n\n"
        headings = [
            Heading("method"),
            *(Heading(name, numbers=True) for name in HEADINGS[2:]),
            Heading("our measure"),
        ]
        rows = [
            [escaped(row[1]), *row[2:], " ".join(cell.row.score) if cell.ours else NONE]
            for row, cell in zip(told(own, over_silos=over_silos), own, strict=True)
        ]
        text += markdown_table(headings, rows)
    return text + "\n## Notes\n\n" + "".join(f"- {escaped(note)}\n" for note in table.notes)


def to_csv(table: PaperTable, cells: Sequence[Cell]) -> str:
    """The same as CSV, accuracies in 0…1 with every digit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for cell in cells:
        ours = cell.ours
        writer.writerow(
            [
                table.path,
                cell.column.name,
                cell.row.title,
                cell.label,
                *cell.row.score,
                cell.value.mean,
                cell.value.deviation,
                *(
                    (ours.score.mean, ours.score.deviation, ours.over_silos, ours.score.seeds)
                    if ours
                    else [None] * 4
                ),
                cell.difference,
                *((ours.silos, ours.drawn, ours.rounds) if ours else [None] * 3),
            ]
        )
    return out.getvalue()


def warning(smaller: Sequence[str]) -> str:
    """Said of every reproduction at a smaller scale."""
    return f"Reduced: {', '.join(smaller)}. These values do not compare with the published ones."


def meaning(table: PaperTable) -> str:
    """What ± is."""
    ours = "Ours: mean ± deviation over seeds."
    if table.deviation == "silos":
        return (
            f"Published: mean ± deviation over clients. {ours} Behind it, in brackets, the"
            " deviation over silos."
        )
    return f"Published: mean ± deviation. {ours}"


def _ran(row: PaperRow, column: PaperColumn, runs: Sequence[Recorded]) -> Ran | None:
    seen = [(run, within(run.history, column.silos)) for run in runs]
    found = [(run, history, scores(history)) for run, history in seen]
    taken = [(run, history, own[row.score]) for run, history, own in found if row.score in own]
    if not taken:
        return None
    measure, *_ = row.score
    over = [
        one.spread
        for _, history, score in taken
        for one in history
        if (one.measure, one.rounds) == (measure, score.rounds)
    ]
    first = taken[0][0]
    job = Job.from_document(first.identity.job, str(first.folder), federated=False)
    value = spread([score.value for *_, score in taken])
    return Ran(value, fmean(over), len(first.silos), job.cohort_size, job.rounds)


def within(history: Sequence[Measured], start: str) -> tuple[Measured, ...]:
    """What was measured of the silos whose names begin so.

    Nothing where a measure had none of them.
    """
    if not start:
        return tuple(history)
    found = []
    for one in history:
        records = {silo: count for silo, count in one.records.items() if silo.startswith(start)}
        if records:
            found.append(
                replace(one, correct={silo: one.correct[silo] for silo in records}, records=records)
            )
    return tuple(found)


def _published(value: PaperValue) -> str:
    if value.mean is None:
        return value.text or NONE
    return _percent(value.mean, value.deviation, value.digits)


def _ours(ran: Ran, *, over_silos: bool) -> tuple[str, str]:
    behind = f" ({100 * ran.over_silos:.2f})" if over_silos else ""
    return _percent(ran.score.mean, ran.score.deviation, 2) + behind, str(ran.score.seeds)


def _percent(mean: float, deviation: float | None, digits: int) -> str:
    return f"{100 * mean:.{digits}f}" + (
        "" if deviation is None else f" ± {100 * deviation:.{digits}f}"
    )
