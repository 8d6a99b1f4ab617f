"""``staddle job results``: the results of a job as files."""

from pathlib import Path
from typing import Annotated

import typer

from ...algorithms.job.job import Job
from ...bundle import folder
from ...bundle.description import Origin, Reported
from ...bundle.shared_model import SharedModelMaker
from ...coordinator import config as configs
from ...coordinator.config import CoordinatorConfig
from ...coordinator.storage import results as files
from ...errors import LocalError, StaddleError
from ...files import tensor_file
from ...files.documents import parse_json
from ...files.packages import others_code
from ...security.identity.keys import load_keys
from ..terminal import printer
from .jobs import Name, given_file, status_fields
from .operator_client import connected
from .round_text import reading, round_fields

MODEL = "model"  # a folder
DELIVERED = ".delivered"  # in names of measures: of the model as it came down


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
    """Rounds as CSV and JSON; on the coordinator's machine also the shared parts as safetensors.

    There, too, the model that silos share as a folder for staddle model, signed by the coordinator,
    once the job has ended and where the shared parts are all of a model.
    """
    # Only one of them has the tensors: which one is read must be explicit.
    if (operator is None) == (config is None):
        raise LocalError(
            "give --operator (rounds only), or --config of the coordinator on its own machine"
        )

    # The operator may see rounds only: models lie on the coordinator's machine, and no call gives
    # them away.
    coordinator = None if config is None else configs.load(config)
    if coordinator is not None:
        _check_place(out / MODEL, job)
        kept = files.read(coordinator.directory, job)
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
    if coordinator is not None:
        _show_model(coordinator, kept, out)


def _check_place(path: Path, job: str) -> None:
    """LocalError where a model of another job would stand among the files of this one."""
    if path.exists() and (other := folder.read(path).description.job["name"]) != job:
        raise LocalError(f"{path}: is a model of job {other!r}; choose another --out for {job!r}")


def _show_model(config: CoordinatorConfig, kept: files.Kept, out: Path) -> None:
    """Make the model's folder, or say why there is none."""
    if kept.state["outcome"] != "completed":
        printer.show("no model among them: the job is not completed", err=True)
        return
    try:
        # A task, a metric or torch may fail in any way.
        with others_code("it cannot be described", "report it"):
            printer.show(str(_model(config, kept, out / MODEL)))
    # The other files are there, and nothing that is said about a model may cost them.
    except StaddleError as error:
        printer.show(f"no model among them: {error}", err=True)


def _model(config: CoordinatorConfig, kept: files.Kept, path: Path) -> Path:
    """The folder of the model that silos share; LocalError where they share less than a model."""
    keys, signed = load_keys(config.keys), parse_json(kept.signed, "the job")
    job = Job.from_document(signed["document"], "the job", config.packages)
    origin = Origin(
        kind="coordinator",
        name=keys.entry.id,
        federation=config.trust.federation,
        signer=signed["signer"],
    )
    last = kept.rounds[-1]
    reported = Reported(
        round=last["round"],
        silos=tuple(last["members"]),
        noised=last["noisy"],
        measures={
            name.replace(DELIVERED, ""): value
            for name, value in last["measures"].items()
            if DELIVERED in name
        },
    )
    # The copies, since they were checked.
    published = {
        name: tensor_file.read(path.with_name(f"{name}.safetensors"))[0] for name in kept.published
    }
    maker = SharedModelMaker(job.with_weights(config.directory), origin, keys, reported)
    maker.write(path, published)
    return path
