"""Measures convolutions of many silos at once, grouped and unfolded.

``python benchmarks/convolutions.py [--device cuda]``

Every convolution of a network of the catalog, with weights of its own for each of ``--silos``, and
batches of 32 for each: seconds of a forward pass, and of a backward pass by weights and input, of
both forms in turn; the median of ``--repeats``. The last column is how many times as long grouped
takes; above 1, unfolded is the faster one.
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

from staddle.algorithms.engines.convolutions import can_unfold, unfold_all
from staddle.algorithms.models.build import ModelOptions, build, input_shape
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.numerics.devices import check_precision, exact, find, multiplying

BATCH, WARM = 32, 3


def shapes(network: str) -> list[tuple[nn.Conv2d, torch.Size]]:
    """Its convolutions that can be unfolded, with the shape of what each is given for a batch."""
    config = ModelOptions(name=network, classes=10, norm=NETWORKS[network].norms[0])
    model, found = nn.Sequential(*build(config, 0).values()), []
    for leaf in model.modules():
        if isinstance(leaf, nn.Conv2d) and can_unfold(leaf):
            leaf.register_forward_hook(lambda own, given, _: found.append((own, given[0].shape)))
    with torch.no_grad():
        model.eval()(torch.zeros(BATCH, *input_shape(config)))
    for own, _ in found:
        own._forward_hooks.clear()  # noqa: SLF001 they end here
    return found


def timed(run: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Seconds of a call, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, result


def measured(
    leaf: nn.Conv2d, shape: torch.Size, options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Median seconds forward and backward, by form."""
    device = find(options.device)
    other = nn.Conv2d(
        leaf.in_channels,
        leaf.out_channels,
        leaf.kernel_size,
        leaf.stride,
        leaf.padding,
        bias=leaf.bias is not None,
    )
    unfold_all([other])
    x = torch.randn(options.silos, *shape, device=device, requires_grad=True)
    values = {
        name: torch.randn(options.silos, *own.shape, device=device, requires_grad=True)
        for name, own in leaf.named_parameters()
    }
    wall: dict[str, list[tuple[float, float]]] = {"grouped": [], "unfolded": []}
    for repeat in range(WARM + options.repeats):
        for form, module in (("grouped", leaf), ("unfolded", other)):
            run = vmap(lambda values, x, module=module: functional_call(module, values, x))
            forward, out = timed(lambda run=run: run(values, x), device)
            wanted = [*values.values(), x]
            backward, _ = timed(
                lambda of=out, by=wanted: torch.autograd.grad(of, by, torch.ones_like(of))[0],
                device,
            )
            if repeat >= WARM:
                wall[form].append((forward, backward))
    return {
        form: tuple(map(statistics.median, zip(*times, strict=True)))
        for form, times in wall.items()
    }


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
        "--network", action="append", help="lenet5, convnet-4x128 and resnet18 by default"
    )
    parser.add_argument("--device", default="cpu", help="cpu (one thread), cuda or cuda:N")
    parser.add_argument("--precision", choices=["float32", "tf32"], default="float32")
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
    columns = ["grouped forw.", "backw.", "unfolded forw.", "backw.", "times"]
    tell(f"  {'':<40}" + "".join(f"{column:>16}" for column in columns))
    with exact(), multiplying(options.precision):
        for network in options.network or ("lenet5", "convnet-4x128", "resnet18"):
            known = set()
            for leaf, shape in shapes(network):
                told = (
                    f"{network} {'x'.join(map(str, shape[1:]))} {leaf.out_channels} of"
                    f" {leaf.kernel_size[0]}"
                )
                if (told, leaf.stride) in known:
                    continue
                known.add((told, leaf.stride))
                found = measured(leaf, shape, options)
                times = [
                    1e3 * seconds for form in ("grouped", "unfolded") for seconds in found[form]
                ]
                tell(
                    f"  {told:<40}"
                    + "".join(f"{value:>16.3g}" for value in times)
                    + f"{sum(times[:2]) / sum(times[2:]):>16.2f}"
                )


if __name__ == "__main__":
    sys.exit(main())
