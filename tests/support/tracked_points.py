"""Points of a run, as trackers are given them."""

from staddle.simulator.tracking.points import Point

SCORE = "all/trained/accuracy.macro"


def point(rounds, value):
    return Point(rounds, {SCORE: value, "loss": 1 / rounds})
