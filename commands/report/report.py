"""The ledger report as HTML: one self-contained file, for people who print and file it."""

import contextlib
import datetime as dt
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError, ProofError
from ...files.documents import write_atomic
from ...security.identity.roster import Roster
from ...security.ledger import (
    audit,
    messages,
    overview,
    receipt_checks,
)
from ...security.ledger.audit import AuditResult
from ...security.ledger.receipt_checks import Receipts
from ...security.ledger.records import Intent, Start
from ...security.log.head import roster_log_key, stored
from ...security.log.note import VerifierKey
from ..ledger import received, roster_files
from ..ledger.roster_files import Founders, RosterFiles, Threshold
from ..ledger.show import LedgerPath
from ..terminal import printer
from . import page as report_page
from . import signed_jobs
from .page import Page, RosterSources
from .render import render

REPORT = Path("ledger-report.html")


def report(
    path: LedgerPath,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page; a file of that name is replaced.")
    ] = REPORT,
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    roster: RosterFiles = None,
    founder: Founders = None,
    threshold: Threshold = None,
) -> None:
    """Write one HTML page on what left, to print and to file.

    Exit code 1 if the ledger does not hold.

    Its first two printed pages say in lay words, for each job: its purpose, whose records, what
    left, who can read that, what protects it, and what it took of the privacy budget. Tables with
    every figure follow. The page is complete in itself and needs no network. It says first whether
    the ledger holds. Purposes and numbers of records come from the jobs that the silo keeps next to
    its ledger. With --founder, the rosters that the ledger keeps supply names, and the keys that
    check the tree head and the receipts; --roster adds files.
    """
    folder = audit.ledger_folder(path)
    files = roster_files.read(roster, founder, threshold, folder)
    # Their signatures were checked when they were read.
    sources = report_page.RosterSources(files.each, files.founders)

    # the one thing on the page that is not from the ledger
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    made = f"{now}, by staddle {version('staddle')}"
    # A coordinator's ledger cannot show what left a silo.
    received.check_silos(folder)
    page = read(folder, made, sources, job or "")

    # a page is written for a broken ledger, too: it is what one files
    write_atomic(out, html(page))
    if page.body is None:
        printer.show(f"{out}: the ledger does NOT hold, and the page says why")
        raise typer.Exit(1)
    left = f"{page.body.sent_count:,} messages, {page.body.total.bytes:,} bytes"
    printer.show(f"{out}: verified, {left}, head {page.head or 'none'}")


def read(ledger: Path, made: str, sources: RosterSources, only: str = "") -> Page:
    """The page of a ledger, which is checked first.

    Raises LocalError where there is no ledger, or nothing of that job in it.
    """
    if not ledger.exists():
        raise LocalError(f"{ledger}: there is no such ledger; name a silo's folder")
    # First without a key: chain, rules and tree need none, and a broken ledger is not quoted.
    verified = audit.verify(ledger)
    if not verified.ok:
        # nothing in a broken ledger is quoted as a fact
        return report_page.broken(verified, made, _claimed(ledger))
    # One walk through the records for all tables.
    view = overview.view(verified, messages.records(ledger))
    if only and only not in view.jobs:
        raise LocalError(
            f"{ledger}: no record is of job {only!r}; its jobs: {', '.join(view.jobs) or 'none'}"
        )
    # What the silo keeps of its jobs, where the ledger still lies in its folder.
    jobs = signed_jobs.read(ledger.parent, view)
    # Without a roster that the ledger names, there are no keys to check with.
    roster = sources.named(view)
    if roster is None:
        return report_page.page(view, made, sources, only, jobs)

    # A roster has the keys of silo and coordinator, so signatures can be checked as well. A page
    # that holds shows no wrong receipt: the first one makes it the page of a broken ledger.
    signed, receipts = _check_signatures(ledger, verified, roster, sources)
    if receipts is None or not signed.ok:
        return report_page.broken(signed, made, view.silo)
    view = replace(view, verified=replace(verified, signed=True))
    return report_page.page(view, made, sources, only, jobs, receipts)


def _check_signatures(
    ledger: Path, verified: AuditResult, roster: Roster, sources: RosterSources
) -> tuple[AuditResult, Receipts | None]:
    """Check the tree head, and then the receipts; None where the head does not hold."""
    try:
        # Again, now with the silo's key, which only the roster has.
        signed = audit.verify(ledger, key=_log_key(ledger, roster))
    except ProofError as error:
        return replace(verified, problems=(str(error),)), None
    if not signed.ok:
        return signed, None
    # the agent may have appended since, and what it wrote then is not on the page
    lines = islice(messages.lines(ledger), verified.records)
    receipts = receipt_checks.check(lines, sources.rosters)
    return replace(signed, problems=tuple(receipts.problems)), receipts


def _log_key(ledger: Path, roster: Roster) -> VerifierKey:
    """The key that must have signed the checkpoint, which is there in a ledger that holds."""
    note = stored(ledger)
    if note is None:
        raise LocalError(
            f"{ledger}: its checkpoint was removed while it was read; leave it alone and try again"
        )
    # The head names the silo, the roster its key.
    return roster_log_key(note, roster)


def _claimed(ledger: Path) -> str:
    """The name that a ledger gives itself before the place where it is broken."""
    with contextlib.suppress(LocalError):
        # Stops where the ledger breaks; the page calls this name a claim.
        for _, record in messages.records(ledger):
            if isinstance(record, Start | Intent):
                return record.silo
    # It breaks before the first record that names the silo.
    return ""


def html(page: Page) -> bytes:
    """The page as an HTML file in UTF-8: the same bytes for the same page."""
    return render("report.html", page=page)
