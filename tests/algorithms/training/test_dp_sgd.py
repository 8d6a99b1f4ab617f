"""Private steps against plain ones, by hand, and record by record.

What bounds a record's influence holds exactly.
"""

from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import pytest
import torch
from support.refusals import refused
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.foreign import TRAITS, Traits
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.numerics.torch_draws import drawing
from staddle.algorithms.training.clipped_sum import ClippedSum
from staddle.algorithms.training.dp_sgd import Mechanism, Private, _by_function, check, check_apart
from staddle.algorithms.training.loop import PLAIN, train
from staddle.algorithms.training.silo_round import facts_of, handed, to_modules
from staddle.errors import LocalError

METHODS = {
    "ditto": {},
    "fedavg": {},
    "feddyn": {"alpha": 0.5},
    "fedntd": {"temperature": 2.0},
    "scaffold": {},
    "fedprox": {},
    "fedrep": {"head_epochs": 2},
    "moon": {"mu": 5},
    "fedrod": {},
    "pfedsim": {},
    "fedssa": {},
    "fedsimsup": {"supervisor": "lenet"},
    "fml": {},
    "fedaims": {"sampling": "full"},
    "fedaims-prototype": {"sampling": "full", "aux_ce": "prototype"},
    "ppfl": {"models": 2, "lam": 0},
    "ppfl-ppfl2": {"models": 2, "lam": 0, "variant": "ppfl2"},
}
CLIP = 32.0  # above the gradients of these tests
GRID = 1e-8  # by which fixed point, in steps of CLIP / 2^38, is off in a few steps


@dataclass(frozen=True)
class Records:
    """A data set in float64."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.y)

    def take(self, index):
        return Records(self.x[index], self.y[index])


class Fixed:
    """Draws what it is told, and noise of a seed."""

    def __init__(self, draws=(), seed=0):
        self.draws, self.random, self.asked = list(draws), np.random.default_rng(seed), 0

    def __call__(self):
        return self

    def drawn(self, records, q):
        return np.array(self.draws.pop(0), np.int64) if self.draws else np.arange(records)

    def normal(self, count):
        self.asked += count
        return self.random.normal(size=count)


def uncharged(stage):
    """Nobody counts."""


def private(draws=(), fresh=None, charge=uncharged, **fields):
    how = {"clip": CLIP, "sigma": 0.0, "whole_sigma": 0.0, "q": 1.0, "divisor": 8.0}
    mechanism = Mechanism(**{**how, "physical_batch": 16, **fields})
    return Private(mechanism, fresh or Fixed(draws), charge)


def stepped(parts, stage, data, way, batch=1):
    """Train the parts, of a method's those that the stage names."""
    return train(handed(parts, stage), stage, data, batch, rng(), way)


def apart(one, other):
    return (values(one) - values(other)).abs().max()


def double(modules):
    return {part: module.double() for part, module in modules.items()}


def stages_of(make_job, make_data, name):
    """A method's stages in a round in which all parts may train, its modules in float64, and eight
    records.
    """
    torch.manual_seed(0)
    method_name, _, _ = name.partition("-")
    model = {"name": "convnet-digits"} if method_name == "fedaims" else {}
    fields = {"silos": ["a", "b", "c"]}
    if method_name == "fedsimsup":
        fields = {"silos": list("abcdef"), "participation": 0.67, "min_cohort": 3}
    job, data = make_job(method_name, METHODS[name], model=model, **fields), make_data(8)
    method, silo = job.method(), job.silos[0]
    state = initial_state(method, silo)
    if method_name == "fedaims":
        prototypes = torch.randn(state.extra["prototypes"].shape)
        state = replace(state, extra={**state.extra, "prototypes": prototypes})
    stages = [
        replace(stage, context={key: value.double() for key, value in stage.context.items()})
        for stage in method.stages(state, facts_of(job, silo, 1, data))
    ]
    return stages, double(to_modules(method, silo, state)), Records(data.x.double(), data.y)


def rng():
    return stream(0, "a", 0, "train/0")


def values(modules, parts=None):
    chosen = parts or modules
    return torch.cat(
        [p.detach().reshape(-1) for part in chosen for p in modules[part].parameters()]
    )


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_and_clip_it_is_plain_training(make_job, make_data, name):
    """Security rule 26: within 1e-8 in float64 on the same batches: what is added up is in fixed
    point.
    """
    stages, modules, data = stages_of(make_job, make_data, name)
    _, others, _ = stages_of(make_job, make_data, name)
    before, way = values(modules), private()
    for stage in stages:
        stepped(modules, stage, data, PLAIN, len(data))
        stepped(others, stage, data, way)
    assert (values(modules) - before).abs().max() > 1e-4
    assert apart(modules, others) < GRID


@pytest.mark.parametrize("name", METHODS)
def test_no_record_moves_more_than_the_clip(make_job, make_data, name):
    """With a record and without it: all parameters of a step together differ by C lr / D at
    most.
    """
    clip, moved = 0.05, []
    for index in range(4):
        stages, modules, data = stages_of(make_job, make_data, name)
        _, others, _ = stages_of(make_job, make_data, name)
        stage = replace(stages[-1], epochs=1, optimiser=Optimiser(1.0), full_batch=False)
        whole, less = list(range(8)), [i for i in range(8) if i != index]
        stepped(modules, stage, data, private([whole], clip=clip))
        stepped(others, stage, data, private([less], clip=clip))
        moved.append(float((values(modules) - values(others)).norm()))
    assert max(moved) <= clip / 8 * (1 + 1e-9)  # what the difference of two models is off
    assert max(moved) > 0.99 * clip / 8  # the bound is reached, over all trained parts together


def linear():
    torch.manual_seed(0)
    return {
        "extractor": nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double(),
        "classifier": nn.Linear(5, 3).double(),
    }


def cross_entropy(parts, x, y, context):
    return nn.functional.cross_entropy(
        parts["classifier"](parts["extractor"](x)), y, reduction="none"
    )


def records(n):
    random = np.random.default_rng(1)
    return Records(
        torch.from_numpy(random.normal(size=(n, 6))), torch.from_numpy(random.integers(0, 3, n))
    )


BOTH = Stage(
    ("extractor", "classifier"), 1, cross_entropy, Optimiser(0.5, momentum=0.9, weight_decay=0.01)
)


def clipped_by_hand(parts, data, clip):
    """Σ of the cut gradients, record after record, by autograd alone."""
    parameters = [p for part in ("extractor", "classifier") for p in parts[part].parameters()]
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(data)):
        loss = cross_entropy(parts, data.x[i : i + 1], data.y[i : i + 1], {}).sum()
        found = torch.autograd.grad(loss, parameters)
        norm = torch.cat([g.reshape(-1) for g in found]).norm()
        total = [t + g * min(1.0, clip / float(norm)) for t, g in zip(total, found, strict=True)]
    return torch.cat([t.reshape(-1) for t in total])


@pytest.mark.parametrize("physical", [1, 3, 7, 16])
def test_clipped_sums_are_those_by_hand_however_few_records_fit_into_memory(physical):
    parts, data = linear(), records(7)
    expected = clipped_by_hand(parts, data, 0.3)
    before = values(parts)
    stage = replace(BOTH, optimiser=Optimiser(1.0))
    train(parts, stage, data, 1, rng(), private(clip=0.3, physical_batch=physical))
    assert torch.allclose((before - values(parts)) * 8, expected, atol=1e-9, rtol=2e-6)


def test_no_choice_of_the_other_records_lets_one_move_more_than_the_clip():
    """In float32, one by one, these leave the sum at 257, or take it from 256 down by twice what
    they are.

    tests/algorithms/training/test_clipped_sum.py has them with 23,553 records, and 8 clips.
    """
    x = torch.tensor([[1.0]] * 257 + [[-(2.0**-17) * (1 + 2.0**-20)]] * 512)
    adding = x.flatten().numpy()
    assert np.add.accumulate(adding)[-1] - np.add.accumulate(adding[1:])[-1] == 1 + 2**-7
    loss = lambda parts, x, *_: parts["linear"](x)[:, 0]
    stage, ends = Stage(("linear",), 1, loss, Optimiser(1.0)), []
    data = Records(x, torch.zeros(769, dtype=torch.int64))
    for drawn in (range(769), range(1, 769)):
        parts = {"linear": nn.Linear(1, 1, bias=False)}
        parts["linear"].weight.data.zero_()  # its gradient is the record
        stepped(parts, stage, data, private([list(drawn)], clip=1.0, divisor=1.0, physical_batch=1))
        ends.append(parts["linear"].weight.item())
    # float32's steps there: the release is rounded to them
    assert ends[1] - ends[0] == pytest.approx(1, abs=2**-14)


@pytest.mark.parametrize("functional", [False, True])
def test_what_a_record_adds_has_the_same_bits_however_many_are_drawn(
    make_job, make_data, monkeypatch, functional
):
    """Matrix products round otherwise in calls of one, two and four records, and a model may make
    much of that.
    """
    seen, real = [], ClippedSum.add

    def add(self, shares):
        seen.append([share.clone() for share in shares])
        real(self, shares)

    monkeypatch.setattr(ClippedSum, "add", add)
    job, data, first = make_job("fedavg"), make_data(40), []
    method = job.method()
    state = initial_state(method, "a")
    (stage,) = method.stages(state, facts_of(job, "a", 1, data))
    for drawn in ([0], [0, 1], [0, 1, 2], [*range(5)], [*range(7, 12), 0], [*range(16, 35), 0]):
        seen.clear()
        modules = to_modules(method, "a", state)
        modules["extractor"].functional = functional
        stepped(modules, stage, data, private([drawn]))
        place = drawn.index(0)
        first.append(torch.cat([share[place % 16].reshape(-1) for share in seen[place // 16]]))
    assert first[0].any()
    assert first[0].dtype == torch.float32
    assert all(torch.equal(one, first[0]) for one in first)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e308])
def test_a_record_whose_gradient_is_no_number_adds_nothing(functional, value):
    """Nor does it end the training, which would show that it is there."""
    one, other, data = linear(), linear(), records(9)
    other["extractor"].functional = one["extractor"].functional = functional
    stage = replace(BOTH, loss=lambda *given: cross_entropy(*given) * (1 + given[1].abs().sum(1)))
    stepped(one, stage, data, private([[0, 1, 3, 4], [5, 6]], q=0.5, clip=0.3))
    data.x[2] = value
    way = private([[0, 1, 2, 3, 4], [5, 6, 2]], q=0.5, clip=0.3)
    assert isfinite(stepped(other, stage, data, way))
    assert apart(one, other) < GRID


@pytest.mark.parametrize("functional", [False, True])
def test_losses_whose_sum_is_beyond_float32_end_no_training(functional):
    """Who delivers a model could make a few records' losses so large, and see by the end whether
    they were drawn.
    """
    data = records(8)
    parts = {name: module.float() for name, module in linear().items()}
    parts["extractor"].functional = functional
    stage = replace(BOTH, loss=lambda *given: cross_entropy(*given) + 3e38)
    train(parts, stage, Records(data.x.float(), data.y), 1, rng(), private(clip=0.3))
    assert values(parts).isfinite().all()


def test_noise_is_added_in_float64_and_rounded_once():
    """Rounded to float32 before it is scaled and added, it takes some values only, and these tell
    what it is added to.

    Mironov 2012; see security/dp/noise.py.
    """
    parts = {name: module.float() for name, module in linear().items()}
    for module in parts.values():
        for p in module.parameters():
            p.data.zero_()  # what a step makes of them is the gradient, bit for bit
    data = Records(records(3).x.float(), records(3).y)
    way = private([[]], sigma=1.7, clip=0.9, divisor=1.0)
    stepped(parts, replace(BOTH, optimiser=Optimiser(1.0)), data, way)
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=values(parts).numel()))
    assert torch.equal(values(parts), -(1.7 * 0.9 * noise).float())


def test_hooks_and_functions_give_the_same():
    one, other = linear(), linear()
    other["extractor"].functional = True
    for parts in (one, other):
        stepped(parts, BOTH, records(9), private(clip=0.3))
    assert apart(one, other) < GRID


def test_layers_that_draw_draw_for_each_record_under_vmap():
    """As in plain training: one record ten times has more than one loss and gradient."""
    parts, data = linear(), records(1)
    parts["extractor"] = nn.Sequential(nn.Dropout(0.5), *parts["extractor"]).train()
    gradients = _by_function(parts, BOTH)
    with drawing(rng()):
        losses, found = gradients(data.x.expand(10, 6), data.y.expand(10))
    assert len(set(losses.tolist())) > 1
    assert len(found[0].flatten(1).unique(dim=0)) > 1
    # the same again where the generator begins anew
    with drawing(rng()):
        assert torch.equal(gradients(data.x.expand(10, 6), data.y.expand(10))[0], losses)


def test_noise_has_the_size_that_is_said_and_is_fresh_for_each_step():
    """Nobody is drawn, so what is left of a step is noise alone: σ C / D lr."""
    data, moves = records(50), []
    random = Fixed([[]] * 400)
    way = private(fresh=random, clip=0.5, sigma=3.0, q=1 / 400, divisor=4.0)
    parts = linear()
    stage = replace(BOTH, optimiser=Optimiser(1.0))
    step = way.begin({part: module.train() for part, module in parts.items()}, stage)
    for index in way.batches(stage, 50, 1, rng(), False):
        before = values(parts)
        step(data.x[index], data.y[index])
        moves.append(values(parts) - before)
    moved = torch.stack(moves)
    assert moved.shape[0] == 400
    assert moved.std() == pytest.approx(3.0 * 0.5 / 4.0, rel=0.02)
    assert abs(float(moved.mean())) < 4 * 0.375 / moved.numel() ** 0.5
    assert random.asked == moved.numel()


def test_a_step_is_charged_before_it_draws_and_none_is_taken_beyond():
    parts, left = linear(), [2]

    def charge(stage):
        if not left[0]:
            raise LocalError("spent")
        left[0] -= 1

    way = private(q=0.25, charge=charge, fresh=Fixed([[0], [1], [2], [3]]))
    with refused("spent"):
        train(parts, BOTH, records(4), 1, rng(), way)
    by_hand = linear()
    with pytest.raises(IndexError):
        train(by_hand, BOTH, records(4), 1, rng(), private(q=0.25, fresh=Two([[0], [1]])))
    assert (values(parts) == values(by_hand)).all()


class Two(Fixed):
    """Draws as told, and then no more."""

    def drawn(self, records, q):
        return np.array(self.draws.pop(0), np.int64)


def test_a_stage_over_all_records_draws_all_and_says_so():
    charged, parts, others = [], linear(), linear()
    stage = replace(BOTH, full_batch=True, epochs=3)
    stepped(parts, stage, records(8), private(q=0.5, divisor=4.0, charge=charged.append))
    stepped(others, stage, records(8), PLAIN, 8)
    assert [each.full_batch for each in charged] == [True] * 3
    assert apart(parts, others) < GRID


def test_a_stage_over_all_records_has_noise_of_its_own():
    """Its divisor is that of a drawn step by q, so noise of σ / q is as much on the mean of the
    gradients.
    """
    stage = replace(BOTH, full_batch=True, epochs=300, optimiser=Optimiser(1.0))
    parts, data = linear(), records(4)
    moves, before = [], values(parts)
    way = private(clip=1e-9, sigma=0.0, whole_sigma=8e9, q=0.25, divisor=1.0)
    step = way.begin(parts, stage)
    for index in (i for _ in range(stage.epochs) for i in way.batches(stage, 4, 1, rng(), False)):
        step(data.x[index], data.y[index])
        moves.append(values(parts) - before)
        before = values(parts)
    assert torch.stack(moves).std() == pytest.approx(8e9 * 1e-9 / 4, rel=0.02)


def test_penalties_come_after_the_noise():
    penalty = lambda parts, _: 0.3 * sum((p**2).sum() for p in parts["classifier"].values())
    stage, one, other, alone = replace(BOTH, penalty=penalty), linear(), linear(), linear()
    stepped(one, stage, records(8), PLAIN, 8)
    stepped(other, stage, records(8), private())
    assert apart(one, other) < GRID
    # of the records next to nothing is left
    stepped(alone, stage, records(8), private(clip=1e-12))
    assert (values(alone, ["classifier"]) - values(linear(), ["classifier"])).abs().max() > 0.01


def test_hooks_of_a_stage_are_gone_in_the_next():
    parts, others, way = linear(), linear(), private()
    for trains in (("extractor",), ("classifier",), ("extractor", "classifier")):
        stage = replace(BOTH, trains=trains)
        train(parts, stage, records(8), 8, rng(), way)
        train(others, stage, records(8), 8, rng(), PLAIN)
    assert apart(parts, others) < GRID


def test_normalisation_over_a_batch_is_refused():
    with refused(r"part 'extractor' cannot be trained with differential privacy.*group"):
        check("extractor", nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))
    check("extractor", nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)))


COUPLED = {
    "mean": lambda losses, _: losses / losses.mean(),
    "features": lambda losses, x: losses + (x - x.mean(0)).square().sum(1),
    "sorted": lambda losses, _: losses * losses.argsort(descending=True),
    "number": lambda losses, x: losses + x.detach().sum().item(),
}


@pytest.mark.parametrize("couple", COUPLED.values(), ids=COUPLED)
def test_a_loss_that_couples_records_and_does_not_say_so_is_refused(couple):
    parts = linear()
    before = values(parts)
    stage = replace(BOTH, loss=lambda *given: couple(cross_entropy(*given), given[1]))
    with refused("extractor, classifier the loss of a record depends on another one of its"):
        train(parts, stage, records(8), 8, rng(), private())
    assert torch.equal(values(parts), before)


def test_chance_within_a_record_couples_nothing():
    """Dropout, which draws anew in each call."""
    parts = linear()
    parts["extractor"] = nn.Sequential(parts["extractor"], nn.Dropout(0.5))
    state = torch.random.get_rng_state()
    one = records(1)
    check_apart({part: module.train() for part, module in parts.items()}, BOTH, one.x, one.y)
    assert torch.equal(torch.random.get_rng_state(), state)


def dropped(way, seed):
    """What a model with dropout holds after a stage, whose layers are offered a job's stream."""
    parts = {"extractor": nn.Sequential(*linear().values(), nn.Dropout(0.5))}
    setattr(parts["extractor"], TRAITS, Traits(draws=True))
    stage = Stage(("extractor",), 1, squares, Optimiser(0.1))
    train(parts, stage, records(64), 64, rng(), way, draws=stream(seed, "a", 0, "draw/0"))
    return values(parts)


def squares(parts, x, y, context):
    return parts["extractor"](x).square().sum(1)


def test_what_layers_draw_follows_from_the_job_except_in_private_training():
    """Else a record that moves the others by a row would change what each of them gives."""
    assert torch.equal(dropped(PLAIN, 1), dropped(PLAIN, 1))
    assert not torch.equal(dropped(PLAIN, 1), dropped(PLAIN, 2))
    one, other = (dropped(private(physical_batch=64), 1) for _ in range(2))
    assert not torch.equal(one, other)


def noised(x, y):
    """As augmentation changes records: by torch's generator."""
    return x + torch.rand_like(x), y


def test_private_training_augments_by_a_secret_key_too():
    stage = replace(BOTH, augment=noised)
    ends = []
    for way in (PLAIN, PLAIN, private(), private()):
        parts = linear()
        train(parts, stage, records(8), 8, rng(), way, draws=stream(0, "a", 0, "draw/0"))
        ends.append(values(parts))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[3])
