import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_tensors
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.training.loop import (
    PLAIN,
    PlainStepper,
    batch_coupled,
    batches,
    evaluate,
    measure,
    train,
)
from staddle.algorithms.training.optimisers import clipped
from staddle.errors import CancelledError


def cross_entropy(parts, x, y, context):
    return nn.functional.cross_entropy(
        parts["classifier"](parts["extractor"](x)), y, reduction="none"
    )


BOTH = Stage(("extractor", "classifier"), 1, cross_entropy, Optimiser(0.1))


def linear_parts(norm=False):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(6, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh()]
    return {"extractor": nn.Sequential(*layers), "classifier": nn.Linear(5, 3)}


def records(n, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(
        torch.from_numpy(rng.normal(size=(n, 6)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 3, n)),
    )


def rng():
    return stream(0, "a", 0, "train/0")


def test_batches_cover_every_record_once_and_the_last_is_smaller():
    drawn = batches(10, 4, rng(), wrap=False)
    assert [len(b) for b in drawn] == [4, 4, 2]
    assert sorted(np.concatenate(drawn).tolist()) == list(range(10))
    one = stream(0, "a", 0, "train/0")
    assert (
        batches(10, 4, one, wrap=False)[0].tolist() != batches(10, 4, one, wrap=False)[0].tolist()
    )


@pytest.mark.parametrize(("n", "size", "count"), [(10, 4, 3), (8, 4, 2), (3, 8, 1)])
def test_wrapped_batches_are_full_and_repeat_the_shuffle_from_its_start(n, size, count):
    plain_order = np.concatenate(batches(n, size, rng(), wrap=False))
    drawn = batches(n, size, rng(), wrap=True)
    assert [len(b) for b in drawn] == [size] * count
    assert np.concatenate(drawn).tolist() == [plain_order[i % n] for i in range(size * count)]


@pytest.mark.parametrize(
    ("last", "n", "sizes"),
    [
        ("fill", 10, [4, 4, 4]),
        ("keep", 10, [4, 4, 2]),
        ("drop", 10, [4, 4]),
        # One record that is left over has no variance.
        ("fill", 9, [4, 4, 4]),
        ("keep", 9, [4, 4]),
        ("drop", 9, [4, 4]),
        # The only batch of an epoch stays.
        ("fill", 3, [4]),
        ("keep", 3, [3]),
        ("drop", 3, [3]),
        ("keep", 1, [1]),
        # Nothing is left over.
        *((last, 8, [4, 4]) for last in ("fill", "keep", "drop", None)),
        (None, 9, [4, 4, 1]),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_the_job_says_what_becomes_of_the_last_batch(last, n, sizes, norm):
    """Whatever the model, unless the job does not say."""
    if last is None and norm:
        sizes = [4] * len(sizes)
    order = np.concatenate(batches(n, 4, rng(), wrap=False))
    stage = replace(BOTH, last=last)
    drawn = PLAIN.batches(stage, n, 4, rng(), norm)
    assert [len(batch) for batch in drawn] == sizes
    assert np.concatenate(drawn).tolist() == [order[i % n] for i in range(sum(sizes))]
    assert PLAIN.steps(stage, n, 4) == len(sizes)
    assert np.isfinite(train(linear_parts(norm), stage, records(max(n, 2)), 4, rng()))


def sliced(n, size, last):
    """Batches of the records 0, 1, …, each taken in turn; what is left over is as ``last`` says."""
    found = [[]]
    for record in range(n):
        if len(found[-1]) == size:
            found.append([])
        found[-1].append(record)
    *whole, final = found
    match last:
        case "fill":
            final += [i % n for i in range(size - len(final))]
        case "keep" if whole and len(final) == 1:
            return whole
        case "drop" if whole and len(final) < size:
            return whole
    return [*whole, final]


@pytest.mark.parametrize("last", ["fill", "keep", "drop"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9, 10, 11])
@pytest.mark.parametrize("norm", [False, True])
def test_without_a_shuffle_batches_are_slices_of_the_records_in_their_order(last, n, norm):
    """The same in every epoch, and nothing is drawn."""
    own, stage = rng(), replace(BOTH, last=last, shuffle=False)
    for _ in range(2):
        drawn = PLAIN.batches(stage, n, 4, own, norm)
        assert [batch.tolist() for batch in drawn] == sliced(n, 4, last)
        assert {batch.dtype for batch in drawn} == {np.dtype(np.int64)}
    assert PLAIN.steps(stage, n, 4) == len(sliced(n, 4, last))
    assert own.integers(2**60) == rng().integers(2**60)


@pytest.mark.parametrize(("norm", "last"), [(True, "fill"), (False, "keep")])
def test_an_unshuffled_job_that_leaves_its_last_batch_open_depends_on_the_model(norm, last):
    drawn = PLAIN.batches(replace(BOTH, shuffle=False), 10, 4, rng(), norm)
    assert [batch.tolist() for batch in drawn] == sliced(10, 4, last)


@pytest.mark.parametrize(("norm", "sizes"), [(False, [4, 4, 2]), (True, [4, 4, 4])])
def test_training_wraps_exactly_where_normalisation_couples_a_batch(norm, sizes):
    seen = []

    class Seeing(PlainStepper):
        def begin(self, modules, stage):
            return lambda x, _: torch.tensor(float(len(seen.append(len(x)) or [])))

    assert batch_coupled(linear_parts(norm)) is norm
    train(linear_parts(norm), BOTH, records(10), 4, rng(), Seeing())
    assert seen == sizes


def test_clipped_is_torchs_clipping_over_all_tensors_together():
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator) for shape in ((4, 3), (3,))]
    whole = float(torch.cat([g.flatten() for g in gradients]).norm())
    theirs = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for limit in (0.3 * whole, 1.5 * whole):
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(theirs, limit)
        ours = clipped(gradients, limit)
        assert all(torch.allclose(a, p.grad, rtol=1e-5) for a, p in zip(ours, theirs, strict=True))
    assert all(a is b for a, b in zip(clipped(gradients, None), gradients, strict=True))
    halves = clipped([torch.tensor([3.0]), torch.tensor([4.0])], 2.5)
    assert [half.tolist() for half in halves] == [[1.5], [2.0]]
    parts, by_hand = linear_parts(), linear_parts()
    stage = Stage(("classifier",), 1, cross_entropy, Optimiser(0.1, clip=1e-3))
    train(parts, stage, records(4), 4, rng())
    step = (parts["classifier"].weight - by_hand["classifier"].weight).square().sum()
    step = step + (parts["classifier"].bias - by_hand["classifier"].bias).square().sum()
    assert step.sqrt().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_a_trained_part_that_the_loss_does_not_touch_decays_only():
    parts = {**linear_parts(), "adapter": nn.Linear(2, 2)}
    decayed = {name: 0.95 * value for name, value in parts["adapter"].state_dict().items()}
    stage = Stage(("classifier", "adapter"), 1, cross_entropy, Optimiser(0.1, weight_decay=0.5))
    train(parts, stage, records(4), 4, rng())
    check_tensors(parts["adapter"].state_dict(), decayed, 1e-8)


def test_measure_adds_up_over_chunks_and_touches_no_running_statistics(make_job):
    class Counting:
        def measure(self, parts, x, y):
            features = parts["extractor"](x)
            assert not any(module.training for module in parts.values())
            return {"sum": features.sum(0), "count": torch.tensor(len(y))}

    parts, data = linear_parts(norm=True), records(1100)
    for module in parts.values():
        module.train()
    found = measure(Counting().measure, parts, data)
    assert found["count"].item() == 1100
    assert not parts["extractor"][2].num_batches_tracked
    assert torch.allclose(found["sum"], parts["extractor"](data.x).double().sum(0), rtol=1e-4)
    assert found["sum"].dtype == torch.float64
    assert measure(make_job().method().measure, parts, data) == {}


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_full_batch_is_one_step_an_epoch_on_all_records(epochs):
    parts, oracle, data = linear_parts(), linear_parts(), records(21)
    stage = Stage(("classifier",), epochs, cross_entropy, Optimiser(0.1), full_batch=True)
    train(parts, stage, data, 4, rng())
    optimiser = torch.optim.SGD(oracle["classifier"].parameters(), lr=0.1)
    for _ in range(epochs):
        optimiser.zero_grad()
        cross_entropy(oracle, data.x, data.y, {}).mean().backward()
        optimiser.step()
    assert torch.equal(parts["classifier"].weight, oracle["classifier"].weight)


@pytest.mark.parametrize("norm", [False, True])
def test_train_equals_an_obvious_loop(norm):
    data, parts, oracle = records(21), linear_parts(norm), linear_parts(norm)
    stage = Stage(("extractor", "classifier"), 3, cross_entropy, Optimiser(0.1, 0.9, 1e-3))
    loss = train(parts, stage, data, 4, rng(), PLAIN)
    same = rng()
    model = nn.Sequential(oracle["extractor"], oracle["classifier"]).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(3):
        losses = []
        for index in batches(21, 4, same, wrap=norm):
            optimiser.zero_grad()
            value = nn.functional.cross_entropy(model(data.x[index]), data.y[index])
            value.backward()
            optimiser.step()
            losses.append(value.item())
    for part, module in oracle.items():
        check_tensors(parts[part].state_dict(), module.state_dict())
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_parts_not_trained_stand_still_in_evaluation_mode():
    parts, before = linear_parts(norm=True), linear_parts(norm=True)
    stage = Stage(("classifier",), 2, cross_entropy, Optimiser(0.1, 0.9, 0.1))
    train(parts, stage, records(12), 4, rng())
    check_tensors(parts["extractor"].state_dict(), before["extractor"].state_dict())
    assert not torch.equal(parts["classifier"].weight, before["classifier"].weight)


def test_momentum_does_not_outlive_a_stage():
    two, one = linear_parts(), linear_parts()
    for parts, momentum in ((two, 0.9), (one, 0.0)):
        stage = replace(BOTH, optimiser=Optimiser(0.1, momentum))
        for number in range(3):  # stages of one batch: momentum never gets to act
            train(parts, stage, records(4), 4, stream(0, "", number, "s"))
    assert torch.equal(two["classifier"].weight, one["classifier"].weight)


def test_the_penalty_adds_its_own_gradient():
    parts = linear_parts()
    before = parts["classifier"].weight.detach().clone()
    zero = lambda parts, x, y, context: 0 * cross_entropy(parts, x, y, context)
    penalty = lambda parameters, _: (parameters["classifier"]["weight"] ** 2).sum() / 2
    train(parts, Stage(("classifier",), 1, zero, Optimiser(0.25), penalty), records(4), 4, rng())
    assert torch.equal(parts["classifier"].weight, before * 0.75)


def test_the_context_reaches_the_loss():
    seen = []
    loss = lambda parts, x, y, context: (
        seen.append(context["t"].item()) or cross_entropy(parts, x, y, context)
    )
    stage = Stage(("classifier",), 1, loss, Optimiser(0.1), context={"t": torch.tensor(3.0)})
    train(linear_parts(), stage, records(4), 4, rng())
    assert seen == [3.0]


def test_a_loss_that_is_not_finite_stops_and_names_the_lr():
    stage = Stage(("extractor", "classifier"), 50, cross_entropy, Optimiser(1e38))
    with refused(r"loss is (nan|inf); lower training.lr \(1e\+38\)"):
        train(linear_parts(), stage, records(12), 4, rng())


def test_cancellation_is_asked_between_batches():
    answers, done = iter([False, False, True]), []
    asking = {"cancelled": lambda: next(answers), "progress": lambda: done.append(1)}
    with pytest.raises(CancelledError):
        train(linear_parts(), BOTH, records(12), 4, rng(), **asking)
    assert len(done) == 2


@pytest.mark.parametrize("trains", [(), ("supervisor",)])
def test_a_stage_must_train_parts_that_exist(trains):
    with refused("the model has parts"):
        train(linear_parts(), Stage(trains, 1, cross_entropy, Optimiser(0.1)), records(4), 4, rng())


def test_evaluate_counts_over_chunks_without_touching_running_statistics(make_job):
    method = make_job().method()
    parts, data = linear_parts(norm=True), records(1100)
    before = parts["extractor"][2].running_mean.clone()
    for module in parts.values():
        module.eval()
    with torch.no_grad():
        slow = sum(
            int(parts["classifier"](parts["extractor"](x[None])).argmax() == y)
            for x, y in zip(data.x, data.y, strict=True)
        )
    for module in parts.values():
        module.train()
    assert evaluate(method, parts, data, ClassCounting(3)).correct == slow
    assert torch.equal(parts["extractor"][2].running_mean, before)
    assert math.isclose(slow / 1100, 1 / 3, abs_tol=0.2)
