"""The numbers that a run is known by: each measure at its last round, and at its best, and how that
was chosen.

"best by test" is the highest accuracy that was ever seen on the test records themselves, which
nobody could have chosen without them: it is what many papers print, and too high. "best by
validation" is the test accuracy after as many rounds as were best on validation records. Of several
best the earliest counts.

The measures in words: a few for a picture, and sentences that say exactly what was counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Literal, TypeAlias, get_args

from .history import Measure, Measured

Average = Literal["macro", "micro"]  # of the silos' accuracies; over all their records
Choice = Literal["last", "best by test", "best by validation"]

# by what a measure's best round is chosen without its test records
CHOOSER: Mapping[Measure, Measure] = {
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
    """Scores of several seeds: their mean, and their standard deviation, of a sample.

    None of one seed.
    """

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
    return Spread(
        len(values), mean, sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    )


def _chosen(
    measure: Measure,
    average: Average,
    own: Sequence[Measured],
    taken: Mapping[Measure, Sequence[Measured]],
) -> dict[Choice, Score]:
    values = {one.rounds: _value(one, average) for one in own}
    last = max(values)
    found: dict[Choice, int] = {"last": last}
    if not measure.startswith("validation/"):
        found["best by test"] = _best(values)
    choosing = {
        one.rounds: _value(one, average) for one in taken.get(CHOOSER.get(measure, measure), ())
    }
    if measure in CHOOSER and (
        shared := {rounds: value for rounds, value in choosing.items() if rounds in values}
    ):
        found["best by validation"] = _best(shared)
    return {choice: Score(rounds, values[rounds]) for choice, rounds in found.items()}


def _best(values: Mapping[int, float]) -> int:
    """The rounds of the highest value, the fewest where there are several."""
    return min(values, key=lambda rounds: (-values[rounds], rounds))


def _value(one: Measured, average: Average) -> float:
    return one.macro if average == "macro" else one.micro


ALL: tuple[Measure, ...] = ("all/aggregated", "all/trained")  # what methods are compared by

TITLES: dict[Measure, str] = {
    "selected/before": "cohort, before local training",
    "selected/after": "cohort, after local training",
    "all/aggregated": "all silos, model as delivered",
    "all/trained": "all silos, model as trained last",
    "validation/aggregated": "all silos, model as delivered, validation records",
    "validation/trained": "all silos, model as trained last, validation records",
}

DEFINITIONS: dict[Measure, str] = {
    "all/aggregated": (
        "every silo, whether or not it took part in the round, with the model that it would have if"
        " one more round began and delivered what the rounds so far came to, on its test records"
    ),
    "all/trained": (
        "every silo with the model that its own last local training left, or its initial model"
        " where it never trained, on its test records"
    ),
    "selected/before": (
        "the silos of the round's cohort, each with the model that it has in that round after what"
        " came down and before it trains, on its test records"
    ),
    "selected/after": (
        "the same silos at the end of their local training in that round, before anything is"
        " aggregated, on their test records"
    ),
    "validation/aggregated": "as all/aggregated, on the silo's validation records",
    "validation/trained": "as all/trained, on the silo's validation records",
}

AVERAGES: dict[Average, str] = {
    "macro": "the mean of the silos' accuracies, each silo counting the same",
    "micro": "the share of all these silos' records that are right, each record counting the same",
}

CHOICES: dict[Choice, str] = {
    "last": "after the last round",
    "best by test": (
        "the highest that was ever measured on the test records themselves: what many papers print,"
        " and too high, since nobody could have chosen that round without those records"
    ),
    "best by validation": (
        "on test records, after as many rounds as were best on validation records, by the same kind"
        " of model and average"
    ),
}
