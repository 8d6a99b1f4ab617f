"""A closed round as plain values, and in words: how good its models were on test records."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ...algorithms.evaluation.measures import numbers, of_sums
from ...errors import PeerError
from ...proto import operations_pb2 as pb
from ..console.printer import PrintedTable

# zeros leave of a private job without metrics_sigma
UNTOLD = "the silos keep their test counts to themselves"
NOISY = "with noise, since the job is private"
WORDS = {"delivered": "as delivered", "trained": "as trained"}


def round_fields(rounds: Sequence[pb.ClosedRound]) -> list[dict[str, Any]]:
    """Closed rounds as plain values, in ascending order.

    ``metrics`` are sums over the members; tables, as nested lists, are in the newest round alone.
    ``measures`` are what they say. PeerError for tables that are none.
    """
    return [_fields(one) for one in rounds]


def _fields(one: pb.ClosedRound) -> dict[str, Any]:
    metrics: dict[str, Any] = dict(sorted(one.metrics.items()))
    for table in one.tables:
        part, _, model = table.name.partition(".")
        shape, counts = tuple(table.shape), np.array(table.counts, dtype=np.int64)
        sound = {"confusion": _is_confusion, "scores": _is_scores}.get(part)
        if model not in WORDS or sound is None or not sound(shape) or prod(shape) != len(counts):
            raise PeerError(
                "coordinator",
                f"round {one.round} has a table {table.name[:64]!a} of shape {shape} and"
                f" {len(counts)} counts, which no job makes; ask its people for its release",
            )
        metrics[table.name] = counts.reshape(shape).tolist()
    _check_pairs(one)
    return {
        "round": one.round,
        "members": list(one.members),
        "noisy": one.noisy,
        "metrics": metrics,
        "measures": numbers(of_sums(metrics)),
    }


def _check_pairs(one: pb.ClosedRound) -> None:
    """Both models are tested on the same classes."""
    shapes = {table.name: tuple(table.shape) for table in one.tables}
    for part in ("confusion", "scores"):
        delivered, trained = (shapes.get(f"{part}.{model}") for model in WORDS)
        if delivered != trained:
            raise PeerError(
                "coordinator",
                f"round {one.round} has tables {part!r} of shapes {delivered} and {trained}, which"
                " no job makes; ask its people for its release",
            )


def _is_confusion(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] >= 2


def _is_scores(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] >= 1 and shape[1] == 2 <= shape[2]


def in_words(closed: Mapping[str, Any]) -> str:
    """What a round's sums say, on one line."""
    sums, measures = closed["metrics"], closed["measures"]
    tested = sums.get("tested", 0)
    if not measures:
        return UNTOLD
    text = f"{tested:,} test records"
    if closed["noisy"]:
        text += f" ({NOISY})"
    if "majority.trained" in measures:
        text += f", {measures['majority.trained']:.1%} of one class"
    for model, words in WORDS.items():
        text += f"; {words} {measures[f'accuracy.{model}']:.1%} right"
        if own := ", ".join(_further(measures, model)):
            text += f" ({own})"
    return text


def _further(measures: Mapping[str, float], model: str) -> Iterator[str]:
    if f"balanced_accuracy.{model}" in measures:
        yield f"balanced {measures[f'balanced_accuracy.{model}']:.1%}"
    names = {"auroc": "AUROC", "auprc": "AUPRC", "calibration_error": "calibration error"}
    for name, words in names.items():
        key = f"{name}.{model}"
        if key in measures:
            # The bins leave open what is between.
            least, most = measures[f"{key}.least"], measures[f"{key}.most"]
            yield f"{words} {measures[key]:.3f} [{least:.3f}, {most:.3f}]"


def class_table(closed: Mapping[str, Any]) -> PrintedTable | None:
    """Each class of the newest round; None where the job has no confusion matrix."""
    measures = of_sums(closed["metrics"])
    models = [measures.get(model, {}).get("classes") for model in WORDS]
    # All cells of a noisy matrix may be zero.
    if not all(models):
        return None
    columns = ["class", "records"]
    for words in WORDS.values():
        columns += [f"sensitivity {words}", "specificity", "precision", "F1"]
    rows = []
    for number, own in enumerate(zip(*models, strict=True)):
        row = [str(number), f"{own[-1]['records']:,}"]
        for one in own:
            row += [_share(one[name]) for name in ("sensitivity", "specificity", "precision", "f1")]
        rows.append(row)
    title = f"Classes in round {closed['round']}"
    return PrintedTable(columns, rows, range(1, len(columns)), title=title)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
