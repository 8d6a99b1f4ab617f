"""The console script as a whole."""

from importlib import metadata

from typer.testing import CliRunner

from staddle.commands.main import app


def test_it_says_its_version_and_what_it_is():
    asked = CliRunner().invoke(app, ["--version"])
    assert (asked.exit_code, asked.output) == (0, f"staddle {metadata.version('staddle')}\n")
    help_ = CliRunner().invoke(app, ["--help"])
    assert "Cross-silo personalised federated learning, with a ledger" in " ".join(
        help_.output.split()
    )
