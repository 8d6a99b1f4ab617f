"""Curves as points, and in words."""

import pytest

from staddle.console.curves import MOST_POINTS, SHARE, curve


def test_a_curve_fills_its_frame_and_says_where_it_ends():
    found = curve("accuracy", {"as trained": [(0, 0.5), (1, 0.75), (4, 1.0)]}, SHARE)
    (line,) = found.lines
    assert line.points == "0.0,120.0 80.0,60.0 320.0,0.0"
    assert (found.least, found.most, line.last) == ("50.0%", "100.0%", "100.0%")
    assert found.said == "accuracy, rounds 0 to 4: as trained 50.0% to 100.0%"


def test_lines_share_their_axes_and_keep_their_places():
    found = curve("loss", {"a": [(0, 1.0)], "none": [], "b": [(2, 3.0), (3, 1.0)]})
    assert [line.name for line in found.lines] == ["a", "b"]
    assert [line.style for line in found.lines] == ["line-0", "line-1"]
    assert found.lines[0].points == "0.0,120.0"
    assert found.lines[1].points == "213.3,0.0 320.0,120.0"


@pytest.mark.parametrize("points", [[(7, 2.0)], [(7, 2.0), (8, 2.0)]])
def test_what_does_not_change_is_drawn_in_the_middle(points):
    assert all(
        point.endswith(",60.0") for point in curve("x", {"a": points}).lines[0].points.split()
    )


def test_nothing_is_no_curve_and_of_many_points_the_newest_are_drawn():
    assert curve("x", {"a": [], "b": []}) is None
    found = curve("x", {"a": [(number, float(number)) for number in range(2 * MOST_POINTS)]})
    assert (found.first, found.last) == (MOST_POINTS, 2 * MOST_POINTS - 1)
