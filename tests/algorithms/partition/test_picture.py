import io

import numpy as np
import pytest
from PIL import Image
from support.refusals import refused

from staddle.algorithms.partition.picture import (
    MOST_DISCS,
    NARROW,
    PALEST,
    SMALLEST,
    WIDE,
    WIDEST,
    by_class,
    cell_of,
    darkness,
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
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, text):
    with refused(text):
        picture(*arguments)


def test_silos_stand_by_class_and_purity():
    assert by_class(np.array([[1, 8], [6, 0], [5, 5], [0, 3]])) == [1, 2, 3, 0]


def test_many_silos_are_stripes_as_dark_as_they_hold_records():
    counts = np.tile([[100, 0], [0, 25], [4, 0]], (40, 1))
    dark = darkness(counts)
    assert sorted(dark[:, 0].tolist()) == [0.0] * 40 + [0.2] * 40 + [1.0] * 40
    assert dark[80:].tolist() == [[0, 0.5]] * 40
    image = drawn(counts)
    width = WIDEST // 120
    assert image.shape[1] < WIDEST + 4 * NARROW
    first = image[NARROW // 2, -120 * width :].reshape(120, width)  # the first class, silo by silo
    assert np.allclose(first, first[:, :1])
    assert np.allclose(first[:, 0] / first.max(), dark[:, 0], atol=0.02)


def test_more_silos_than_pixels_share_them():
    counts = np.ones((4 * WIDEST, 2), np.int64)
    counts[:, 0] = 3
    counts[-1] = [0, 1]
    dark = darkness(counts)
    assert dark.shape == (WIDEST, 2)
    assert dark[0].tolist() == pytest.approx([1, np.sqrt(1 / 3)])
    assert drawn(counts).shape[1] < WIDEST + 4 * NARROW
    assert darkness(np.array([[10**6, 1], [1, 1]]))[0, 1] == PALEST  # not white: it holds one
    assert drawn(np.ones((MOST_DISCS + 1, 1), np.int64)).shape[0] < 2 * NARROW  # without names
