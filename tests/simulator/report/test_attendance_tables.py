"""Newcomers' scores of histories of a few numbers, and counts of who was missing."""

import csv
import io
from dataclasses import replace

import pytest
from support.counted import of_counts
from support.finished_runs import finished
from support.simulated_jobs import make_run

from staddle.algorithms.engines.attendance import EVERYONE, Attendance
from staddle.algorithms.tasks.class_counting import ACCURACY
from staddle.simulator.report.attendance_tables import attendance_section, newcomers_section
from staddle.simulator.report.results_csv import results_csv
from staddle.simulator.report.summary import drawn, summary
from staddle.simulator.run.work_file import RoundWork

WHO = Attendance(newcomers=("a", "c"), join_after=2, step_seconds=2.0)
SILOS = ("d", "b", "a", "c")
RECORDS = dict.fromkeys(SILOS, 10)
TRAINED = (0.5, 4, 30, 2_000_000)
WORK = (
    RoundWork(0, 1, 100, 1, {"d": TRAINED, "b": TRAINED}, simulated=8.0),
    RoundWork(1, 2, 100, 7, {"b": TRAINED}, ("d",), simulated=6.0),
    RoundWork(2, 3, 100, 7, {"d": TRAINED, "a": TRAINED}, ("b",), ("c",), 4.5),
    RoundWork(3, 3, 0, 14, {}),  # the last delivery
)


def history(*looks):
    """Looks after rounds 1 to 3; those who are right in ``looks``, in the order of SILOS."""
    found = []
    for rounds, correct in enumerate(looks, 1):
        right = dict(zip(SILOS, correct, strict=True))
        found += [
            of_counts(rounds, "all/aggregated", right, RECORDS),
            of_counts(rounds, "all/trained", dict.fromkeys(SILOS, rounds), RECORDS),
        ]
    return tuple(found)


def recorded(looks, seed=1, label="fedavg", who=WHO, work=WORK):
    run = replace(make_run("fedavg", seed, label, rounds=3, participation=1.0), attendance=who)
    timed = dict.fromkeys(range(4), 1.0)
    return finished(run, history(*looks), seconds=6.0, work=work, timed=timed)


FIRST = recorded([(9, 9, 1, 3), (10, 10, 2, 4), (10, 8, 5, 7)])
SECOND = recorded([(9, 9, 1, 3), (10, 10, 4, 8), (10, 8, 5, 7)], seed=2)


def rows(text, title):
    """The cells of a table below a heading, with those of its head."""
    lines = [line for line in text.split(title, 1)[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_newcomers_stand_apart_as_they_join_and_later():
    text = newcomers_section({"fedavg": [FIRST]}, ACCURACY)
    assert "2 of 4 silos take no part in the first 2 rounds, and join then: a, c." in text
    head, _, own, *_ = rows(text, "(newcomers/aggregated)")
    assert head == ["method", "0", "1", "last round", "others"]
    assert own == ["fedavg", "30.00", "60.00", "60.00", "90.00"]
    head, _, own = rows(text, "(newcomers/trained)")
    assert own == ["fedavg", "20.00", *["30.00"] * 3]
    both = newcomers_section({"fedavg": [FIRST, SECOND]}, ACCURACY)
    assert rows(both, "(newcomers/aggregated)")[2][1] == "45.00 ± 21.21"


def test_newcomers_that_never_join_have_what_a_delivery_gives():
    never = WHO.model_copy(update={"join_after": 3})
    text = newcomers_section({"fedavg": [recorded([(9, 9, 1, 3)] * 3, who=never)]}, ACCURACY)
    head, _, own, *_ = rows(text, "(newcomers/aggregated)")
    assert head == ["method", "0", "last round", "others"]
    assert own == ["fedavg", "20.00", "20.00", "90.00"]


def test_the_table_of_results_has_rows_of_both_groups_and_of_the_clock():
    table = list(csv.DictReader(io.StringIO(results_csv({"fedavg": [FIRST]}))))
    found = {(row["round"], row["measure"]): row for row in table}
    own = found["2", "newcomers/aggregated/accuracy.macro"]
    assert (float(own["value"]), own["silos"]) == (pytest.approx(0.3), "2")
    assert float(found["2", "others/aggregated/accuracy.macro"]["value"]) == 1.0
    assert float(found["2", "all/aggregated/accuracy.macro"]["value"]) == pytest.approx(0.65)
    seconds = [found[n, "all/trained/accuracy.macro"]["simulated_seconds"] for n in "123"]
    assert seconds == ["8.0", "14.0", "18.5"]
    real = [found[n, "all/trained/accuracy.macro"]["seconds"] for n in "123"]
    assert real == ["1.0", "2.0", "4.0"]
    without = recorded([(9, 9, 1, 3)] * 3, who=EVERYONE, work=WORK[:1])
    table = list(csv.DictReader(io.StringIO(results_csv({"fedavg": [without]}))))
    assert {row["simulated_seconds"] for row in table} == {""}
    assert not any(row["measure"].startswith(("newcomers", "others")) for row in table)


def test_who_was_missing_is_counted():
    text = attendance_section({"fedavg": [FIRST, SECOND]})
    head, _, own = rows(text, "## Who was there")
    assert head == ["method", "took part", "absent", "late", "simulated seconds"]
    assert own == ["fedavg", "5", "2", "1", "18.5"]
    untimed = recorded([(9, 9, 1, 3)] * 3, who=Attendance(absent=0.1), work=WORK[:0])
    assert rows(attendance_section({"fedavg": [untimed]}), "## Who")[2][1:] == ["0", "0", "0", "–"]
    without = recorded([(9, 9, 1, 3)] * 3, who=EVERYONE)
    assert attendance_section({"fedavg": [without]}) == ""
    assert newcomers_section({"fedavg": [without]}, ACCURACY) == ""


def test_the_summary_has_it_all():
    text = summary({"fedavg": [FIRST]})
    (setting,) = (line for line in text.splitlines() if line.startswith("| attendance"))
    assert "newcomers = \\[a, c\\], join\\_after = 2, step\\_seconds = 2.0" in setting
    assert text.index("## Newcomers") < text.index("## Who was there")
    # Only an upload in time counts as having trained.
    assert drawn(FIRST) == {"d", "b", "a"}
