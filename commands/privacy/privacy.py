"""``staddle privacy``: what a private job will cost a silo's records, and what jobs have cost them."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ..console import printer

app = typer.Typer(no_args_is_help=True, help="What private jobs cost the records of a silo.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command("plan")
def plan(
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.toml|JOB.json", help="A job as a person wrote it, or a signed one.")
    ],
    roster: Annotated[
        Path | None, typer.Option(help="The roster that the signature of a signed job is checked against.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Reckon at this delta instead of the job's.")] = None,
    records: Annotated[
        int | None, typer.Option(min=1, help="Training records of a silo: what a step on them looks like.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what each kind of release of a private job costs, and all of them together.

    The noise of a job that names none is planned, as it is where the job is signed. Nothing is written.
    """
    from . import plan as privacy_plan  # noqa: PLC0415 torch and opacus take seconds to import

    if delta is not None and not 0 < delta < 1:
        raise LocalError(f"--delta {delta:g}: give a number between 0 and 1, below one by the number of records")
    document, lines = privacy_plan.explained(job_file, roster, delta, records)
    if as_json:
        printer.show_json(document)
        return
    privacy_plan.tell(document, lines)


@app.command("show")
def show(
    config: Annotated[Path, typer.Option(metavar="SILO.toml", help="The silo's configuration.")],
    as_json: AsJson = False,
) -> None:
    """Show what jobs have spent of the budgets of this silo's data sets, and what is left.

    Reads and checks the disk, while an agent runs too. Exit code 1 if a budget does not hold or is gone.
    """
    from . import show as privacy_show  # noqa: PLC0415 likewise

    found = privacy_show.documents(config)
    if as_json:
        printer.show_json(found)
    else:
        privacy_show.tell(found)
    if any("lost" in each for each in found):
        raise typer.Exit(1)
