"""The picture of a table: which values stand where."""

import pytest
from matplotlib.figure import Figure

from staddle.simulator.reproduce import picture as module
from staddle.simulator.reproduce.comparison import Cell, Ran
from staddle.simulator.reproduce.picture import APART, drawn
from staddle.simulator.reproduce.published import PaperColumn, PaperRow, PaperValue
from staddle.simulator.run.scores import Spread

SCORE = ("all/trained", "micro", "last")


def cell(column, method, published, ours):
    value = PaperValue("?") if published is None else PaperValue("…", *published)
    ran = (
        None if ours is None else Ran(Spread(3, *ours), over_silos=0.0, silos=4, drawn=2, rounds=1)
    )
    return Cell(PaperColumn(column, column, None), PaperRow(method, (), SCORE), value, None, ran)


CELLS = [
    cell("easy", "FedAvg", (0.50, 0.02), (0.55, 0.01)),
    cell("easy", "lost", None, None),  # has no row
    cell("easy", "Local", None, (0.4, None)),
    cell("easy", "not run", (0.9, None), None),
    *(cell(f"hard {number}", "FedAvg", (0.3, None), None) for number in range(3)),
]


@pytest.fixture
def panels(monkeypatch):
    """The panels of what is drawn."""
    figure = Figure()
    monkeypatch.setattr(module, "picture", lambda _width, _height, draw, _form: draw(figure))
    drawn(CELLS)
    return figure.axes


def points(panel, label):
    """Places from above, and values, of what has this label."""
    (found,) = [drawn for drawn in panel.containers if drawn.get_label() == label]
    return [(y, x) for x, y in found.lines[0].get_xydata().tolist()]


def test_a_panel_has_a_row_per_method_that_has_a_value(panels):
    easy, *_ = panels
    assert [tick.get_text() for tick in easy.get_yticklabels()] == ["FedAvg", "Local", "not run"]
    assert points(easy, "published") == [(0 - APART, 0.5), (2 - APART, 0.9)]
    assert points(easy, "ours") == [(0 + APART, 0.55), (1 + APART, 0.4)]
    # the first method stands highest
    assert easy.yaxis_inverted()
    low, high = easy.get_xlim()
    assert low < 0.4
    assert high > 0.9


def test_panels_have_the_columns_titles_and_the_rest_of_a_line_is_empty(panels):
    titles = [(panel.get_title(), panel.axison) for panel in panels]
    hard = [(f"hard {number}", True) for number in range(3)]
    assert titles == [("easy", True), *hard, ("", False), ("", False)]


def test_the_same_cells_give_the_same_picture():
    assert drawn(CELLS) == drawn(CELLS)
    assert drawn(CELLS).startswith(b"\x89PNG")
