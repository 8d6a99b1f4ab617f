"""Arguments that the commands have in common, and figures as tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ...algorithms.data.rows import Decimal, Encoding
from ...bundle.description import Figures, Threshold
from ...bundle.figure_tables import (
    CLASSES,
    FIGURES,
    THRESHOLDS,
    class_rows,
    figure_rows,
    threshold_rows,
)
from ..terminal.printer import PrintedTable

ModelFolder: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="The model's folder, such as jobs/<job>/model of a silo's state.",
    ),
]

Delimiter: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="CHAR", help="Between two columns of a CSV file; default: the contract's."
    ),
]
DecimalMark: TypeAlias = Annotated[
    Decimal | None,
    typer.Option("--decimal", help="Before the decimals of its numbers; default: the contract's."),
]
FileEncoding: TypeAlias = Annotated[
    Encoding | None, typer.Option("--encoding", help="Of its text; default: the contract's.")
]


def tables(
    measured: Figures, thresholds: tuple[Threshold, ...], names: tuple[str, ...], unit: str
) -> Iterator[PrintedTable]:
    """The figures of a model, its classes and its thresholds, as far as it has these."""
    found = {
        FIGURES: figure_rows(measured, names, unit),
        CLASSES: class_rows(measured, names),
        THRESHOLDS: threshold_rows(thresholds),
    }
    for columns, rows in found.items():
        if own := list(rows):
            yield PrintedTable(columns, own, title=f"{measured.records:,} records")
