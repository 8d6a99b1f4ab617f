"""A closed round as plain values, and in words: how good its models were on test records."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from ...algorithms.job.evaluated import Evaluated, evaluated
from ...algorithms.job.torchmetrics_counting import TORCHMETRICS
from ...algorithms.tasks.counting import METRICS, ScoreForm, flattened
from ...errors import LocalError, PeerError
from ...files.documents import parse_json
from ...proto import operations_pb2 as pb
from ..terminal.printer import PrintedTable

# zeros leave of a private job without metrics_sigma
UNTOLD = "the silos keep their test counts to themselves"
NOISY = "with noise, since the job is private"
OTHERS = "its task or a metric is of an installed package: --json has the sums"
MOST_AXES = 8  # of a table
WORDS = {"delivered": "as delivered", "trained": "as trained"}
# Measures, in this order after the score.
NAMES = {
    "balanced_accuracy": "balanced",
    "rmse": "RMSE",
    "r2": "R²",
    "loss": "loss",
    "concordance": "C-index",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "calibration_error": "calibration error",
}
FORMATS = {"balanced_accuracy": ".1%"}


def reading(report: pb.JobReport) -> Evaluated | None:
    """How to read the sums of a report's rounds; None for the task of an installed package.

    PeerError where the coordinator does not say so as Staddle does.
    """
    try:
        return evaluated(parse_json(report.evaluation, "evaluation"))
    except LocalError as error:
        raise PeerError(
            "coordinator",
            "does not say what the job's sums are as this release does; ask its people for its"
            " release",
        ) from error


def round_fields(report: pb.JobReport) -> list[dict[str, Any]]:
    """Closed rounds as plain values, in ascending order.

    ``metrics`` are sums over the members; tables, as nested lists, are in the newest round alone.
    ``measures`` are what they say. PeerError for tables that the job does not make.
    """
    known = reading(report)
    return [_fields(one, known) for one in report.rounds]


def _fields(one: pb.ClosedRound, known: Evaluated | None) -> dict[str, Any]:
    metrics: dict[str, Any] = dict(sorted(one.metrics.items()))
    made = None if known is None else _made(known)
    for table in one.tables:
        shape, counts = tuple(table.shape[:MOST_AXES]), np.array(table.counts, dtype=np.int64)
        # Of another project's task nothing is known but that its tables are whole.
        wanted = shape if made is None else made.get(table.name)
        whole = len(table.shape) <= MOST_AXES and min(shape, default=0) > 0
        whole = whole and prod(shape) == len(counts) and table.name not in one.metrics
        if not whole or shape != wanted:
            raise PeerError(
                "coordinator",
                f"round {one.round} has a table {table.name[:64]!a} of shape {shape} and"
                f" {len(counts)} counts, which the job does not make; ask its people for its"
                " release",
            )
        metrics[table.name] = counts.reshape(shape).tolist()
    return {
        "round": one.round,
        "members": list(one.members),
        "noisy": one.noisy,
        "metrics": metrics,
        "measures": {} if known is None else flattened(_said_of(metrics, known)),
    }


def _made(known: Evaluated) -> dict[str, tuple[int, ...]]:
    """By name, the shapes of all sums that a job makes."""
    return {
        spec.name if part.name == METRICS else f"{part.name}.{spec.name}": spec.shape
        for part in known.counting.parts()
        for spec in part.tensors
    }


def _said_of(metrics: Mapping[str, Any], known: Evaluated) -> dict[str, dict[str, Any]]:
    """What the sums say that the job makes; a coordinator may name any others."""
    own = {
        name: metrics[name]
        for name, shape in _made(known).items()
        if name in metrics and np.shape(metrics[name]) == shape
    }
    return known.counting.of_sums(own)


def in_words(closed: Mapping[str, Any], known: Evaluated | None) -> str:
    """What a round's sums say, on one line."""
    tested, measures = closed["metrics"].get("tested", 0), closed["measures"]
    if tested <= 0:
        return UNTOLD
    text = f"{tested:,} test records"
    if closed["noisy"]:
        text += f" ({NOISY})"
    if known is None:
        return f"{text}; {OTHERS}"
    return f"{text}; {in_numbers(measures, known.counting.score)}"


def in_numbers(measures: Mapping[str, float], score: ScoreForm) -> str:
    """What is said of both models, the score first; measures as ``flattened`` has them."""
    models = (
        f"{words} {', '.join(_said(measures, model, score))}" for model, words in WORDS.items()
    )
    constant = measures.get("majority.trained")
    same = [] if constant is None else [f"the same answer for all {constant:.1%}"]
    return "; ".join([*models, *same])


def _said(measures: Mapping[str, float], model: str, score: ScoreForm) -> Iterator[str]:
    yield from _own(measures, model, score)
    for key, value in measures.items():
        library, _, rest = key.partition(".")
        if library == TORCHMETRICS and (name := rest.removesuffix(f".{model}")) != rest:
            yield f"{name} {value:.4g}"


def _own(measures: Mapping[str, float], model: str, score: ScoreForm) -> Iterator[str]:
    for name in dict.fromkeys((score.key, *NAMES)):
        if (value := measures.get(key := f"{name}.{model}")) is None:
            continue
        # Of a histogram, the bins leave open what is between.
        if f"{key}.least" in measures:
            least, most = measures[f"{key}.least"], measures[f"{key}.most"]
            yield f"{NAMES[name]} {value:.3f} [{least:.3f}, {most:.3f}]"
        elif name == score.key:
            yield f"{score.name} {score.text(value)}"
        else:
            yield f"{NAMES[name]} {value:{FORMATS.get(name, '.4g')}}"


def class_table(closed: Mapping[str, Any], known: Evaluated | None) -> PrintedTable | None:
    """Each class, or label, of the newest round; None where the job has no confusion matrix."""
    if known is None:
        return None
    measures = _said_of(closed["metrics"], known)
    models = [measures.get(model, {}).get("classes") for model in WORDS]
    # All cells of a noisy matrix may be zero.
    if not all(models):
        return None
    columns = ["class", "records"]
    for words in WORDS.values():
        columns += [f"sensitivity {words}", "specificity", "precision", "F1"]
    rows = []
    for number, own in enumerate(zip(*models, strict=True)):
        name = known.class_names[number] if known.class_names else str(number)
        row = [name, f"{own[-1]['records']:,}"]
        for one in own:
            row += [_share(one[name]) for name in ("sensitivity", "specificity", "precision", "f1")]
        rows.append(row)
    title = f"Classes in round {closed['round']}"
    return PrintedTable(columns, rows, range(1, len(columns)), title=title)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
