"""``staddle console``: the page next to a daemon."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..commands.federation.status import is_coordinator
from ..commands.terminal import printer
from ..coordinator import config as coordinator_configs
from ..coordinator.config import CoordinatorConfig
from ..errors import LocalError
from ..silo import config as silo_configs
from ..silo.config import SiloConfig

INSTALL = (
    "the console needs Starlette and uvicorn, which are not installed; run: pip install"
    " 'staddle[console]'"
)


def console(
    config: Annotated[Path, typer.Option(help="coordinator.toml or silo.toml.")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to serve the page; port 0 is a free one. Beyond loopback only members with"
            " a certificate of the roster see it.",
        ),
    ] = "127.0.0.1:0",
    operator: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The operator's TOML file, so that the page of a coordinator can stop jobs; on"
            " loopback only.",
        ),
    ] = None,
) -> None:
    """Show a web page next to a daemon: what runs, what left, who is missing.

    It reads the daemon's folder, and disturbs it no more than `staddle status`. The printed address
    works once, in one browser, until Ctrl-C.
    """
    # An extra: the command line and the daemons work without it.
    try:
        from .server import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise LocalError(INSTALL) from error
    loaded: CoordinatorConfig | SiloConfig = (
        coordinator_configs.load(config) if is_coordinator(config) else silo_configs.load(config)
    )
    log.setup(loaded.log)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(config, loaded, listen, operator, printer.show))
