"""``staddle simulate``: an experiment of many silos on this machine, method after method, seed after seed."""

from pathlib import Path
from typing import Annotated

import typer

from ..console.device_options import Device, Graphs, OneByOne, Precision, Workers


def simulate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="The experiment: a job file with data, a partition, methods.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where results go. Default: a folder next to FILE, named after the experiment."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Only this method of FILE; may be given again.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Instead of FILE's seeds; may be given again.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Instead of FILE's rounds.")] = None,
    workers: Workers = None,
    device: Device = "auto",
    graphs: Graphs = True,
    one_by_one: OneByOne = False,
    precision: Precision = "float32",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, for scripts.")] = False,
) -> None:
    """Run an experiment: each of its methods with each of its seeds, on the same silos, and compare them.

    After a stop or a kill, the same command resumes, and the results are byte-identical. What is finished is not run
    again. Results, curves and a summary lie in DIR.
    """
    from ...simulator.engines.choose import OnGpu  # noqa: PLC0415 torch takes seconds to import
    from . import run as simulating  # noqa: PLC0415

    gpu = OnGpu(graphs=graphs, stacked=not one_by_one, precision=precision)
    asked = simulating.RunOptions(
        out, tuple(method or ()), tuple(seed or ()), rounds, workers, device, gpu, tensorboard
    )
    simulating.simulate(file, asked, as_json=as_json)
