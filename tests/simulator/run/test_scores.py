import pytest
from support.counted import of_counts, of_scores

from staddle.simulator.run.scores import AVERAGES, Score, Spread, over_seeds, scores, spread


def measured(rounds, measure, a, b):
    """Of two silos, with 10 and with 40 records."""
    return of_counts(rounds, measure, {"a": a, "b": b}, {"a": 10, "b": 40})


HISTORY = [
    measured(1, "selected/after", 5, 20),
    measured(2, "all/trained", 9, 4),  # macro 0.5, micro 0.26
    measured(2, "validation/trained", 1, 16),  # macro 0.25, micro 0.34
    measured(4, "all/trained", 6, 20),  # macro 0.55, micro 0.52
    measured(4, "validation/trained", 8, 0),  # macro 0.4, micro 0.16
    measured(6, "all/trained", 3, 24),  # macro 0.45, micro 0.54
    measured(6, "validation/trained", 2, 24),  # macro 0.4, micro 0.52
]


def test_last_and_best_are_each_named():
    found = scores(HISTORY)
    assert {key[1:]: score for key, score in found.items() if key[0] == "all/trained"} == {
        ("macro", "last"): Score(6, pytest.approx(0.45)),
        ("macro", "best by test"): Score(4, pytest.approx(0.55)),
        ("macro", "best by validation"): Score(4, pytest.approx(0.55)),  # 0.4 twice: the earlier
        ("micro", "last"): Score(6, 0.54),
        ("micro", "best by test"): Score(6, 0.54),
        ("micro", "best by validation"): Score(6, 0.54),
        # each silo's records are of one class
        ("balanced", "last"): Score(6, pytest.approx(0.45)),
        ("balanced", "best by test"): Score(4, pytest.approx(0.55)),
        ("balanced", "best by validation"): Score(4, pytest.approx(0.55)),
    }
    assert {
        key[1:]: score.rounds for key, score in found.items() if key[0] == "validation/trained"
    } == {
        ("macro", "last"): 6,
        ("macro", "best by validation"): 4,
        ("micro", "last"): 6,
        ("micro", "best by validation"): 6,
        ("balanced", "last"): 6,
        ("balanced", "best by validation"): 4,
    }
    assert {key[1:] for key in found if key[0] == "selected/after"} == {
        (average, choice) for average in AVERAGES for choice in ("last", "best by test")
    }
    assert {key[0] for key in found} == {"selected/after", "all/trained", "validation/trained"}


def test_what_validation_chooses_need_not_be_best_on_test():
    history = [
        measured(1, "all/aggregated", 9, 36),
        measured(1, "validation/aggregated", 1, 4),
        measured(2, "all/aggregated", 5, 20),
        measured(2, "validation/aggregated", 2, 8),
    ]
    found = scores(history)
    assert found["all/aggregated", "macro", "best by validation"] == Score(2, 0.5)
    assert found["all/aggregated", "macro", "best by test"] == Score(1, 0.9)


def test_where_less_is_better_the_least_is_best_and_without_classes_nothing_is_balanced():
    seen = {2: (3.0, 9.0), 4: (1.0, 9.5), 6: (4.0, 8.0), 8: (1.0, 9.0)}
    history = [
        of_scores(rounds, measure, {"a": score}, {"a": 3})
        for rounds, both in seen.items()
        for measure, score in zip(("all/trained", "validation/trained"), both, strict=True)
    ]
    found = scores(history, higher=False)
    assert {key[1:]: score for key, score in found.items() if key[0] == "all/trained"} == {
        (average, choice): score
        for average in ("macro", "micro")
        for choice, score in (
            ("last", Score(8, 1.0)),
            ("best by test", Score(4, 1.0)),
            ("best by validation", Score(6, 4.0)),
        )
    }
    assert scores(history)["all/trained", "macro", "best by test"] == Score(6, 4.0)


def test_the_aggregated_model_does_not_choose_for_the_trained():
    history = [*HISTORY, measured(2, "validation/aggregated", 10, 40)]
    assert scores(history) == {
        **scores(HISTORY),
        **{
            ("validation/aggregated", average, choice): Score(2, 1.0)
            for average in AVERAGES
            for choice in ("last", "best by validation")
        },
    }


def test_the_earliest_of_several_best_counts_and_seeds_spread_as_a_sample():
    found = scores([measured(rounds, "all/trained", 5, 20) for rounds in (3, 6, 9)])
    assert found["all/trained", "macro", "best by test"] == Score(3, 0.5)
    assert ("all/trained", "macro", "best by validation") not in found
    assert scores([]) == {}
    assert over_seeds([]) == {}
    assert spread([0.5, 0.7, 0.9]) == Spread(3, pytest.approx(0.7), pytest.approx(0.2))
    assert spread([0.5]) == Spread(1, 0.5, None)
    assert spread([0.25, 0.25]) == Spread(2, 0.25, 0)


def test_over_seeds_only_what_all_have_is_compared():
    one, other = scores(HISTORY), scores([measured(6, "all/trained", 5, 20)])
    found = over_seeds([one, other])
    assert set(found) == {("all/trained", a, c) for a in AVERAGES for c in ("last", "best by test")}
    assert found["all/trained", "macro", "last"] == Spread(
        2, pytest.approx(0.475), pytest.approx(0.05 / 2**0.5)
    )
