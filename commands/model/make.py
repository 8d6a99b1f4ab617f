"""``staddle model make``: the model of a simulated silo as a folder."""

from pathlib import Path
from typing import Annotated

import typer

from ...algorithms.job.job import Job
from ...bundle.description import Origin
from ...bundle.making import ModelMaker
from ...errors import LocalError
from ...simulator.experiment.experiment import read
from ...simulator.experiment.population import populate
from ...simulator.report.finished_runs import Recorded, load_runs
from ..terminal import printer

MOST_SHOWN = 20  # names, in an error


def make(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")],
    silo: Annotated[str, typer.Option(metavar="SILO", help="Whose model.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The model's new folder.")],
    method: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Its method; default: the only one.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Its seed; default: the only one.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The simulation's --out, where it was given."),
    ] = None,
) -> None:
    """Make the folder of a model that a finished simulation left for one of its silos.

    The records are read and dealt out again, to measure the model on the silo's test records. An
    agent makes this folder by itself when a job ends.
    """
    experiment = read(file)
    run = make_folder(file, results or file.parent / experiment.name, silo, out, method, seed)
    printer.show(f"{out}: {run.title}, {silo}")


def make_folder(
    file: Path, results: Path, silo: str, out: Path, method: str | None, seed: int | None
) -> Recorded:
    """The same for programs; returns the run whose model it is."""
    experiment, run = read(file), find_run(results, method, seed)
    silos = [own.name for own in run.silos]
    if silo not in silos:
        raise LocalError(f"unknown silo {silo!r}; {file} has {', '.join(silos[:MOST_SHOWN])}")
    population = populate(experiment)
    if run.identity.population != population.digest:
        raise LocalError(
            f"{run.folder}: is a run on other records than those of {file}; restore them"
        )
    own, state = population.records[silo], run.model(silo)
    # Which test records choose thresholds; whoever has the records knows it.
    key = f"{population.digest}/{silo}".encode()
    contract = experiment.file.data.contract()
    job = Job.from_document(run.identity.job, str(run.folder), None, federated=False)
    maker = ModelMaker(job, Origin(kind="simulation", name=silo), contract, key)
    maker.write(out, state, own.train, own.test)
    return run


def find_run(results: Path, method: str | None, seed: int | None) -> Recorded:
    """The one finished run of a method and a seed; LocalError where none or several are left."""
    finished = [run for run in load_runs(results) if run.finished]
    found = [run for run in finished if method in (None, run.label) and seed in (None, run.seed)]
    if len(found) == 1:
        return found[0]
    if not finished:
        raise LocalError(
            "no finished run there; run staddle simulate first, or name its --out by --results"
        )
    names = [run.title for run in finished[:MOST_SHOWN]]
    raise LocalError(f"name one run by its method and seed; finished: {'; '.join(names)}")
