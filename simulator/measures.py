"""The measures in words: a few for a picture, and a sentence that says exactly what was counted."""

from .history import Measure

TITLES: dict[Measure, str] = {
    "selected/before": "cohort, before local training",
    "selected/after": "cohort, after local training",
    "all/aggregated": "all silos, model as delivered",
    "all/trained": "all silos, model as trained last",
    "validation/aggregated": "all silos, model as delivered, validation records",
    "validation/trained": "all silos, model as trained last, validation records",
}

DEFINITIONS: dict[Measure, str] = {
    "selected/before": "the silos of the round's cohort, each with the model that it has after what came down and "
    "before it trains in that round, on its test records",
    "selected/after": "the same silos at the end of their local training in that round, before anything is aggregated, "
    "on their test records",
    "all/aggregated": "every silo, whether it took part in the round or not, with the model that it would have if a "
    "further round delivered to it what the rounds so far came to, on its test records",
    "all/trained": "every silo, with its own model as its last local training left it (its initial model where it has "
    "not trained yet), on its test records",
    "validation/aggregated": "as all/aggregated, on the silo's validation records",
    "validation/trained": "as all/trained, on the silo's validation records",
}
