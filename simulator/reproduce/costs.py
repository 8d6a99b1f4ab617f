"""What methods cost, next to what papers print: bytes that cross, and bytes at a silo.

All of it follows from the jobs of the paper's other tables, so no record is read and nothing
trains. MB are 2^20 bytes, as FedAIMS and FedSSA print them.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from ...algorithms.exchange.parts import WEIGHT, nbytes_of
from ...algorithms.job.job import Job
from ...algorithms.job.security import SecurityTable
from ...algorithms.methods.fedaims.method import FedAIMS
from ...errors import LocalError
from ...files.documents import parse_toml
from ..experiment.experiment import job_of, stand_ins
from ..experiment.hints import hint
from ..report.markdown import NONE, escaped
from ..report.markdown import MarkdownColumn as Heading
from ..report.markdown import table as markdown_table
from .experiments import experiment_of
from .published import (
    LOST,
    NEVER,
    CostRowTable,
    CostsTable,
    PaperColumn,
    PaperFile,
    PaperRow,
    PaperSetting,
    PaperTable,
    Quantity,
    one_of,
    paper_files,
    parse,
    parsed_column,
    published,
)

MEBIBYTE = 2**20
DIGITS = 2  # of ours, where the paper prints nothing
MEANING = (
    "MB are 2^20 bytes, per silo. Ours follow from jobs and models; nothing runs for them. They are"
    " of tensors alone, without counts of tests, weights of sums and message headers."
)
COST_HEADINGS = ("setting", "row", "quantity", "published", "ours", "difference")
COST_CSV = (
    "table",
    "column",
    "row",
    "label",
    "quantity",
    "without",
    "published",
    "ours",
    "bytes",
    "difference",
)


@dataclass(frozen=True)
class PaperCostRow:
    """A row of costs as printed, and the row of the other table whose method ours are of."""

    title: str
    values: tuple[str, ...]
    counted: PaperRow
    quantity: Quantity
    without: tuple[str, ...]


@dataclass(frozen=True)
class PaperCosts:
    """A table of costs; ``of`` is the table of accuracies whose jobs ours follow from."""

    name: str
    title: str
    of: PaperTable
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperCostRow, ...]
    notes: tuple[str, ...]

    @property
    def path(self) -> str:
        """``fedaims/table6``."""
        return f"{self.paper}/{self.name}"

    @property
    def paper(self) -> str:
        """The name of its file."""
        return self.of.paper

    @property
    def citation(self) -> str:
        """As in all tables of its paper."""
        return self.of.citation


@dataclass(frozen=True)
class CostCell:
    """A published cost and ours; None where the catalogue lacks the method or the setting."""

    column: PaperColumn
    row: PaperCostRow
    text: str  # as printed
    label: str | None
    ours: int | None  # bytes

    @property
    def published(self) -> float | None:
        """In MB; None where it is lost or never was."""
        return None if self.text in (LOST, NEVER) else float(self.text)

    @property
    def megabytes(self) -> float | None:
        """Ours."""
        return None if self.ours is None else self.ours / MEBIBYTE

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's in MB; None where one of the two is missing."""
        if self.megabytes is None or self.published is None:
            return None
        return self.megabytes - self.published


@cache
def published_costs() -> tuple[PaperCosts, ...]:
    """All tables of costs, paper by paper; read once per process."""
    found: list[PaperCosts] = []
    for paper, data in paper_files():
        found += parse_costs(paper, data)
    return tuple(found)


def find_any(path: str) -> PaperTable | PaperCosts:
    """The table of accuracies or of costs of a path, as ``published.one_of`` finds it."""
    known: dict[str, PaperTable | PaperCosts] = {table.path: table for table in published()}
    known.update({costs.path: costs for costs in published_costs()})
    return one_of(known, path)


def parse_costs(paper: str, data: bytes) -> tuple[PaperCosts, ...]:
    """The tables of costs of a file, as ``published.parse`` takes it."""
    origin = f"{paper}.toml"
    file = parse_toml(data, PaperFile, origin)
    # Most papers print none, and parsing their other tables takes time.
    if not file.costs:
        return ()
    tables = {table.name: table for table in parse(paper, data)}
    return tuple(_costs(costs, tables, origin) for costs in file.costs)


def _costs(costs: CostsTable, tables: Mapping[str, PaperTable], origin: str) -> PaperCosts:
    where = f"{origin}, {costs.name}"
    if costs.name in tables:
        raise LocalError(f"{where}: two tables have this name; rename one")
    if costs.of not in tables:
        raise LocalError(f"{where}: no table {costs.of!r} of accuracies; {hint(costs.of, tables)}")
    of = tables[costs.of]
    settings = {setting.name: setting for setting in of.settings}
    return PaperCosts(
        name=costs.name,
        title=costs.title,
        of=of,
        columns=tuple(parsed_column(column, settings, where) for column in costs.columns),
        rows=tuple(_cost_row(row, of, where) for row in costs.rows),
        notes=costs.notes,
    )


def _cost_row(row: CostRowTable, of: PaperTable, where: str) -> PaperCostRow:
    rows = {each.title: each for each in of.rows}
    title = row.row or row.title
    # Otherwise a typo would silently make a row without our value.
    if title not in rows:
        raise LocalError(f"{where}: {of.path} has no row {title!r}; known: {', '.join(rows)}")
    return PaperCostRow(row.title, row.published, rows[title], row.quantity, row.without)


def counted(costs: PaperCosts) -> tuple[CostCell, ...]:
    """The cells, column by column; no record is read.

    LocalError where a quantity is not the method's.
    """
    places = range(len(costs.columns))
    return tuple(chain.from_iterable(_column_cells(costs, place) for place in places))


def _column_cells(costs: PaperCosts, place: int) -> Iterator[CostCell]:
    column = costs.columns[place]
    for row in costs.rows:
        label, ours = None, None
        method = row.counted.methods.get(column.setting.name) if column.setting else None
        if column.setting is not None and method is not None:
            label = method.title
            job = job_in(costs.of, column.setting, label)
            ours = _bytes(row, job, _silo(job, column))
        yield CostCell(column, row, row.values[place], label, ours)


def job_in(table: PaperTable, setting: PaperSetting, label: str) -> Job:
    """A method's job at the paper's scale, by its label; other names may stand in for silos."""
    experiment = experiment_of(table, setting, Path(), labels=frozenset({label}))
    (method,) = experiment.file.all_methods
    return job_of(experiment, method, 1, stand_ins(experiment.file), SecurityTable())


def _silo(job: Job, column: PaperColumn) -> str:
    """The first silo of a column: silos may have models of their own."""
    for silo in job.silos:
        if silo.startswith(column.silos):
            return silo
    raise LocalError(f"column {column.title!r}: no silo begins with {column.silos!r}")


def _bytes(row: PaperCostRow, job: Job, silo: str) -> int:
    """A row's quantity of a job, per silo."""
    match row.quantity:
        case "bytes of a round":
            return _of_a_round(job, row.without)
        case "bytes of the model":
            return sum(size for own, size in _modules(job, silo) if own)
        case "bytes besides the model":
            return sum(size for own, size in _modules(job, silo) if not own)
        case "bytes spared by adapters":
            return _spared(job)


def _of_a_round(job: Job, without: Sequence[str]) -> int:
    """Up and down in the middle of the job: first and last rounds may have other parts.

    Neither counts of tests nor weights of sums are among them.
    """
    method, round_ = job.method(), job.rounds // 2
    crossing = (*method.up(round_), *method.down(round_))
    # Otherwise a typo would silently leave out nothing.
    if unknown := set(without).difference(part.name for part in crossing):
        raise LocalError(f"{method.name} has no part {min(unknown)!r} that could be left out")
    kept = (part for part in crossing if part.name not in without)
    return sum(spec.nbytes for part in kept for spec in part.wire if spec.name != WEIGHT)


def _modules(job: Job, silo: str) -> Iterator[tuple[bool, int]]:
    """Of each module of a silo, whether it is of the model that the job names; and its bytes."""
    method = job.method()
    model = method.setting.sketch()
    # Without values, so that no model is drawn or held.
    with torch.device("meta"):
        modules = method.modules(silo)
    for part, module in modules.items():
        yield part in model, nbytes_of(module.state_dict().values())


def _spared(job: Job) -> int:
    """Prototypes of FedAIMS's middle blocks, if they crossed: up and down, in all rounds."""
    method = job.method()
    if not isinstance(method, FedAIMS):
        raise LocalError(f"{method.name} has no adapters that spare bytes; count another quantity")
    (mean,) = method.prototypes.tensors  # [classes, width of the last block]
    *middle, last = method.widths
    return 2 * job.rounds * sum(middle) * mean.nbytes // last


def cost_rows(cells: Sequence[CostCell]) -> list[list[str]]:
    """Rows of COST_HEADINGS, with as many digits as the paper prints."""
    return [[cell.column.title, cell.row.title, *_numbers(cell)] for cell in cells]


def _numbers(cell: CostCell) -> list[str]:
    """Quantity, published, ours and difference."""
    digits = DIGITS
    if cell.published is not None:
        digits = len(cell.text.partition(".")[2])
    ours, difference = NONE, NONE
    if cell.megabytes is not None:
        ours = f"{cell.megabytes:.{digits}f}"
    if cell.difference is not None:
        # adding 0 turns a rounded -0 into 0
        difference = f"{round(cell.difference, digits) + 0:+.{digits}f}"
    return [cell.row.quantity, cell.text or NONE, ours, difference]


def costs_to_markdown(costs: PaperCosts, cells: Sequence[CostCell]) -> str:
    """The table, column by column; titles from papers are escaped."""
    text = f"# {escaped(costs.path)}\n\n{escaped(costs.title)}.\n\n"
    text += f"{escaped(costs.citation)}\n\n{escaped(MEANING)}\n"
    numbers = [Heading(name, numbers=True) for name in COST_HEADINGS[3:]]
    headings = [Heading("row"), *numbers, Heading("quantity")]
    for column in costs.columns:
        rows = []
        for cell in cells:
            if cell.column == column:
                quantity, *values = _numbers(cell)
                rows.append([escaped(cell.row.title), *values, quantity])
        text += f"\n## {escaped(column.title)}\n\n{markdown_table(headings, rows)}"
    notes = "".join(f"- {escaped(note)}\n" for note in costs.notes)
    return f"{text}\n## Notes\n\n{notes}"


def costs_to_csv(costs: PaperCosts, cells: Sequence[CostCell]) -> str:
    """The same as CSV, in MB with every digit; missing values are empty. Lines end with LF."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COST_CSV, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        row = cost_document(cell)
        writer.writerow({**row, "table": costs.path, "without": " ".join(cell.row.without)})
    return out.getvalue()


def cost_document(cell: CostCell) -> dict[str, object]:
    """A cell for scripts: MB, and our bytes."""
    return {
        "column": cell.column.name,
        "row": cell.row.title,
        "label": cell.label,
        "quantity": cell.row.quantity,
        "without": cell.row.without,
        "published": cell.published,
        "ours": cell.megabytes,
        "bytes": cell.ours,
        "difference": cell.difference,
    }
