"""``staddle job results``: the results of a job as files."""

from pathlib import Path
from typing import Annotated

import typer

from ...coordinator import config as configs
from ...coordinator.storage import results as files
from ...errors import LocalError
from ..console import printer
from .jobs import Name, given_file, status_fields
from .operator_client import connected
from .round_text import reading, round_fields


def results(
    job: Name,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    operator: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The operator's TOML file: sums only.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The coordinator's TOML file, on its machine: also the tensors."
        ),
    ] = None,
) -> None:
    """Rounds as CSV and JSON; on the coordinator's machine also the shared parts as safetensors."""
    # Only one of them has the tensors: which one is read must be explicit.
    if (operator is None) == (config is None):
        raise LocalError(
            "give --operator (rounds only), or --config of the coordinator on its own machine"
        )

    # The operator may see rounds only: models lie on the coordinator's machine, and no call gives
    # them away.
    if config is not None:
        kept = files.read(configs.load(config).directory, job)
        if kept.relayed:
            # On standard error, since a program may read the paths below.
            printer.show(
                f"not among them: {', '.join(kept.relayed)}, which the coordinator passed on and"
                f" cannot open; every silo of the job has it, in jobs/{job}/model of"
                " its own folder",
                err=True,
            )
    else:
        with connected(given_file(operator)) as here:
            report = here.show(job)
        rounds, first = round_fields(report), files.sums_of(reading(report))
        kept = files.Kept(status_fields(report.status), rounds, first)
    printer.show(*map(str, files.write(out, kept)))
