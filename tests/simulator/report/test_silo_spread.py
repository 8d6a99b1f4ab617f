from dataclasses import replace

import pytest
from support.counted import of_counts

from staddle.simulator.report.silo_spread import Against, against, kept, spectrum

MANY = of_counts(
    1, "all/trained", {str(n): n for n in range(11)}, dict.fromkeys(map(str, range(11)), 10)
)


def test_a_spectrum_by_hand():
    found = spectrum(MANY)  # accuracies 0.0, 0.1 … 1.0; a tenth of eleven, rounded up, is two
    assert (found.least, found.median, found.most) == (0.0, 0.5, 1.0)
    assert found.worst_tenth == pytest.approx(0.05)
    assert found.best_tenth == pytest.approx(0.95)
    assert found.spread == pytest.approx(0.1**0.5)
    alone = spectrum(of_counts(1, "all/trained", {"a": 3}, {"a": 4}))
    assert alone.least == alone.worst_tenth == alone.best_tenth == 0.75


def test_silos_against_themselves_under_another_method():
    other = replace(MANY, scores={**MANY.scores, "0": 0.1, "1": 0.2, "9": 0.8})
    assert against(MANY, other) == Against(better=1, equal=8, worse=2)


def test_where_less_is_better_the_least_is_at_the_best_end_and_wins():
    found = spectrum(MANY, higher=False)
    assert (found.least, found.median, found.most) == (1.0, 0.5, 0.0)
    assert found.worst_tenth == pytest.approx(0.95)
    assert found.best_tenth == pytest.approx(0.05)
    assert found.spread == pytest.approx(0.1**0.5)
    other = replace(MANY, scores={**MANY.scores, "0": 0.1, "1": 0.2, "9": 0.8})
    assert against(MANY, other, higher=False) == Against(better=2, equal=8, worse=1)


def test_a_silo_that_never_trained_keeps_what_was_delivered():
    records = {"a": 10, "b": 10}
    delivered = of_counts(4, "all/aggregated", {"a": 5, "b": 6}, records)
    own = of_counts(4, "all/trained", {"a": 7, "b": 1}, records)
    history = [of_counts(2, "all/trained", {"a": 9, "b": 9}, records), delivered, own]
    assert kept(history, "delivered", {"a"}).scores == {"a": 0.5, "b": 0.6}
    assert kept(history, "trained", {"a"}).scores == {"a": 0.7, "b": 0.6}
    assert kept(history, "trained", {"a", "b"}) == own
