"""``staddle model predict``: what a model says of new records."""

from pathlib import Path
from typing import Annotated

import typer

from ...algorithms.data.rows import is_parquet
from ...bundle import answers_file
from ...bundle.trained import load
from ...errors import LocalError
from ...files.file_bounds import open_regular
from ..terminal import printer
from ..terminal.package_option import Packages
from .shown import DecimalMark, Delimiter, FileEncoding, ModelFolder

AT_ONCE = 2**20  # bytes that are looked through for lines at a time


def predict(
    model: ModelFolder,
    data: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="New records: a CSV, Parquet or .npz file or a folder of images, as the model's"
            " contract says. What is true of them need not be there.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Where the answers go: .csv, or .npz with a class per position."
        ),
    ],
    delimiter: Delimiter = None,
    decimal: DecimalMark = None,
    encoding: FileEncoding = None,
    package: Packages = None,
) -> None:
    """Ask a model about new records.

    Records are read piece by piece, so a file may be larger than the memory. The answers' file is
    there once all records were answered; a record that is not of the contract is an error that
    names its line.
    """
    trained = load(model, package or ()).as_written(
        data, delimiter=delimiter, decimal=decimal, encoding=encoding
    )
    screen, done = printer.Screen(err=True), 0
    with screen.progress(elapsed=True) as bars:
        bar = bars.add_task("records", total=_about(data), note="")
        for records in answers_file.write(out, trained, trained.answer(data)):
            done += records
            bars.update(bar, completed=done)
        bars.update(bar, total=done)
    printer.show(f"{out}: {done:,} records")
    if trained.thresholds:
        texts = (f"{own.of} from {own.value:.4f}" for own in trained.description.thresholds)
        printer.show(f"decided by thresholds: {', '.join(texts)}")


def _about(data: Path) -> int | None:
    """How many records a text file seems to have; None for others."""
    if not data.is_file() or is_parquet(data) or data.suffix.lower() == ".npz":
        return None
    lines = 0
    try:
        with open_regular(data) as file:
            while piece := file.read(AT_ONCE):
                lines += piece.count(b"\n")
    # Whoever reads the records says what is wrong.
    except (OSError, LocalError):
        return None
    return lines
