"""``staddle coordinator``: the daemon."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..proto.channel import require_tls13
from .console import examples, output, printer

app = typer.Typer(no_args_is_help=True, help="Configure, check and run the coordinator daemon.")


@app.command("init")
def init(file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as coordinator.toml.")]) -> None:
    """Write a commented example of the coordinator's configuration."""
    examples.write(file, examples.text("coordinator"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle coordinator check --config {file}")


@app.command("check")
def check(
    config: Annotated[Path, typer.Option(help="The coordinator's TOML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, database, jobs, disk and the address to listen on; exit code 1 if one fails."""
    require_tls13()
    from ..coordinator.check import check as checked  # noqa: PLC0415 torch and grpc take seconds to import

    output.show(checked(config), as_json)


@app.command("run")
def run(config: Annotated[Path, typer.Option(help="The coordinator's TOML file.")]) -> None:
    """Serve silos and run the configured jobs in turn, until SIGTERM or Ctrl-C."""
    require_tls13()
    from ..coordinator import config as configs  # noqa: PLC0415 torch and grpc take seconds to import
    from ..coordinator.server import serve  # noqa: PLC0415

    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(serve(loaded))
