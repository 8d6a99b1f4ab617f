from math import exp, log

import pytest
import torch
from support.two_row_model import HALF, LINEAR, gradient_of, line, played
from support.whole_jobs import check_tensors

from staddle.algorithms.methods.common.second_model import MODEL
from staddle.algorithms.training.silo_round import to_modules

ALPHA = 2 * HALF  # ln 3


def meta(method, *labels, x=1.0):
    """Losses of records with these labels, and their gradient, at w = (0, 0).

    The last two records are x, others 1.
    """
    parts, records = line(0.0, 0.0), torch.ones(len(labels), 1)
    records[-2:] = x
    losses = method.meta(parts, records, torch.tensor(labels), {})
    assert losses.shape == (len(labels),)
    return losses.mean().item(), gradient_of(losses, parts["classifier"])


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_both_steps_by_hand(make_job, variant):
    """An inner step of ln 3 on the first two records goes to (a, -a), where x = 2 is of class 0
    with 9/10.

    So its gradient is 2 (-1/10, 1/10), if it is of class 0, or 2 (9/10, -9/10). The Hessian of the
    first two at w is 1/4 (1, -1; -1, 1), which makes half of that: I - α H leaves 1 - α/2 of it.
    """
    method = make_job("per-fedavg", {"alpha": ALPHA, "variant": variant}).method()
    for label, loss, slope in ((0, log(10 / 9), -1 / 5), (1, log(10), 9 / 5)):
        expected = slope * (1 - ALPHA / 2 if variant == "hf" else 1)
        found, gradient = meta(method, 0, 0, label, label, x=2.0)
        assert found == pytest.approx(loss)
        assert gradient == pytest.approx([expected, -expected])


def test_a_batch_is_halved_the_larger_half_first_and_a_small_one_serves_whole(make_job):
    method = make_job("per-fedavg", {"alpha": ALPHA}).method()
    assert meta(method, 0, 0, 0, 1, 1)[0] == pytest.approx(log(4))  # three records, then two
    assert meta(method, 0)[0] == pytest.approx(log(4 / 3))
    # of 0, 0, 1 the mean gradient at w is (-1/6, 1/6), so w̃ = (α/6, -α/6)
    right, wrong = log(1 + exp(-ALPHA / 3)), log(1 + exp(ALPHA / 3))
    assert meta(method, 0, 0, 1)[0] == pytest.approx((2 * right + wrong) / 3)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_with_the_smallest_alpha_on_whole_batches_it_is_fedavg(make_job, make_shards, variant):
    training, options = {"batch_size": 3, "momentum": 0.9}, {"alpha": 1e-9, "variant": variant}
    averages = make_job("fedavg", {}, LINEAR, training, rounds=2)
    job = make_job("per-fedavg", options, LINEAR, training, rounds=2)
    (_, one), (_, other) = played(averages, make_shards(averages)), played(job, make_shards(job))
    check_tensors(other["a"].parts, one["a"].parts, 1e-5)


def test_in_the_end_every_silo_takes_its_own_step_and_keeps_it(make_job, make_shards):
    """θ = w - α ∇f(w), with all records in one batch."""
    fields = {"silos": ["a", "b", "c", "d"], "participation": 0.5, "rounds": 2}
    job = make_job("per-fedavg", {"alpha": 0.5}, LINEAR, {"batch_size": 100}, **fields)
    assert [len(job.cohort(round_)) for round_ in range(job.length)] == [2, 2, 4]
    shards = make_shards(job)
    trained, delivered = played(job, shards)
    for silo in job.silos:
        modules, data = to_modules(job.method(), silo, delivered[silo]), shards[silo][0]
        loss = torch.nn.functional.cross_entropy(job.method().predict(modules, data.x), data.y)
        for part in MODEL:
            for name, value in modules[part].named_parameters():
                (slope,) = torch.autograd.grad(loss, [value], retain_graph=True)
                stepped = value.detach() - 0.5 * slope
                check_tensors(trained[silo].parts[part], {name: stepped}, 1e-5)


def test_more_own_steps_go_farther(make_job, make_shards):
    ways = []
    for epochs in (1, 4):
        options = {"alpha": 0.1, "tuning_epochs": epochs}
        job = make_job("per-fedavg", options, LINEAR, rounds=1)
        ends = [end["a"].parts["classifier"]["bias"] for end in played(job, make_shards(job))]
        ways.append((ends[0] - ends[1]).norm())
    assert ways[1] > 1.5 * ways[0] > 0


def test_the_inner_step_leaves_running_statistics_to_the_outer_one(make_job, make_shards):
    job = make_job("per-fedavg", {}, {"norm": "batch", "buffers": "global"}, rounds=1)
    states, _ = played(job, make_shards(job))
    # 24 records, then the own steps
    assert states["a"].parts["extractor"]["norm1.num_batches_tracked"] == 3 + 3
