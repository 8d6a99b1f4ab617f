"""``MODEL_CARD.md``: the description of a model for people (Mitchell et al., FAT* 2019)."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..algorithms.data.features import Feature
from ..algorithms.job.job import Job
from ..algorithms.models.build import input_shape
from .description import Description, Reported, SplitSizes, Threshold
from .figure_tables import (
    CLASSES,
    FIGURES,
    THRESHOLDS,
    Row,
    class_rows,
    figure,
    figure_rows,
    name_of,
    threshold_rows,
)

MOST_ROWS = 200  # of a table
TRUTHS = ("label", "target", "survival", "labels")  # keys of columns that hold what is predicted
COORDINATOR = (
    "The coordinator read what each silo uploaded",
    "The coordinator read sums over silos, and no silo's own upload",
)  # by whether the job was blind
USES = (
    "Use it for records like those of the silos, prepared as the job says.",
    "Use it for records like those of this silo: it was measured on no others.",
)  # by whether the maker measured it
WHOSE, COSTS = ("the silos", "this silo"), ("a", "the")
PROTECTED = {  # by unit
    "record": "each record of {a} silo's data set",
    "silo": "the whole of {a} silo, all its records together,",
}
SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]<>#|!"})


def card(description: Description, job: Job) -> str:
    """The text; what others wrote, such as names of classes, is escaped in it."""
    parts = chain(
        _head(description, job),
        _use(description, job),
        _records(description, job),
        _figures(description, job),
        _thresholds(description.thresholds),
        _privacy(description, job),
        _origin(description, job),
    )
    return "\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text on one line in which Markdown sees no mark."""
    return " ".join(text.split()).translate(SPECIAL)


def table(columns: Row, rows: Iterable[Row]) -> Iterator[str]:
    """Lines of a table, at most ``MOST_ROWS`` of its rows; texts are escaped."""
    own = list(rows)
    yield ""
    for row in (columns, ["---"] * len(columns), *own[:MOST_ROWS]):
        yield f"| {' | '.join(map(plain, row))} |"
    if len(own) > MOST_ROWS:
        yield f"\n{len(own) - MOST_ROWS:,} more rows are in model.json."
    yield ""


def _head(description: Description, job: Job) -> Iterator[str]:
    origin = description.origin
    where = f" in federation {plain(origin.federation)}" if origin.federation else ""
    yield f"# Model of job {plain(job.name)} at {origin.role} {plain(origin.name)}"
    yield ""
    yield (
        f"A model for {job.task.kind}, trained by method {plain(job.method_name)} with"
        f" {len(job.silos)} silos over {job.rounds} rounds{where}. Made on {description.made}."
    )
    if origin.kind == "simulation":
        yield ""
        yield "It comes from a simulation: nobody signed it, and its silos were on one machine."
    if origin.kind == "coordinator":
        yield ""
        yield (
            "It is the model that the silos share, as the last round published it. The coordinator"
            " has no records: it measured nothing."
        )
        if job.method().product == "trained":
            yield f"By method {plain(job.method_name)} each silo trains it further for itself."


def _use(description: Description, job: Job) -> Iterator[str]:
    answers = job.task.answer_names(description.output_names)
    yield "\n## Use\n"
    yield "    staddle model predict --model FOLDER --data FILE --out predictions.csv\n"
    yield f"- It predicts: {plain(_truth(description.contract) or job.task.kind)}"
    yield f"- It answers, for each record: {', '.join(map(plain, answers))}"
    yield ""
    measured = USES[description.measured is not None]
    yield (
        f"{measured} Before anybody acts by it in the care of patients, it needs an evaluation of"
        " its own there, and whatever the law asks of such a device."
    )


def _truth(contract: Mapping[str, Any]) -> str:
    """The columns of what is predicted; empty where records have no columns."""
    columns = map(np.ravel, filter(None, map(contract.get, TRUTHS)))
    return ", ".join(map(str, chain.from_iterable(columns)))


def _records(description: Description, job: Job) -> Iterator[str]:
    records = description.records
    yield "\n## Records\n"
    if records is not None:
        yield from _sizes(records, description.output_names)
    if job.features:
        yield "Each record has these features, in this order:"
        columns = ["feature", "unit", "range", "subtracted", "divided by", "missing counts as"]
        yield from table(columns, map(_feature, job.features))
        yield _writing(description.contract)
        return
    kind = description.contract.get("kind")
    shape = list(input_shape(job.model))
    yield f"\nRecords are read as kind {plain(str(kind))}, and have the shape {shape}."


def _sizes(records: SplitSizes, names: Sequence[str]) -> Iterator[str]:
    yield f"The silo trained on {records.train:,} records and held out {records.test:,} as a test."
    if records.train_by_class:
        counts = map("{:,}".format, records.train_by_class)
        yield from table(["class", "training records"], zip(names, counts, strict=False))


def _writing(contract: Mapping[str, Any]) -> str:
    """How a CSV file is written, which nobody sees from the features."""
    marks = json.dumps(contract.get("missing_marks", [""]), ensure_ascii=False)
    known = {
        "delimiter": contract.get("delimiter", ","),
        "decimal": contract.get("decimal", "."),
        "encoding": contract.get("encoding", "utf-8"),
        **contract.get("dates", {}),
    }
    texts = ", ".join(f"{name} {json.dumps(own)}" for name, own in known.items())
    return (
        f"A CSV file is read with {plain(texts)}; what is missing is written as {plain(marks)}."
        " Parquet files and data frames need none of this."
    )


def _feature(feature: Feature) -> Row:
    missing = feature.missing or "may not be missing"
    if feature.categories is not None:
        return [feature.name, "", f"one of: {', '.join(feature.categories)}", "", "", missing]
    known = (f"{feature.low:g} to {feature.high:g}", f"{feature.center:g}", f"{feature.scale:g}")
    return [feature.name, feature.unit, *known, missing]


def _figures(description: Description, job: Job) -> Iterator[str]:
    measured, names = description.measured, description.output_names
    yield "\n## Figures\n"
    if measured is None:
        yield from _reported(description.reported)
        return
    yield (
        f"Measured on the silo's {measured.records:,} test records, with 95 % intervals. Shares of"
        " records have Wilson's interval, other figures that of a bootstrap over records, or over"
        " groups of them."
    )
    unit = str(getattr(job.task, "unit", ""))
    yield from table(FIGURES, figure_rows(measured, names, unit))
    if classes := list(class_rows(measured, names)):
        yield "Each record counts as called by the answer that is most probable:"
        yield from table(CLASSES, classes)


def _reported(reported: Reported | None) -> Iterator[str]:
    yield "Nobody measured this model; staddle model evaluate does, on labelled records."
    if reported is None or not reported.measures:
        return
    noise = ("", ", with noise")[reported.noised]
    yield (
        f"\n{len(reported.silos)} silos measured the model as it was before the last round, on"
        f" their own test records. They reported together{noise}:"
    )
    names, values = map(name_of, reported.measures), map(figure, reported.measures.values())
    yield from table(["figure", "value"], zip(names, values, strict=True))


def _thresholds(thresholds: Sequence[Threshold]) -> Iterator[str]:
    if not thresholds:
        return
    yield "\n## Thresholds\n"
    yield (
        "`predict` does not decide by what is most probable: it calls a record by the class below,"
        " or the label, from this probability on, and by a label without a threshold from 0.5 on."
        " Some of the test records chose the threshold, which has the largest sensitivity plus"
        " specificity on them; the others measured it."
    )
    yield from table(THRESHOLDS, threshold_rows(thresholds))


def _privacy(description: Description, job: Job) -> Iterator[str]:
    yield "\n## Privacy\n"
    spent, own = description.privacy, description.measured is not None
    if spent is None:
        yield (
            "The job had no differential privacy: the model and the figures above may reveal"
            f" something about single records of {WHOSE[own]}. Give them only to those who may know"
            " it."
        )
        return
    yield (
        f"The job cost {PROTECTED[job.private.unit].format(a=COSTS[own])} at most"
        f" ε = {spent.epsilon:g} at δ = {spent.delta:g} (differential privacy)."
    )
    if own:
        yield (
            "The figures above are exact, and not covered: give them only to those who may know"
            " something about single records."
        )
    if spent.exact:
        yield (
            f"\nNot covered either: {', '.join(map(plain, spent.exact))}, trained without noise at"
            " this silo. Nothing of them left it; who gets this model gets them."
        )


def _origin(description: Description, job: Job) -> Iterator[str]:
    origin = description.origin
    yield "\n## Where it comes from\n"
    yield f"- Job {plain(job.name)}, SHA-256 {description.job_digest}"
    if origin.signer:
        yield f"- The job was signed by operator {plain(origin.signer)}"
        yield f"- {COORDINATOR[job.security.required]}"
        yield f"- Silos: {', '.join(map(plain, job.silos))}"
    for package in job.packages:
        yield f"- Code of {plain(package.name)} {plain(package.version)}, SHA-256 {package.sha256}"
    releases = description.releases
    yield f"- Made with staddle {plain(releases.staddle)}, torch {plain(releases.torch)}"
    if origin.head:
        yield "- Signed head of the silo's ledger, which records all that left the silo:"
        yield ""
        yield from (f"        {line}" for line in origin.head.splitlines())
    yield "\n`staddle model verify` says whether these files are as they were made, and by whom."
