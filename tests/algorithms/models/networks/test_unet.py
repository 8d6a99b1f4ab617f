import pytest
import torch
from support.engines import check_engines_agree
from support.jobs import make_job
from support.other_tasks import SEGMENTED, shards
from torch import nn

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.models.build import ModelOptions, build, couples_records, dense, maps
from staddle.files.documents import validate


def made(shape, seed=7, **changes):
    fields = {"name": "unet", "classes": 3, "input": shape, "options": {"widths": [4, 6, 8]}}
    return build(validate({**fields, **changes}, ModelOptions, "job.toml"), seed)


def two(level, x, stride):
    """Two convolutions with ReLU, by the functions of torch."""
    run = (nn.functional.conv2d, nn.functional.conv3d)[x.ndim - 4]
    for number, step in ((1, stride), (2, 1)):
        own = getattr(level, f"conv{number}")
        x = run(x, own.weight, own.bias, step, 1).clamp(min=0)
    return x


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 8, 12), (2, 7, 5), (1, 4, 6, 5)])
def test_it_is_levels_down_and_up_with_what_was_before_next_to_them(shape):
    parts = made(shape)
    own, x = parts["extractor"], torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    top = two(own.down[0], x, 1)
    middle = two(own.down[1], top, 2)
    y = two(own.down[2], middle, 2)
    for level, skip in ((own.up[0], middle), (own.up[1], top)):
        larger = nn.functional.interpolate(y, scale_factor=2, mode="nearest")
        within = [slice(side) for side in skip.shape[2:]]
        y = two(level, torch.cat([larger[(..., *within)], skip], 1), 1)
    torch.testing.assert_close(own(x), y)
    assert parts["classifier"](y).shape == (2, 3, *shape[1:])


def test_what_it_is_and_takes():
    for norm in ("none", "group", "batch"):
        own = ModelOptions(name="unet", classes=3, norm=norm)
        assert dense(own)
        assert maps(own)
        assert couples_records(own) == (norm == "batch")
    assert not dense(ModelOptions(name="mlp", classes=3))
    with pytest.raises(
        ValueError, match=r"'unet' takes \[channels, height, width\] or \[channels, "
    ):
        ModelOptions(name="unet", classes=3, input=(1, 8))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_silos_that_train_at_once_end_as_one_by_one(norm):
    model = {**SEGMENTED, "norm": norm, "options": {"widths": [4, 6], "dropout": 0.0}}
    job = make_job("fedavg", model=model, rounds=1, task={"kind": "segmentation"})
    check_engines_agree(job, shards("segmentation", job.silos))


def test_it_learns_to_find_what_one_class_everywhere_does_not():
    training = {"epochs": 5, "batch_size": 8, "lr": 0.02, "optimiser": "adam"}
    job = make_job(
        "fedavg", model=SEGMENTED, rounds=5, training=training, task={"kind": "segmentation"}
    )
    found = simulate(job, shards("segmentation", job.silos))
    for own in found.history.values():
        last = own[-1].delivered
        assert last.score > last.baseline + 0.25
