"""``staddle model export``: a model for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from ...bundle.exporting import Format
from ...bundle.exporting import export as write
from ...bundle.trained import load
from ..terminal import printer
from ..terminal.package_option import Packages
from .shown import ModelFolder


def export(
    model: ModelFolder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the exported model goes.")],
    form: Annotated[
        Format, typer.Option("--format", help="What reads it: torch, ONNX Runtime, or anything.")
    ],
    package: Packages = None,
) -> None:
    """Write a model in a form that other programs read, with its preprocessing inside.

    It takes records as they were measured, and gives what predict does; safetensors holds the
    values alone. The file is read again and compared with the model before it gets its name. It
    says nothing of who made it: keep the model's folder for that.
    """
    difference = write(load(model, package or ()), out, form)
    printer.show(f"{out}: {form}, read again: answers differ by at most {difference:.1e}")
