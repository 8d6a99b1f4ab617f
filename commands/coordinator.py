"""``staddle coordinator``: the daemon."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..proto.channel import require_tls13

app = typer.Typer(no_args_is_help=True, help="Run the coordinator daemon.")


@app.callback()
def _noun() -> None:
    """Keep ``run`` a command of its own."""


@app.command("run")
def run(config: Annotated[Path, typer.Option(help="The coordinator's TOML file.")]) -> None:
    """Serve silos and run the configured jobs in turn, until SIGTERM or Ctrl-C."""
    require_tls13()
    from ..coordinator import config as configs  # noqa: PLC0415 torch and grpc take seconds to import
    from ..coordinator.server import serve  # noqa: PLC0415

    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(serve(loaded))
