"""The finished runs of a simulation as a table, and as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...simulator.report.finished_runs import Recorded, load_runs
from ...simulator.run.history import Measure
from ...simulator.run.scores import Named, Spread, over_seeds, scores

SHOWN: tuple[Measure, ...] = ("all/trained", "all/aggregated")
MEANING = (
    "mean accuracy of the silos on their test records, after the last round (mean ± deviation over"
    " seeds)"
)
COLUMNS = ("method", "seeds", "rounds", *SHOWN)


def finished(folder: Path) -> list[Recorded]:
    """The runs in an output folder that reached their last round."""
    return [run for run in load_runs(folder) if run.finished]


def rows(recorded: Sequence[Recorded]) -> list[list[str]]:
    """One row per method: the mean over silos after the last round, in per cent, over its seeds.

    A score that is missing is "-".
    """
    found = []
    for label, own in _by_label(recorded).items():
        spreads = _over(own)
        shown = [_shown(spreads.get((measure, "macro", "last"))) for measure in SHOWN]
        found.append([label, str(len(own)), str(own[0].rounds), *shown])
    return found


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
