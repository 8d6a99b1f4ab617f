"""``staddle silo``: the agent."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ... import log
from ...silo import config as configs
from ...silo.check import check as checked
from ...silo.daemon import serve
from ..console import output


def check(
    config: Annotated[Path, typer.Option(help="The silo's TOML file.")],
    job: Annotated[
        list[Path] | None,
        typer.Option(metavar="JOB.json", help="A signed job, to be judged too; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, policy, data, ledger, disk and the way to the coordinator.

    Exit code 1 if one fails.

    No record leaves and a running agent is not disturbed: the coordinator sees a TLS handshake and
    a health call.
    """
    # Jobs are judged by the agent's own code, so that both give the same answer.
    output.show(checked(config, job or []), as_json)


def run(config: Annotated[Path, typer.Option(help="The silo's TOML file.")]) -> None:
    """Dial the coordinator and take part in the jobs that the policy allows.

    It runs until SIGTERM or Ctrl-C.
    """
    # The log's form is in the file, so an error in the file itself is shown as text.
    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(serve(loaded))
