import os
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.dataset import split
from staddle.algorithms.data.sources.public.natural import SOURCES, Natural

REAL = pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)


def read(folder, name, **fields):
    return Natural(kind="natural", folder=folder, name=name, **fields).read()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"name": "heart-disease", "sources": ["cleaveland"]},
            "'cleaveland' is not one of heart-disease; known: cleveland",
        ),
        ({"name": "har", "sources": ["31"]}, "'31' is not one of har"),
        ({"name": "har", "sources": ["3", "3"]}, "sources: '3' is listed twice"),
        ({"name": "har", "years": 3}, "years belongs to tcga-brca"),
        ({"name": "har", "survival": True}, "survival belongs to tcga-brca without years"),
        ({"name": "tcga-brca", "survival": True, "years": 3}, "survival belongs to tcga-brca with"),
        ({"name": "tcga-brca", "survival": 1}, "valid boolean"),
        ({"name": "tcga-brca", "years": 0}, "greater than or equal to 1"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path, fields, said):
    with pytest.raises(pydantic.ValidationError, match=said):
        Natural(kind="natural", folder=tmp_path, **fields)


def test_sources_without_records_are_named(tmp_path):
    held = {"x": np.zeros((2, 9, 128), np.float32), "y": np.zeros(2, int)}
    np.savez(tmp_path / "har.npz", **held, subject=np.array([4, 5]))
    assert read(tmp_path, "har", sources=["5"]).ids == ("5/0",)
    with refused("no record of 6, 7; name other sources"):
        read(tmp_path, "har", sources=["6", "7"])


@REAL
def test_the_real_hospitals():
    data = read(Path(os.environ["STADDLE_DATA"]) / "heart_disease", "heart-disease")
    assert data.x.shape == (920, 1, 1, 22)
    assert [data.sources.count(hospital) for hospital in SOURCES["heart-disease"]] == [
        303, 294, 123, 200,
    ]  # fmt: skip
    assert torch.bincount(data.y).tolist() == [164 + 188 + 8 + 51, 509]
    assert len(set(data.ids)) == 920
    # its means and deviations are those that the constants stand for
    cleveland = data.x[:303, 0, 0]
    numbers = cleveland[:, [0, 6, 7, 12, 14]]  # age, trestbps, chol, thalach, oldpeak
    assert numbers.mean(0).abs().max() < 0.1
    assert (numbers.std(0) - 1).abs().max() < 0.1
    # a cholesterol of 0 is a missing one
    assert data.x[data.ids.index("switzerland/0"), 0, 0, 7] == 0


@REAL
def test_the_real_subjects():
    data = read(Path(os.environ["STADDLE_DATA"]), "har")
    assert data.x.shape == (10_299, 9, 1, 128)
    assert torch.bincount(data.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert set(data.sources) == set(SOURCES["har"])
    assert len(set(data.groups)) == 857
    one = read(Path(os.environ["STADDLE_DATA"]), "har", sources=["1"])
    train, test = split(one, b"key", 0.25)
    halves = {window[6:, 0, 64:].numpy().tobytes() for window in train.x}
    assert not any(window[6:, 0, :64].numpy().tobytes() in halves for window in test.x)


@REAL
def test_the_real_regions():
    data = read(Path(os.environ["STADDLE_DATA"]) / "tcga_brca", "tcga-brca")
    assert data.x.shape == (505, 1, 1, 39)
    known = {
        "Northeast": (171, 21), "South": (79, 14), "West": (69, 15), "Midwest": (94, 10),
        "Europe": (21, 7),
    }  # fmt: skip
    for region, (alive, dead) in {**known, "Canada": (2, 2)}.items():
        own = read(Path(os.environ["STADDLE_DATA"]) / "tcga_brca", "tcga-brca", sources=[region])
        assert torch.bincount(own.y).tolist() == [alive, dead]
        assert set(own.sources) == {region}
