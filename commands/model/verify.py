"""``staddle model verify``: who made a model, and whether it is as it was made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...bundle import folder
from ...bundle.folder import VerifiedFolder
from ...bundle.ledger_head import check_head, check_ledger
from ...security.identity.roster import signers
from ...security.ledger.audit import ledger_folder
from ...security.log.tree_head import TreeHead
from ..ledger import roster_files
from ..ledger.roster_files import Founders, RosterFiles, Rosters, Threshold
from ..ledger.show import Json
from ..terminal import printer
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
    as_json: Json = False,
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
    records = None if ledger is None else check_ledger(found, ledger_folder(ledger))
    if as_json:
        printer.show_json(_document(found, head, records, rosters), indent=1)
    else:
        printer.show(*_lines(found, head, records, rosters))


def _document(
    found: VerifiedFolder, head: TreeHead | None, records: int | None, rosters: Rosters
) -> dict[str, Any]:
    """What holds; a key is None where there is nothing of the kind."""
    origin, signer = found.description.origin, found.signer
    return {
        "files": list(folder.FILES),
        "maker": {"kind": origin.kind, "name": origin.name, "federation": origin.federation},
        "job": found.description.job.get("name"),
        "job_digest": found.description.job_digest,
        "signer": signer
        and {
            "id": signer.id,
            "organisation": signer.organisation,
            "fingerprint": signer.protocol_fingerprint,
        },
        "head": head and {"records": head.size, "root": head.root.hex()},
        "ledger": None if records is None else {"records": records},
        # Version → founders who signed it.
        "rosters": {each.version: signers(each, rosters.founders) for each in rosters.each},
    }


def _lines(
    found: VerifiedFolder, head: TreeHead | None, records: int | None, rosters: Rosters
) -> Iterator[str]:
    origin, signer = found.description.origin, found.signer
    whose = f" of federation {origin.federation}" if origin.federation else ""
    yield f"files      as they were signed: {', '.join(folder.FILES)}"
    yield f"made by    {origin.kind} {origin.name}{whose}"
    yield f"job        {found.description.job.get('name')}, SHA-256 {found.description.job_digest}"
    if signer is None:
        yield "signature  none: a simulation has no keys"
        return
    yield f"signed by  {signer.id} ({signer.organisation}), {signer.protocol_fingerprint}"
    if head is not None:
        yield f"ledger     head of {head.size:,} records, root {head.root.hex()}"
    if records is not None:
        yield f"           the ledger has {records:,} records by now, and grew from it"
    if rosters.each:
        yield from rosters.vouchers
    else:
        yield (
            f"roster     none given: compare the fingerprint with the {origin.kind}'s, by telephone"
            " (protocol key of staddle keys show)"
        )
