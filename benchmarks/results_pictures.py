"""Draws docs/results-PAPER.svg of each paper from docs/results.csv: published values next to ours.

``python benchmarks/results_pictures.py [docs/results.csv]``

The CSV has a line per method and setting, in percent; ``silos_of_paper`` and ``rounds_of_paper``
are the full protocol, and ``measure`` is how silos are averaged. Its lines come from the tables
that ``staddle reproduce`` wrote, and are those of docs/results.md, which says what was tested.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from staddle.simulator.reproduce.comparison import Cell, Ran
from staddle.simulator.reproduce.picture import drawn
from staddle.simulator.reproduce.published import PaperColumn, PaperRow, PaperValue
from staddle.simulator.run.scores import Spread

SCORE = ("all/trained", "micro", "last")  # not in the picture, which has what the page calls ours


def share(text: str) -> float | None:
    """Percent as 0…1; None for an empty field."""
    return float(text) / 100 if text else None


def cell(line: Mapping[str, str]) -> Cell:
    """A line of the CSV."""
    title = line["setting"]
    smaller = [
        f"{line[what]} of {line[f'{what}_of_paper']} {what}"
        for what in ("silos", "rounds")
        if line[what] != line[f"{what}_of_paper"]
    ]
    if smaller:
        title += f"\nours: {', '.join(smaller)}"
    mean, deviation = share(line["published"]), share(line["published_deviation"])
    score = Spread(int(line["seeds"]), float(line["ours"]) / 100, share(line["ours_deviation"]))
    silos = int(line["silos"])
    return Cell(
        PaperColumn(line["setting"], title, None),
        PaperRow(line["method"], (), SCORE),
        PaperValue(line["published"], mean, deviation),
        None,
        Ran(score, over_silos=0.0, silos=silos, drawn=silos, rounds=int(line["rounds"])),
    )


def pictures(lines: Iterable[Mapping[str, str]]) -> dict[str, bytes]:
    """An SVG by paper; lines of one paper stand together."""
    papers = groupby(lines, itemgetter("paper"))
    return {paper: drawn([*map(cell, own)], "svg") for paper, own in papers}


def main() -> None:
    """Read, draw and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("values", type=Path, nargs="?", default=Path("docs/results.csv"))
    values = parser.parse_args().values
    with values.open() as file:
        found = pictures(csv.DictReader(file))
    for paper, svg in found.items():
        values.with_name(f"{values.stem}-{paper}.svg").write_bytes(svg)


if __name__ == "__main__":
    main()
