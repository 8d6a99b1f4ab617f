"""``staddle membership``: which canonical models the silos of a ppfl job mix, as far as they released it."""

from pathlib import Path
from typing import Annotated

import typer

from ...files.documents import write_atomic
from ..console import printer

app = typer.Typer(no_args_is_help=True, help="Show the memberships of a ppfl job, where they were released.")


@app.command("show")
def show(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="The coordinator's result.safetensors, or a silo's own model.safetensors."),
    ],
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the heat map into this file, too.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What to call a silo's own file; once for each of them, in their order."),
    ] = None,
) -> None:
    """Print memberships: a row a silo, a column a canonical model, "-" where a silo released nothing.

    At the coordinator only what the policies of the silos released exists: the job's option release_membership = "last"
    or "always". A silo may always look at its own. Nothing leaves the machine.
    """
    from ...algorithms.methods.ppfl import heatmap  # noqa: PLC0415 torch takes seconds to import
    from . import membership_files  # noqa: PLC0415

    found = membership_files.read_all(files, label or [])
    if png is not None:
        write_atomic(png, heatmap.picture(found.memberships, found.silos))
    width = max(len(silo) for silo in ("silo", *found.silos))
    printer.show("  ".join([f"{'silo':<{width}}", *(f"{k:>6}" for k in range(found.memberships.shape[1]))]))
    for silo, row in zip(found.silos, found.memberships.tolist(), strict=True):
        cells = [f"{value:6.4f}" if any(row) else f"{'-':>6}" for value in row]
        printer.show("  ".join([f"{silo:<{width}}", *cells]))
    if png is not None:
        printer.show(f"{png}: {len(found.silos)} rows, darker is nearer to 1")
