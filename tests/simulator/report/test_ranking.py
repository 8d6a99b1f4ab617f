"""The ranking of variants whose histories are a few numbers."""

import csv
import io

from support.counted import of_counts, of_scores
from support.finished_runs import finished
from support.simulated_jobs import SILOS, make_run

from staddle.algorithms.tasks.class_counting import ACCURACY
from staddle.algorithms.tasks.counting import ScoreForm
from staddle.simulator.experiment.sweep import Variant
from staddle.simulator.report.finished_runs import Recorded
from staddle.simulator.report.ranking import rank, section, sweep_csv

RECORDS = dict.fromkeys(SILOS, 10)
DAYS = ScoreForm("mae", "MAE", "always the median", share=False, higher=False, unit="days")


def looks(test, validation=None, scored=of_counts):
    """The last look: so many records are right at each silo; or with ``of_scores``, scores."""
    sides = {"all": test} if validation is None else {"all": test, "validation": validation}
    return [
        scored(4, f"{side}/{model}", dict.fromkeys(SILOS, value), RECORDS)
        for side, value in sides.items()
        for model in ("aggregated", "trained")
    ]


def recorded(label, history, seed=1, form=ACCURACY):
    class Formed(Recorded):
        pass

    Formed.form = form
    return finished(make_run("fedavg", seed, label), history, Formed)


def variants(*rates, method="fedavg"):
    return [Variant(method, f"{method}+lr={rate}", {"training.lr": rate}) for rate in rates]


def order(ranking, method="fedavg"):
    return [one.variant.values["training.lr"] for one in ranking.methods[method]]


def test_validation_records_rank_where_all_silos_have_them():
    groups = {
        "fedavg+lr=1": [recorded("fedavg+lr=1", looks(9, 4))],
        "fedavg+lr=2": [recorded("fedavg+lr=2", looks(5, 6))],
        "local": [recorded("local", looks(1, 1))],
    }
    ranking = rank(groups, [Variant("local", "local", {}), *variants(1, 2, 3)])
    assert (ranking.by, order(ranking), ranking.unfinished) == (
        "validation", [2, 1], ("fedavg+lr=3",),
    )  # fmt: skip
    assert ranking.outranked == {"fedavg+lr=1"}
    text = section(ranking, ACCURACY)
    assert "|    1 |           2 |     1 |      4 |      60.00 | 50.00 |" in text
    assert "validation records rank them, by the mean over silos of the accuracy" in text
    assert "too good" not in text
    assert "Without a finished run: fedavg+lr=3." in text


def test_test_records_rank_with_a_warning_where_some_have_no_others():
    groups = {
        "fedavg+lr=1": [recorded("fedavg+lr=1", looks(5))],
        "fedavg+lr=2": [recorded("fedavg+lr=2", looks(9))],
    }
    ranking = rank(groups, variants(1, 2))
    assert (ranking.by, order(ranking)) == ("test", [2, 1])
    text = section(ranking, ACCURACY)
    assert "The test records chose, so the best score on them is too good" in text
    assert "| validation" not in text


def test_lower_is_better_in_some_tasks():
    groups = {
        f"fedavg+lr={rate}": [recorded(f"fedavg+lr={rate}", looks(error, None, of_scores), 1, DAYS)]
        for rate, error in ((1, 3.0), (2, 2.0))
    }
    assert order(rank(groups, variants(1, 2))) == [2, 1]


def test_a_mean_over_fewer_seeds_comes_after_the_others():
    """The seed that is missing may be one that diverged."""
    groups = {
        "fedavg+lr=1": [recorded("fedavg+lr=1", looks(9, 9))],
        "fedavg+lr=2": [recorded("fedavg+lr=2", looks(5, 5), seed) for seed in (1, 2)],
    }
    assert order(rank(groups, variants(1, 2))) == [2, 1]


def test_nothing_is_ranked_without_a_sweep():
    groups = {"local": [recorded("local", looks(1))]}
    assert rank(groups, ()) is None
    assert rank(groups, [Variant("local", "local", {}), *variants(1)]) is None


def test_the_table_has_a_column_per_setting_and_all_digits():
    groups = {
        "fedavg+lr=1": [
            recorded("fedavg+lr=1", looks(5, 6)), recorded("fedavg+lr=1", looks(7, 9), 2),
        ],
        "near+mu": [recorded("near+mu", looks(1, 1))],
    }  # fmt: skip
    near = Variant("near", "near+mu", {"options.mu": [True, 0.5]})
    text = sweep_csv(rank(groups, [*variants(1), near]))
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["training.lr"], first["options.mu"]) == ("1", "")
    assert (second["training.lr"], second["options.mu"]) == ("", "[true, 0.5]")
    assert first["seeds"] == "2"
    assert (float(first["validation"]), float(first["test"])) == (0.75, 0.6)
    assert round(float(first["test_deviation"]), 6) == 0.141421
    assert (second["rank"], second["test_deviation"], second["ranked_by"]) == (
        "1",
        "",
        "validation",
    )
