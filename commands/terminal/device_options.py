"""Options of commands that train silos: on what, and how."""

from typing import Annotated, Literal, TypeAlias

import typer

from ...errors import LocalError
from ...simulator.engines.choose import Cluster

Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Processes that train on a CPU. Default: one per core."),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="auto (the first GPU, if any), cpu, cuda (all GPUs), cuda:N or cuda:0,cuda:1.",
    ),
]
EngineName: TypeAlias = Annotated[
    Literal["local", "ray"],
    typer.Option(
        "--engine", help="What trains: processes of this machine, or the actors of a Ray cluster."
    ),
]
Address: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="With --engine ray: a cluster that runs. Default: one on this machine alone.",
    ),
]
Graphs: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--graphs/--no-graphs", help="On a GPU, record training steps once and replay them."
    ),
]
OneByOne: TypeAlias = Annotated[
    bool,
    typer.Option("--one-by-one", help="On a GPU, train silos one after another, not all at once."),
]
Precision: TypeAlias = Annotated[
    Literal["float32", "tf32", "bf16"],
    typer.Option(
        help="On a GPU, the precision of layers in training; parameters and losses stay float32."
    ),
]


def cluster(engine: str, address: str | None) -> Cluster | None:
    """The cluster that was asked for; LocalError for an address that nothing would use."""
    if engine == "ray":
        return Cluster(address)
    if address is not None:
        raise LocalError(f"--address {address}: is that of a Ray cluster; add --engine ray")
    return None
