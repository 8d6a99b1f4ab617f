"""``staddle ledger rekey``: a ledger under the new keys of its silo."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...security.dp.budget import rekey_all
from ...security.identity.keys import load_keys
from ...security.ledger import audit
from ...security.ledger.egress_ledger import Ledger
from ...security.log.head import log_key, stored
from ...security.log.segments import CHECKPOINT
from ...security.log.tree_head import TreeHead, owner
from ...silo.admission.budget import FOLDER
from ..terminal import printer
from .show import LedgerPath


def rekey(
    path: LedgerPath,
    old: Annotated[Path, typer.Option(help="The folder of keys that signed so far.")],
    new: Annotated[Path, typer.Option(help="The silo's folder of new keys.")],
) -> None:
    """Continue the ledger under a new log key, after the silo's keys were rotated.

    Privacy budgets continue too. The agent must not run.
    """
    folder = audit.ledger_folder(path)
    # Both are needed: the ledger is opened under the old key and continued under the new one.
    before, after = load_keys(old), load_keys(new)
    note = stored(folder)
    if note is None:
        raise LocalError(f"{folder / CHECKPOINT}: is missing; run: staddle ledger verify {folder}")
    federation, silo = owner(TreeHead.parse(note.text).origin)
    # A typo must not put another silo's key into this ledger for ever.
    if not silo == before.entry.id == after.entry.id:
        raise LocalError(
            f"{folder}: is the ledger of {silo!r}, the keys are of {before.entry.id!r} and"
            f" {after.entry.id!r}; name the old and the new keys of that silo"
        )

    # Budgets first: after a crash in between, the same command finds the ledger under the old key
    # and does the rest.
    with Ledger.open(folder, silo, federation, before.log) as ledger:
        datasets = rekey_all(folder.parent / FOLDER, federation, silo, before.log, after.log)
        appended = ledger.rekey(after.log)
    for dataset in datasets:
        printer.show(f"the budget of data set {dataset!r} continues under the new key")
    printer.show(
        f"record {appended.seq} names the new key, {log_key(federation, silo, after.entry.log_key)}"
    )
