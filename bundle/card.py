"""``MODEL_CARD.md``: the description of a model for people (Mitchell et al., FAT* 2019)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..algorithms.data.features import Feature
from ..algorithms.job.job import Job
from ..algorithms.models.build import input_shape
from .description import Description, PrivacyCost, Threshold
from .figure_tables import (
    CLASSES,
    FIGURES,
    THRESHOLDS,
    Row,
    class_rows,
    figure_rows,
    threshold_rows,
)

MOST_ROWS = 200  # of a table
SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]<>#|!"})


def card(description: Description, job: Job) -> str:
    """The text; what others wrote, such as names of classes, is escaped in it."""
    parts = chain(
        _head(description, job),
        _use(description),
        _records(description, job),
        _figures(description),
        _thresholds(description.thresholds),
        _privacy(description.privacy),
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
    yield f"# {plain(job.name)}, kept by {plain(origin.name)}"
    yield ""
    yield (
        f"A model for {job.task.kind}, trained by method {plain(job.method_name)} with"
        f" {len(job.silos)} silos over {job.rounds} rounds{where}. Made on {description.made}."
    )
    if origin.kind == "simulation":
        yield ""
        yield "It comes from a simulation: nobody signed it, and its silos were on one machine."


def _use(description: Description) -> Iterator[str]:
    yield "\n## Use\n"
    yield "    staddle model predict --model FOLDER --data FILE --out predictions.csv"
    yield ""
    yield (
        "Use it for records like those of this silo. It was measured on no others, and a model for"
        " patients needs more than these figures before anybody acts by it."
    )
    yield f"\nIt says for each record: {', '.join(map(plain, description.output_names))}."


def _records(description: Description, job: Job) -> Iterator[str]:
    records = description.records
    yield "\n## Records\n"
    yield f"The silo trained on {records.train:,} records and held out {records.test:,} as a test."
    if records.train_by_class:
        counts = map("{:,}".format, records.train_by_class)
        rows = zip(description.output_names, counts, strict=False)
        yield from table(["class", "training records"], rows)
    if job.features:
        yield "Each record has these features, in this order:"
        columns = ["feature", "unit", "range", "subtracted", "divided by", "missing counts as"]
        yield from table(columns, map(_feature, job.features))
        return
    kind = description.contract.get("kind")
    shape = list(input_shape(job.model))
    yield f"\nRecords are read as kind {plain(str(kind))}, and have the shape {shape}."


def _feature(feature: Feature) -> Row:
    missing = feature.missing or "none may miss"
    if feature.categories is not None:
        return [feature.name, "", f"one of: {', '.join(feature.categories)}", "", "", missing]
    known = (f"{feature.low:g} to {feature.high:g}", f"{feature.center:g}", f"{feature.scale:g}")
    return [feature.name, feature.unit, *known, missing]


def _figures(description: Description) -> Iterator[str]:
    yield "\n## Figures\n"
    tested = f"{description.measured.records:,} test records"
    yield (
        f"Measured on the silo's {tested}, with 95 % intervals. Shares of records have Wilson's"
        " interval, other figures that of a bootstrap over records."
    )
    yield from table(FIGURES, figure_rows(description.measured))
    if classes := list(class_rows(description.measured, description.output_names)):
        yield from table(CLASSES, classes)


def _thresholds(thresholds: Sequence[Threshold]) -> Iterator[str]:
    if not thresholds:
        return
    yield "\n## Thresholds\n"
    yield (
        "From its threshold on, `predict` calls a record by this name. A threshold has the largest"
        " sensitivity plus specificity on the test records that chose it; the figures are of the"
        " others."
    )
    yield from table(THRESHOLDS, threshold_rows(thresholds))


def _privacy(spent: PrivacyCost | None) -> Iterator[str]:
    yield "\n## Privacy\n"
    if spent is None:
        yield (
            "The job had no differential privacy: the model may show something of the records that"
            " it was trained on. Whoever gets it, and the figures above, should be allowed to."
        )
        return
    yield (
        f"The job cost a record of the silo's data set at most ε = {spent.epsilon:g} at δ ="
        f" {spent.delta:g}. The figures above are exact, and not covered."
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
        yield f"- Signed by operator {plain(origin.signer)}"
    for package in job.packages:
        yield f"- Code of {plain(package.name)} {plain(package.version)}, SHA-256 {package.sha256}"
    releases = description.releases
    yield f"- Made with staddle {plain(releases.staddle)}, torch {plain(releases.torch)}"
    if origin.head:
        yield "- The silo's ledger at that time:"
        yield ""
        yield from (f"        {line}" for line in origin.head.splitlines())
    yield "\n`staddle model verify` checks the signature of these files."
