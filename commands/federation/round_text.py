"""A closed round as plain values, and in words: how good its models were on test records."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...algorithms.evaluation.measures import of_sums
from ...proto import operations_pb2 as pb
from ..console.printer import PrintedTable

# zeros leave of a private job without metrics_sigma
UNTOLD = "the silos keep their test counts to themselves"
NOISY = "with noise, since the job is private"
WORDS = {"delivered": "as delivered", "trained": "as trained"}


def round_fields(rounds: Sequence[pb.ClosedRound]) -> list[dict[str, Any]]:
    """Closed rounds as plain values, in ascending order.

    ``metrics`` are sums over the members; tables, as nested lists, are in the newest round alone.
    ``measures`` are what they say.
    """
    closed = []
    for one in rounds:
        metrics: dict[str, Any] = dict(sorted(one.metrics.items()))
        for table in one.tables:
            metrics[table.name] = np.array(table.counts).reshape(table.shape).tolist()
        measures = dict(sorted(one.measures.items()))
        closed.append(
            {
                "round": one.round,
                "members": list(one.members),
                "metrics": metrics,
                "measures": measures,
                "noisy": one.noisy,
            }
        )
    return closed


def in_words(closed: Mapping[str, Any]) -> str:
    """What a round's sums say, on one line."""
    sums, measures = closed["metrics"], closed["measures"]
    tested = sums.get("tested", 0)
    if not tested:
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
    names = {"balanced_accuracy": "balanced", "auroc": "AUROC", "auprc": "AUPRC"}
    for name, words in names.items():
        key = f"{name}.{model}"
        if key not in measures:
            continue
        value = f"{measures[key]:.1%}" if name == "balanced_accuracy" else f"{measures[key]:.3f}"
        if f"{key}.least" in measures:
            # Half of what the bins leave open.
            value += f" ± {(measures[f'{key}.most'] - measures[f'{key}.least']) / 2:.3f}"
        yield f"{words} {value}"


def class_table(closed: Mapping[str, Any]) -> PrintedTable | None:
    """Each class of the newest round; None where the job has no confusion matrix."""
    measures = of_sums(closed["metrics"])
    if "classes" not in measures.get("trained", {}):
        return None
    columns = ["class", "records"]
    for words in WORDS.values():
        columns += [f"sensitivity {words}", "specificity", "F1"]
    rows = []
    models = [measures[model]["classes"] for model in WORDS]
    for number, own in enumerate(zip(*models, strict=True)):
        row = [str(number), f"{own[-1]['records']:,}"]
        for one in own:
            row += [_share(one[name]) for name in ("sensitivity", "specificity", "f1")]
        rows.append(row)
    right = range(1, len(columns))
    return PrintedTable(columns, rows, right, title=f"Classes in round {closed['round']}")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
