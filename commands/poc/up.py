"""``staddle poc up``, ``status`` and ``down``: the folder and its daemons."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ...algorithms.data.rows import Decimal
from ...coordinator import config as coordinator_configs
from ...coordinator import status as coordinator
from ...errors import check_local
from ...files.portable import check_runs_daemons
from ...security.log.lock import claimed
from ..federation import background
from ..federation.processes import exit_on_signals
from ..federation.status import coordinator_lines
from ..terminal import printer
from ..terminal.output import number
from ..terminal.printer import PrintedTable, Screen
from .workspace import RECORD, SILOS, Choices, Workspace, alone, make, opened

FOLDER = Path("staddle-poc")
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the federation.")]
WARNING = """\
All keys and all records lie on this machine, in {folder}: whoever reads it can be everybody. So
this federation is for trying out. For real, each party makes its keys on its own machine, and
only public files travel: docs/operate.md. `staddle poc export` moves a silo to another machine."""
NEXT = """\
Next, run a first job, and see whether the silos gain by it:
  staddle poc run {folder}
A page that follows the coordinator, with the extra 'console':
  staddle console --config {folder}/coordinator/coordinator.toml --operator {folder}/operator.toml
Stop everything with `staddle poc down {folder}`; `staddle poc up {folder}` starts it again."""


def up(
    folder: Folder = FOLDER,
    silos: Annotated[
        int, typer.Option(min=2, max=32, help="Silos, which hold handwritten digits.")
    ] = SILOS,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A silo's CSV or Parquet file; once for each silo."),
    ] = None,
    target: Annotated[str, typer.Option(help="The column that is to be predicted.")] = "",
    record_id: Annotated[
        str, typer.Option("--id", help="The column that names each record once.")
    ] = "",
    delimiter: Annotated[
        str, typer.Option(help="Between two columns; left out, as the first line has it.")
    ] = "",
    decimal: Annotated[Decimal, typer.Option(help="Before the decimals of a number.")] = ".",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the coordinator; 0: the first free one.")
    ] = 0,
) -> None:
    """Make a federation on this machine that keeps running, or start again what does not run.

    Real keys, a signed roster, a coordinator and silos as processes in the background, policies,
    and two jobs to begin with. With --data each file is a silo, which is named after it; without,
    the silos share the handwritten digits that come with scikit-learn. Run again, it starts what
    has stopped, and changes nothing else.
    """
    check_runs_daemons("a federation")
    exit_on_signals()
    files = tuple(str(path.resolve()) for path in data or ())
    alone_given = not files or silos == SILOS
    check_local(alone_given, "--silos: each file of --data is a silo; leave --silos out")
    choices = Choices(
        target=target,
        record_id=record_id,
        delimiter=delimiter,
        decimal=decimal,
        silos=silos,
        data=files,
        port=port,
    )
    screen = Screen()
    # Made before it is locked, so it may be there and empty.
    no_file = folder.is_dir() or not folder.exists()
    check_local(no_file, f"{folder}: not a folder; choose a new or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder):
        workspace = _workspace(folder, choices)
        with screen.waiting("starting the daemons"):
            started = background.start(workspace.daemons)
    said = f"started: {', '.join(started)}" if started else "everything runs already"
    screen.show(f"{said}; the coordinator listens on {workspace.address}")
    screen.show(*WARNING.format(folder=folder).splitlines())
    screen.show(*NEXT.format(folder=quote(str(folder))).splitlines())


def _workspace(folder: Path, choices: Choices) -> Workspace:
    """What is there, or else a new one."""
    if not (folder / RECORD).exists():
        made, notes = make(folder, choices)
        printer.show(
            f"made {folder}: keys of {number(len(made.federation.silos), 'silo')}, of a"
            " coordinator, an operator and a founder; roster, configurations, policies, two jobs",
            *notes,
        )
        return made
    found = opened(folder)
    check_local(
        choices in (Choices(), found.choices),
        f"{folder}: was made with other options; leave them out to start it again, or choose"
        " another folder",
    )
    return found


def status(folder: Folder = FOLDER) -> None:
    """Show which daemons run, and the coordinator's jobs.

    Reads the disk and disturbs no daemon.
    """
    workspace = opened(folder)
    rows = [(daemon.name, *_state(daemon)) for daemon in workspace.daemons]
    moved = sorted(set(workspace.federation.silos) - set(workspace.here))
    rows += [(silo, "exported", "-", "-") for silo in moved]
    columns = ("daemon", "state", "process", "log")
    printer.show(f"coordinator's address: {workspace.address}")
    printer.show(PrintedTable(columns, rows, frame="none"))
    if (workspace.coordinator.state / "coordinator.sqlite").exists():
        config = coordinator_configs.load(workspace.coordinator.config)
        printer.show(*coordinator_lines(coordinator.read(config)))


def _state(daemon: background.BackgroundDaemon) -> tuple[str, str, str]:
    process = daemon.process()
    if process is None:
        return "does not run", "-", str(daemon.log)
    return "runs", str(process.pid), str(daemon.log)


def down(folder: Folder = FOLDER) -> None:
    """Stop all daemons, and wait until each has ended; `staddle poc up` starts them again."""
    with alone(folder) as workspace:
        stopped = background.stop(workspace.daemons)
    printer.show(f"stopped: {', '.join(stopped)}" if stopped else "nothing ran")
