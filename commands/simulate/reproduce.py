"""``staddle reproduce``: a published table, run here and shown next to the paper's values."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...simulator.engines.choose import OnGpu
from ...simulator.reproduce.costs import PaperCosts, find_any
from ...simulator.reproduce.published import published as all_tables
from ..terminal.device_options import Device, Graphs, OneByOne, Precision, Workers
from . import published
from .published_costs import show_costs
from .published_runs import run_all, run_table
from .simulate import RunOptions


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(metavar="PAPER/TABLE", help="Such as pfedsim/table3; --list names them."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the tables, or show settings and values of the one that is named."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Holds the data sets, each where --list says that it belongs."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this setting; may be given again."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="Only this method, and Local and FedRep; may be given again."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only so many of the paper's clients, each with its own records."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Instead of the paper's rounds.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Instead of 1, 2, … as many as in the paper; may be given again."
        ),
    ] = None,
    workers: Workers = None,
    device: Device = "auto",
    graphs: Graphs = True,
    one_by_one: OneByOne = False,
    precision: Precision = "float32",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where results go; left out, a folder here, named as the paper."
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--resume-all",
            help="Run what is unfinished of all tables: the first seed of each setting, then the"
            " second, and so on.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is shown as JSON, for scripts.")
    ] = False,
) -> None:
    """Run a published table, and show it next to the paper's values.

    It runs setting by setting, always with Local and FedRep. After a stop or a kill, the same
    command resumes. Finished runs are not repeated. A table of costs, such as fedaims/table6, needs
    no data and no run.
    """
    # before the checks: listing the tables needs no data sets
    if listed:
        published.show(table, data, as_json=as_json)
        return
    if every and (table or setting or method):
        raise LocalError(
            "--resume-all runs all tables, settings and methods; name none, or leave it out"
        )
    if table is None and not every:
        raise LocalError(
            "which table? Name it, such as pfedsim/table3; staddle reproduce --list shows all"
        )
    chosen = None if table is None else find_any(table)
    if isinstance(chosen, PaperCosts):
        # without effect, they would be taken for what was counted
        if setting or method or seed or clients is not None or rounds is not None:
            raise LocalError(
                f"{table}: a table of costs is computed whole, and nothing runs; leave out"
                " --setting, --method, --clients, --rounds and --seed"
            )
        show_costs(chosen, out, as_json=as_json)
        return
    if data is None:
        raise LocalError(
            f"{table or '--resume-all'}: --data DIR is missing, the folder with the data sets"
        )
    gpu = OnGpu(graphs=graphs, stacked=not one_by_one, precision=precision)
    asked = RunOptions(out, tuple(method or ()), tuple(seed or ()), rounds, workers, device, gpu)
    if chosen is None:
        run_all(all_tables(), data, clients, asked, as_json=as_json)
        return
    run_table(chosen, data, tuple(setting or ()), clients, asked, as_json=as_json)
