"""The commented examples that ``staddle … init`` writes: templates/*.toml.

job_example.py has that of a job.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ...files.documents import write_new
from ...security.identity.roster import Pins
from . import printer


def silo(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as silo.toml.")],
) -> None:
    """Write a commented example of the silo's configuration."""
    write(file, text("silo"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle silo check --config {file}")


def coordinator(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new file, such as coordinator.toml.")
    ],
) -> None:
    """Write a commented example of the coordinator's configuration."""
    write(file, text("coordinator"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle coordinator check --config {file}")


def operator(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new file, such as operator.toml.")
    ],
) -> None:
    """Write a commented example of what `staddle job submit` and its like read with --operator."""
    write(file, text("operator"), 0o600)
    printer.show(f"{file}: edit it, then run: staddle job list --operator {file}")


def policy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new file, such as policy.toml.")
    ],
) -> None:
    """Write a commented example of a policy; it allows nothing until you edit it."""
    write(file, text("policy"), 0o644)
    printer.show(f"{file}: edit it, then run: staddle policy check JOB.json --config SILO.toml")


def text(name: str) -> str:
    """The text of a template; ``name`` is its file's, without suffix."""
    return (resources.files(__package__) / "templates" / f"{name}.toml").read_text("utf-8")


def filled(name: str, trust: Pins, address: str, proxy: str = "") -> str:
    """A template with a federation's pins and the coordinator's address, host:port, in it."""
    port = address.rpartition(":")[2]
    founders = ", ".join(f'"{each}"' for each in trust.founders)
    settings = {
        'coordinator = "federation.example:7443"': f'coordinator = "{address}"',
        'listen = "0.0.0.0:7443"': f'listen = "0.0.0.0:{port}"',
        'federation = "my-federation"': f'federation = "{trust.federation}"',
        'founders = ["SHA256:ReplaceThisByTheFingerprintOfAFoundersKey00"]': (
            f"founders = [{founders}]"
        ),
        "\nthreshold = 1\n": f"\nthreshold = {trust.threshold}\n",
        '# proxy = ""': f'proxy = "{proxy}"' if proxy else '# proxy = ""',
        "# minimum_version = 1": f"minimum_version = {trust.minimum_version}",
    }
    content = text(name)
    for example, setting in settings.items():
        content = content.replace(example, setting)
    return content


def write(path: Path, content: str, mode: int) -> None:
    """A new file; LocalError if there is one already.

    ``mode`` is set when the file is made, so nobody else can read it in between. An
    existing file stays as it is.
    """
    write_new(path, content.encode(), mode)
