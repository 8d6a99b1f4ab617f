"""A run's measures: the task's score of each silo's models on its records, after which round.

On disk a history is a line per measure, and lines are only ever added.

::

    {"rounds":3,"measure":"all/trained","silos":{"clinic-a":[0.77,71,0.68,0.6],"clinic-b":[0.59,68,0.5,0.5]}}

that is, by silo: the score, records, the score of the best answer that is the same for all of them,
and the score where each class counts the same, or null without classes. A snapshot says how many
bytes belong to it (``Prefix``); a run that resumes from it measures again what came after them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...algorithms.tasks.counting import Tally
from ...algorithms.training.silo_round import Evaluation, RoundReport, Seen
from ...errors import LocalError
from .disk import BEGIN_ANEW, GrowingFile, Prefix, kept_bytes, read_kept

Measure = Literal[
    # silos of a round's cohort: the model as delivered, before local training, on test records
    "selected/before",
    "selected/after",  # the same silos after local training
    "all/aggregated",  # every silo: what the rounds so far would deliver to it now, on test records
    "all/trained",  # every silo: the model that it trained last
    "validation/aggregated",  # as all/aggregated, on validation records
    "validation/trained",  # as all/trained, on validation records
]


@dataclass(frozen=True)
class Measured:
    """One measure after so many rounds that train, by silo in job order.

    A silo is in it only with at least one record.
    """

    rounds: int
    measure: Measure
    scores: Mapping[str, float]  # such as the share of records that were classified correctly
    records: Mapping[str, int]
    baselines: Mapping[str, float]  # the score of the best answer that is the same for all records
    recalls: Mapping[str, float | None]  # the silo's balanced score; None in tasks without classes

    def of(self, silos: Collection[str]) -> "Measured":
        """The same measure of some of its silos.

        KeyError for a silo that it does not have.
        """
        return replace(
            self,
            scores=_some(self.scores, silos),
            records=_some(self.records, silos),
            baselines=_some(self.baselines, silos),
            recalls=_some(self.recalls, silos),
        )

    @property
    def by_silo(self) -> NDArray[np.float64]:
        """The score of each silo [n], in the order of ``records``."""
        return np.array([self.scores[silo] for silo in self.records])

    @property
    def macro(self) -> float:
        """The mean of the silos' scores: each silo counts the same."""
        return float(self.by_silo.mean())

    @property
    def micro(self) -> float:
        """The mean of the silos' scores by their records: each record counts the same."""
        whole = fsum(self.scores[silo] * count for silo, count in self.records.items())
        return whole / sum(self.records.values())

    @property
    def balanced(self) -> float | None:
        """The mean of the silos' balanced scores: each class of each silo counts."""
        known = [recall for recall in self.recalls.values() if recall is not None]
        return float(np.mean(known)) if known else None

    @property
    def constant(self) -> float:
        """The mean over silos of the score of the best answer that is the same for all records.

        It is the macro score where each silo knows its best one.
        """
        return float(np.mean(list(self.baselines.values())))

    @property
    def spread(self) -> float:
        """The standard deviation of the silos' scores (of a population, not of a sample)."""
        return float(self.by_silo.std())


Value = TypeVar("Value")


def _some(values: Mapping[str, Value], silos: Iterable[str]) -> dict[str, Value]:
    return {silo: values[silo] for silo in silos}


def of_round(rounds: int, reports: Mapping[str, RoundReport]) -> tuple[Measured, ...]:
    """The measures of the silos that trained in the last of these rounds.

    Both measures are on test records.
    """
    seen = {silo: Seen(report.delivered, report.trained) for silo, report in reports.items()}
    return _pair(rounds, ("selected/before", "selected/after"), seen)


def of_look(rounds: int, looks: Mapping[str, Evaluation]) -> tuple[Measured, ...]:
    """The measures of all silos; those on validation records where every silo has some.

    ``looks`` are those of every silo, in job order.
    """
    test: dict[str, Seen] = {}
    validation: dict[str, Seen] = {}
    for silo, look in looks.items():
        test[silo] = look.test
        if look.validation is not None:
            validation[silo] = look.validation
    measures = _pair(rounds, ("all/aggregated", "all/trained"), test)
    # a mean over some of the silos would not compare with one over all
    if len(validation) < len(looks):
        return measures
    return measures + _pair(rounds, ("validation/aggregated", "validation/trained"), validation)


def _pair(
    rounds: int, measures: tuple[Measure, Measure], seen: Mapping[str, Seen]
) -> tuple[Measured, ...]:
    """The two measures, of models as delivered and as trained."""
    first, second = measures
    delivered = {silo: one.delivered for silo, one in seen.items()}
    trained = {silo: one.trained for silo, one in seen.items()}
    return _of_counts(rounds, first, delivered), _of_counts(rounds, second, trained)


def _of_counts(rounds: int, measure: Measure, counts: Mapping[str, Tally]) -> Measured:
    for silo, own in counts.items():
        # A file of JSON holds no NaN, and could not be read again.
        if not isfinite(own.score):
            raise LocalError(
                f"{measure} after round {rounds}: silo {silo!r} has a score that is NaN"
            )
    return Measured(
        rounds,
        measure,
        {silo: own.score for silo, own in counts.items()},
        {silo: own.records for silo, own in counts.items()},
        {silo: own.baseline for silo, own in counts.items()},
        {silo: own.balanced for silo, own in counts.items()},
    )


Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    rounds: Positive
    measure: Measure
    silos: Annotated[
        dict[str, tuple[float, Positive, float, Share | None]], msgspec.Meta(min_length=1)
    ]


_LINE = msgspec.json.Decoder(_Line)


class HistoryFile(GrowingFile):
    """The one writer of a history.

    It resumes after ``kept``, and cuts off what the file has beyond that.
    """

    def __init__(self, path: Path, kept: Prefix) -> None:
        # Before anything is cut off.
        self.measures = read(path, kept)
        super().__init__(path, kept)

    def append(self, measures: Iterable[Measured]) -> None:
        """Add lines; they reach the disk with the next ``sync``.

        UnwritableError if the disk fails.
        """
        self.add(b"".join(to_line(measured) for measured in measures))


def read(path: Path, kept: Prefix | None = None) -> tuple[Measured, ...]:
    """The measures of a history that ``kept`` describes; without it, those of all whole lines.

    LocalError if it does not begin so, or a line is not a measure.
    """
    data = read_kept(path) if kept is None else kept_bytes(path, kept)
    return parse(data[: data.rfind(b"\n") + 1], str(path))


def to_line(measured: Measured) -> bytes:
    """A measure as its line.

    Silos in the order of ``records``; the same measure gives the same bytes.
    """
    by_silo = (measured.scores, measured.records, measured.baselines, measured.recalls)
    silos: Any = {silo: tuple(values[silo] for values in by_silo) for silo in measured.records}
    return msgspec.json.encode(_Line(measured.rounds, measured.measure, silos)) + b"\n"


def parse(data: bytes, origin: str) -> tuple[Measured, ...]:
    """Whole lines, each checked; ``origin`` names them in errors.

    LocalError names the first invalid line.
    """
    return tuple(
        _measured(line, f"{origin}, line {number}")
        for number, line in enumerate(data.splitlines(), 1)
    )


def _measured(line: bytes, where: str) -> Measured:
    try:
        found = _LINE.decode(line)
    except ValueError as error:  # of msgspec, or no UTF-8
        raise LocalError(f"{where}: no measure of a run: {error}; {BEGIN_ANEW}") from error

    columns = zip(*found.silos.values(), strict=True)
    by_silo = (dict(zip(found.silos, column, strict=True)) for column in columns)
    return Measured(found.rounds, found.measure, *by_silo)
