import pytest
import torch

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.data.sources.public.bundled import Bundled


def read(name, **fields):
    return Bundled(kind="bundled", name=name, **fields).read()


def test_the_sets_come_with_the_software():
    numbers = read("digits")
    assert torch.equal(numbers.x, digits().x)
    assert numbers.ids == tuple(map(str, range(1797)))
    tumours = read("breast-cancer")
    assert tumours.x.shape == (569, 1, 1, 30)
    assert tumours.class_names == ("malignant", "benign")
    assert torch.bincount(tumours.y).tolist() == [212, 357]
    assert tumours.x.mean(0).abs().max() < 1e-5
    assert tumours.x.std(0, correction=0).sub(1).abs().max() < 1e-5
    patients = read("diabetes")
    assert patients.x.shape == (442, 1, 1, 10)
    assert (patients.y.dtype, patients.y.shape) == (torch.float32, (442,))
    assert (patients.y.min(), patients.y.max(), patients.class_names) == (25, 346, None)
    assert patients.x.mean(0).abs().max() < 1e-5
    assert patients.x.std(0, correction=0).sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["digits", "breast-cancer", "diabetes"])
def test_shares_are_pieces_of_the_set_and_keep_its_ids(name):
    whole, shares = read(name), [read(name, share=(k, 3), seed=5) for k in (1, 2, 3)]
    assert sorted(sum((share.ids for share in shares), ()), key=int) == list(whole.ids)
    for share in shares:
        own = [int(own) for own in share.ids]
        assert torch.equal(share.x, whole.x[own])  # standardised by the whole set, not by the share
        assert torch.equal(share.y, whole.y[own])
        assert share.class_names == whole.class_names
