"""``staddle``: the one console script, and how errors end it."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any, cast

import typer

from ..errors import StaddleError
from . import coordinator, job, keys, roster, silo, status
from .console import printer
from .federation import demo, operator_client
from .ledger import ledger
from .policy import policy
from .privacy import privacy
from .simulate import membership, partition, reproduce, simulate

UsageError = cast("type[Exception]", typer.BadParameter.__base__)  # click's, or typer's own, by the release of typer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(keys.app, name="keys")
app.add_typer(roster.app, name="roster")
app.add_typer(operator_client.app, name="operator")
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
        printer.show(f"staddle {metadata.version('staddle')}")
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
    ended(lambda: app(standalone_mode=False))


def single(command: Callable[..., None]) -> None:
    """Run one command as a program of its own."""
    alone = typer.Typer(pretty_exceptions_enable=False)
    alone.command()(command)
    ended(lambda: alone(standalone_mode=False))


def ended(run: Callable[[], Any]) -> None:
    """Run and exit, with the code that ``run`` gives or, where it fails, with an error on standard error."""
    printer.escape_unknown()
    try:
        sys.exit(run())
    except StaddleError as error:
        printer.show_error(str(error))
    except UsageError as error:
        printer.show_usage(error)
        sys.exit(2)
    except typer.Abort:
        printer.show_error("stopped")
    except Exception as error:  # noqa: BLE001 whatever it is, its text may be somebody else's
        printer.show_crash(error)
    sys.exit(1)
