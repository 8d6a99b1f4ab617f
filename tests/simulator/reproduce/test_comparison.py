"""A published table beside what runs came to; runs are stood in for by what is read of them."""

import csv
import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from support.counted import of_counts
from support.refusals import refused

from staddle.simulator.reproduce.comparison import (
    HEADINGS,
    compared,
    meaning,
    table_rows,
    to_csv,
    to_markdown,
    warning,
    within,
)
from staddle.simulator.reproduce.published import parse

TABLE = b"""\
citation = "A & B"

[settings.easy]
title = "Easy"
data = { kind = "bundled", name = "digits" }

[settings.hard]
title = "Hard"
data = { kind = "bundled", name = "digits" }

[[tables]]
name = "one"
title = "Two domains"
unit = "percent"
deviation = "silos"
score = { measure = "all/trained", average = "micro", choice = "last" }
columns = [
  { setting = "easy", name = "clipart", title = "Clipart", silos = "clipart-" },
  { setting = "easy", name = "all", title = "All" },
  { setting = "hard" },
]
notes = ["[R] a * note"]

[[tables.rows]]
title = "Mean*"
method = { name = "fedavg" }
published = ["50.0 (2.0)", "61.25 (3.5)", "1"]

[[tables.rows]]
title = "By mean of silos"
method = { name = "fedavg" }
score = { measure = "all/trained", average = "macro", choice = "last" }
published = ["?", "-", "1"]

[[tables.rows]]
title = "Nobody's"
published = ["12.5", "13.5", "1"]
"""
SILOS = {"clipart-0": 10, "clipart-1": 30, "sketch-0": 60}


@dataclass(frozen=True)
class Job:
    cohort_size: int = 2
    rounds: int = 5


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    own = SimpleNamespace(from_document=lambda *_, **__: Job())
    monkeypatch.setattr("staddle.simulator.reproduce.comparison.Job", own)


def run(label, rights):
    """A finished run whose last look saw so many records right, silo by silo."""
    correct = dict(zip(SILOS, rights, strict=True))
    history = (
        of_counts(4, "all/trained", dict.fromkeys(SILOS, 0), SILOS),
        of_counts(5, "selected/after", {"sketch-0": 60}, {"sketch-0": 60}),
        of_counts(5, "all/trained", correct, SILOS),
    )
    identity = SimpleNamespace(job={})
    silos = tuple(SimpleNamespace(name=silo) for silo in SILOS)
    return SimpleNamespace(
        label=label, history=history, silos=silos, identity=identity, folder="run"
    )


@pytest.fixture
def table():
    return parse("toy", TABLE)[0]


@pytest.fixture
def cells(table):
    # clipart: 5 of 10 and 15 of 30 right, then 10 and 20: of 40 records 20, then 30, right; sketch:
    # 45, then 30 of 60
    return compared(table, {"easy": [run("fedavg", (5, 15, 45)), run("fedavg", (10, 20, 30))]})


def test_a_column_has_its_silos_and_a_row_its_score(cells):
    assert [(cell.column.name, cell.row.title) for cell in cells] == [
        (column, row)
        for column in ("clipart", "all")
        for row in ("Mean*", "By mean of silos", "Nobody's")
    ]  # nothing of hard, of which no run is finished
    clipart, by_silo, nobody, everywhere, *_ = cells
    assert clipart.ours.score.mean == pytest.approx((20 / 40 + 30 / 40) / 2)  # 0.625
    assert clipart.ours.score.deviation == pytest.approx(0.25 / 2**0.5)  # of 0.5 and 0.75
    assert clipart.difference == pytest.approx(0.125)
    # silos 1/2 and 1/2, then 1 and 2/3: over silos 0, then 1/6
    assert clipart.ours.over_silos == pytest.approx(1 / 12)
    assert by_silo.ours.score.mean == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert (by_silo.difference, nobody.ours, nobody.difference) == (None, None, None)
    assert everywhere.ours.score.mean == pytest.approx((65 / 100 + 60 / 100) / 2)  # 0.625
    assert (everywhere.ours.silos, everywhere.ours.drawn, everywhere.ours.rounds) == (3, 2, 5)


def test_a_row_may_be_of_the_silos_that_one_of_several_choices_fell_to():
    """Dealt in turn to clipart-0, clipart-1 and sketch-0: of two choices the first to two silos."""
    text = TABLE.replace(b'title = "By mean of silos"', b'title = "One"\ndealt = [1, 2]')
    text = text.replace(
        b'title = "Nobody\'s"', b'title = "Other"\nmethod = { name = "fedavg" }\ndealt = [2, 2]'
    )
    cells = compared(parse("toy", text)[0], {"easy": [run("fedavg", (5, 15, 45))]})
    means = [cell.ours.score.mean for cell in cells if cell.column.name == "all"]
    # all: 65 of 100; the first by silo: 5 of 10 and 45 of 60; the other: 15 of 30
    assert means == pytest.approx([0.65, (0.5 + 0.75) / 2, 0.5])
    (clipart,) = (c for c in cells if (c.column.name, c.row.title) == ("clipart", "One"))
    assert clipart.ours.score.mean == 0.5
    with refused("dealt"):
        parse("toy", TABLE.replace(b'title = "Mean*"', b'title = "Mean*"\ndealt = [0, 2]'))


def test_it_is_told_in_percent_with_the_digits_of_the_paper(cells):
    rows = table_rows(cells, over_silos=False)
    assert rows[0] == ["Clipart", "Mean*", "50.0 ± 2.0", "62.50 ± 17.68", "2", "+12.50"]
    assert rows[1][2:] == ["?", "66.67 ± 23.57", "2", "–"]
    assert rows[2][2:] == ["12.5", "–", "–", "–"]
    assert rows[3][2:] == ["61.25 ± 3.50", "62.50 ± 3.54", "2", "+1.25"]
    assert table_rows(cells, over_silos=True)[0][3] == "62.50 ± 17.68 (8.33)"


def test_as_markdown_it_says_what_was_less_than_in_the_paper(table, cells):
    text = to_markdown(table, cells, ["10 instead of 100 clients"])
    said = "These values do not compare with the published ones."
    assert f"**Reduced: 10 instead of 100 clients. {said}**" in text
    assert "## Clipart\n\n3 silos, 2 drawn for a round, 5 rounds.\n" in text
    line = "| Mean\\*           | 50.0 ± 2.0 | 62.50 ± 17.68 (8.33) |     2 |     +12.50 |"
    assert f"{line} all/trained micro last |" in text
    assert "deviation over clients" in meaning(table)
    assert meaning(table) in text
    assert "- \\[R\\] a \\* note\n" in text
    assert "Hard" not in text
    assert "Reduced" not in to_markdown(table, cells, [])
    assert warning(["2 instead of 9 rounds"]).startswith("Reduced: 2 instead of 9 rounds. ")


def test_as_csv_it_has_every_digit(table, cells):
    rows = list(csv.DictReader(io.StringIO(to_csv(table, cells))))
    assert len(rows) == 6
    assert float(rows[0]["ours"]) == cells[0].ours.score.mean
    assert (rows[0]["published"], rows[0]["published_deviation"]) == ("0.5", "0.02")
    assert (rows[0]["label"], rows[0]["average"]) == ("fedavg", "micro")
    assert rows[1]["average"] == "macro"
    assert (rows[2]["label"], rows[2]["ours"], rows[2]["seeds"]) == ("", "", "")
    assert len(HEADINGS) == 6


def test_of_one_seed_there_is_no_deviation(table):
    alone = compared(table, {"easy": [run("fedavg", (5, 15, 45))]})
    first, *_ = table_rows(alone, over_silos=False)
    assert first[3:5] == ["50.00", "1"]


def test_a_measure_of_none_of_the_silos_is_left_out():
    history, measures = (run("x", (5, 15, 45)).history, ["all/trained", "all/trained"])
    every = {silo for one in history for silo in one.records}
    assert [one.measure for one in within(history, "clipart-", every)] == measures
    assert within(history, "", every) == history
    assert within(history, "", ()) == ()
