"""``staddle silo``: the agent."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..proto.channel import require_tls13

app = typer.Typer(no_args_is_help=True, help="Run a silo agent.")


@app.callback()
def _noun() -> None:
    """Keep ``run`` a command of its own."""


@app.command("run")
def run(config: Annotated[Path, typer.Option(help="The silo's TOML file.")]) -> None:
    """Dial the coordinator and take part in the jobs that the policy allows, until SIGTERM or Ctrl-C."""
    require_tls13()
    from ..silo import config as configs  # noqa: PLC0415 torch and grpc take seconds to import
    from ..silo.daemon import serve  # noqa: PLC0415

    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(serve(loaded))
