"""``staddle``: the one console script, and how errors end it."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any, cast

import typer

from ..errors import CancelledError, StaddleError
from .loader import LazyGroup, program
from .terminal import printer

# click's, or typer's own, by the release of typer
UsageError = cast("type[Exception]", typer.BadParameter.__base__)

STOPPED = 130  # as shells have it for Ctrl-C

# ``ended`` shows errors, and escapes what could steer a terminal.
app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        printer.show(f"staddle {metadata.version('staddle')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Cross-silo personalised federated learning, with a ledger of exactly what left each silo."""


def main() -> None:
    """Run the console script; an error of ours is one line on standard error and exit code 1.

    It never returns. A wrong command line gives exit code 2.
    """
    ended(lambda: app(standalone_mode=False))


def single(target: str) -> None:
    """Run one command as a program of its own, such as ``silo.agent:run``.

    This is behind ``python -m staddle.silo``, as the demo starts its daemons.
    """
    ended(lambda: program(target, target)(standalone_mode=False))


def ended(run: Callable[[], Any]) -> None:
    """Run and exit, with the code that ``run`` returns; an error goes to standard error.

    Exit code 1 for an error of ours, 2 for a wrong command line, 130 after a stop that was asked
    for. Texts are escaped, so that they cannot steer a terminal.
    """
    # First, since any output may hold letters that the terminal's encoding lacks.
    printer.escape_unknown()
    try:
        sys.exit(run())
    # What was asked for is no failure.
    except (CancelledError, typer.Abort) as error:
        printer.show(str(error) or "stopped", err=True)
        sys.exit(STOPPED)
    # Our own errors are written for people: no traceback.
    except StaddleError as error:
        printer.show_error(str(error))
    except UsageError as error:
        printer.show_usage(error)
        sys.exit(2)
    except Exception as error:  # noqa: BLE001 whatever it is, its text may be somebody else's
        printer.show_crash(error)
    sys.exit(1)
