"""``staddle poc run``: jobs from their files to what each silo gained by them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ...errors import check_local
from ...files.documents import read_bytes, write_all
from ...silo.job_folder import JobFolder
from ..federation.accuracy import accuracy_table
from ..federation.jobs import follow
from ..federation.operator_client import Operator, connected
from ..policy.visibility import seen
from ..privacy.noise import noise
from ..terminal import printer
from ..terminal.printer import Screen
from .up import FOLDER, Folder
from .workspace import BASELINE, FIRST, Workspace, alone

COLUMNS: Mapping[str, str] = {BASELINE: "each on its own", FIRST: "federated"}
BEFORE = "policy.before.toml"
LOOK = """\
To look at a silo's side of it, what left it and the model that it keeps:
  staddle ledger show {folder}/{silo} --job {job}
  staddle model show --model {folder}/{silo}/state/jobs/{job}/model
A job of your own: copy {folder}/jobs/{job}.toml to NAME.toml there, change its name to NAME and
what you like, and run `staddle poc run {folder} NAME --allow`: policies allow what was drafted."""


def run(
    folder: Folder = FOLDER,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Jobs of the folder's jobs/NAME.toml; left out: the first two.",
        ),
    ] = None,
    allow: Annotated[
        bool,
        typer.Option(
            "--allow",
            help="Draft the policies of the silos here again, to allow these jobs; the old ones are"
            " kept as policy.before.toml.",
        ),
    ] = False,
) -> None:
    """Sign jobs, submit them, watch them until they have ended, and compare what came of them.

    Without NAME these are the job that federates and the one in which each silo trains on its own.
    A job runs once under its name; for one that has run, this shows the results.
    """
    screen = Screen()
    with alone(folder) as workspace:
        runs = workspace.coordinator.process() is not None
        check_local(runs, f"{folder}: no coordinator runs; start it with: staddle poc up")
        drafted = {COLUMNS[kind]: path for kind, path in workspace.jobs.items()}
        chosen = {name: workspace.folder / "jobs" / f"{name}.toml" for name in names or ()}
        columns = chosen or drafted
        if allow:
            _allow(workspace, columns.values())
        with connected(workspace.operator) as operator:
            ran = {status.job for status in operator.jobs()}
            for path in columns.values():
                if path.stem not in ran:
                    _submit(screen, workspace, operator, path)

    # Others may stop the daemons meanwhile.
    jobs = {title: path.stem for title, path in columns.items()}
    with connected(workspace.operator) as operator:
        for name in jobs.values():
            follow(screen, operator, name)
    finished = [silo for silo in workspace.here if _has_all(workspace, silo, jobs)]
    check_local(bool(finished), f"{folder}: no silo here has finished {', '.join(jobs.values())}")
    printer.show(accuracy_table(workspace.federation, finished, jobs))
    job, silo = list(jobs.values())[-1], finished[0]
    printer.show(*LOOK.format(folder=quote(str(folder)), silo=silo, job=job).splitlines())


def _allow(workspace: Workspace, sources: Iterable[Path]) -> None:
    files = map(workspace.policy_file, workspace.here)
    write_all([(path.with_name(BEFORE), path.read_bytes()) for path in files], 0o600)
    workspace.renew_policies(workspace.policy(sources), workspace.here)


def _has_all(workspace: Workspace, silo: str, jobs: Mapping[str, str]) -> bool:
    """Whether a silo has finished all these jobs."""
    state = workspace.federation.state(silo)
    return all(JobFolder(state / "jobs" / name).finished for name in jobs.values())


def _submit(screen: Screen, workspace: Workspace, operator: Operator, source: Path) -> None:
    job = workspace.sign(source)
    named = job.name == source.stem
    check_local(named, f'{source}: has name = "{job.name}"; call it "{source.stem}" there')
    screen.show(f"{job.name}: {'; '.join(filter(None, (seen(job), noise(job))))}")
    operator.submit(read_bytes(source.with_suffix(".json")))
