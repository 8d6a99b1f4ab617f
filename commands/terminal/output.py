"""Sizes and numbers as people read them, and the findings of ``check``.

Each finding is one numbered line, or a member of the JSON; exit code 1 where one failed.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from ...security.preflight import Finding, PreflightReport
from . import printer

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``2048`` as ``2 KiB``; four digits at most.

    ``count`` in bytes; units of 1024.
    """
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {UNITS[-1]}"


def number(count: int, of: str) -> str:
    """``1 tensor``, ``2 tensors``.

    Commas separate thousands. ``of`` is the singular.
    """
    plural = "" if count == 1 else "s"
    return f"{count:,} {of}{plural}"


WIDTH = 100
# paths and fingerprints
UNBROKEN: Mapping[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def show(report: PreflightReport, as_json: bool) -> None:
    """Print, and end with exit code 1 unless all is well.

    In JSON, an object with ``ok`` and the findings in their order.
    """
    findings = report.findings
    if as_json:
        printer.show_json({"ok": report.ok, "findings": list(map(asdict, findings))})
    else:
        for number, finding in enumerate(findings, 1):
            printer.show(*_wrapped(number, finding))
        failed = sum(not finding.ok for finding in findings)
        verdict = "all is well"
        if failed:
            verdict = f"{failed} of {len(findings)} failed"
        printer.show(verdict)
    # Scripts and service managers read the exit code, not the text.
    if not report.ok:
        raise typer.Exit(1)


def _wrapped(number: int, finding: Finding) -> list[str]:
    verdict = "ok" if finding.ok else "FAIL"
    # Further lines begin below the text, so that a verdict stands out at the margin.
    head = f"{number:>2}  {verdict:<4}  {finding.name:<13}  "
    return textwrap.wrap(head + finding.text, WIDTH, subsequent_indent=" " * len(head), **UNBROKEN)
