"""The picture of a table: which values stand where."""

import pytest
from matplotlib.figure import Figure

from staddle.simulator.reproduce import picture as module
from staddle.simulator.reproduce.comparison import Cell, Ran
from staddle.simulator.reproduce.picture import APART, drawn
from staddle.simulator.reproduce.published import PaperColumn, PaperRow, PaperValue
from staddle.simulator.run.scores import Spread

SCORE = ("all/trained", "micro", "last")


def cell(column, method, published, ours, at=None):
    value = PaperValue("?") if published is None else PaperValue("…", *published)
    ran = (
        None if ours is None else Ran(Spread(3, *ours), over_silos=0.0, silos=4, drawn=2, rounds=1)
    )
    return Cell(
        PaperColumn(column, column, None), PaperRow(method, (), SCORE, at=at), value, None, ran
    )


CELLS = [
    cell("easy", "FedAvg", (0.50, 0.02), (0.55, 0.01)),
    cell("easy", "lost", None, None),  # has no row
    cell("easy", "Local", None, (0.4, None)),
    cell("easy", "not run", (0.9, None), None),
    *(cell(f"hard {number}", "FedAvg", (0.3, None), None) for number in range(3)),
]


STUDY = [
    cell("easy", "λ = 10", (0.7, None), (0.72, 0.01), 10.0),  # not in the order of its values
    cell("easy", "λ = 0.1", None, (0.6, None), 0.1),
    cell("easy", "λ = 1", None, None, 1.0),  # not known: the axis has it
    cell("easy", "fedrep", None, (0.65, None)),
    cell("hard", "λ = 1", None, (0.5, None), 1.0),
    cell("hard", "Local", None, (0.4, None)),
    cell("hard", "fedrep", (0.3, None), (0.35, None)),
]


@pytest.fixture
def figure(monkeypatch):
    """What is drawn."""
    figure = Figure()
    monkeypatch.setattr(module, "picture", lambda _width, _height, draw, _form: draw(figure))
    return figure


@pytest.fixture
def panels(figure):
    """The panels of what is drawn."""
    drawn(CELLS)
    return figure.axes


def dots(panel, label):
    """Of what has this label."""
    (found,) = [drawn for drawn in panel.containers if drawn.get_label() == label]
    return found.lines[0].get_xydata().tolist()


def points(panel, label):
    """Places from above, and values, of what has this label."""
    return [(y, x) for x, y in dots(panel, label)]


def lines(panel):
    """Value and dashes of each line across a panel, by label."""
    across = [line for line in panel.lines if ", " in line.get_label()]
    # matplotlib says of all dashes that they are "--"
    return {line.get_label(): (line.get_ydata()[0], line._unscaled_dash_pattern) for line in across}


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


def test_a_parameter_s_values_stand_on_an_axis_and_other_rows_are_lines_across(figure):
    drawn(STUDY, parameter="λ")
    easy, hard, *_ = figure.axes
    assert dots(easy, "published") == [[10.0, 0.7]]
    assert dots(easy, "ours") == [[0.1, 0.6], [10.0, 0.72]]
    assert dots(hard, "ours") == [[1.0, 0.5]]
    # one that nobody published is not in the legend as if it were there
    assert [drawn.get_label() for drawn in hard.containers] == ["ours"]
    for panel in (easy, hard):
        assert panel.get_xlabel() == "λ"
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0.1", "1", "10"]
        assert panel.get_xscale() == "log"
    assert {label: value for label, (value, _) in lines(hard).items()} == {
        "Local, ours": 0.4, "fedrep, published": 0.3, "fedrep, ours": 0.35,
    }  # fmt: skip
    # one legend serves all panels
    assert lines(easy)["fedrep, ours"][1] == lines(hard)["fedrep, ours"][1]
    assert lines(hard)["Local, ours"][1] != lines(hard)["fedrep, ours"][1]
    (legend,) = figure.legends
    shown = {text.get_text() for text in legend.get_texts()}
    assert shown == {"published", "ours", *lines(easy), *lines(hard)}
    low, high = hard.get_ylim()
    assert low < 0.3
    assert high > 0.5


def test_values_that_lie_together_or_begin_at_0_have_a_linear_axis(figure):
    drawn(
        [cell("easy", f"ρ = {at}", None, (0.5, None), at) for at in (0.0, 0.5, 1.0)], parameter="ρ"
    )
    assert figure.axes[0].get_xscale() == "linear"


def test_a_study_of_which_only_other_methods_ran_is_drawn():
    assert drawn(STUDY[3:4], parameter="λ").startswith(b"\x89PNG")
