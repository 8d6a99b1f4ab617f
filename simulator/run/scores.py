"""A run's scores: each measure at its last round and at its best, and how the best was chosen.

"best by test" is the best score that was ever seen on the test records themselves. Nobody
could have chosen that round without them: it is what many papers print, and too high. "best by
validation" is the test score after as many rounds as were best on validation records. The
earliest of several best rounds counts.

The measures also stand here in words: a few for a picture, and sentences that say exactly what was
counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import fmean
from typing import Literal, TypeAlias, get_args

from .history import Measure, Measured

# of the silos' scores; over all their records; of the silos' balanced scores
Average = Literal["macro", "micro", "balanced"]
Choice = Literal["last", "best by test", "best by validation"]

# by what a measure's best round is chosen without its test records
CHOOSER: Mapping[Measure, Measure] = {
    "all/aggregated": "validation/aggregated",
    "all/trained": "validation/trained",
    "validation/aggregated": "validation/aggregated",
    "validation/trained": "validation/trained",
}

AVERAGES: dict[Average, str] = {
    "macro": "the mean of the silos' scores, each silo counting the same",
    "micro": "the mean of the silos' scores by their records, each record counting the same",
    "balanced": (
        "the mean of the silos' balanced accuracies, which are means of the shares that are right"
        " of each class the silo has, each class counting the same"
    ),
}

Named: TypeAlias = tuple[Measure, Average, Choice]


@dataclass(frozen=True)
class Score:
    """A value of the task's score, and after how many rounds.

    ``rounds`` counts rounds that train.
    """

    rounds: int
    value: float


@dataclass(frozen=True)
class Spread:
    """Mean of ``seeds`` scores, and their standard deviation (of a sample; None for one)."""

    seeds: int
    mean: float
    deviation: float | None


def scores(history: Iterable[Measured], *, higher: bool = True) -> dict[Named, Score]:
    """All scores of a run, measure by measure; the best is the ``higher`` one, or the lower.

    Measures that were never taken are left out.
    """
    # every measure has an entry, in the order of the tables, so that all runs list them alike
    looks: dict[Measure, dict[int, Measured]] = {measure: {} for measure in get_args(Measure)}
    for one in history:
        looks[one.measure][one.rounds] = one

    found: dict[Named, Score] = {}
    # Each average has its own best round.
    for measure, average in product(looks, AVERAGES):
        values = _values(looks[measure], average)
        for choice, rounds in _chosen(looks, measure, average, higher).items():
            found[measure, average, choice] = Score(rounds, values[rounds])
    return found


def _chosen(
    looks: Mapping[Measure, Mapping[int, Measured]],
    measure: Measure,
    average: Average,
    higher: bool,
) -> dict[Choice, int]:
    """The round of each choice; nothing where this was never measured."""
    values = _values(looks[measure], average)
    if not values:
        return {}

    chosen: dict[Choice, int] = {"last": max(values)}
    # validation records are for choosing: their own best round is "best by validation"
    if not measure.startswith("validation/"):
        chosen["best by test"] = _best(values, higher)

    if measure in CHOOSER:
        validated = _values(looks[CHOOSER[measure]], average)
        # a round counts only where both were measured
        for rounds in validated.keys() - values.keys():
            del validated[rounds]
        if validated:
            chosen["best by validation"] = _best(validated, higher)
    return chosen


def over_seeds(runs: Sequence[Mapping[Named, Score]]) -> dict[Named, Spread]:
    """One method's scores over its seeds, as far as all of them have a score.

    Each of ``runs`` has the ``scores`` of one seed. Empty without runs.
    """
    if not runs:
        return {}
    first, *others = runs
    # A mean over only some of the seeds would not be comparable.
    common = set(first).intersection(*others)
    found = {}
    for named in filter(common.__contains__, first):
        values = [run[named].value for run in runs]
        found[named] = spread(values)
    return found


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation of at least one value."""
    mean = fmean(values)
    seeds = len(values)
    if seeds == 1:
        return Spread(1, mean, None)

    # of a sample: the seeds stand for all seeds that might have been drawn
    squares = sum((value - mean) ** 2 for value in values)
    return Spread(seeds, mean, sqrt(squares / (seeds - 1)))


def _values(looks: Mapping[int, Measured], average: Average) -> dict[int, float]:
    found = {rounds: getattr(look, average) for rounds, look in looks.items()}
    # Without classes nothing is balanced by them.
    return {rounds: value for rounds, value in found.items() if value is not None}


def _best(values: Mapping[int, float], higher: bool) -> int:
    """The rounds of the best value, the fewest where there are several."""
    sign = -1 if higher else 1
    return min(values, key=lambda rounds: (sign * values[rounds], rounds))


ALL: tuple[Measure, ...] = ("all/aggregated", "all/trained")  # what methods are compared by

TITLES: dict[Measure, str] = {
    "selected/before": "cohort, before local training",
    "selected/after": "cohort, after local training",
    "all/aggregated": "all silos, model as delivered",
    "all/trained": "all silos, model as last trained",
    "validation/aggregated": "all silos, model as delivered, validation records",
    "validation/trained": "all silos, model as last trained, validation records",
}

DEFINITIONS: dict[Measure, str] = {
    "all/aggregated": (
        "every silo, whether or not it took part in the round, with the model that one more round"
        " would deliver to it, on its test records"
    ),
    "all/trained": (
        "every silo with the model after its own last local training, or its initial model if it"
        " never trained, on its test records"
    ),
    "selected/before": (
        "the silos of the round's cohort, each with its model after that round's delivery and"
        " before local training, on its test records"
    ),
    "selected/after": (
        "the same silos at the end of their local training in that round, before anything is"
        " aggregated, on their test records"
    ),
    "validation/aggregated": "as all/aggregated, on the silo's validation records",
    "validation/trained": "as all/trained, on the silo's validation records",
}

CHOICES: dict[Choice, str] = {
    "last": "after the last round",
    "best by test": (
        "the best value ever measured on the test records: many papers print it, but it is too"
        " good, since nobody could have chosen that round without those records"
    ),
    "best by validation": (
        "on test records, after the round that was best on validation records, for the same kind of"
        " model and average"
    ),
}
