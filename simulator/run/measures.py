"""The measures in words: a few for a picture, and sentences that say exactly what was counted."""

from .history import Measure
from .scores import Average, Choice

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
    "all/aggregated": "every silo, whether or not it took part in the round, with the model that it would have if one "
    "more round began and delivered what the rounds so far came to, on its test records",
    "all/trained": "every silo with the model that its own last local training left, or its initial model where it "
    "never trained, on its test records",
    "selected/before": "the silos of the round's cohort, each with the model that it has in that round after what came "
    "down and before it trains, on its test records",
    "selected/after": "the same silos at the end of their local training in that round, before anything is aggregated, "
    "on their test records",
    "validation/aggregated": "as all/aggregated, on the silo's validation records",
    "validation/trained": "as all/trained, on the silo's validation records",
}

AVERAGES: dict[Average, str] = {
    "macro": "the mean of the silos' accuracies, each silo counting the same",
    "micro": "the share of all these silos' records that are right, each record counting the same",
}

CHOICES: dict[Choice, str] = {
    "last": "after the last round",
    "best by test": "the highest that was ever measured on the test records themselves: what many papers print, and "
    "too high, since nobody could have chosen that round without those records",
    "best by validation": "on test records, after as many rounds as were best on validation records, by the same kind "
    "of model and average",
}
