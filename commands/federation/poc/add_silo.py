"""``staddle poc add-silo``: one more silo, by the steps of docs/operate.md, section 12."""

import shutil
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ....algorithms.data.dataset import Dataset
from ....coordinator import config as coordinator_configs
from ....coordinator import status as coordinator
from ....files.documents import read_bytes, write_all
from ....files.toml_document import parse_document
from ....security.faults import check_local
from ....security.identity import roster as rosters
from ...console import printer
from ...silo.data import Contract, contract_of
from .. import background, local_federation
from .tables import SiloTable, read_table
from .up import Folder
from .workspace import FIRST, SPARE, Workspace, alone, check_names, digit_shards


def add_silo(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new silo's name.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its records; left out, a spare share of the digits."),
    ] = None,
) -> None:
    """Add a silo: its keys, a new roster, its configuration, and jobs for all silos with it.

    The daemons are restarted, since each knows the roster with which it was started.
    """
    with alone(folder) as workspace:
        check_names([name])
        _check_idle(workspace)
        before = workspace.policy()
        joined = _join(workspace, name, data)
        kept = _renew_policies(joined, before.encode())
        restart(joined)
    printer.show(
        f"{name} is a silo of {folder}, by version {_version(joined)} of the roster",
        f"Jobs that name it, too: {', '.join(path.stem for path in joined.jobs.values())}; run"
        f" them with: staddle poc run {quote(str(folder))}",
    )
    for silo in kept:
        printer.show(f"{silo}: its policy was changed by hand, and is as it was")
    for moved in sorted(set(joined.federation.silos) - set(joined.here)):
        printer.show(f"{moved} runs elsewhere: give it {folder / 'roster.json'}, and restart it")


def restart(workspace: Workspace) -> None:
    """Stop all daemons and start them: each knows the roster with which it was started."""
    background.stop(workspace.daemons)
    background.start(workspace.daemons)


def _renew_policies(workspace: Workspace, before: bytes) -> list[str]:
    """Let the silos' policies allow the new jobs; the silos with another policy than ``before``.

    With four silos jobs are blind, for one, which takes other rules.
    """
    files = workspace.policy_files()
    drafted = [path for path in files.values() if path.read_bytes() == before]
    renewed = workspace.policy().encode()
    write_all([(path, renewed) for path in drafted], 0o600)
    return [silo for silo, path in files.items() if path.read_bytes() != renewed]


def _version(workspace: Workspace) -> int:
    return rosters.load(workspace.folder / "roster.json").version


def _check_idle(workspace: Workspace) -> None:
    """LocalError while a job runs: it was signed under the roster of before."""
    if not (workspace.coordinator.state / "coordinator.sqlite").exists():
        return
    found = coordinator.read(coordinator_configs.load(workspace.coordinator.config))
    unfinished = ", ".join(job.job for job in found.jobs if job.stage != "ended")
    why = f"{unfinished} has not ended, and may not survive a new roster; wait until it has"
    check_local(not unfinished, why)


def _join(workspace: Workspace, name: str, data: Path | None) -> Workspace:
    """The workspace with one more silo; the signed roster is written last."""
    folder, federation, record = workspace.folder / name, workspace.federation, workspace.record
    check_local(not folder.exists(), f"{folder}: exists already; choose another name")
    drafted = workspace.jobs[FIRST]
    contract = contract_of(drafted)
    own = _table(workspace, data, contract) or _spare(workspace)
    records = {**record.records, name: len(own)}
    joined = Workspace(
        replace(federation, silos=(*federation.silos, name)),
        record.model_copy(update={"records": records}),
    )
    written = parse_document(read_bytes(drafted), str(drafted))
    described = {key: written[key] for key in {"model", "features"} & written.keys()}
    end = f"-{_version(workspace) + 1}"
    folder.mkdir()
    try:
        joined.draft_jobs(described, end)
        joined.place(name, own, contract)
        local_federation.join(federation, name)
    # Ctrl-C, too: keys that no roster has, and jobs for a silo that is none
    except BaseException:
        shutil.rmtree(folder)
        for path in drafted.parent.glob(f"*{end}.toml"):
            path.unlink()
        raise
    joined.write_record()
    return joined


def _spare(workspace: Workspace) -> Dataset:
    """The next share of the digits that no silo has."""
    first, records = workspace.choices.silos, workspace.record.records
    left = digit_shards(workspace.choices)[len(records) :]
    check_local(bool(left), f"the digits are dealt out to {first} silos and {SPARE} added ones")
    return left[0]


def _table(workspace: Workspace, data: Path | None, contract: Contract) -> SiloTable | None:
    """The new silo's file, which fits the jobs; None for a share of the digits."""
    hold = "files: give --data FILE" if workspace.choices.data else "digits: leave --data out"
    same_kind = bool(workspace.choices.data) == (data is not None)
    check_local(same_kind, f"the silos of {workspace.folder} hold {hold}")
    if data is None:
        return None
    table = read_table(data, workspace.choices)
    faults = table.faults(workspace.choices, contract)
    check_local(not faults, "\n".join(["the file does not fit the jobs", *faults]))
    return table
