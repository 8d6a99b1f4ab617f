import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import vmap_evaluation
from staddle.algorithms.engines.vmap_evaluation import evaluate, measure, saved_bytes
from staddle.algorithms.engines.vmap_training import Silos, couples
from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.training.loop import evaluate as evaluate_one
from staddle.algorithms.training.loop import measure as measure_one

COUNTING = ClassCounting(3, confusion=True, bins=8)


class Counting:
    """Sums of features by silo, and as a check the number of records."""

    def predict(self, parts, x):
        return parts["classifier"](parts["extractor"](x))

    def measure(self, parts, x, y):
        total = parts["extractor"](x).sum(0)
        return {"sum": total, "labels": y.sum(), "count": torch.tensor(len(y))}

    def rows(self, parts, x, y):
        return {"features": parts["extractor"](x), "labels": y}


def parts(seed, tracked):
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(5, track_running_stats=tracked)
    if tracked:
        norm.running_mean.normal_()
    return {
        "extractor": nn.Sequential(nn.Flatten(), nn.Linear(6, 5), norm, nn.Tanh()),
        "classifier": nn.Linear(5, 3),
    }


@pytest.mark.parametrize("tracked", [True, False])
def test_looks_are_those_of_one_silo(tracked, monkeypatch):
    """Chunks of 8 and 12 records.

    Where statistics are of the batch, each chunk is as it is for one silo.
    """
    monkeypatch.setattr(vmap_evaluation, "CHUNK", 8)
    monkeypatch.setattr("staddle.algorithms.training.loop.EVALUATION_CHUNK", 12)
    rng, sizes = np.random.default_rng(0), [5, 0, 31, 24, 12]
    x = torch.from_numpy(rng.normal(size=(72, 6)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 3, 72))
    ranges = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(5)]
    models = [parts(seed, tracked) for seed in range(5)]
    states = [{part: module.state_dict() for part, module in model.items()} for model in models]
    values = {
        part: {name: torch.stack([state[part][name] for state in states]) for name in named}
        for part, named in states[0].items()
    }
    template = {part: module.to("meta") for part, module in parts(0, tracked).items()}
    silos, method = Silos(template, values, x, y), Counting()
    found = zip(
        ranges,
        models,
        evaluate(method, silos, ranges, COUNTING),
        measure(method.measure, silos, ranges),
        measure(method.rows, silos, ranges, rows=True),
        strict=True,
    )
    assert couples(template) is not tracked
    for own, model, right, sums, rows in found:
        data = Dataset(x[own.start : own.stop], y[own.start : own.stop])
        assert right == evaluate_one(method, model, data, COUNTING)
        assert right.records == right.confusion.sum() == right.scores[0].sum() == len(own)
        assert sums["count"] == len(own)
        assert sums["labels"] == data.y.sum()
        alone = measure_one(method.rows, model, data, rows=True)
        assert rows.keys() == alone.keys() == ({"features", "labels"} if len(own) else set())
        if len(own):
            total = measure_one(method.measure, model, data)["sum"]
            assert_close(sums["sum"], total.double(), rtol=1e-4, atol=1e-5)
            assert rows["features"].shape == (len(own), 5)
            assert_close(rows["features"], alone["features"].double(), rtol=1e-4, atol=1e-5)
            assert torch.equal(rows["labels"], data.y.double())  # in the records' order


def test_what_a_backward_pass_keeps():
    modules = {"a": nn.Sequential(nn.Linear(3, 1000), nn.Tanh())}
    kept = saved_bytes(lambda parts, x: parts["a"](x), modules, (3,))
    assert 4 * 1000 <= kept <= 4 * 1003  # the output and the input, not the weights
