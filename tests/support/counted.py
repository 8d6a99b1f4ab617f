"""Tally and measures of a few numbers, for tests that only look at how many records are right."""

import numpy as np

from staddle.algorithms.evaluation.counting import Tally
from staddle.simulator.run.history import Measured


def counts(records, correct):
    """Of a model on records of class 0, of two classes."""
    wrong = records - correct
    return Tally(np.array([[correct, 0], [records, 0], [correct, wrong]]))


def of_counts(rounds, measure, correct, records):
    """All records of a silo are of one class, so its balanced accuracy is its accuracy."""
    recalls = {silo: correct[silo] / count for silo, count in records.items()}
    return Measured(rounds, measure, dict(correct), dict(records), dict(records), recalls)
