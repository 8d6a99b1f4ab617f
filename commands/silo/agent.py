"""``staddle silo``: the agent."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ... import log
from ...security.log.lock import locked
from ...silo import config as configs
from ...silo.check import check as checked
from ...silo.daemon import serve
from ...silo.job_folder import new_split_key
from ..federation import systemd
from ..terminal import output, printer
from ..terminal.newest_roster import newest_in_use


def check(
    config: Annotated[Path, typer.Option(help="The silo's TOML file.")],
    job: Annotated[
        list[Path] | None,
        typer.Option(metavar="JOB.json", help="A signed job, to be judged too; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try keys, roster, clock, policy, data, split, ledger, disk and the way to the coordinator.

    Exit code 1 if one fails.

    No record leaves and a running agent is not disturbed: the coordinator sees a TLS handshake, a
    health call, and one for the newest roster, which counts here if the founders signed it.
    """
    # A roster of before others joined would fail jobs that the agent takes.
    # Jobs are judged by the agent's own code, so that both give the same answer.
    output.show(checked(config, job or [], newest_in_use), as_json)


def run(config: Annotated[Path, typer.Option(help="The silo's TOML file.")]) -> None:
    """Dial the coordinator and take part in the jobs that the policy allows.

    It runs until SIGTERM or Ctrl-C.
    """
    # The log's form is in the file, so an error in the file itself is shown as text.
    loaded = configs.load(config)
    log.setup(loaded.log)
    serving = serve(loaded)
    asyncio.run(systemd.supervised(serving, loaded.directory, systemd.SILO))


def new_split(config: Annotated[Path, typer.Option(help="The silo's TOML file.")]) -> None:
    """Draw again which records are trained on, where state/split.key is lost for good.

    Only where no backup has the key. Records that earlier jobs trained on may be tested on from now
    on: scores of jobs that still run, and of models that begin with this silo's own weights, are
    too good. Privacy budgets are unaffected. The agent must not run.
    """
    directory = configs.load(config).directory
    # A running agent knows the old split.
    with locked(directory):
        new_split_key(directory)
    printer.show(
        f"{directory / 'split.key'}: a new split. Records that were trained on may be tested on"
        " from now on: do not compare scores with those of before, and have jobs that still run"
        " signed again under a new name. Back up this folder"
    )
