"""The finished runs of a simulation as a table, and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from ...algorithms.tasks.counting import ScoreForm
from ...simulator.report.finished_runs import Recorded, by_label
from ...simulator.report.ranking import TOO_GOOD, Ranking, cells, chosen_by
from ...simulator.run.history import Measure
from ...simulator.run.scores import Average, Choice, Named, Spread, over_seeds, scores

SHOWN: tuple[Measure, ...] = ("all/trained", "all/aggregated")
AVERAGES: tuple[Average, ...] = ("macro", "balanced")
LAST: tuple[Choice, ...] = ("last",)
COLUMNS: tuple[Named, ...] = tuple(product(SHOWN, AVERAGES, LAST))


@dataclass(frozen=True)
class ResultsTable:
    """The columns and rows of a table of methods, and what its numbers are."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    meaning: str


def results_table(recorded: Sequence[Recorded]) -> ResultsTable:
    """One row per method: the means over silos after the last round, over its seeds.

    The last row is of answers that are the same for all records of a silo. A score that is missing
    is "-". There is at least one run; all are of one task.
    """
    form, labels = recorded[0].form, by_label(recorded)
    spreads = {label: _over(own) for label, own in labels.items()}
    # Without classes nothing is balanced by them.
    measured = set().union(*spreads.values())
    shown = [named for named in COLUMNS if named in measured]
    rows = []
    for label, own in labels.items():
        cells = (_shown(spreads[label].get(named), form) for named in shown)
        rows.append([label, str(len(own)), str(own[0].rounds), *cells])
    # All runs of a folder have the same test records.
    looks = (one for run in recorded for one in run.history if one.measure in SHOWN)
    for look in islice(looks, 1):
        constant = form.cell(look.constant, None)
        cells = (constant if average == "macro" else "-" for _, average, _ in shown)
        rows.append([form.constant, "-", "-", *cells])
    names = (measure if average == "macro" else average for measure, average, _ in shown)
    meaning = (
        f"mean over the silos: {form.name} on their test records, {form.measured_in}, after the"
        " last round (mean ± deviation over seeds)"
    )
    if any(average == "balanced" for _, average, _ in shown):
        meaning += "; balanced: each class of a silo counts the same"
    return ResultsTable(("method", "seeds", "rounds", *names), rows, meaning)


def best_table(ranking: Ranking, form: ScoreForm) -> ResultsTable:
    """One row per method of a sweep: its best variant, and how many were ranked."""
    rows = []
    columns = ["method", "variants", "best"]
    for method, own in ranking.methods.items():
        best = own[0]
        rows.append([method, str(len(own)), best.variant.label, *cells(best, form)])
    columns += best.scores
    meaning = f"best of the variants: {chosen_by(ranking, form)}; sweep.csv has all"
    if ranking.by == "test":
        meaning += f"; {TOO_GOOD}"
    if ranking.unfinished:
        meaning += f"; without a finished run: {', '.join(ranking.unfinished)}"
    return ResultsTable(columns, rows, meaning)


def document(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Every score of every method over its seeds, and of each of its runs.

    Plain values for JSON; ``deviation`` is None for a single seed.
    """
    return [_method(label, own) for label, own in by_label(recorded).items()]


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
    for name, score in scores(run.history, higher=run.form.higher).items():
        row = {**_named(name), "rounds": score.rounds, "value": score.value}
        own.append(row)
    return {
        "seed": run.seed,
        "folder": str(run.folder),
        "scores": own,
    }


def _over(own: Sequence[Recorded]) -> dict[Named, Spread]:
    return over_seeds([scores(run.history, higher=run.form.higher) for run in own])


def _named(name: Named) -> dict[str, str]:
    return dict(zip(("measure", "average", "choice"), name, strict=True))


def _shown(found: Spread | None, form: ScoreForm) -> str:
    return "-" if found is None else form.cell(found.mean, found.deviation)
