"""Curves of fine bins, brought to tenths of probability."""

import pytest

from staddle.algorithms.tasks.measures import CalibrationBin
from staddle.bundle.measuring import wilson
from staddle.commands.model.calibration_plot import tables, tenths, write

CURVE = (
    CalibrationBin(0.00, 0.04, 10, 0.0),
    CalibrationBin(0.04, 0.08, 30, 0.2),
    CalibrationBin(0.50, 0.54, 4, 0.5),
    CalibrationBin(0.98, 1.00, 5, 1.0),
)


def test_bins_of_one_tenth_count_by_their_records():
    low, middle, high = tenths(CURVE)
    assert (low.place, low.records) == (0, 40)
    assert low.given == pytest.approx((10 * 0.02 + 30 * 0.06) / 40)
    assert low.true == pytest.approx(6 / 40)
    assert low.interval == wilson(6 / 40, 40)
    assert (middle.place, middle.true) == (5, 0.5)
    assert (high.place, high.records, high.true) == (9, 5, 1.0)


def test_the_picture_and_the_table_have_each_class(tmp_path):
    write(tmp_path / "curves.svg", {"ill": CURVE, "well": CURVE})
    drawn = (tmp_path / "curves.svg").read_text()
    assert ">ill<" in drawn
    assert ">well<" in drawn
    first, _ = tables({"ill": CURVE, "well": CURVE})
    assert first.rows[0] == ("0% to 10%", "40", "15.0%", "######")
