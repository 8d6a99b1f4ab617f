"""Sizes and numbers as people read them.

How ``check`` prints what it found: a numbered line each, or JSON; exit code 1 where something
failed.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from ...security.preflight import PreflightReport
from . import printer

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``2048`` as ``2 KiB``; four digits at most."""
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {UNITS[-1]}"


def number(count: int, of: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{count:,} {of}" + ("" if count == 1 else "s")


WIDTH = 100
# paths and fingerprints
UNBROKEN: Mapping[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def show(report: PreflightReport, as_json: bool) -> None:
    """Print, and end with exit code 1 unless all is well."""
    if as_json:
        printer.show_json(
            {"ok": report.ok, "findings": [asdict(finding) for finding in report.findings]}
        )
    else:
        for number, finding in enumerate(report.findings, 1):
            head = f"{number:>2}  {'ok' if finding.ok else 'FAIL':<4}  {finding.name:<13}  "
            for line in textwrap.wrap(
                head + finding.text, WIDTH, subsequent_indent=" " * len(head), **UNBROKEN
            ):
                printer.show(line)
        failed = sum(not finding.ok for finding in report.findings)
        printer.show(f"{failed} of {len(report.findings)} failed" if failed else "all is well")
    if not report.ok:
        raise typer.Exit(1)
