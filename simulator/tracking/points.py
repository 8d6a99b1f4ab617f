"""What trackers show of a run: named numbers after so many rounds, with the names of results.csv.

``all/trained/accuracy.macro`` and so on, and ``loss``, the mean training loss of a round's silos.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from operator import attrgetter
from typing import Any, Protocol

from ...algorithms.tasks.counting import ScoreForm
from ...errors import LocalError
from ..report.results_csv import numbers
from ..run.history import Measured
from ..run.work_file import RoundWork

LOSS = "loss"


@dataclass(frozen=True)
class Point:
    """Numbers by name after ``rounds`` rounds that train; all are finite."""

    rounds: int
    values: Mapping[str, float]


class PointTracker(Protocol):
    """Shows the points of one run."""

    def add(self, points: Iterable[Point]) -> None:
        """Show them; LocalError where that fails."""
        ...

    def close(self) -> None:
        """No point comes any more: the run is over, or stopped."""
        ...


def tracker_failed(tool: str, name: str, why: object) -> LocalError:
    """What to say where a tool does not take points; ``name`` is that of ``--track``."""
    return LocalError(
        f"{tool} failed: {why}; the same command resumes once it is mended, and without --track"
        f" {name} it needs none"
    )


def points(
    measures: Iterable[Measured], work: Iterable[RoundWork], form: ScoreForm
) -> tuple[Point, ...]:
    """The points of measures in the order in which they were taken, with the loss of their rounds.

    ``form`` is how the run's models are compared.
    """
    # The last delivery comes after the last round, and trains nothing.
    losses = {line.rounds: line.loss for line in work if line.silos}
    found = []
    for rounds, together in groupby(measures, attrgetter("rounds")):
        values: dict[str, float] = {}
        for one in together:
            named = numbers(one, form.key, higher=form.higher)
            values |= {f"{one.measure}/{name}": value for name, value in named.items()}
        if isfinite(loss := losses.get(rounds, float("nan"))):
            values[LOSS] = loss
        found.append(Point(rounds, values))
    return tuple(found)


def settings(job: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """The settings of a job's document by dotted names, such as ``training.lr``; lists as JSON.

    Who the silos are and what they declare is left out, and so is what is not set.
    """
    own = {key: value for key, value in job.items() if key not in {"silos", "security"}}
    return dict(_flat(own, ""))


def _flat(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, str | int | float | bool]]:
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, str | int | float):
            yield name, value
        elif value is not None:
            yield name, json.dumps(value)
