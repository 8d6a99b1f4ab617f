"""results.csv: every measure of every finished run as one tidy table.

::

    label,seed,round,measure,silos,value,loss,bytes_up,bytes_down,simulated_seconds,seconds

A row is one number. ``measure`` names whose models were measured on which records, the score, and
how silos are averaged: ``all/trained/accuracy.macro``. ``round`` counts the rounds that train.
Newcomers have rows of their own, ``newcomers/…``, as have all other silos, ``others/…``. ``loss``
is the mean training loss of that round's silos. Bytes and seconds are sums from the beginning of
the run to the measure, so each is an axis to draw a value against.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

from ..run.history import Measured
from .attendance_tables import apart
from .finished_runs import Recorded
from .silo_spread import spectrum

COLUMNS = (
    "label",
    "seed",
    "round",
    "measure",
    "silos",
    "value",
    "loss",
    "bytes_up",
    "bytes_down",
    "simulated_seconds",
    "seconds",
)


@dataclass(frozen=True)
class Spent:
    """What a run had taken by a measure; ``seconds`` is NaN where a round was not timed.

    ``simulated`` are seconds of the clock of [attendance]; NaN without one.
    """

    loss: float
    bytes_up: int
    bytes_down: int
    seconds: float
    simulated: float = nan

    @property
    def megabytes(self) -> float:
        """Up and down together, in 10^6 bytes."""
        return (self.bytes_up + self.bytes_down) / 1e6


NOTHING = Spent(nan, 0, 0, 0.0)


def results_csv(groups: Mapping[str, Sequence[Recorded]]) -> str:
    """The table, by label, seed and time; numbers have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for label, runs in groups.items():
        for run in runs:
            for row in _rows(run):
                writer.writerow((label, run.seed, *row))
    return text.getvalue()


def spent(run: Recorded) -> dict[int, Spent]:
    """By rounds that train, what the run had taken after them; the end includes what follows.

    A census counts with the first round. After the last round come tuning and the last delivery.
    """
    found: dict[int, Spent] = {}
    taken = NOTHING
    if run.identity.who.step_seconds is not None:
        taken = replace(NOTHING, simulated=0.0)
    for line in run.work:
        loss = line.loss
        # The last delivery trains nothing, and leaves the loss of the last round.
        if not line.silos:
            loss = taken.loss
        taken = Spent(
            loss,
            taken.bytes_up + line.bytes_up,
            taken.bytes_down + line.bytes_down,
            taken.seconds + run.timed.get(line.round, nan),
            taken.simulated + (line.simulated or 0.0),
        )
        found[line.rounds] = taken
    return found


def _rows(run: Recorded) -> Iterator[tuple[object, ...]]:
    by_round = spent(run)
    for one in run.history:
        taken = by_round.get(one.rounds, NOTHING)
        after = (
            known(taken.loss),
            taken.bytes_up,
            taken.bytes_down,
            known(round(taken.simulated, 3)),
            known(round(taken.seconds, 3)),
        )
        for measure, own in ((one.measure, one), *apart(run, one)):
            for name, value in numbers(own, run.form.key, higher=run.form.higher).items():
                yield (one.rounds, f"{measure}/{name}", len(own.records), value, *after)


def known(value: float) -> float | None:
    """None, which is an empty cell, for NaN."""
    return None if isnan(value) else value


def numbers(one: Measured, key: str, *, higher: bool) -> dict[str, float]:
    """A measure's numbers by name; the score is ``key``, such as ``accuracy``.

    ``macro`` is the mean over silos, ``micro`` over all records. Without classes nothing is
    balanced.
    """
    own = spectrum(one, higher=higher)
    found = {f"{key}.macro": one.macro, f"{key}.micro": one.micro}
    if one.balanced is not None:
        found["balanced.macro"] = one.balanced
    return found | {
        f"{key}.constant": one.constant,
        f"{key}.worst": own.least,
        f"{key}.worst_tenth": own.worst_tenth,
        f"{key}.median": own.median,
        f"{key}.best_tenth": own.best_tenth,
        f"{key}.best": own.most,
        f"{key}.variance": own.spread**2,
    }
