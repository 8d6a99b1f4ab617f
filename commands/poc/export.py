"""``staddle poc export``: a silo moves to another machine, with all that it was and is."""

import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from ...errors import LocalError, check_local, reason
from ...files.documents import read_bytes, write_atomic
from ...files.toml_document import parse_document
from ...proto.channel import checked_address
from ...silo import config as silo_configs
from ..federation import background
from ..terminal import printer
from ..terminal.toml import to_toml
from .up import Folder
from .workspace import EXPORTED, Workspace, alone

ARCHIVE = ".tar.gz"
MOVED = """\
{out} holds the silo {silo}: keys, mode 0600, configuration, policy, roster, records, and its state
with the ledger. They are gone from here. Start a single copy of it, since two agents with one
ledger fork it. On the other machine, after `tar xzf` of an archive:
  staddle silo check --config {config}
  staddle silo run --config {config}"""
LOCAL = """\
No other machine reaches a coordinator on {address}. Change listen in {file}, then run
`staddle poc down` and `staddle poc up`. The silo calls {called}: coordinator in its silo.toml."""


def export(
    folder: Folder,
    silo: Annotated[str, typer.Argument(metavar="SILO", help="The silo that moves.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The new folder, or archive OUT.tar.gz.")
    ],
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the silo finds the coordinator.")
    ] = "",
) -> None:
    """Move a silo's whole folder out, to run on another machine; it does not start here again.

    Its agent is stopped first. It stays a member: jobs may name it, wherever it runs.
    """
    with alone(folder) as workspace:
        if coordinator:
            checked_address(coordinator)
        _check(workspace, silo, out)
        background.stop([workspace.agent(silo)])
        config = workspace.federation.silo_config(silo)
        elsewhere = _elsewhere(config)
        # Nobody else gets into this folder while the files in it do not have their modes yet.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as private:
            made = _copy(workspace, silo, Path(private) / silo, coordinator)
            if out.name.endswith(ARCHIVE):
                made = _packed(made)
            _hand_over(config, made, out)
        _remove_here(workspace.folder / silo)
    place = silo if out.name.endswith(ARCHIVE) else str(out)
    printer.show(*MOVED.format(out=out, silo=silo, config=quote(f"{place}/silo.toml")).splitlines())
    printer.show(*(f"not in it: {path}; place these records there, too" for path in elsewhere))
    if workspace.address.startswith("127."):
        file = workspace.federation.coordinator_config
        called = coordinator or workspace.address
        lines = LOCAL.format(address=workspace.address, file=file, called=called)
        printer.show(*lines.splitlines())


def _check(workspace: Workspace, silo: str, out: Path) -> None:
    silos = workspace.federation.silos
    known = f"{silo!r} is no silo of {workspace.folder}; its silos: {', '.join(silos)}"
    check_local(silo in silos, known)
    moved = f"{silo} was exported before; only its new folder can start it"
    check_local(silo in workspace.here, moved)
    check_local(not out.exists(), f"{out}: exists already; choose another name")
    check_local(out.parent.is_dir(), f"{out}: there is no folder {out.parent}; make it first")


def _elsewhere(config: Path) -> list[Path]:
    """Records that the silo reads from outside its folder."""
    inside = config.parent.resolve()
    paths = [own.path for own in silo_configs.load(config).sources.values() if own.path]
    return [path for path in paths if not path.resolve().is_relative_to(inside)]


def _copy(workspace: Workspace, silo: str, made: Path, coordinator: str) -> Path:
    """The silo's folder with its modes, whose paths stay within it; where it lies."""
    source = workspace.folder / silo
    shutil.copytree(source, made, ignore=shutil.ignore_patterns("LOCK", "*.log"))
    made.chmod(0o700)
    shutil.copyfile(workspace.folder / "roster.json", made / "roster.json")
    config = made / "silo.toml"
    written = parse_document(read_bytes(config), str(config))
    document: dict[str, Any] = {**written, "roster": "roster.json"}
    if coordinator:
        document["coordinator"] = coordinator
    write_atomic(config, to_toml(document).encode())
    return made


def _packed(made: Path) -> Path:
    """A folder as an archive, for its owner alone."""
    packed = made.with_name(f"{made.name}{ARCHIVE}")
    packed.touch(0o600)
    with packed.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.add(made, made.name)
    return packed


def _hand_over(config: Path, made: Path, out: Path) -> None:
    """Let the silo that was ``made`` start in OUT alone; LocalError where it stays here."""
    here = config.with_name(EXPORTED)
    # From here on it cannot start in this folder, and only then it can in the other one.
    config.rename(here)
    try:
        made.rename(out)
    # Somebody may have made a folder of that name meanwhile.
    except OSError as error:
        here.rename(config)
        raise LocalError(
            f"{out}: cannot make it: {reason(error)}; the silo is still here, and stopped: choose"
            " another name, or start it with staddle poc up"
        ) from error


def _remove_here(folder: Path) -> None:
    """Remove the silo's keys, records and state from this machine; they are where they moved to."""
    # A power cut must not take both.
    os.sync()
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != EXPORTED:
            path.unlink()
