"""``staddle``: the one console script, and how errors end it."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer

from ..errors import StaddleError
from . import (
    coordinator,
    demo,
    job,
    keys,
    ledger,
    membership,
    operator,
    partition,
    policy,
    privacy,
    reproduce,
    roster,
    silo,
    simulate,
    status,
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(keys.app, name="keys")
app.add_typer(roster.app, name="roster")
app.add_typer(operator.app, name="operator")
app.add_typer(job.app, name="job")
app.add_typer(coordinator.app, name="coordinator")
app.add_typer(silo.app, name="silo")
app.add_typer(policy.app, name="policy")
app.add_typer(ledger.app, name="ledger")
app.add_typer(privacy.app, name="privacy")
app.add_typer(membership.app, name="membership")
app.add_typer(partition.app, name="partition")
app.command("status")(status.status)
app.command("demo")(demo.demo)
app.command("simulate")(simulate.simulate)
app.command("reproduce")(reproduce.reproduce)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"staddle {metadata.version('staddle')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Cross-silo personalised federated learning, with a ledger of exactly what left each silo."""


def main() -> None:
    """Run the console script; an error of ours is one line on standard error and exit code 1."""
    ended(app)


def single(command: Callable[..., None]) -> None:
    """Run one command as a program of its own."""
    alone = typer.Typer(pretty_exceptions_enable=False)
    alone.command()(command)
    ended(alone)


def ended(run: Callable[[], Any]) -> None:
    """Run and exit."""
    try:
        run()
    except StaddleError as error:
        sys.stderr.write(f"staddle: {error}\n")
        sys.exit(1)
