"""The papers' tables: what was published, under which settings, and by which of our methods.

They stand in ``tables/<paper>.toml``::

    citation = "Author, Author, 'Title', venue, arXiv:…"
    seeds = 5                             # that the paper ran; left out if it does not say
    # how Local and FedRep run if no row has them
    alongside = [{ name = "fedrep", options = { head_epochs = 1 } }]

    [common]                      # what settings have in common; a setting's own keys replace these
    rounds = 200
    participation = 0.1

    # an experiment (simulator/experiment/experiment.py) without name, seeds and methods
    [settings.cifar10-dir01]
    title = "CIFAR-10, Dir(0.1)"
    without = ["fedrep"]                  # methods of ``alongside`` that cannot work there
    # paths start at the folder that the user names
    data = { kind = "torchvision", name = "CIFAR10" }
    partition = { kind = "dirichlet", silos = 100, alpha = 0.1 }
    model = { name = "lenet5", classes = 10 }
    training = { lr = 0.01 }

    [[tables]]
    name = "table3"
    title = "Average model accuracy"
    unit = "percent"                      # or "share", of values such as .863
    deviation = "seeds"                   # or "silos": over which the published ± is a deviation
    # rows are values of it; left out where rows are methods
    parameter = "ρ, the share of the first phase"
    # which of our scores the number is
    score = { measure = "all/trained", average = "micro", choice = "last" }
    # also name, title, silos if they differ; no setting if we cannot run it
    columns = [{ setting = "cifar10-dir01" }]
    notes = ["[R] …"]

    [[tables.rows]]
    title = "pFedSim (Ours)"              # as printed
    # also label, training, model, rounds; no method if we lack it
    method = { name = "pfedsim", options = { rho = 0.5 } }
    score = { … }                         # if it differs from the table's
    # what differs in a setting; false: the method does not run there
    own = { cifar10-dir01 = { options = { rho = 0.3 } } }
    at = 0.5                              # the value of the table's parameter
    # the row is of the second of every three of our silos, in job order; left out, of all
    dealt = [2, 3]
    # one text per column, as printed: mean, or mean and deviation; "?" if the value is lost, "" if
    # the paper never had it
    published = ["86.76 (0.84)"]

    # what methods cost; nothing runs for it (costs.py)
    [[costs]]
    name = "table6"
    title = "Communication"
    of = "table3"                         # whose rows and settings ours are taken from
    columns = [{ setting = "cifar10-dir01" }]
    notes = ["[R] …"]

    [[costs.rows]]
    title = "FedAvg [2]"
    row = "FedAvg [1]"                    # of that table; left out where it has the same title
    quantity = "bytes of a round"
    without = ["direction"]               # parts that are not counted
    published = ["3.42"]                  # in MB of 2^20 bytes

Notes begin with a mark: [P] the paper says so, [C] its authors' code does, [D] deduced, [R] our
choice. A row whose method is not in the catalogue only shows what was published.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib import resources
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import Field

from ...algorithms.catalog import METHODS
from ...algorithms.job.job import Rounds
from ...algorithms.job.security import Name
from ...errors import LocalError
from ...files.documents import Strict, parse_toml
from ..experiment.chosen_method import ChosenMethod
from ..experiment.hints import hint
from ..experiment.options import Count
from ..run.history import Measure
from ..run.scores import Average, Choice, Named

MARKS = ("[P] ", "[C] ", "[D] ", "[R] ")
# a value that no copy of the paper has; one that the paper prints so, of what did not converge; one
# that the paper does not have
LOST, FAILED, NEVER = "?", "-", ""
# Papers print deviations in brackets, or after ±.
PRINTED = re.compile(
    r"(?P<mean>\d*\.?\d+)(?: ?(?:\((?P<std>\d*\.?\d+)\)|± ?(?P<spread>\d*\.?\d+)))?"
)
MEGABYTES = r"(\d+(\.\d+)?|\?|)"  # a cost as printed, lost, or one that the paper never had
NEXT_TO_IT = ("local", "fedrep")  # methods that every reproduction runs next to the others

Unit = Literal["percent", "share"]
# by unit: the number that is the whole, and how many digits of a value are not behind the point in
# percent
SCALES: dict[Unit, tuple[Decimal, int]] = {"percent": (Decimal(100), 0), "share": (Decimal(1), 2)}
Of = Literal["seeds", "silos"]
Quantity = Literal[
    "bytes of a round",
    "bytes of the model",
    "bytes besides the model",
    "bytes spared by adapters",
]
Document: TypeAlias = Mapping[str, Any]
Table = TypeVar("Table")


class ScoreTable(Strict):
    """The score of ours that a published number corresponds to.

    Papers differ in the models that they test, how they average, and which round they choose.
    """

    measure: Measure
    average: Average
    choice: Choice

    @property
    def named(self) -> Named:
        """As scores are named."""
        return self.measure, self.average, self.choice


class OwnTable(Strict):
    """Changes to a method in one setting; its keys replace the method's one by one."""

    options: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    rounds: Rounds | None = None

    def of(self, method: ChosenMethod) -> ChosenMethod:
        """The method in this setting."""
        # A copy, since other settings use the row's method, too.
        changed: dict[str, Any] = {
            "options": method.options | self.options,
            "training": method.training | self.training,
            "model": method.model | self.model,
        }
        if self.rounds is not None:
            changed["rounds"] = self.rounds
        return method.model_copy(update=changed)


class RowTable(Strict):
    """One row.

    ``published`` has one text per column of the table. ``dealt`` [k, n] are the silos to which the
    k-th of n choices fell that were dealt out in turn, in job order. ``at`` is the value of the
    table's parameter.
    """

    title: str
    at: Annotated[float, Field(allow_inf_nan=False)] | None = None
    method: ChosenMethod | None = None
    score: ScoreTable | None = None
    dealt: tuple[Count, Count] = (1, 1)
    own: dict[Name, OwnTable | Literal[False]] = Field(default_factory=dict)
    published: tuple[str, ...]

    @pydantic.field_validator("dealt")
    @classmethod
    def _one_of_them(cls, dealt: tuple[int, int]) -> tuple[int, int]:
        place, choices = dealt
        if place > choices:
            raise ValueError(f"dealt = [{place}, {choices}]: the first is at most the second")
        return dealt


class ColumnTable(Strict):
    """One column: a setting, all of its silos or those whose names begin so.

    ``name`` and ``title`` are the setting's unless they are given.
    """

    setting: Name | None = None
    name: Name | None = None
    title: str | None = None
    silos: str = ""

    @pydantic.model_validator(mode="after")
    def _named(self) -> "ColumnTable":
        # a column that cannot be run here has no setting from which to take them
        if self.setting is None and None in (self.name, self.title):
            raise ValueError("a column without a setting needs a name and a title")
        return self


def check_width(
    table: str, row: str, values: Sequence[str], columns: Sequence[ColumnTable]
) -> None:
    """ValueError unless a row has one value per column."""
    if len(values) != len(columns):
        raise ValueError(
            f"{table}, row {row!r} has {len(values)} values for {len(columns)} columns"
        )


def check_marks(table: str, notes: Sequence[str]) -> None:
    """ValueError for a note that begins with none of MARKS.

    A reader must know what the paper says and what was chosen here.
    """
    for note in notes:
        if not note.startswith(MARKS):
            raise ValueError(f"{table}: begin the note {note!r} with one of {', '.join(MARKS)}")


class TableTable(Strict):
    """One table.

    An error names the row whose values do not fit the columns.
    """

    name: Name
    title: str
    unit: Unit
    deviation: Of = "seeds"
    parameter: str = ""
    score: ScoreTable
    columns: Annotated[tuple[ColumnTable, ...], Field(min_length=1)]
    rows: Annotated[tuple[RowTable, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _as_wide_as_its_columns(self) -> "TableTable":
        for row in self.rows:
            self._check_values(row)
        return self

    def _check_values(self, row: RowTable) -> None:
        check_width(self.name, row.title, row.published, self.columns)
        for text in row.published:
            printed = text in (LOST, FAILED, NEVER) or PRINTED.fullmatch(text)
            if not printed:
                raise ValueError(
                    f"{self.name}, row {row.title!r}: {text!r} is not a mean with or without"
                    " deviation"
                )

    @pydantic.model_validator(mode="after")
    def _values_are_of_a_parameter(self) -> "TableTable":
        places = [row.at for row in self.rows if row.at is not None]
        if bool(self.parameter) != bool(places):
            raise ValueError(
                f'{self.name}: "parameter" and the rows\' "at" go together; give both, or neither'
            )
        if len(set(places)) < len(places):
            raise ValueError(f'{self.name}: two rows have the same "at"')
        return self

    @pydantic.model_validator(mode="after")
    def _notes_are_marked(self) -> "TableTable":
        check_marks(self.name, self.notes)
        return self


class CostRowTable(Strict):
    """One row of costs: the method is that of ``row`` in the other table, or of the same title.

    ``published`` has one text per column, in MB. ``without`` names parts that are not counted.
    """

    title: str
    row: str = ""
    quantity: Quantity
    without: tuple[str, ...] = ()
    published: tuple[Annotated[str, Field(pattern=f"^{MEGABYTES}$")], ...]

    @pydantic.model_validator(mode="after")
    def _parts_of_a_round(self) -> "CostRowTable":
        # only parts of a round can be left out
        if self.without and self.quantity != "bytes of a round":
            raise ValueError(f'row {self.title!r}: "without" needs quantity = "bytes of a round"')
        return self


class CostsTable(Strict):
    """One table of costs; ``of`` names the table of accuracies whose jobs are counted."""

    name: Name
    title: str
    of: Name
    columns: Annotated[tuple[ColumnTable, ...], Field(min_length=1)]
    rows: Annotated[tuple[CostRowTable, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _checked(self) -> "CostsTable":
        check_marks(self.name, self.notes)
        for row in self.rows:
            check_width(self.name, row.title, row.published, self.columns)
        return self


class PaperFile(Strict):
    """One file.

    The module's docstring explains the keys.
    """

    citation: str
    seeds: Count | None = None
    alongside: tuple[ChosenMethod, ...] = ()
    common: dict[str, Any] = Field(default_factory=dict)
    settings: dict[Name, dict[str, Any]]
    tables: Annotated[tuple[TableTable, ...], Field(min_length=1)]
    costs: tuple[CostsTable, ...] = ()

    @pydantic.field_validator("alongside")
    @classmethod
    def _of_those_alongside(cls, methods: tuple[ChosenMethod, ...]) -> tuple[ChosenMethod, ...]:
        # Any other method belongs in its own row.
        names = {method.name for method in methods}
        others = sorted(names.difference(NEXT_TO_IT))
        if others:
            raise ValueError(
                f'"alongside" has {", ".join(others)}; next to every table run'
                f" {' and '.join(NEXT_TO_IT)} alone"
            )
        return methods


@dataclass(frozen=True)
class PaperValue:
    """A published number as printed, and in 0…1.

    ``mean`` is None where it is lost or the paper has none. ``digits`` counts the digits behind the
    point in percent.
    """

    text: str
    mean: float | None = None
    deviation: float | None = None
    digits: int = 2


@dataclass(frozen=True)
class PaperSetting:
    """The experiment behind a column.

    ``document`` is that of ``experiment.ExperimentFile`` without name, seeds and methods.
    """

    name: str
    title: str
    document: Document
    without: frozenset[str] = frozenset()  # methods of NEXT_TO_IT that cannot work in it


@dataclass(frozen=True)
class PaperColumn:
    """One setting of a table, for the silos whose names begin with ``silos`` (all where empty).

    A column without a setting cannot be run here.
    """

    name: str
    title: str
    setting: PaperSetting | None
    silos: str = ""


@dataclass(frozen=True)
class PaperRow:
    """A method as printed: its values by column, and our method by setting.

    ``methods`` is empty where the catalogue does not have the method. ``dealt`` and ``at`` as in
    ``RowTable``.
    """

    title: str
    values: tuple[PaperValue, ...]
    score: Named
    methods: Mapping[str, ChosenMethod] = field(default_factory=dict)
    dealt: tuple[int, int] = (1, 1)
    at: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper; ``seeds`` is how many the paper ran, where it says so.

    ``parameter`` is that of a study, whose rows are its values; empty in other tables.
    ``alongside`` are the methods of NEXT_TO_IT in the settings where no row has them, with the
    options that the paper's other tables have.
    """

    paper: str
    name: str
    title: str
    citation: str
    seeds: int | None
    deviation: Of
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]
    alongside: tuple[PaperRow, ...]
    notes: tuple[str, ...]
    parameter: str = ""

    @property
    def path(self) -> str:
        """``pfedsim/table3``."""
        return f"{self.paper}/{self.name}"

    @property
    def settings(self) -> tuple[PaperSetting, ...]:
        """The settings of its columns, each once, in the order of the columns."""
        return _settings(self.columns)

    @property
    def all_rows(self) -> tuple[PaperRow, ...]:
        """The paper's rows, then those that run next to them."""
        return (*self.rows, *self.alongside)


@cache
def published() -> tuple[PaperTable, ...]:
    """All tables of accuracies, paper by paper; first those of methods, then those of a parameter.

    Read once per process. A LocalError would be a mistake in one of our files.
    """
    tables: list[PaperTable] = []
    for paper, data in paper_files():
        tables += parse(paper, data)
    return tuple(sorted(tables, key=_is_study))


def paper_files() -> Iterator[tuple[str, bytes]]:
    """Our files: the paper's name and the bytes of each, in the order of names."""
    folder = resources.files(__package__) / "tables"
    # By name, since file systems list files in different orders.
    for file in sorted(folder.iterdir(), key=attrgetter("name")):
        paper, _, kind = file.name.partition(".")
        if kind == "toml":
            yield paper, file.read_bytes()


def _is_study(table: PaperTable) -> bool:
    return bool(table.parameter)


def parse(paper: str, data: bytes) -> tuple[PaperTable, ...]:
    """The tables of accuracies of a file; LocalError names what is wrong with it.

    ``paper`` is the file's name without its suffix.
    """
    origin = f"{paper}.toml"
    file = parse_toml(data, PaperFile, origin)
    settings = {}
    for name, document in file.settings.items():
        settings[name] = _setting(name, file.common, document)

    # all tables of a paper share the runs of a setting, so a label means one method in all of them
    rows = {}
    everyone: list[PaperRow] = []
    for table in file.tables:
        rows[table.name] = tuple(_row(row, table, settings, origin) for row in table.rows)
        everyone += rows[table.name]
    _check_labels(everyone, origin)
    alongside = _alongside_methods(file)

    # a method next to a table runs as another table has it, so all rows come before all tables
    tables = []
    for table in file.tables:
        where = f"{origin}, {table.name}"
        columns = tuple(parsed_column(column, settings, where) for column in table.columns)
        own = rows[table.name]
        tables.append(
            PaperTable(
                paper=paper,
                name=table.name,
                title=table.title,
                citation=file.citation,
                seeds=file.seeds,
                deviation=table.deviation,
                columns=columns,
                rows=own,
                alongside=_alongside(own, everyone, columns, table.score.named, alongside),
                notes=table.notes,
                parameter=table.parameter,
            )
        )
    return tuple(tables)


def _alongside_methods(file: PaperFile) -> dict[str, ChosenMethod]:
    """By name, the methods of NEXT_TO_IT that the catalogue has, with the file's options."""
    defaults = [ChosenMethod(name=name) for name in NEXT_TO_IT]
    methods = {}
    # The file's own come last and replace the defaults.
    for method in (*defaults, *file.alongside):
        if method.name in METHODS:
            methods[method.name] = method
    return methods


def find(path: str) -> PaperTable:
    """The table of accuracies of a path such as ``pfedsim/table3``, as ``one_of`` finds it."""
    return one_of({table.path: table for table in published()}, path)


def one_of(known: Mapping[str, Table], path: str) -> Table:
    """The table of a path; LocalError suggests the nearest.

    Case matters.
    """
    if path not in known:
        raise LocalError(f"{path}: no such table; {hint(path, known)}")
    return known[path]


def _setting(name: str, common: Document, own: Document) -> PaperSetting:
    """A setting's own keys replace the common ones, in a table key by key."""
    document = {**common, **own}
    for key in common.keys() & own.keys():
        pair = (common[key], own[key])
        are_tables = all(isinstance(value, dict) for value in pair)
        if are_tables:
            document[key] = common[key] | own[key]

    # for the reproduction alone: an experiment's file knows no such keys
    title = document.pop("title", name)
    without = document.pop("without", ())
    return PaperSetting(
        name=name,
        title=title,
        document=document,
        without=frozenset(without),
    )


def _settings(columns: Sequence[PaperColumn]) -> tuple[PaperSetting, ...]:
    """The settings of these columns, each once."""
    found: dict[str, PaperSetting] = {}
    for column in columns:
        if column.setting is not None:
            found[column.setting.name] = column.setting
    return tuple(found.values())


def parsed_column(
    table: ColumnTable, settings: Mapping[str, PaperSetting], origin: str
) -> PaperColumn:
    """A column with its setting out of these; LocalError where it is not among them."""
    name, title, setting = table.name or "", table.title or "", None
    if table.setting is not None:
        # Otherwise a typo would silently make a column that never runs.
        if table.setting not in settings:
            known = ", ".join(settings)
            raise LocalError(f"{origin}: unknown setting {table.setting!r}; known: {known}")
        setting = settings[table.setting]
        name = name or setting.name
        title = title or setting.title
    return PaperColumn(
        name=name,
        title=title,
        setting=setting,
        silos=table.silos,
    )


def _row(
    row: RowTable, table: TableTable, settings: Mapping[str, PaperSetting], origin: str
) -> PaperRow:
    # Otherwise a typo would silently have no effect.
    unknown = row.own.keys() - settings.keys()
    if unknown:
        raise LocalError(
            f"{origin}, {table.name}, row {row.title!r}: own.{min(unknown)} is not a setting of the"
            " file"
        )
    # Percent and shares are both converted to 0…1.
    values = tuple(_value(text, table.unit) for text in row.published)
    score = row.score or table.score
    return PaperRow(
        title=row.title,
        values=values,
        score=score.named,
        methods=_row_methods(row, table),
        dealt=row.dealt,
        at=row.at,
    )


def _row_methods(row: RowTable, table: TableTable) -> dict[str, ChosenMethod]:
    """The row's method by setting; empty where the catalogue does not have it."""
    methods: dict[str, ChosenMethod] = {}
    # Only its published values are shown.
    if row.method is None or row.method.name not in METHODS:
        return methods

    for column in table.columns:
        if column.setting is None:
            continue
        own = row.own.get(column.setting, OwnTable())
        if own:  # false in the file: the method does not run there
            methods[column.setting] = own.of(row.method)
    return methods


def _value(text: str, unit: Unit) -> PaperValue:
    printed = PRINTED.fullmatch(text)
    if printed is None:
        return PaperValue(text)

    # in decimals: 86.76 percent is .8676, which a division of floats may miss
    whole, hidden = SCALES[unit]
    mean = float(Decimal(printed["mean"]) / whole)
    deviation = None
    # At most one of the two groups matched.
    over = printed["std"] or printed["spread"]
    if over:
        deviation = float(Decimal(over) / whole)

    # our number is compared at as many digits as the paper prints
    _, _, decimals = printed["mean"].partition(".")
    digits = max(len(decimals) - hidden, 0)
    return PaperValue(
        text=text,
        mean=mean,
        deviation=deviation,
        digits=digits,
    )


def _check_labels(rows: Sequence[PaperRow], origin: str) -> None:
    """One label is one method in a setting, in all tables of a paper: they share its runs."""
    first: dict[tuple[str, str], ChosenMethod] = {}
    for row in rows:
        for setting, method in row.methods.items():
            folder = method.title.lower()  # some disks tell no case apart
            if first.setdefault((setting, folder), method) != method:
                raise LocalError(
                    f"{origin}: {method.title!r} is two methods in setting {setting!r}; give each"
                    " a label of its own"
                )


def _alongside(
    rows: Sequence[PaperRow],
    everyone: Sequence[PaperRow],
    columns: Sequence[PaperColumn],
    score: Named,
    alongside: Mapping[str, ChosenMethod],
) -> tuple[PaperRow, ...]:
    """A row without values per method that runs next to this table's; ``everyone``: all tables'."""
    settings = _settings(columns)
    # The paper has no values for these methods.
    nothing = (PaperValue(""),) * len(columns)
    found = []
    for name, method in alongside.items():
        methods = {}
        for setting in settings:
            has_own_row = _first_of(rows, setting, name) is not None
            if name in setting.without or has_own_row:
                continue
            # the options that the paper's other tables have: the tables share the runs
            elsewhere = _first_of(everyone, setting, name)
            # Otherwise with the options of ``alongside``, or the defaults.
            methods[setting.name] = elsewhere or method
        if methods:
            found.append(PaperRow(name, nothing, score, methods))
    return tuple(found)


def _first_of(rows: Sequence[PaperRow], setting: PaperSetting, name: str) -> ChosenMethod | None:
    """A method as the first of these rows has it in a setting; None where no row does."""
    for row in rows:
        method = row.methods.get(setting.name)
        if method is not None and method.name == name:
            return method
    return None
