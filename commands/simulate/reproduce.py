"""``staddle reproduce``: a published table, run here, beside what was published."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ..console.device_options import Device, Graphs, OneByOne, Precision, Workers


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="PAPER/TABLE", help="Such as pfedsim/table3; --list names them.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Show the tables, or of the one that is named settings and values.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds the data sets, each where --list says that it belongs.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this setting; may be given again.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only this method, and Local and FedRep; may be given again."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(metavar="N", help="Only so many of the paper's clients, each with its own records.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Instead of the paper's rounds.")] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Instead of 1, 2, … as many as in the paper; may be given again."),
    ] = None,
    workers: Workers = None,
    device: Device = "auto",
    graphs: Graphs = True,
    one_by_one: OneByOne = False,
    precision: Precision = "float32",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go; left out, a folder here, named as the paper.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is shown as JSON, for scripts.")] = False,
) -> None:
    """Run a published table, setting by setting, always with Local and FedRep, and show it next to the paper's values.

    After a stop or a kill, the same command resumes. What is finished is not run again.
    """
    from ...simulator.engines.choose import OnGpu  # noqa: PLC0415 torch takes seconds to import
    from . import published, reproduce_run  # noqa: PLC0415
    from .run import RunOptions  # noqa: PLC0415

    if listed:
        published.show(table, data, as_json=as_json)
        return
    if table is None:
        raise LocalError("which table? Name it, such as pfedsim/table3; staddle reproduce --list shows all")
    if data is None:
        raise LocalError(f"{table}: --data DIR is missing, the folder with the data sets")
    gpu = OnGpu(graphs=graphs, stacked=not one_by_one, precision=precision)
    asked = RunOptions(out, tuple(method or ()), tuple(seed or ()), rounds, workers, device, gpu, tensorboard=False)
    reproduce_run.reproduce(table, data, tuple(setting or ()), clients, asked, as_json=as_json)
