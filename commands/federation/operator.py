"""``staddle operator``: the file by which an operator reaches the coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import examples, printer

app = typer.Typer(no_args_is_help=True, help="Configure an operator's access to the coordinator.")


@app.command("init")
def init(file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as operator.toml.")]) -> None:
    """Write a commented example of what `staddle job submit` and its like read with --operator."""
    examples.write(file, examples.text("operator"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle job list --operator {file}")
