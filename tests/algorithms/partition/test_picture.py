import io

import numpy as np
import pytest
from PIL import Image
from support.refusals import refused

from staddle.algorithms.partition.picture import (
    MOST_CELLS,
    NARROW,
    SMALLEST,
    WIDE,
    cell_of,
    held,
    picture,
    radii,
)

COUNTS = np.array([[400, 0, 100], [1, 400, 25]])
CELL, LARGEST = WIDE, WIDE / 2 - 1


def drawn(*arguments):
    return 255 - np.asarray(Image.open(io.BytesIO(picture(*arguments))).convert("L")).astype(float)


def cell(image, silo, label, silos=2):
    """The pixels of one disc: the discs begin at the right of the classes' names."""
    left = image.shape[1] - silos * CELL + silo * CELL
    return image[label * CELL : (label + 1) * CELL, left : left + CELL]


def test_counts_by_silo_and_class():
    labels = np.array([2, 0, 0, 1, 2, 2])
    expected = [[2, 0, 1, 0], [0, 0, 2, 0]]
    assert held({"a": np.array([0, 1, 2]), "b": np.array([4, 5])}, labels, 4).tolist() == expected
    with refused("labels from 0 to 2 for 2 classes"):
        held({"a": np.array([0])}, labels, 2)


def test_areas_are_in_proportion_and_none_vanishes():
    assert np.allclose(
        radii(COUNTS), LARGEST * np.array([[1, 0, 0.5], [SMALLEST / LARGEST, 1, 0.25]])
    )
    assert cell_of(np.ones((2, 26))) == NARROW
    assert radii(np.ones((26, 2), np.int64)).max() == NARROW / 2 - 1
    assert radii(np.zeros((2, 2), np.int64)).tolist() == [[0, 0], [0, 0]]


def test_a_disc_a_silo_and_class_of_which_it_holds_records():
    image = drawn(COUNTS)
    ink = np.array([[cell(image, silo, label).sum() for label in range(3)] for silo in range(2)])
    assert np.allclose(ink[0] / ink[0, 0], [1, 0, 0.25], atol=0.02)
    assert ink[1, 0] > 0
    assert np.isclose(ink[1, 1], ink[0, 0])
    assert np.isclose(ink[0, 0] / cell(image, 0, 0).max(), np.pi * LARGEST**2, rtol=0.02)
    assert image[3 * CELL :].any()  # the names below
    assert not np.array_equal(image[-20:], drawn(2 * COUNTS)[-20:])  # what the largest stands for
    assert np.array_equal(image[:-20], drawn(2 * COUNTS)[:-20])


def test_names_are_drawn_and_take_room():
    plain, named = drawn(COUNTS), drawn(COUNTS, ["cleveland", "va"], ["absent", "mild", "severe"])
    assert named.shape[0] > plain.shape[0]
    assert named[: 3 * CELL, : -2 * CELL].sum() > plain[: 3 * CELL, : -2 * CELL].sum()
    for silo in range(2):
        for label in range(3):
            assert np.array_equal(cell(plain, silo, label), cell(named, silo, label))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((COUNTS, ["a"]), "1 names for 2 silos"),
        ((COUNTS, [], ["a"]), "1 names for 3 classes"),
        ((-COUNTS,), "counts"),
        ((np.zeros((0, 3), np.int64),), r"not \[0, 3\]"),
        ((np.zeros((MOST_CELLS, 2), np.int64),), f"{2 * MOST_CELLS} discs, at most {MOST_CELLS}"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, text):
    with refused(text):
        picture(*arguments)
