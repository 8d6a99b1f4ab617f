"""The page of results, its values as CSV, and the pictures that are drawn of them."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = {"results.md": "", "results.csv": ""}
# the tests also run without docs/
FILES.update({name: (DOCS / name).read_text() for name in FILES if (DOCS / name).exists()})
PAGE, LINES = FILES["results.md"], list(csv.DictReader(FILES["results.csv"].splitlines()))
PAPERS = sorted({line["paper"] for line in LINES})

pytestmark = pytest.mark.skipif(not PAGE, reason="the tests run without docs/")


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['setting']}, {line['method']}")
def test_a_value_of_the_csv_stands_on_the_page(line):
    rows = [row for row in PAGE.splitlines() if row.startswith(f"| {line['method']} |")]
    wanted = {line["published"], line["ours"], line["ours_deviation"]} - {""}
    assert any(all(number in row for number in wanted) for row in rows), (wanted, rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_picture_of_each_paper_stands_on_the_page(paper):
    assert f"](results-{paper}.svg)" in PAGE
    svg = (DOCS / f"results-{paper}.svg").read_text()
    own = [line for line in LINES if line["paper"] == paper]
    assert all(f">{line['method']}</text>" in svg for line in own)


def test_pictures_are_those_of_the_csv(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import results_pictures  # noqa: PLC0415

    found = results_pictures.pictures(LINES)
    assert sorted(found) == PAPERS
    for paper in PAPERS:
        drawn = (DOCS / f"results-{paper}.svg").read_text()
        # the points: where each stands, whatever version of matplotlib draws the letters
        assert drawn.count("<use ") == found[paper].decode().count("<use ")
