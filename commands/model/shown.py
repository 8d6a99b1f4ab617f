"""Arguments that the commands have in common, and figures as tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ...bundle.card import MAJORITY, MEASURES, figure
from ...bundle.description import Figures, Threshold
from ..console.printer import PrintedTable

ModelFolder: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="The model's folder, such as jobs/<job>/model of a silo's state.",
    ),
]
KINDS = ("sensitivity", "specificity", "precision", "f1")


def tables(
    measured: Figures, thresholds: tuple[Threshold, ...], names: tuple[str, ...]
) -> Iterator[PrintedTable]:
    """The figures of a model, its classes and its thresholds."""
    yield _figures(measured)
    if measured.said.get("classes"):
        yield _classes(measured, names)
    if thresholds:
        yield _thresholds(thresholds)


def _figures(measured: Figures) -> PrintedTable:
    rows = []
    for key, said in measured.said.items():
        value = said.get("value") if isinstance(said, dict) else said
        if isinstance(value, float) and key != MAJORITY:
            rows.append((MEASURES.get(key, key), figure(value, measured.intervals.get(key))))
    score = MEASURES.get(measured.score, measured.score)
    rows.append((f"{score} of the best constant answer", figure(measured.baseline)))
    title = f"{measured.records:,} records"
    return PrintedTable(("figure", "value (95 % interval)"), rows, title=title)


def _classes(measured: Figures, names: tuple[str, ...]) -> PrintedTable:
    rows = []
    for place, (name, own) in enumerate(zip(names, measured.said["classes"], strict=False)):
        paths = [f"classes.{place}.{kind}" for kind in KINDS]
        pairs = zip(KINDS, map(measured.intervals.get, paths), strict=True)
        cells = (figure(own[kind], interval) for kind, interval in pairs)
        rows.append((name, f"{own['records']:,}", *cells))
    return PrintedTable(("class", "records", *KINDS), rows, (1,))


def _thresholds(thresholds: tuple[Threshold, ...]) -> PrintedTable:
    rows = [
        (
            own.of,
            f"{own.value:.4f}",
            figure(own.sensitivity, own.sensitivity_interval),
            figure(own.specificity, own.specificity_interval),
        )
        for own in thresholds
    ]
    return PrintedTable(("called from", "threshold", *KINDS[:2]), rows, (1,))
