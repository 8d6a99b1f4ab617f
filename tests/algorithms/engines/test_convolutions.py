import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from staddle.algorithms.engines import convolutions
from staddle.algorithms.engines.convolutions import (
    LARGE_BYTES,
    can_unfold,
    in_parallel,
    patches,
    prepare,
)
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.numerics.devices import CPU, casting, exact, multiplying

GPU = torch.device("cuda")  # named only
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), PAIR, PAIR, PAIR, PAIR, st.booleans()
)
def test_unfolded_gives_what_the_convolution_gives(
    batch, inputs, outputs, kernel, stride, padding, dilation, bias
):
    """Output and gradients, in float64, of two silos at once."""
    plain = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=bias).double()
    other = copy.deepcopy(plain)
    prepare([other], "unfolded", CPU)
    x = torch.randn(2, batch, inputs, 7, 8, dtype=torch.float64, requires_grad=True)
    values = {
        name: torch.randn(2, *own.shape).double().requires_grad_()
        for name, own in plain.named_parameters()
    }
    ends = []
    for module in (plain, other):
        run = lambda values, x, module=module: torch.func.functional_call(module, values, x)
        out = vmap(run)(values, x)
        ends.append((out, *torch.autograd.grad(out.sin().sum(), [x, *values.values()])))
    for one, two in zip(*ends, strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kept", [{"groups": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}]
)
def test_other_convolutions_stay_as_they_are(kept):
    module = nn.Conv2d(2, 4, 3, **kept)
    x, own = torch.randn(2, 2, 6, 6), module._conv_forward
    before = module(x)
    prepare([module], "unfolded", CPU)
    assert not can_unfold(module)
    assert module._conv_forward == own
    assert torch.equal(module(x), before)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedaims", {"name": "convnet-digits", "norm": "batch"}),
        ("per-fedavg", {}),
        ("pfedsim", {"norm": "batch"}),
    ],
)
def test_silos_train_so(make_job, make_data, method, model, monkeypatch):
    job, calls = make_job(method, {}, model, {"epochs": 2, "lr": 0.05}, rounds=1), []
    records = {
        silo: Records(make_data(17 + i, i), make_data(7, i)) for i, silo in enumerate(job.silos)
    }
    watched = lambda *given: calls.append(None) or patches(*given)
    monkeypatch.setattr("staddle.algorithms.engines.convolutions.patches", watched)
    unfolded, ends = Stacked(job, records, convolutions="unfolded"), []
    for engine in (Serial(job, records), Stacked(job, records), unfolded):
        assert not calls
        simulation = Simulation(job, engine)
        simulation.step()
        ends.append(simulation.states)
    assert calls
    for other in ends[1:]:
        for silo in job.silos:
            one, found = ends[0][silo].flat, other[silo].flat
            assert all(torch.allclose(one[name], found[name], atol=1e-5) for name in one)


@pytest.mark.parametrize(
    ("precision", "layer", "side", "unfolds"),
    [
        ("float32", nn.Conv2d(3, 64, 3, padding=1), 32, False),
        ("float32", nn.Conv2d(6, 16, 5), 14, True),
        ("float32", nn.Conv2d(128, 128, 3, padding=1), 16, True),
        ("bf16", nn.Conv2d(3, 64, 3, padding=1), 32, False),
        ("bf16", nn.Conv2d(6, 16, 5), 14, True),
        ("bf16", nn.Conv2d(128, 128, 3, padding=1), 16, False),
        ("tf32", nn.Conv2d(512, 512, 3, padding=1), 4, True),
        ("tf32", nn.Conv2d(512, 512, 3, padding=1), 5, False),
        ("tf32", nn.Conv2d(512, 512, 3, 2, 1), 8, True),
        ("tf32", nn.Conv2d(64, 128, 1, 2), 32, True),
    ],
)
def test_a_gpu_unfolds_what_was_measured_to_be_faster_so(
    monkeypatch, precision, layer, side, unfolds
):
    """Silos at once; one by itself has nothing to group."""
    x, calls = torch.randn(2, layer.in_channels, side, side), []
    values = {name: own[None] for name, own in layer.named_parameters()}
    before = layer(x)
    assert convolutions.outputs(layer, x.shape) == tuple(before.shape[2:])
    monkeypatch.setattr(
        convolutions, "patches", lambda *given: calls.append(None) or patches(*given)
    )
    prepare([layer], "faster", GPU)
    run = lambda values, x: torch.func.functional_call(layer, values, x)
    near = 5e-2 if precision == "bf16" else 1e-5
    with exact(), multiplying(precision), casting(CPU, precision):
        assert torch.allclose(layer(x).float(), before, atol=near)
        assert not calls
        assert torch.allclose(vmap(run)(values, x[None])[0].float(), before, atol=near)
    assert len(calls) == unfolds


@pytest.mark.parametrize(
    ("form", "device", "precision", "kept", "so"),
    [
        ("faster", GPU, "bf16", LARGE_BYTES, True),
        ("faster", GPU, "tf32", LARGE_BYTES, True),
        ("faster", GPU, "bf16", LARGE_BYTES - 1, False),
        ("faster", GPU, "float32", 99 * LARGE_BYTES, False),
        ("faster", CPU, "bf16", LARGE_BYTES, False),
        ("parallel", CPU, "float32", 1, True),
        ("grouped", GPU, "bf16", LARGE_BYTES, False),
    ],
)
def test_large_networks_train_in_parallel_on_tensor_cores(form, device, precision, kept, so):
    assert in_parallel(form, device, precision, kept) == so


@pytest.mark.parametrize(("form", "device"), [("grouped", GPU), ("faster", CPU)])
def test_nothing_is_unfolded_where_grouped_is_faster(form, device):
    layer = nn.Conv2d(6, 16, 5)
    before = layer._conv_forward
    prepare([layer], form, device)
    assert layer._conv_forward == before
