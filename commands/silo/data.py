"""``staddle data``: a table of records, before it is used."""

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, starmap
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...algorithms.data.features import Feature
from ...algorithms.data.registry import KINDS
from ...algorithms.data.rows import Decimal, Encoding, is_parquet
from ...algorithms.data.survey import Column, TableSurvey, contract_faults, survey
from ...errors import LocalError, check_local
from ...files.documents import Strict, parse_json, read_bytes, validate
from ...files.toml_document import parse_document
from ..terminal import printer
from ..terminal.toml import to_toml

DELIMITERS = ",;\t|"
OF_FILE = (
    "All columns that can be features: a job takes those that it declares, in its order. Delete"
    " what no job is to use. The classes have to mean, one by one, what the job's class_names say."
)
Key = Literal["label", "labels", "target", "survival"]


@dataclass(frozen=True)
class TruthColumns:
    """The columns of what is true of a record, and the key of [data] that names them."""

    key: Key
    columns: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Columns of 0 and 1."""
        return {"labels": self.columns, "survival": self.columns[1:]}.get(self.key, ())

    def faults(self, found: TableSurvey) -> Iterator[str]:
        """What a reader would stumble over."""
        for column in map(found.__getitem__, self.columns):
            where = f"{self.key} {column.name!r}"
            if gone := column.missing.total():
                yield f"{where}: missing values: {gone:,}"
            if self.key == "label":
                names = classes_of(column)
                if len(names) < 2:
                    yield f"{where}: {len(names)} class; at least 2 are needed"
                continue
            if texts := column.texts.total():
                first = column.first_text
                yield f"{where}: cells that are no numbers: {texts:,}, the first in line {first}"
            if column.name in self.flags and (others := set(column.numbers) - {0.0, 1.0}):
                yield f"{where}: has {min(others):g}, and only 0 and 1 may stand there"
        if self.key == "survival" and min(found[self.columns[0]].numbers, default=1) <= 0:
            yield f"survival {self.columns[0]!r}: has times that are not above 0"

    def entry(self) -> Any:
        """Its value in [data]."""
        return self.columns[0] if self.key in ("label", "target") else list(self.columns)


class Contract(Strict):
    """The part of a job that says what a record is."""

    features: tuple[Feature, ...] = ()
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LabelValues:
    """The values of a label's column, and the classes of a job, in its order.

    Their order in the file says nothing of what they mean: a silo whose classes are the other way
    round would be averaged into nonsense, and nobody would notice.
    """

    column: str
    values: tuple[str, ...]
    classes: tuple[str, ...]
    """None where no job is known."""

    @property
    def named(self) -> bool:
        """The values are the job's own names."""
        return set(self.values) <= set(self.classes)

    @property
    def numbered(self) -> bool:
        """The values are numbers from 0 on, which a reader takes as they stand."""
        return self.values == tuple(map(str, range(len(self.values))))

    @property
    def unknown(self) -> bool:
        """Only people can say which value is which class of the job."""
        counted = self.numbered & (len(self.values) <= len(self.classes))
        return bool(self.classes) & (not (self.named | counted))

    @property
    def table(self) -> dict[str, Any]:
        """Keys of [data]; none where they are unknown."""
        cases: tuple[tuple[bool, dict[str, Any]], ...] = (
            (self.unknown, {}),
            (self.named, {"classes": list(self.classes)}),
            (not self.numbered, {"classes": list(self.values)}),
            (bool(self.classes), {"class_names": list(self.classes)}),
        )
        return next((table for applies, table in cases if applies), {})

    def faults(self) -> list[str]:
        """What people have to say before the file can be used."""
        said = (
            f"label {self.column!r}: its values are {_quoted(self.values)}; the job's classes are"
            f" {_quoted(self.classes)}. Write data.classes so that its first value means"
            f" {''.join(self.classes[:1])!r}, and so on in the job's order"
        )
        return [said] * self.unknown

    def comments(self) -> list[str]:
        """For the draft: what people have to fill in or to look at."""
        asked = "classes = [" + ", ".join("?" * len(self.classes)) + "]"
        names = to_toml({"class_names": list(self.classes)}).strip()
        if self.unknown:
            return [f"# In the order of class_names: {asked}", f"# {names}"]
        pairs = zip(self.values, self.classes, strict=False)
        counted = ", ".join(starmap("{} counts as {!r}".format, pairs))
        return [f"# Is it so? {counted}"] * ("class_names" in self.table)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A table of records, CSV or .parquet, or the folder of a Hugging Face data set.",
        ),
    ],
    label: Annotated[str, typer.Option(help="The column with the classes.")] = "",
    labels: Annotated[
        list[str] | None, typer.Option(help="A column of 0 and 1; once for each label.")
    ] = None,
    target: Annotated[str, typer.Option(help="The column with the numbers of a regression.")] = "",
    survival: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="TIME EVENT", help="The columns of the time and of the event."),
    ] = None,
    record_id: Annotated[
        str, typer.Option("--id", help="The column that names each record once.")
    ] = "",
    delimiter: Annotated[str, typer.Option(help="Between two columns.")] = ",",
    decimal: Annotated[Decimal, typer.Option(help="Before the decimals of a number.")] = ".",
    encoding: Annotated[Encoding, typer.Option(help="Of the text.")] = "utf-8",
    split: Annotated[
        str | None, typer.Option(help="Of a Hugging Face data set that has several.")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB", help="A job file or a signed job, to compare its features."),
    ] = None,
) -> None:
    """Show the columns of a table and all its faults, and draft a silo's table of data.

    Exit code 1 if something is wrong.

    Nothing leaves: it prints what stands in the file for those who hold it.
    """
    if not re.fullmatch(r'[^"\r\n]', delimiter):
        raise LocalError(
            f"--delimiter {delimiter!r}: give one character, and neither a quote nor a line's end"
        )
    contract = Contract() if job is None else contract_of(job)
    found = survey(file, delimiter, encoding, decimal, split)
    form = {"split": split, "delimiter": delimiter, "decimal": decimal, "encoding": encoding}
    # Before anything is shown, what was asked for has to be there.
    truth = _truth({"label": label, "labels": labels, "target": target, "survival": survival})
    for name in filter(None, (*truth.columns, record_id)):
        if name not in found.names:
            raise LocalError(f"{file}: has no column {name!r}; {_columns_of(found)}")
    rows = [_row(column, found.records) for column in found.columns]
    columns = ("column", "kind", "missing", "values")
    printer.show(printer.PrintedTable(columns, rows, (2,), title=f"{found.records:,} records"))
    faults = _faults(found, truth, record_id, contract)
    printer.show(*faults or ["no fault found"])
    if truth.columns:
        # Absolute: silo.toml lies in another folder than the one where this command stands.
        path = file.absolute()
        printer.show("", *_draft(path, found, truth, record_id, form, contract).split("\n"))
    else:
        printer.show(
            "",
            "give --label COLUMN for a draft of the silo's [data] table, or --labels, --target or"
            " --survival for other tasks",
        )
    if faults:
        raise typer.Exit(1)


def _columns_of(found: TableSurvey) -> str:
    """What to do where a column is missing: most often the delimiter is another."""
    shown = f"its columns: {', '.join(found.names)}"
    between = max(DELIMITERS, key=found.names[0].count)
    other = len(found.names) == 1 and between in found.names[0]
    return f"{shown}; is it --delimiter {between!r}?" if other else shown


def _truth(given: Mapping[Key, Any]) -> TruthColumns:
    """What was asked for; no columns where nothing was. LocalError for more than one."""
    asked = {key: value for key, value in given.items() if value}
    if len(asked) > 1:
        options = " and ".join(f"--{key}" for key in asked)
        raise LocalError(f"{options}: give one of them, as the job's task needs it")
    nothing: tuple[Key, Any] = ("label", ())
    key, value = next(iter(asked.items()), nothing)
    return TruthColumns(key, (value,) if isinstance(value, str) else tuple(value))


def contract_of(path: Path) -> Contract:
    """The features and classes of a job file (TOML), or of a signed job (JSON, not verified)."""
    data = read_bytes(path)
    if path.suffix == ".json":
        document: Any = parse_json(data, str(path))
        document = document.get("document") if isinstance(document, dict) else None
    else:
        document = parse_document(data, str(path))
    if not isinstance(document, dict):
        raise LocalError(f"{path}: not a job; give a job file, or a signed job")
    model = document.get("model")
    names = model.get("class_names") if isinstance(model, dict) else None
    own = {"features": document.get("features", ()), "class_names": names}
    return validate(own, Contract, str(path))


def _row(column: Column, records: int) -> tuple[str, ...]:
    missing = "-"
    if column.missing:
        missing = f"{column.missing.total() / records:.1%}"
    marks = ", ".join(map(repr, filter(None, column.missing)))
    if marks:
        missing += f" ({marks})"
    return column.name, column.kind, missing, column.shown()


def _faults(
    found: TableSurvey, truth: TruthColumns, record_id: str, contract: Contract
) -> list[str]:
    """All that is wrong; targets and the id are no features."""
    faults = list(found.faults)
    said = {*truth.columns, record_id}
    # What a contract says of a column is said below, with both sides; it uses no others.
    looked_at = found.columns * (not contract.features)
    for column in filterfalse(lambda column: column.name in said, looked_at):
        faults += [f"column {column.name!r}: {fault}" for fault in column.faults()]
    faults += truth.faults(found)
    faults += chain.from_iterable(map(LabelValues.faults, label_values(found, truth, contract)))
    if record_id and (twice := _repeated(found[record_id])):
        faults.append(f"id {record_id!r}: records whose id stands twice: {twice:,}")
    return faults + contract_faults(found, contract.features)


def classes_of(column: Column) -> tuple[str, ...]:
    """The classes in a column, as texts: numbers by size, then the others."""
    numbers = sorted(set(column.numbers))
    return column.known or (*(f"{number:.15g}" for number in numbers), *column.categories)


def label_values(found: TableSurvey, truth: TruthColumns, contract: Contract) -> list[LabelValues]:
    """Of a classification; none for other tasks."""
    classes = tuple(contract.class_names or ())
    names = truth.columns * (truth.key == "label")
    return [LabelValues(name, classes_of(found[name]), classes) for name in names]


def _repeated(column: Column) -> int:
    """Records whose id another one has, too."""
    numbers = len(column.numbers) - len(set(column.numbers))
    return numbers + column.texts.total() - len(column.texts)


def of_file(file: Path, label: str, base: Path) -> str:
    """A silo's [data] table for a CSV file with a column of classes, relative to a folder.

    LocalError for a file that is no such table.
    """
    check_local(file.is_file(), f"{file}: no such file; give the CSV file of this silo's records")
    with file.open(encoding="utf-8", errors="replace") as lines_of:
        first = lines_of.readline()
    form = {"delimiter": max(DELIMITERS, key=first.count)}
    found = survey(file, form["delimiter"])
    known = ", ".join(found.names)
    check_local(label in found.names, f"{file}: has no column {label!r}; its columns: {known}")
    truth = TruthColumns("label", (label,))
    faults = "; ".join(truth.faults(found))
    check_local(not faults, f"{file}: {faults}")
    # What this silo has of a column may be nothing, and the job may still say what that counts as.
    own = _guessed(found, {label}, ("number", "categories", "empty"))
    contract = Contract.model_construct(features=tuple(own))
    table = drafted_table(file, found, truth, "", form, contract)
    table["file"] = os.path.relpath(file, base)
    lines = [f"# {line}" for line in textwrap.wrap(OF_FILE, 116)]
    return "\n".join([*lines, to_toml({"data": table}).strip()])


def _draft(
    file: Path,
    found: TableSurvey,
    truth: TruthColumns,
    record_id: str,
    form: Mapping[str, str | None],
    contract: Contract,
) -> str:
    """The silo's [data] table, with comments for whoever edits it."""
    table = drafted_table(file, found, truth, record_id, form, contract)
    lines = ["# A draft; the order of classes and of features has to be that of the job."]
    if "features" in table:
        # A column of lists is another form, and stands in no row of a table.
        lines += [
            f"# Column {name!r} holds lists: for a model that takes it, name it as array in place"
            " of features."
            for name in _arrays(found)
        ]
    if "features" in table and not contract.features:
        lines += [
            "# Agree on center, scale and missing with the other silos: constants of these records",
            "# would tell of them.",
        ]
    # Below its head: keys of the table itself end where the first table in it begins.
    head, *keys = to_toml({"data": table}).strip().split("\n")
    asked = map(LabelValues.comments, label_values(found, truth, contract))
    return "\n".join([*lines, head, *chain.from_iterable(asked), *keys])


def drafted_table(
    file: Path,
    found: TableSurvey,
    truth: TruthColumns,
    record_id: str,
    form: Mapping[str, str | None],
    contract: Contract,
) -> dict[str, Any]:
    """A silo's table [data]: by the job's features, or by the columns that can be some.

    ``form`` has the keys that say how the file is written.
    """
    kind, key = _source_of(file)
    table: dict[str, Any] = {"kind": kind, key: str(file)}
    # How it is written, where that is another way than by default.
    fields = KINDS[kind].model_fields
    table |= {
        key: said for key, said in form.items() if key in fields and said != fields[key].default
    }
    table[truth.key] = truth.entry()
    if record_id:
        table["id"] = record_id
    for values in label_values(found, truth, contract):
        table |= values.table
    features = contract.features or _guessed(found, {*truth.columns, record_id})
    if other := _other_form(found, features, contract):
        return table | other
    table["features"] = [feature.name for feature in features]
    for key in ("unit", "categories", "center", "scale", "missing"):
        default = Feature.model_fields[key].default
        stated = {
            feature.name: _plain(feature, key)
            for feature in features
            # What is taken from the job need not stand here, too.
            if getattr(feature, key) != default and key not in feature.constants()
        }
        if stated:
            table["units" if key == "unit" else key] = stated
    # Only where they stand: elsewhere "-" or "." may be a category, or a fault.
    marks = {
        column.name: sorted({"", *column.missing})
        for column in found.columns
        if column.name in table["features"] and set(column.missing) - {""}
    }
    if marks:
        table["missing_marks"] = marks
    return table


def _source_of(path: Path) -> tuple[str, str]:
    """The kind that reads a file or folder, and its key for the path."""
    if path.is_dir():
        return "huggingface", "folder"
    return "parquet" if is_parquet(path) else "csv", "file"


def _arrays(found: TableSurvey) -> list[str]:
    return [column.name for column in found.columns if column.kind == "array"]


def _other_form(
    found: TableSurvey, features: Sequence[Feature], contract: Contract
) -> dict[str, str]:
    """The column of images, or else of arrays, where a model is to take that."""
    asked = {"image": contract.features, "array": features}
    free = {key for key, taken in asked.items() if not taken}
    columns = [(column.kind, column.name) for column in found.columns if column.kind in free]
    # The first one, images before arrays.
    return dict(sorted(columns, key=itemgetter(0), reverse=True)[:1])


def _plain(feature: Feature, key: str) -> Any:
    value = getattr(feature, key)
    if key == "missing" and feature.categories is None:
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _guessed(
    found: TableSurvey, others: set[str], kinds: Sequence[str] = ("number", "categories")
) -> list[Feature]:
    features = []
    for column in found.columns:
        if column.name in others or column.kind not in kinds:
            continue
        categories = column.categories if column.kind == "categories" else None
        features.append(Feature.model_construct(name=column.name, categories=categories))
    return features
