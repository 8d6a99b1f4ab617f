"""Measures convolutions of many silos at once, grouped, unfolded, and one for each silo.

``python benchmarks/convolutions.py [--device cuda]``

Every convolution of a network of the catalog, with weights of its own for each of ``--silos``, and
batches of 32 for each: milliseconds of a forward pass, and of a forward and backward pass (by the
weights, and by the input where it is not the network's own), the median of ``--repeats``. On a GPU
each is a CUDA graph that is replayed. The last column names the fastest form.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from staddle.algorithms.engines.convolutions import can_unfold, prepare
from staddle.algorithms.models.build import ModelOptions, build, input_shape
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.numerics.devices import (
    CPU,
    casting,
    check_precision,
    exact,
    find,
    multiplying,
)

BATCH, WARM = 32, 3
# networks, with the input of one record; None: the network's own
MEASURED: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("lenet5", (1, 32, 32)),
    ("lenet5", None),
    ("convnet-4x128", None),
    ("resnet18", None),
)
FORMS = ("grouped", "unfolded", "looped")


def shapes(
    network: str, record: tuple[int, ...] | None = None
) -> list[tuple[nn.Conv2d, torch.Size]]:
    """Its convolutions that can be unfolded, with the shape of what each is given for a batch.

    ``record`` is the shape of a record; None: the network's own.
    """
    config = ModelOptions(name=network, classes=10, norm=NETWORKS[network].norms[0], input=record)
    model, found = nn.Sequential(*build(config, 0).values()), []
    for leaf in model.modules():
        if isinstance(leaf, nn.Conv2d) and can_unfold(leaf):
            leaf.register_forward_hook(lambda own, given, _: found.append((own, given[0].shape)))
    with torch.no_grad():
        model.eval()(torch.zeros(BATCH, *input_shape(config)))
    for own, _ in found:
        own._forward_hooks.clear()  # noqa: SLF001 they end here
    return found


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call.

    On a GPU it is recorded as a CUDA graph, as the engine's steps are, and replayed.
    """
    wall: list[float] = []
    if device.type != "cuda":
        for repeat in range(WARM + repeats):
            began = time.perf_counter()
            run()
            if repeat >= WARM:
                wall.append(time.perf_counter() - began)
        return statistics.median(wall)

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    for _ in range(repeats):
        began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_at.record()
        graph.replay()
        ended_at.record()
        torch.cuda.synchronize(device)
        wall.append(began_at.elapsed_time(ended_at) / 1e3)
    return statistics.median(wall)


def looped(leaf: nn.Conv2d, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """One convolution for each silo."""
    own = [
        functional_call(leaf, {name: tensor[silo] for name, tensor in values.items()}, x[silo])
        for silo in range(len(x))
    ]
    return torch.stack(own)


def measured(
    leaf: nn.Conv2d, shape: torch.Size, options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Seconds of a forward pass, and of a forward and backward pass, by form."""
    device = find(options.device)
    other = nn.Conv2d(
        leaf.in_channels,
        leaf.out_channels,
        leaf.kernel_size,
        leaf.stride,
        leaf.padding,
        bias=leaf.bias is not None,
    )
    prepare([other], "unfolded", CPU)
    first = leaf.in_channels in (1, 3)  # what a network is given has no gradient
    x = torch.randn(options.silos, *shape, device=device, requires_grad=not first)
    values = {
        name: torch.randn(options.silos, *own.shape, device=device, requires_grad=True)
        for name, own in leaf.named_parameters()
    }
    forms: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: vmap(lambda values, x: functional_call(leaf, values, x))(values, x),
        "unfolded": lambda: vmap(lambda values, x: functional_call(other, values, x))(values, x),
        "looped": lambda: looped(leaf, values, x),
    }
    wanted = [*values.values(), *([] if first else [x])]

    def forward(form: str) -> Tensor:
        with casting(device, options.precision):
            return forms[form]()

    def both(form: str) -> None:
        out = forward(form)
        torch.autograd.grad(out, wanted, torch.ones_like(out))

    wall: dict[str, tuple[float, float]] = {}
    for form in FORMS:
        with torch.no_grad():
            alone = timed(lambda form=form: forward(form), device, options.repeats)
        wall[form] = (alone, timed(lambda form=form: both(form), device, options.repeats))
    return wall


def tell(line: str) -> None:
    """Say it at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--network",
        action="append",
        help="lenet5 with one channel and with three, convnet-4x128 and resnet18 by default",
    )
    parser.add_argument("--device", default="cpu", help="cpu (one thread), cuda or cuda:N")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default="float32")
    parser.add_argument("--silos", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = find(options.device)
    check_precision(device, options.precision)
    torch.set_num_threads(1)
    cpu = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    title = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else cpu.partition(":")[2].strip()
    )
    tell(
        f"torch {torch.__version__}, {title}, {options.silos} silos, batches of {BATCH},"
        f" {options.precision}; ms"
    )
    columns = [f"{form}{what}" for form in FORMS for what in ("", " forw.")]
    tell(f"  {'':<34}" + "".join(f"{column:>15}" for column in columns))
    with exact(), multiplying(options.precision):
        chosen = [(network, None) for network in options.network or ()]
        for network, record in chosen or MEASURED:
            known = set()
            for leaf, shape in shapes(network, record):
                told = (
                    f"{network} {'x'.join(map(str, shape[1:]))} {leaf.out_channels} of"
                    f" {leaf.kernel_size[0]} by {leaf.stride[0]}"
                )
                if told in known:
                    continue
                known.add(told)
                found = measured(leaf, shape, options)
                times = [1e3 * s for form in FORMS for s in reversed(found[form])]
                fastest = min(FORMS, key=lambda form: found[form][1])
                cells = "".join(f"{value:>15.3g}" for value in times)
                tell(f"  {told:<34}{cells}  {fastest}")


if __name__ == "__main__":
    sys.exit(main())
