"""Options of commands that train silos on this machine: on what, and how."""

from typing import Annotated, Literal, TypeAlias

import typer

Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Processes that train on a CPU. Default: one per core."),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one."
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
