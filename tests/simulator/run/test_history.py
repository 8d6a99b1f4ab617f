"""Numbers worked by hand."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from support.counted import counts, of_counts, of_scores

from staddle.algorithms.course import SiloState
from staddle.algorithms.tasks.class_counting import ClassTally
from staddle.algorithms.training.silo_round import Evaluation, RoundReport, Seen
from staddle.simulator.run.history import of_look, of_round

STATE = SiloState({})


def test_each_average_counts_what_it_says_in_order_and_one_silo_has_no_spread():
    measured = of_counts(3, "all/trained", {"a": 1, "b": 9, "c": 10}, {"a": 2, "b": 10, "c": 40})
    assert measured.by_silo.tolist() == [0.5, 0.9, 0.25]
    assert (measured.macro, measured.micro) == (pytest.approx(1.65 / 3), 20 / 52)
    # of a population
    assert measured.spread == pytest.approx(sqrt((0.05**2 + 0.35**2 + 0.30**2) / 3))
    found = of_counts(1, "all/trained", {"a": 1, "b": 0}, {"b": 2, "a": 1}).by_silo.tolist()
    assert found == [0, 1]
    measured = of_counts(1, "all/trained", {"a": 1}, {"a": 3})
    assert (measured.spread, measured.macro, measured.micro) == (0, 1 / 3, 1 / 3)


def test_scores_that_are_no_shares_are_averaged_alike_and_have_no_balance():
    records = {"a": 1, "b": 3}
    measured = of_scores(2, "all/trained", {"b": 4.5, "a": 2.5}, records, {"a": 3.0, "b": 6.0})
    assert measured.by_silo.tolist() == [2.5, 4.5]
    assert (measured.macro, measured.micro, measured.constant) == (3.5, 16 / 4, 4.5)
    assert (measured.spread, measured.balanced) == (1, None)
    one = measured.of({"b"})
    assert one == of_scores(2, "all/trained", {"b": 4.5}, {"b": 3}, {"b": 6.0})
    some = replace(measured, recalls={"a": None, "b": 0.75})
    assert some.balanced == 0.75


def test_the_constant_is_of_each_silos_own_best_answer():
    own = ClassTally(np.array([[2, 1], [3, 7], [4, 6]]))
    other = ClassTally(np.array([[0, 0], [4, 0], [0, 4]]))
    _, measured = of_round(1, {
        "a": RoundReport(1, 9, own, own, None), "b": RoundReport(1, 9, other, other, None)
    })  # fmt: skip
    assert measured.scores == {"a": 0.3, "b": 0.0}
    assert measured.baselines == {"a": 0.7, "b": 1.0}
    assert measured.constant == pytest.approx(0.85)
    assert measured.recalls == {"a": pytest.approx((2 / 3 + 1 / 7) / 2), "b": 0.0}


def test_a_round_measures_its_cohort_and_validation_where_every_silo_has_records():
    reports = {
        "b": RoundReport(4, 30, counts(10, 6), counts(10, 8), 0.5),
        "a": RoundReport(4, 20, counts(5, 0), counts(5, 5), None),
    }
    before, after = of_round(4, reports)
    assert before == of_counts(4, "selected/before", {"b": 6, "a": 0}, {"b": 10, "a": 5})
    assert after == of_counts(4, "selected/after", {"b": 8, "a": 5}, {"b": 10, "a": 5})
    assert (before.macro, before.micro) == (0.3, 0.4)
    looks = {
        "a": Evaluation(
            STATE, Seen(counts(10, 1), counts(10, 2)), Seen(counts(5, 3), counts(5, 4))
        ),
        "b": Evaluation(STATE, Seen(counts(20, 7), counts(20, 8))),
    }
    assert [measured.measure for measured in of_look(2, looks)] == ["all/aggregated", "all/trained"]


def test_a_look_measures_all_silos_on_each_side():
    looks = {
        "a": Evaluation(
            STATE, Seen(counts(10, 1), counts(10, 2)), Seen(counts(5, 3), counts(5, 4))
        ),
        "b": Evaluation(
            STATE, Seen(counts(20, 7), counts(20, 8)), Seen(counts(6, 5), counts(6, 6))
        ),
    }
    assert of_look(2, looks) == (
        of_counts(2, "all/aggregated", {"a": 1, "b": 7}, {"a": 10, "b": 20}),
        of_counts(2, "all/trained", {"a": 2, "b": 8}, {"a": 10, "b": 20}),
        of_counts(2, "validation/aggregated", {"a": 3, "b": 5}, {"a": 5, "b": 6}),
        of_counts(2, "validation/trained", {"a": 4, "b": 6}, {"a": 5, "b": 6}),
    )
