"""The commented example that ``staddle simulate init`` writes: templates/simulation.toml."""

import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from ...algorithms.catalog import method_class
from ...algorithms.method import Method
from ...errors import LocalError
from ..terminal import examples, printer
from ..terminal.job_example import SETTINGS, options_text
from ..terminal.toml import inline

NAME = re.compile(r"[a-z0-9-]{1,64}")  # of an experiment
BASELINES = ("local", "fedavg")  # in each example, so that there is something to compare with


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new file, such as simulation.toml.")
    ],
    method: Annotated[
        str,
        typer.Option(help="The method to compare with local and fedavg; its options are written."),
    ] = "pfedsim",
) -> None:
    """Write a commented example of a simulation, which runs as it stands."""
    # Files in one folder then have results of their own.
    stem = file.stem.lower()
    name = stem if NAME.fullmatch(stem) else "first"
    examples.write(file, simulation_text(method, name), 0o644)
    printer.show(f"{file}: edit it, then run: staddle simulate {file}")


def simulation_text(method: str, name: str = "first") -> str:
    """A simulation's file for one method and the two that it is compared with; TOML.

    ``name`` is that of the experiment.

    LocalError names the known methods for an unknown one, and where the digits suit a method not.
    """
    chosen: type[Method] = method_class(method, "--method")
    if method in BASELINES or "lines" in SETTINGS.get(method, {}):
        raise LocalError(
            f"--method {method}: choose a method that trains, to compare with"
            f" {' and '.join(BASELINES)}"
        )
    # A few methods need another model than the digits' own, or silos that are away.
    settings = SETTINGS.get(method, {})
    model, participation = "# model = {}", "# participation = 1.0"
    if "participation" in settings:
        participation = f"participation = {settings['participation']}"
    if "model" in settings:
        model = f"model = {inline(settings['model'])}"
    return Template(examples.text("simulation")).substitute(
        name=name,
        method=method,
        version=chosen.version,
        model=model,
        participation=participation,
        options=options_text(chosen.options_model),
    )
