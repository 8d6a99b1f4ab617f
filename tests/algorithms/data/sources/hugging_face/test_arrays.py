"""A column of lists of one shape."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.refusals import refused
from support.saved_sets import save

from staddle.algorithms.data.sources.hugging_face.source import HuggingFace


@pytest.fixture
def table(tmp_path):
    def call(column, **fields):
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        save(folder, {"a": column, "y": [0] * len(column)}, shards=2)
        return HuggingFace(kind="huggingface", folder=folder, array="a", label="y", **fields)

    return call


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float32(), 3), pa.list_(pa.float64()), pa.large_list(pa.int32()),
        pa.list_(pa.float16())],
)  # fmt: skip
def test_lists_of_one_length_are_records(table, kind):
    values = np.arange(30).reshape(10, 3)
    column = pa.array(values.tolist(), pa.list_(pa.int64())).cast(kind)
    found = table(column).read()
    assert torch.equal(found.x, torch.from_numpy(values).float())
    assert table(column).read_at((3,)).x.shape == (10, 3)
    assert table(column).read_at((1, 1, 3)).x.shape == (10, 1, 1, 3)


def test_lists_of_lists_keep_their_sides(table):
    values = np.random.default_rng(1).normal(size=(7, 2, 4)).astype(np.float32)
    column = pa.array(values.tolist(), pa.list_(pa.list_(pa.float32(), 4)))
    assert torch.equal(table(column).read().x, torch.from_numpy(values))
    assert table(column).read_at((1, 2, 4)).x.shape == (7, 1, 2, 4)
    # A model of fewer sides is not served: record_checks says so.
    assert table(column).read_at((8,)).x.shape == (7, 2, 4)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([[1], [2, 3]]), "its lists differ in length, or one is missing; cut or pad them"),
        (pa.array([[1], None]), "its lists differ in length, or one is missing"),
        (pa.array([[[1], [2, 3]], [[1], [2]]]), "its lists differ in length"),
        (pa.array([[1.0], [None]]), r"holds list<item: double>, or a number is missing; give"),
        (pa.array([["a"], ["b"]]), r"holds list<item: string>, or a number is missing"),
        (pa.array([[1], [2]], pa.list_(pa.uint8())), "pixels of 8 bits by 255, or save an Image"),
        (pa.array([[True], [False]]), "holds list<item: bool>, or a number is missing"),
        (pa.array([[2**24 + 1], [2]]), "has whole numbers beyond 16,777,216"),
        (pa.array([1, 2]), "holds int64, not lists of numbers; name it in data.features"),
        (pa.array(["a", "b"]).dictionary_encode(), "holds dictionary<.*, not lists of numbers"),
    ],
)
def test_what_cannot_be_records_is_named_with_its_type(table, column, said):
    with refused(rf"column 'a': .*{said}"):
        table(column).read()


def test_one_file_may_not_have_another_length(table):
    with refused("column 'a': its lists differ in length"):
        table(pa.array([[1.0]] * 3 + [[1.0, 2.0]] * 3)).read()


def test_more_than_the_memory_is_refused_first(table, monkeypatch):
    monkeypatch.setattr("staddle.files.file_bounds.available_memory", lambda: 10)
    with refused("the arrays of column 'a' would take 96 bytes of memory, 10 are available"):
        table(pa.array([[1.0, 2.0]] * 3)).read()
