"""``staddle poc add-silo``: one more silo, by the steps of docs/operate.md, section 12."""

import shutil
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ...algorithms.data.dataset import Dataset
from ...errors import check_local
from ...files.documents import read_bytes
from ...files.toml_document import parse_document
from ...security.identity import roster as rosters
from ..federation import background, local_federation
from ..members import membership_client
from ..silo.data import Contract, contract_of
from ..terminal import printer
from .tables import SiloTable, read_table
from .up import Folder
from .workspace import FIRST, METHODS, SPARE, Workspace, alone, check_names, digit_shards


def add_silo(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new silo's name.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its records; left out, a spare share of the digits."),
    ] = None,
) -> None:
    """Add a silo: its keys, a new roster, its configuration, and jobs for all silos with it.

    What runs continues: the coordinator passes the roster on.
    """
    with alone(folder) as workspace:
        check_names([name])
        before = workspace.policy()
        joined = _join(workspace, name, data)
        kept = _renew_policies(joined, before.encode())
        runs = workspace.coordinator.process() is not None
        background.start([joined.agent(name)] * runs)
    printer.show(
        f"{name} is a silo of {folder}, by version {_version(joined)} of the roster",
        f"Jobs that name it, too: {', '.join(path.stem for path in joined.jobs.values())}; run"
        f" them with: staddle poc run {quote(str(folder))}",
    )
    for silo in kept:
        printer.show(f"{silo}: its policy was changed by hand, and is as it was")


def _publish(workspace: Workspace, roster: rosters.Roster) -> None:
    """Give everybody the roster, which a running coordinator passes on."""
    if workspace.coordinator.process() is not None:
        founder = membership_client.read(workspace.folder / "founder.toml")
        with membership_client.connected(founder) as calls:
            calls.publish(roster)
    rosters.save(roster, workspace.folder / "roster.json")


def _renew_policies(workspace: Workspace, before: bytes) -> list[str]:
    """Let the silos' policies allow the new jobs; the silos with another policy than ``before``.

    With four silos jobs are blind, for one, which takes other rules.
    """
    silos = workspace.here
    drafted = [silo for silo in silos if workspace.policy_file(silo).read_bytes() == before]
    renewed = workspace.policy()
    workspace.renew_policies(renewed, drafted)
    return [silo for silo in silos if workspace.policy_file(silo).read_text() != renewed]


def _version(workspace: Workspace) -> int:
    return rosters.load(workspace.folder / "roster.json").version


def _join(workspace: Workspace, name: str, data: Path | None) -> Workspace:
    """The workspace with one more silo; the signed roster is given to everybody last."""
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
        _publish(workspace, local_federation.roster_with(federation, name))
    # Ctrl-C, too: keys that no roster has, and jobs for a silo that is none
    except BaseException:
        shutil.rmtree(folder)
        _undraft(drafted.parent, end)
        raise
    joined.write_record()
    return joined


def _undraft(jobs: Path, end: str) -> None:
    """Remove the job files of a silo that did not join; those of the user's own stay."""
    for kind in METHODS:
        (jobs / f"{kind}{end}.toml").unlink(missing_ok=True)


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
