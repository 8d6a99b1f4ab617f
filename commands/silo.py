"""``staddle silo``: the agent."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .. import log
from ..proto.channel import require_tls13
from .console import examples, output, printer

app = typer.Typer(no_args_is_help=True, help="Configure, check and run a silo agent.")


@app.command("init")
def init(file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as silo.toml.")]) -> None:
    """Write a commented example of the silo's configuration."""
    examples.write(file, examples.text("silo"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle silo check --config {file}")


@app.command("check")
def check(
    config: Annotated[Path, typer.Option(help="The silo's TOML file.")],
    job: Annotated[
        list[Path] | None, typer.Option(metavar="JOB.json", help="A signed job, to be judged too; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, policy, data, ledger, disk and the way to the coordinator; exit code 1 if one fails.

    No record leaves and a running agent is not disturbed: the coordinator sees a TLS handshake and a health call.
    """
    require_tls13()
    from ..silo.check import check as checked  # noqa: PLC0415 torch and grpc take seconds to import

    output.show(checked(config, job or []), as_json)


@app.command("run")
def run(config: Annotated[Path, typer.Option(help="The silo's TOML file.")]) -> None:
    """Dial the coordinator and take part in the jobs that the policy allows, until SIGTERM or Ctrl-C."""
    require_tls13()
    from ..silo import config as configs  # noqa: PLC0415 torch and grpc take seconds to import
    from ..silo.daemon import serve  # noqa: PLC0415

    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(serve(loaded))
