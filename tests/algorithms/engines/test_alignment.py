"""Silos that train different parts: in one call, against calls of those that train the same."""

from dataclasses import replace

import pytest
import torch
from support.whole_methods import Doubles
from torch import nn

from staddle.algorithms.course import Aligned, Optimiser, Stage
from staddle.algorithms.engines import vmap_engine
from staddle.algorithms.engines.alignment import joined, put_back, shapes
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.grouping import course
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.engines.vmap_training import Silos
from staddle.algorithms.methods.fedaims.method import FedAIMS, balanced
from staddle.errors import LocalError

SILOS = ("a", "b", "c")
CASES = {
    "momentum": ({}, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": ({}, {"optimiser": "adam", "weight_decay": 0.1}),
    "adamw, heads": ({"aux_ce": "head"}, {"optimiser": "adamw", "weight_decay": 0.1}),
    "clipped": ({"aux_ce": "prototype"}, {"clip": 0.1, "momentum": 0.9}),
}


def loss(parts, x, y, context):
    return parts["adapter"](x)[:, 0]


def stage(part, trains=None):
    aligned = Aligned({"adapter": part}, loss, {"number": torch.tensor(int(part[-1]))})
    trains = trains or ("model", part)
    return Stage(trains, 2, lambda *_: None, Optimiser(0.1), aligned=aligned)


def silos(count=3):
    """Adapters 1 and 2 of one shape, and a third."""
    shape = {"model": (4, 3), "adapter1": (3, 2), "adapter2": (3, 2), "adapter3": (3, 5)}
    modules = {part: nn.Linear(*sizes, device="meta") for part, sizes in shape.items()}
    values = {
        part: {name: torch.randn(count, *t.shape) for name, t in module.state_dict().items()}
        for part, module in modules.items()
    }
    return Silos(modules, values, torch.zeros(1, 4), torch.zeros(1))


def test_stages_of_different_parts_are_one_course():
    one, other = stage("adapter1"), stage("adapter2")
    assert course((one,)) == course((other,))
    assert one.common.trains == other.common.trains == ("model", "adapter")
    assert one.common.reads == ("adapter",)
    assert other.common.context["number"] == 2
    assert course((replace(one, aligned=None),)) != course((replace(other, aligned=None),))
    assert course((one,)) != course((stage("adapter1", ("adapter1",)),))


def test_an_aligned_stage_has_no_penalty():
    penalised = replace(stage("adapter1"), penalty=lambda *_: torch.zeros(()))
    with pytest.raises(LocalError, match="an aligned stage has no penalty; leave out one"):
        _ = penalised.common


def test_parts_that_compute_otherwise_are_not_under_one_name():
    modules = silos().modules
    first, second, third = (shapes((stage(f"adapter{j}"),), modules) for j in (1, 2, 3))
    assert first == second != third
    assert shapes((replace(stage("adapter1"), aligned=None),), modules) == ()
    modules["adapter2"] = nn.Sequential(modules["adapter2"], nn.ReLU())
    assert shapes((stage("adapter2"),), modules) != first


def test_each_silo_has_its_own_part_and_gets_it_back():
    own = silos()
    before = {part: {k: t.clone() for k, t in named.items()} for part, named in own.values.items()}
    stages = [stage(part) for part in ("adapter2", "adapter1", "adapter2")]
    whole = joined(own, stages)
    # Steps are kept by module: the first silo's part must not matter.
    assert whole.modules["adapter"] is own.modules["adapter1"]
    assert "adapter" not in own.values
    for name, tensor in whole.values["adapter"].items():
        parts = [before["adapter2"][name][0], before["adapter1"][name][1]]
        assert torch.equal(tensor, torch.stack([*parts, before["adapter2"][name][2]]))
        tensor.add_(1)
    put_back(own, stages, whole.values)
    for part, rows in {"adapter1": [0, 1, 0], "adapter2": [1, 0, 1], "adapter3": [0] * 3}.items():
        for name, tensor in own.values[part].items():
            moved = torch.tensor(rows, dtype=torch.float32).view(3, *[1] * (tensor.ndim - 1))
            assert torch.equal(tensor, before[part][name] + moved)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def in_groups(monkeypatch):
    """Stages as those of a method that aligns nothing."""
    own = FedAIMS.stages
    monkeypatch.setattr(
        FedAIMS, "stages", lambda *given: tuple(replace(s, aligned=None) for s in own(*given))
    )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", CASES)
def test_one_call_trains_what_a_call_per_block_does(make_job, make_data, monkeypatch, case):
    """With every optimiser; an adapter that its silo does not supervise keeps its bits."""
    options, training = CASES[case]
    job = make_job(
        "fedaims",
        options,
        {"name": "convnet-3x64", "norm": "group"},
        {"epochs": 1, "batch_size": 4, "lr": 1e-3, **training},
        silos=list(SILOS),
        rounds=2,
    )
    records = {}
    for number, silo in enumerate(SILOS):
        sides = make_data(6 + 4 * number, number), make_data(7, number)
        records[silo] = Records(*(Doubles(side.x.double(), side.y) for side in sides))
    counts, train = [], vmap_engine.train

    def counting(silos, *rest):
        counts.append(silos.count)
        return train(silos, *rest)

    monkeypatch.setattr(vmap_engine, "train", counting)
    one_call = played(job, records)
    assert counts == [3] * job.rounds
    counts.clear()
    in_groups(monkeypatch)
    groups = played(job, records)
    assert sorted(counts) == [1] * job.rounds + [2] * job.rounds

    method, last = job.method(), job.rounds - 1
    deal = balanced(method.setting.drawn(last), method.middle, method.setting.seed, last)
    for silo in SILOS:
        before, after = (states[silo].parts for states in one_call[-2:])
        for part, named in after.items():
            mine = part[-1] not in "12" or int(part[-1]) == deal[silo]
            for name, tensor in named.items():
                assert torch.equal(tensor, before[part][name]) != mine, (silo, part, name)
                other = groups[-1][silo].parts[part][name]
                assert torch.allclose(tensor, other, rtol=1e-9, atol=1e-9), (silo, part, name)


def played(job, records):
    """The states after each round."""
    simulation, states = Simulation(job, Stacked(job, records)), []
    for _ in range(job.rounds):
        simulation.step()
        states.append(dict(simulation.states))
    return states
