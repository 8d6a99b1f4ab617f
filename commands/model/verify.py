"""``staddle model verify``: who made a model, and whether it is as it was made."""

from pathlib import Path
from typing import Annotated

import typer

from ...bundle import folder
from ...bundle.ledger_head import check_head, check_ledger
from ...security.ledger.audit import ledger_folder
from ..console import printer
from ..ledger import roster_files
from ..ledger.roster_files import Founders, RosterFiles, Threshold
from .shown import ModelFolder


def verify(
    model: ModelFolder,
    roster: RosterFiles = None,
    founder: Founders = None,
    threshold: Threshold = None,
    silo: Annotated[
        str | None, typer.Option(metavar="SILO", help="Whose model it has to be.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The silo's folder, 'state' or 'ledger'.")
    ] = None,
) -> None:
    """Check a model's files, their signature and the ledger's head in it; exit code 1 if one fails.

    With --ledger, the silo's ledger must have grown from that head. Whoever can change the files
    can sign them with keys of their own: with --roster the signer's key must be that of the
    member in the newest roster given, and --founder says who vouches for that.
    """
    # A wrong roster is told first, and a changed file before anything that the files say.
    rosters = roster_files.read(roster, founder, threshold)
    found = folder.read(model)
    if silo is not None:
        found.check_named(silo)
    if rosters.newest is not None:
        found.check_signer(rosters.newest)
    head = check_head(found)
    origin = found.description.origin
    printer.show(
        f"files      as they were signed: {', '.join(folder.FILES)}",
        f"made by    {origin.kind} {origin.name}"
        + (f" of federation {origin.federation}" if origin.federation else ""),
        f"job        {found.description.job.get('name')}, SHA-256 {found.description.job_digest}",
    )
    if found.signer is None:
        printer.show("signature  none: a simulation has no keys")
        return
    signer = found.signer
    printer.show(f"signed by  {signer.id} ({signer.organisation}), {signer.protocol_fingerprint}")
    if head is not None:
        printer.show(f"ledger     head of {head.size:,} records, root {head.root.hex()}")
    if ledger is not None:
        records = check_ledger(found, ledger_folder(ledger))
        printer.show(f"           the ledger has {records:,} records by now, and grew from it")
    if rosters.each:
        printer.show(*rosters.vouchers.split("\n"))
    else:
        printer.show(
            f"roster     none given: compare the fingerprint with the {origin.kind}'s, by telephone"
            " (protocol key of staddle keys show)"
        )
