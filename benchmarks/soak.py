"""Faults for hours: ``python benchmarks/soak.py --hours N [--seed S] [--area A]``.

Draws rows of ``tests/faults`` and seeds at random, makes each fault in an empty folder, and prints
how many were tried in each area, in how many the rule held and in how many it fell. What falls is
printed at once, with the command that repeats it: ``--row R --seed S``. Exit code 1 where something
fell.
"""

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 2**32  # of single faults
LONGEST_WHY = 300  # characters of what a fall says


@dataclass
class Result:
    """What became of the faults, by area."""

    tried: Counter[str] = field(default_factory=Counter)
    fell: Counter[str] = field(default_factory=Counter)

    def table(self, areas: Sequence[str]) -> str:
        """In Markdown."""
        lines = [_line(area, self.tried[area], self.fell[area]) for area in areas]
        lines.append(_line("all", self.tried.total(), self.fell.total()))
        return "\n".join(["| area | tried | held | fell |", "|---|---|---|---|", *lines])


def _line(area: str, tried: int, fell: int) -> str:
    return f"| {area} | {tried} | {tried - fell} | {fell} |"


def attempt(row: Any, seed: int, result: Result) -> str:
    """Make one fault; why the rule fell, empty where it held."""
    result.tried[row.area] += 1
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            row.run(Path(folder), seed)
    except Exception as error:  # noqa: BLE001 whatever comes out is a fall
        result.fell[row.area] += 1
        return f"{type(error).__name__}: {error}"[:LONGEST_WHY]
    return ""


def soak(rows: Mapping[str, Any], seconds: float, draw: random.Random, result: Result) -> None:
    """Make drawn faults until the time is up; each row at least once."""
    names, ends = sorted(rows), time.monotonic() + seconds
    waiting = list(names)
    draw.shuffle(waiting)
    while waiting or time.monotonic() < ends:
        name, seed = waiting.pop() if waiting else draw.choice(names), draw.randrange(SEEDS)
        if why := attempt(rows[name], seed, result):
            print(f"fell: --row {name} --seed {seed}: {why}", flush=True)  # noqa: T201


def chosen(rows: Mapping[str, Any], area: str | None, row: str | None) -> dict[str, Any]:
    """The rows of an area, or one row; exits where there is none."""
    found = {
        name: each
        for name, each in rows.items()
        if area in (None, each.area) and row in (None, name)
    }
    if not found:
        wanted, known = (
            (f"row {row!r}", sorted(rows))
            if row
            else (f"area {area!r}", {r.area for r in rows.values()})
        )
        sys.exit(f"no {wanted} in tests/faults; known: {', '.join(sorted(known))}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something fell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hours", type=float, help="how long faults are drawn; each row is tried once in any case"
    )
    parser.add_argument("--seed", type=int, help="what is drawn; of a --row: the fault itself")
    parser.add_argument("--area", help="rows of this area alone")
    parser.add_argument("--row", help="repeat one fault of this row; needs --seed")
    given = parser.parse_args(arguments)
    if (given.row is None) == (given.hours is None):
        parser.error("give --hours, or --row and --seed")
    if given.row is not None and given.seed is None:
        parser.error("--row needs --seed, as it was printed")
    sys.path.insert(0, str(ROOT / "tests"))
    from faults import table  # noqa: PLC0415 it is there in a checkout only

    rows, result = chosen(table.rows(), given.area, given.row), Result()
    if given.row is not None:
        why = attempt(rows[given.row], given.seed, result)
        print(f"{rows[given.row].fault}: {why or 'held: ' + rows[given.row].holds}")  # noqa: T201
        return bool(why)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    try:
        soak(rows, given.hours * 3600, random.Random(seed), result)  # noqa: S311 no secret
    except KeyboardInterrupt:
        print("stopped before the time was up")  # noqa: T201
    print(  # noqa: T201
        result.table(
            [area for area in table.AREAS if any(row.area == area for row in rows.values())]
        )
    )
    return bool(result.fell)


if __name__ == "__main__":
    sys.exit(main())
