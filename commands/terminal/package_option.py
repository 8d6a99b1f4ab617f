"""The option by which a command lets signed jobs run the code of installed packages."""

from typing import Annotated, TypeAlias

import typer

Packages: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--package",
        metavar="NAME",
        help="An installed package whose code the job may run here; repeat for several.",
    ),
]
