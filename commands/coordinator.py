"""``staddle coordinator``: the daemon."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..coordinator import config as configs
from ..coordinator.check import check as checked
from ..coordinator.server import serve
from .federation import systemd
from .terminal import output


def check(
    config: Annotated[Path, typer.Option(help="The coordinator's TOML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, database, jobs, disk and the address to listen on.

    Exit code 1 if one fails.
    """
    # The daemon may be running: its own port and lock count as fine.
    output.show(checked(config), as_json)


def run(config: Annotated[Path, typer.Option(help="The coordinator's TOML file.")]) -> None:
    """Serve silos and run the configured jobs in turn, until SIGTERM or Ctrl-C."""
    # The log's form is in the file, so an error in the file itself is shown as text.
    loaded = configs.load(config)
    log.setup(loaded.log)
    serving = serve(loaded)
    asyncio.run(systemd.supervised(serving, loaded.directory, systemd.COORDINATOR))
