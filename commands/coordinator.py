"""``staddle coordinator``: the daemon, and copies of its state."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..coordinator import config as configs
from ..coordinator.check import check as checked
from ..coordinator.server import owner, serve
from ..coordinator.storage import backup as backups
from ..coordinator.storage.backup import Manifest, Owner
from .federation import systemd
from .terminal import output, printer

Config = Annotated[Path, typer.Option(help="The coordinator's TOML file.")]


def check(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, database, jobs, disk and the address to listen on.

    Exit code 1 if one fails.
    """
    # The daemon may be running: its own port and lock count as fine.
    output.show(checked(config), as_json)


def run(
    config: Config,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait until no other process serves from the folder.")
    ] = False,
) -> None:
    """Serve silos and run the configured jobs, until SIGTERM or Ctrl-C."""
    # The log's form is in the file, so an error in the file itself is shown as text.
    loaded = configs.load(config)
    log.setup(loaded.log)
    serving = serve(loaded, standby=standby)
    asyncio.run(systemd.supervised(serving, loaded.directory, systemd.COORDINATOR))


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder for it.")], config: Config
) -> None:
    """Back up the coordinator's state, while it runs or not; private keys are not in it.

    Files are linked where that can be done, so a backup on the same disk takes little of it. Copy
    it to another machine.
    """
    made = backups.make(folder, _owner(config))
    printer.show(f"{folder}: {_told(made)}; verified. Keys, roster and configuration are not in it")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of a backup.")],
    config: Config,
) -> None:
    """Verify a backup, and put it in the place of a coordinator's state that is gone.

    The restored coordinator is an older one: jobs that ran then may fail, and silos report that its
    ledger was rolled back.
    """
    whose = _owner(config)
    made = backups.restore(folder, whose)
    printer.show(
        f"{whose.directory}: {_told(made)}; verified, restored. Silos did more since {made.made}:"
        " they repeat nothing that they signed, and report that this ledger was rolled back"
    )


def _owner(config: Path) -> Owner:
    # What we write is for this user alone.
    os.umask(0o077)
    return owner(configs.load(config))


def _told(made: Manifest) -> str:
    size = output.size(sum(each.size for each in made.files))
    files, records = output.number(len(made.files), "file"), output.number(made.records, "record")
    return f"{files} of {made.made}, {size}, {records} of its ledger"
