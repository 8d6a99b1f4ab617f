"""``staddle model show``: what a model is."""

from typing import Annotated

import typer

from ...bundle import folder
from ..terminal import printer
from .shown import ModelFolder


def show(
    model: ModelFolder,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The whole description as JSON.")] = False,
) -> None:
    """Show a model's card: its task, features, figures, thresholds, privacy and origin.

    The files are checked against their digests and the signature first.
    """
    found = folder.read(model)
    if as_json:
        printer.show_json(found.description.model_dump(mode="json"), indent=1)
        return
    printer.show_file((model / folder.CARD).read_bytes())
