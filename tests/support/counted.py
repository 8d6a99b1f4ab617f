"""Tally and measures of a few numbers, for tests that only look at how many records are right."""

import numpy as np

from staddle.algorithms.tasks.class_counting import ClassTally
from staddle.algorithms.tasks.counting import gathered
from staddle.simulator.run.history import Measured


def counts(records, correct):
    """Of a model on records of class 0, of two classes."""
    wrong = records - correct
    return ClassTally(np.array([[correct, 0], [records, 0], [correct, wrong]]))


def of_counts(rounds, measure, correct, records):
    """All records of a silo are of one class, so its balanced accuracy is its accuracy."""
    shares = {silo: correct[silo] / count for silo, count in records.items()}
    return Measured(rounds, measure, shares, dict(records), dict.fromkeys(records, 1.0), shares)


def of_scores(rounds, measure, scores, records, baselines=None):
    """In a task without classes; without ``baselines``, the same answer for all scores 5."""
    baselines = baselines or dict.fromkeys(records, 5.0)
    return Measured(rounds, measure, dict(scores), dict(records), baselines, dict.fromkeys(records))


def tallied(counting, outputs, y, pieces=1):
    """The tally of a model's outputs on records, counted in so many pieces."""
    marks = gathered(counting)
    for own, truth in zip(outputs.chunk(pieces), y.chunk(pieces), strict=True):
        for name, mark in counting.marks(own, truth).items():
            marks[name].append(mark.numpy())
    return counting.count(marks, [truth.numpy() for truth in y.chunk(pieces)])
