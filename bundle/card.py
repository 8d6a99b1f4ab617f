"""``MODEL_CARD.md``: the description of a model for people (Mitchell et al., FAT* 2019)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..algorithms.data.features import Feature
from ..algorithms.job.job import Job
from ..algorithms.models.build import input_shape
from .description import Description, Figures, Range, Spent, Threshold

MOST_ROWS = 200  # of a table
SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]<>#|!"})
MAJORITY = "majority"  # the accuracy of the best constant answer, which is told as such
MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "calibration_error": "expected calibration error",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "concordance": "concordance index",
    "dice": "Dice score",
    "loss": "mean loss",
}


def card(description: Description, job: Job) -> str:
    """The text; what others wrote, such as names of classes, is escaped in it."""
    parts = chain(
        _head(description, job),
        _use(description),
        _records(description, job),
        _figures(description.measured),
        _classes(description.measured, description.output_names),
        _thresholds(description.thresholds),
        _privacy(description.privacy),
        _origin(description, job),
    )
    return "\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text on one line in which Markdown sees no mark."""
    return " ".join(text.split()).translate(SPECIAL)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, at most ``MOST_ROWS`` of its rows."""
    own = list(rows)
    yield ""
    for row in (columns, ["---"] * len(columns), *own[:MOST_ROWS]):
        yield f"| {' | '.join(row)} |"
    if len(own) > MOST_ROWS:
        yield f"\n{len(own) - MOST_ROWS:,} more rows are in model.json."
    yield ""


def figure(value: float | None, interval: Range | None = None) -> str:
    """A figure with its interval, such as 0.912 (0.873 to 0.940)."""
    if value is None:
        return "–"
    text = f"{value:.4g}"
    return text if interval is None else f"{text} ({interval[0]:.4g} to {interval[1]:.4g})"


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
        named = zip(description.output_names, records.train_by_class, strict=False)
        rows = ([plain(name), f"{count:,}"] for name, count in named)
        yield from table(["class", "training records"], rows)
    if job.features:
        yield "Each record has these features, in this order:"
        columns = ["feature", "unit", "range", "subtracted", "divided by", "missing counts as"]
        yield from table(columns, map(_feature, job.features))
        return
    kind = description.contract.get("kind")
    shape = list(input_shape(job.model))
    yield f"\nRecords are read as kind {plain(str(kind))}, and have the shape {shape}."


def _feature(feature: Feature) -> Sequence[str]:
    missing = plain(feature.missing or "none may miss")
    if feature.categories is not None:
        names = ", ".join(map(plain, feature.categories))
        return [plain(feature.name), "", f"one of: {names}", "", "", missing]
    known = (f"{feature.low:g} to {feature.high:g}", f"{feature.center:g}", f"{feature.scale:g}")
    return [plain(feature.name), plain(feature.unit), *known, missing]


def _figures(measured: Figures) -> Iterator[str]:
    yield "\n## Figures\n"
    yield (
        f"Figures on the silo's {measured.records:,} test records, with 95 % intervals. Shares of"
        " records have Wilson's interval, other figures that of a bootstrap over records."
    )
    rows = []
    for key, said in measured.said.items():
        value = said.get("value") if isinstance(said, dict) else said
        if isinstance(value, float) and key != MAJORITY:
            name = MEASURES.get(key, key.replace("_", " "))
            rows.append([plain(name), figure(value, measured.intervals.get(key))])
    constant = MEASURES.get(measured.score, measured.score)
    best = [f"{plain(constant)} of the best constant answer", figure(measured.baseline)]
    yield from table(["figure", "value"], [*rows, best])


def _classes(measured: Figures, names: Sequence[str]) -> Iterator[str]:
    if not (classes := measured.said.get("classes")):
        return
    kinds = ("sensitivity", "specificity", "precision", "f1")
    rows = []
    for place, (name, own) in enumerate(zip(names, classes, strict=False)):
        intervals = (measured.intervals.get(f"classes.{place}.{kind}") for kind in kinds)
        cells = (
            figure(own[kind], interval) for kind, interval in zip(kinds, intervals, strict=True)
        )
        rows.append([plain(name), f"{own['records']:,}", *cells])
    yield from table(["class", "test records", *kinds], rows)


def _thresholds(thresholds: Sequence[Threshold]) -> Iterator[str]:
    if not thresholds:
        return
    yield "\n## Thresholds\n"
    yield (
        "From its threshold on, `predict` calls a record by this name. A threshold has the largest"
        " sensitivity plus specificity on the test records that chose it; the figures are of the"
        " others."
    )
    rows = (
        [
            plain(own.of),
            f"{own.value:.4f}",
            f"{own.chosen_on:,}",
            f"{own.measured_on:,}",
            figure(own.sensitivity, own.sensitivity_interval),
            figure(own.specificity, own.specificity_interval),
        ]
        for own in thresholds
    )
    columns = ["of", "threshold", "chosen on", "measured on", "sensitivity", "specificity"]
    yield from table(columns, rows)


def _privacy(spent: Spent | None) -> Iterator[str]:
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
