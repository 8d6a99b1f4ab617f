"""The numbers that a run is known by: each measure at its last round, and at its best, and how that was chosen.

"best by test" is the highest accuracy that was ever seen on the test records themselves, which nobody could have chosen
without them: it is what many papers print, and too high. "best by validation" is the test accuracy after as many rounds
as were best on validation records. Of several best the earliest counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Literal, TypeAlias, get_args

from .history import Measure, Measured

Average = Literal["macro", "micro"]  # of the silos' accuracies; over all their records
Choice = Literal["last", "best by test", "best by validation"]

CHOOSER: Mapping[Measure, Measure] = {  # by what a measure's best round is chosen without its test records
    "all/aggregated": "validation/aggregated",
    "all/trained": "validation/trained",
    "validation/aggregated": "validation/aggregated",
    "validation/trained": "validation/trained",
}

Named: TypeAlias = tuple[Measure, Average, Choice]


@dataclass(frozen=True)
class Score:
    """An accuracy in 0…1, and after how many rounds."""

    rounds: int
    value: float


@dataclass(frozen=True)
class Spread:
    """Scores of several seeds: their mean, and their standard deviation, of a sample; None of one seed."""

    seeds: int
    mean: float
    deviation: float | None


def scores(history: Iterable[Measured]) -> dict[Named, Score]:
    """All that there are of a run, measure by measure."""
    taken: dict[Measure, list[Measured]] = {measure: [] for measure in get_args(Measure)}
    for one in history:
        taken[one.measure].append(one)
    return {
        (measure, average, choice): score
        for measure, own in taken.items()
        if own
        for average in get_args(Average)
        for choice, score in _chosen(measure, average, own, taken).items()
    }


def over_seeds(runs: Sequence[Mapping[Named, Score]]) -> dict[Named, Spread]:
    """Of one method's scores with several seeds: those that all of them have."""
    common = [named for named in runs[0] if all(named in run for run in runs)] if runs else []
    return {named: spread([run[named].value for run in runs]) for named in common}


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation of at least one value."""
    mean = fmean(values)
    if len(values) == 1:
        return Spread(1, mean, None)
    return Spread(len(values), mean, sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def _chosen(
    measure: Measure, average: Average, own: Sequence[Measured], taken: Mapping[Measure, Sequence[Measured]]
) -> dict[Choice, Score]:
    values = {one.rounds: _value(one, average) for one in own}
    last = max(values)
    found: dict[Choice, int] = {"last": last}
    if not measure.startswith("validation/"):
        found["best by test"] = _best(values)
    choosing = {one.rounds: _value(one, average) for one in taken.get(CHOOSER.get(measure, measure), ())}
    if measure in CHOOSER and (shared := {rounds: value for rounds, value in choosing.items() if rounds in values}):
        found["best by validation"] = _best(shared)
    return {choice: Score(rounds, values[rounds]) for choice, rounds in found.items()}


def _best(values: Mapping[int, float]) -> int:
    """The rounds of the highest value, the fewest where there are several."""
    return min(values, key=lambda rounds: (-values[rounds], rounds))


def _value(one: Measured, average: Average) -> float:
    return one.macro if average == "macro" else one.micro
