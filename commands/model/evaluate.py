"""``staddle model evaluate``: how good a model is on labelled records."""

from pathlib import Path
from typing import Annotated

import typer

from ...bundle.evaluating import evaluate as measure
from ...bundle.trained import load
from ...errors import LocalError
from ..terminal import printer
from ..terminal.package_option import Packages
from . import calibration_plot
from .shown import DecimalMark, Delimiter, FileEncoding, ModelFolder, tables


def evaluate(
    model: ModelFolder,
    data: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Labelled records: a CSV, Parquet or .npz file or a folder, as the model's"
            " contract says.",
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also a calibration plot, as .svg or .png."),
    ] = None,
    delimiter: Delimiter = None,
    decimal: DecimalMark = None,
    encoding: FileEncoding = None,
    package: Packages = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
) -> None:
    """Measure a model on labelled records, with 95 % intervals.

    Its thresholds are measured as they are. Nothing of these records is kept. On records that the
    model was trained on, such as the silo's whole file, it looks better than it is.
    """
    if plot is not None:
        calibration_plot.check_name(plot)
    trained = load(model, package or ()).as_written(
        data, delimiter=delimiter, decimal=decimal, encoding=encoding
    )
    found = measure(trained, data)
    if plot is not None and not found.curves:
        raise LocalError(
            f"--plot: the task {trained.job.task.kind} has no probabilities to calibrate; leave it"
            " out"
        )
    if as_json:
        figures = found.measured.model_dump(mode="json")
        thresholds = [own.model_dump(mode="json") for own in found.thresholds]
        printer.show_json({**figures, "thresholds": thresholds}, indent=1)
    else:
        names, unit = trained.description.output_names, str(getattr(trained.job.task, "unit", ""))
        printer.show(*tables(found.measured, found.thresholds, names, unit))
        printer.show(*calibration_plot.tables(found.curves))
    if plot is not None:
        calibration_plot.write(plot, found.curves)
        printer.show(f"{plot}: calibration", err=as_json)
