"""The table of finished runs, from histories of a few numbers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.counted import of_counts, of_scores

from staddle.algorithms.tasks.class_counting import ACCURACY
from staddle.algorithms.tasks.counting import ScoreForm
from staddle.commands.simulate.results import document, results_table

DAYS = ScoreForm("mae", "MAE", "always the median", share=False, higher=False, unit="days")
RECORDS = {"a": 10, "b": 30}


def run(label, seed, history, form=ACCURACY):
    return SimpleNamespace(
        label=label, seed=seed, history=history, form=form, method="fedavg", rounds=4,
        folder=Path(label),
    )  # fmt: skip


def right(a, b, rounds=4, measure="all/trained"):
    return of_counts(rounds, measure, {"a": a, "b": b}, RECORDS)


def missed(a, b, rounds=4, measure="all/trained"):
    return of_scores(rounds, measure, {"a": a, "b": b}, RECORDS, {"a": 4.0, "b": 6.0})


def test_accuracies_are_in_percent_with_what_is_missing_and_the_same_answer_for_all():
    delivered = right(5, 15, measure="all/aggregated")
    found = results_table([
        run("one", 1, [right(1, 1, 2), delivered, right(5, 30)]),
        run("one", 2, [delivered, right(7, 30)]),
        run("other", 1, [right(10, 0)]),
    ])  # fmt: skip
    both = ("all/trained", "balanced", "all/aggregated", "balanced")
    assert found.columns == ("method", "seeds", "rounds", *both)
    trained, same = "80.00 ± 7.07", "50.00 ± 0.00"
    assert [list(row) for row in found.rows] == [
        ["one", "2", "4", trained, trained, same, same],
        ["other", "1", "4", "50.00", "50.00", "-", "-"],
        ["always the most frequent class", "-", "-", "100.00", "-", "100.00", "-"],
    ]
    assert found.meaning == (
        "mean over the silos: accuracy on their test records, in percent, after the last round"
        " (mean ± deviation over seeds); balanced: each class of a silo counts the same"
    )


def test_scores_without_classes_are_in_their_unit_and_nothing_is_balanced():
    runs = [
        run("one", 1, [missed(2.0, 3.0, 2), missed(2.0, 4.0)], DAYS),
        run("one", 2, [missed(2.0, 3.0, 2), missed(4.0, 4.0)], DAYS),
    ]
    found = results_table(runs)
    assert found.columns == ("method", "seeds", "rounds", "all/trained")
    assert [list(row) for row in found.rows] == [
        ["one", "2", "4", "3.5 ± 0.71"],
        ["always the median", "-", "-", "5"],
    ]
    assert found.meaning == (
        "mean over the silos: MAE on their test records, in days, after the last round (mean ±"
        " deviation over seeds)"
    )
    (told,) = document(runs)
    last, best = (
        next(one["mean"] for one in told["scores"] if one["choice"] == choice)
        for choice in ("last", "best by test")
    )
    # the least is best
    assert (last, best) == (3.5, 2.5)
    assert {one["average"] for one in told["scores"]} == {"macro", "micro"}
    assert [one["rounds"] for one in told["runs"][0]["scores"][:2]] == [4, 2]


@pytest.mark.parametrize("measure", ["validation/trained", "selected/after"])
def test_the_same_answer_is_for_test_records_of_all_silos(measure):
    other = of_scores(4, measure, {"a": 1.0}, {"a": 3}, {"a": 9.0})
    *_, constant = results_table([run("one", 1, [missed(2.0, 4.0), other], DAYS)]).rows
    assert list(constant) == ["always the median", "-", "-", "5"]
