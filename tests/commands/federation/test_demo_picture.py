"""The picture that a demo leaves, from numbers made up here."""

import re
import xml.etree.ElementTree as ET

import pytest

from staddle.commands.federation.demo_picture import MethodResult, svg

TESTED = {"a": 100, "b": 300}
RESULTS = (
    MethodResult("local", {"a": 90, "b": 282}, {"metrics": 512}),
    MethodResult("fedavg", {"a": 96, "b": 297}, {"metrics": 512, "model": 3 * 1024**2}),
)


def texts(picture):
    root = ET.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_it_says_the_accuracy_over_all_records_and_the_bytes_that_left():
    found = texts(svg(RESULTS, TESTED))
    # 372 and 393 of 400 records, not the means of the silos' own shares
    assert {"93.0 %", "98.2 %"} <= set(found)
    assert "Accuracy on 400 held-out records, all and per silo" in found
    assert {"512 B", "3 MiB"} <= set(found)
    assert [found.count(method) for method in ("local", "fedavg")] == [2, 2]
    assert {"metrics", "model"} <= set(found)


def test_a_bar_of_bytes_stands_on_the_one_before_and_is_as_high_as_its_bytes():
    """A part that a method lacks has no height."""
    bars = [MethodResult("one", {"a": 1, "b": 1}, {"x": 100, "y": 300}),
            MethodResult("two", {"a": 1, "b": 1}, {"y": 200})]  # fmt: skip
    root = ET.fromstring(svg(bars, TESTED))
    boxes = []
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        if path.get("clip-path") and "fill: #" in (path.get("style") or ""):
            numbers = [float(each) for each in re.findall(r"[\d.]+", path.get("d"))]
            xs, ys = numbers[::2], numbers[1::2]
            boxes.append((min(xs), max(ys), max(ys) - min(ys)))
    (x_one, x_two, y_one, y_two) = boxes  # by part, then by method
    assert y_one[2] == pytest.approx(3 * x_one[2])
    assert x_two[2] == pytest.approx(0)
    assert y_two[2] == pytest.approx(2 * x_one[2])
    assert y_one[0] == x_one[0]
    assert y_one[1] == pytest.approx(x_one[1] - x_one[2])


def test_the_same_numbers_make_the_same_bytes():
    assert svg(RESULTS, TESTED) == svg(RESULTS, TESTED)
