"""The finished runs of a simulation as a table, and as JSON."""

from collections.abc import Sequence
from typing import Any

from ...simulator.report.finished_runs import Recorded
from ...simulator.run.history import Measure
from ...simulator.run.scores import Named, Spread, over_seeds, scores

SHOWN: tuple[Measure, ...] = ("all/trained", "all/aggregated")
MEANING = (
    "mean accuracy of the silos on their test records, after the last round (mean ± deviation over"
    " seeds)"
)
COLUMNS = ("method", "seeds", "rounds", *SHOWN)


def rows(recorded: Sequence[Recorded]) -> list[list[str]]:
    """A method a row: the mean over silos after the last round, in per cent, over its seeds."""
    return [
        [
            label,
            str(len(own)),
            str(own[0].rounds),
            *(_shown(_over(own).get((measure, "macro", "last"))) for measure in SHOWN),
        ]
        for label, own in _by_label(recorded).items()
    ]


def document(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Every score of every method over its seeds, and of each of its runs."""
    return [
        {
            "label": label,
            "method": own[0].method,
            "rounds": own[0].rounds,
            "scores": [
                {
                    **_named(name),
                    "seeds": found.seeds,
                    "mean": found.mean,
                    "deviation": found.deviation,
                }
                for name, found in _over(own).items()
            ],
            "runs": [
                {
                    "seed": run.seed,
                    "folder": str(run.folder),
                    "scores": [
                        {**_named(name), "rounds": score.rounds, "value": score.value}
                        for name, score in scores(run.history).items()
                    ],
                }
                for run in own
            ],
        }
        for label, own in _by_label(recorded).items()
    ]


def _by_label(recorded: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Finished runs."""
    found: dict[str, list[Recorded]] = {}
    for run in recorded:
        if run.finished:
            found.setdefault(run.label, []).append(run)
    return found


def _over(own: Sequence[Recorded]) -> dict[Named, Spread]:
    return over_seeds([scores(run.history) for run in own])


def _named(name: Named) -> dict[str, str]:
    return dict(zip(("measure", "average", "choice"), name, strict=True))


def _shown(found: Spread | None) -> str:
    if found is None:
        return "-"
    return (
        f"{found.mean:.2%}"
        if found.deviation is None
        else f"{found.mean:.2%} ± {found.deviation * 100:.2f}"
    )
