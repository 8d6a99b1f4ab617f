"""The tidy table of runs whose histories are a few numbers, worked out by hand."""

import csv
import io

from support.counted import of_counts, of_scores
from support.finished_runs import finished
from support.simulated_jobs import make_run

from staddle.simulator.report.finished_runs import by_label
from staddle.simulator.report.results_csv import COLUMNS, numbers, results_csv, spent
from staddle.simulator.report.work_table import work_section, work_taken
from staddle.simulator.run.work_file import RoundWork

HISTORY = (
    of_counts(1, "selected/after", {"a": 1}, {"a": 2}),
    of_counts(2, "all/trained", {"a": 1, "b": 3}, {"a": 2, "b": 4}),
)
WORK = (
    RoundWork(0, 0, 10, 0, {}),  # a census
    RoundWork(1, 1, 100, 1, {"a": (0.5, 4, 30, 2_000_000)}),
    RoundWork(2, 2, 100, 7, {"a": (0.25, 4, 30, 2_000_000), "b": (0.75, 8, 60, 4_000_000)}),
    RoundWork(3, 2, 0, 14, {}),  # the last delivery
)


def recorded(label="fedavg", seed=1, work=WORK, timed=None, history=HISTORY):
    timed = {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.0} if timed is None else timed
    fields = {"rounds": 2, "seconds": 6.0, "work": work, "timed": timed}
    return finished(make_run("fedavg", seed, label), history, **fields)


def table(*runs):
    return list(csv.DictReader(io.StringIO(results_csv(by_label(runs)))))


def test_a_row_is_one_number_with_what_was_spent_by_then():
    rows = table(recorded())
    assert tuple(rows[0]) == COLUMNS
    first = {row["measure"]: row for row in rows if row["round"] == "1"}
    assert list(first["selected/after/accuracy.macro"].values()) == [
        "fedavg", "1", "1", "selected/after/accuracy.macro", "1", "0.5", "0.5", "110", "1", "",
        "3.0",
    ]  # fmt: skip
    end = {row["measure"]: row for row in rows if row["round"] == "2"}
    assert float(end["all/trained/accuracy.macro"]["value"]) == 0.625
    assert float(end["all/trained/accuracy.micro"]["value"]) == 4 / 6
    last = end["all/trained/accuracy.micro"]
    assert [last[name] for name in ("silos", "loss", "bytes_up", "bytes_down", "seconds")] == [
        "2", "0.5", "210", "22", "6.0",
    ]  # fmt: skip


def test_every_number_has_its_mean_in_its_name():
    found = numbers(HISTORY[1], "accuracy", higher=True)
    assert found["balanced.macro"] == 0.625
    assert (found["accuracy.worst"], found["accuracy.best"]) == (0.5, 0.75)
    assert (found["accuracy.worst_tenth"], found["accuracy.variance"]) == (0.5, 0.125**2)
    one = of_scores(2, "all/trained", {"b": 4.5, "a": 2.5}, {"b": 3, "a": 1}, {"b": 6.0, "a": 3.0})
    found = numbers(one, "mae", higher=False)
    assert {name.partition(".")[0] for name in found} == {"mae"}
    assert (found["mae.macro"], found["mae.micro"], found["mae.worst"]) == (3.5, 4.0, 4.5)


def test_what_was_not_counted_is_an_empty_cell():
    (row, *_) = table(recorded(work=(), timed={}))
    assert [row[name] for name in ("loss", "bytes_up", "bytes_down")] == ["", "0", "0"]
    late = recorded(timed={0: 1.0, 2: 3.0, 3: 0.0})
    assert [one.seconds == one.seconds for one in spent(late).values()] == [True, False, False]


def test_work_per_silo_and_round_that_trains():
    """Three silos were drawn; what tunes after the last round is spread over them."""
    assert work_taken(recorded()) == {
        "steps": 16 / 3, "records": 40, "MFLOPs": 8 / 3, "MB up": 210e-6, "MB down": 22e-6,
    }  # fmt: skip
    tuning = RoundWork(3, 2, 0, 0, {"a": (0.1, 2, 9, 1_000_000)})
    assert work_taken(recorded(work=(*WORK[:3], tuning)))["steps"] == 18 / 3


def test_a_warning_names_who_does_not_take_what_most_take():
    def twice(line):
        doubled = {silo: (own[0], 2 * own[1], *own[2:]) for silo, own in line.silos.items()}
        return RoundWork(line.round, line.rounds, line.bytes_up, line.bytes_down, doubled)

    same = {label: [recorded(label)] for label in ("fedavg", "fedper")}
    assert "Warning" not in work_section(same)
    other = recorded("fedrep", work=tuple(map(twice, WORK)))
    text = work_section({**same, "fedrep": [other]})
    assert "- **steps**: most methods take 5.3; fedrep +100%\n" in text
    assert "- **records**" not in text


def test_flops_that_are_not_known_are_a_gap_and_no_warning():
    unknown = (RoundWork(1, 1, 100, 1, {"a": (0.5, 4, 30, None)}),)
    known = (RoundWork(1, 1, 100, 1, {"a": (0.5, 4, 30, 2_000_000)}),)
    text = work_section(
        {"fedavg": [recorded(work=known)], "fedper": [recorded("fedper", work=unknown)]}
    )
    cells = [row.split("|")[4].strip() for row in text.splitlines() if row.startswith("| fed")]
    assert cells == ["2.0", "–"]
    assert "Warning" not in text
