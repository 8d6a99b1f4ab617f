"""The finished runs of a simulation as a table, and as JSON."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...simulator.report.finished_runs import Recorded, load_runs
from ...simulator.run.history import Measure
from ...simulator.run.scores import Average, Named, Spread, over_seeds, scores

SHOWN: tuple[Measure, ...] = ("all/trained", "all/aggregated")
AVERAGES: tuple[Average, ...] = ("macro", "balanced")
SCORES = tuple(product(SHOWN, AVERAGES))
MEANING = (
    "mean of the silos' accuracies on their test records, after the last round (mean ± deviation"
    " over seeds); balanced: each class of a silo counts the same"
)
COLUMNS = ("method", "seeds", "rounds", SHOWN[0], "balanced", SHOWN[1], "balanced")
MAJORITY = "always the most frequent class"


def finished(folder: Path) -> list[Recorded]:
    """The runs in an output folder that reached their last round."""
    return [run for run in load_runs(folder) if run.finished]


def rows(recorded: Sequence[Recorded]) -> list[list[str]]:
    """One row per method: the means over silos after the last round, in per cent, over its seeds.

    The last row is of answers that are the same for all records of a silo. A score that is missing
    is "-".
    """
    found = []
    for label, own in _by_label(recorded).items():
        spreads = _over(own)
        shown = [_shown(spreads.get((measure, average, "last"))) for measure, average in SCORES]
        found.append([label, str(len(own)), str(own[0].rounds), *shown])
    if majority := _majority(recorded):
        found.append([MAJORITY, "-", "-", majority, "-", majority, "-"])
    return found


def _majority(recorded: Sequence[Recorded]) -> str:
    """The accuracy of the same answer for all records of a silo; empty if nothing was measured."""
    # All runs of a folder have the same test records.
    looks = (one for run in recorded for one in run.history if one.measure in SHOWN)
    found = next(looks, None)
    return "" if found is None else f"{found.majority:.2%}"


def document(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Every score of every method over its seeds, and of each of its runs.

    Plain values for JSON; ``deviation`` is None for a single seed.
    """
    return [_method(label, own) for label, own in _by_label(recorded).items()]


def _method(label: str, own: Sequence[Recorded]) -> dict[str, Any]:
    over = []
    for name, found in _over(own).items():
        score = {
            **_named(name),
            "seeds": found.seeds,
            "mean": found.mean,
            "deviation": found.deviation,
        }
        over.append(score)
    return {
        "label": label,
        "method": own[0].method,
        "rounds": own[0].rounds,
        "scores": over,
        "runs": list(map(_run, own)),
    }


def _run(run: Recorded) -> dict[str, Any]:
    own = []
    for name, score in scores(run.history).items():
        row = {**_named(name), "rounds": score.rounds, "value": score.value}
        own.append(row)
    return {
        "seed": run.seed,
        "folder": str(run.folder),
        "scores": own,
    }


def _by_label(recorded: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    found: dict[str, list[Recorded]] = {}
    for run in recorded:
        found.setdefault(run.label, []).append(run)
    return found


def _over(own: Sequence[Recorded]) -> dict[Named, Spread]:
    return over_seeds([scores(run.history) for run in own])


def _named(name: Named) -> dict[str, str]:
    return dict(zip(("measure", "average", "choice"), name, strict=True))


def _shown(found: Spread | None) -> str:
    if found is None:
        return "-"
    # A single seed has no deviation.
    if found.deviation is None:
        return f"{found.mean:.2%}"
    return f"{found.mean:.2%} ± {found.deviation * 100:.2f}"
