"""What the rounds of a run took: steps, records, FLOPs and bytes, and in a file apart the time.

::

    work.jsonl     a line per round of the job, a census and tuning included, and one of the last
                   delivery; the same run writes the same bytes:

        {"round":3,"rounds":4,"bytes_up":91832,"bytes_down":91832,"silos":{"clinic-a":[0.53,24,1420,81920]}}

    seconds.csv    round, seconds: of training and aggregation

A line has ``absent`` where drawn silos were away, ``late`` where uploads came too late (names of
silos both), and ``simulated``, the seconds of the round, where a clock is simulated.

``rounds`` counts the rounds that train by then. By silo: the mean training loss of the last epoch,
optimiser steps, records that went through the model, and FLOPs of all of them, null where they
could not be counted. Bytes are those of tensors in the clear, of all silos together.
"""

from collections.abc import Mapping
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec

from ...algorithms.engines.simulation import Round
from ...algorithms.training.work import LocalWork
from ...errors import LocalError
from .disk import BEGIN_ANEW, GrowingFile, Prefix, kept_bytes, writing

WORK, SECONDS = "work.jsonl", "seconds.csv"
HEADER = "round,seconds\n"
NO_WORK = LocalWork(0, 0, ())

Number = Annotated[int, msgspec.Meta(ge=0)]
# loss, steps, records, FLOPs
SiloLine = tuple[float | None, Number, Number, Number | None]


class RoundWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one round took; ``silos`` are those that took part in it."""

    round: Number
    rounds: Number
    bytes_up: Number
    bytes_down: Number
    silos: dict[str, SiloLine]
    absent: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    simulated: float | None = None

    @property
    def loss(self) -> float:
        """The mean of the silos' training losses; NaN where nothing trained."""
        return fmean(self._column(0) or [nan])

    @property
    def steps(self) -> float:
        """Optimiser steps of all silos."""
        return sum(self._column(1))

    @property
    def records(self) -> float:
        """Records of all silos that went through a model, each as often as it did."""
        return sum(self._column(2))

    @property
    def flops(self) -> float:
        """FLOPs of all silos' training; NaN where those of one are not known."""
        return sum(self._column(3))

    def _column(self, place: int) -> list[float]:
        columns = [own[place] for own in self.silos.values()]
        return [nan if value is None else value for value in columns]


_LINE = msgspec.json.Decoder(RoundWork)


def work_line(
    round_: int,
    rounds: int,
    done: Round,
    flops: Mapping[str, int | None],
) -> RoundWork:
    """The line of a round; silos that trained nothing, as in a census, are left out."""
    silos: dict[str, SiloLine] = {}
    for silo, report in done.reports.items():
        work = report.work or NO_WORK
        if work.course:
            silos[silo] = (
                report.loss,
                work.steps,
                work.records,
                flops[silo],
            )
    return RoundWork(
        round_,
        rounds,
        done.bytes_up,
        done.bytes_down,
        silos,
        done.absent,
        done.late,
        done.seconds,
    )


class WorkFile(GrowingFile):
    """The one writer of work.jsonl; ``lines`` are those that are kept."""

    def __init__(self, path: Path, kept: Prefix) -> None:
        self.lines = parse_work(kept_bytes(path, kept), path)
        super().__init__(path, kept)

    def append(self, line: RoundWork) -> None:
        """Add a line; it reaches the disk with the next ``sync``."""
        self.add(msgspec.json.encode(line) + b"\n")


def read_work(path: Path, kept: Prefix) -> tuple[RoundWork, ...]:
    """The lines that ``kept`` describes; LocalError if the file does not begin so."""
    return parse_work(kept_bytes(path, kept), path)


def parse_work(data: bytes, path: Path) -> tuple[RoundWork, ...]:
    """Whole lines; LocalError names the first invalid one."""
    lines = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            lines.append(_LINE.decode(line))
        except ValueError as error:  # of msgspec, or no UTF-8
            raise LocalError(
                f"{path}, line {number}: not the work of a round: {error}; {BEGIN_ANEW}"
            ) from error
    return tuple(lines)


class Stopwatch:
    """The one writer of seconds.csv; rounds from ``first`` on are timed again."""

    def __init__(self, path: Path, first: int) -> None:
        self._path = path
        rows = HEADER
        for round_, seconds in read_seconds(path).items():
            if round_ < first:
                rows += _seconds_row(round_, seconds)
        with writing(path):
            path.write_text(rows, encoding="utf-8")

    def add(self, round_: int, seconds: float) -> None:
        """Add the seconds of a round."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(_seconds_row(round_, seconds))


def read_seconds(path: Path) -> dict[int, float]:
    """Seconds by round; empty without the file.

    A last line that a kill cut off is left out: its round is timed again. LocalError for a line
    that is no such row.
    """
    text = ""
    if path.exists():
        text = path.read_text(encoding="utf-8")
    # Whole lines only, without the header.
    _, *lines = text[: text.rfind("\n") + 1].splitlines() or [HEADER]
    found: dict[int, float] = {}
    for line in lines:
        try:
            round_, seconds = line.split(",")
            found[int(round_)] = float(seconds)
        except ValueError as error:
            raise LocalError(
                f"{path}: {line!r} is not a round and its seconds; remove the file, no other result"
                " depends on it"
            ) from error
    return found


def _seconds_row(round_: int, seconds: float) -> str:
    return f"{round_},{seconds:.3f}\n"
