"""What the methods' training took, as a section of the summary, and whether it was the same.

A method that takes more steps, or computes more in each, may be better for that alone.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from operator import attrgetter
from statistics import fmean

import numpy as np

from .finished_runs import Recorded
from .markdown import NONE, escaped, method_table

# By column, the decimals that are shown. Bytes are not compared: methods differ in them by design.
COLUMNS = {"steps": 1, "records": 1, "MFLOPs": 1, "MB up": 2, "MB down": 2}
COMPARED = ("steps", "records", "MFLOPs")
# Differences below this share are those of rounding, such as of batches that are filled up.
ROUNDING = 0.01
UNEQUAL = "the methods did not do the same work."
WHY_IT_MATTERS = "One that computes more may be better for that alone."

Taken = Mapping[str, float]  # NaN where a run did not count it


def work_section(groups: Mapping[str, Sequence[Recorded]]) -> str:
    """The section, a row per label; empty where the runs did not count their work."""
    rows = [[escaped(label), *cells] for label, *cells in work_rows(groups)]
    shown = method_table([*COLUMNS], rows)
    return (
        "## What training took\n\nPer silo and round in which it trained: optimiser steps,"
        " records that went through the model for training, and FLOPs of matrix products and"
        " convolutions, forward and backward. What a method does once, such as tuning in the end,"
        " is spread over its rounds. Per run, all silos together: bytes of tensors in the clear; a"
        f" secure sum takes more.\n\n{shown}{_warnings(groups)}"
    )


def work_rows(groups: Mapping[str, Sequence[Recorded]]) -> list[list[str]]:
    """By label, what ``COLUMNS`` name; plain text, not yet escaped."""
    rows = []
    for label, own in _taken(groups).items():
        cells = map(_cell, own.values(), COLUMNS.values())
        rows.append([label, *cells])
    return rows


def differences(groups: Mapping[str, Sequence[Recorded]]) -> dict[str, str]:
    """By column, which methods differ from most, and by how much; empty where none does.

    Plain text, not yet escaped.
    """
    taken, found = _taken(groups), {}
    for name in COMPARED:
        usual = _usual([own[name] for own in taken.values()])
        others = []
        for label, own in taken.items():
            # False for NaN, which is not known to differ.
            if abs(own[name] - usual) > ROUNDING * usual:
                others.append(f"{label} {own[name] / usual - 1:+.0%}")
        if others:
            most = f"{usual:,.{COLUMNS[name]}f}"
            found[name] = f"most methods take {most}; {', '.join(others)}"
    return found


def work_taken(run: Recorded) -> Taken:
    """The columns of one run."""
    # Silos that were drawn, in rounds that train: tuning adds work to these.
    drawn, before = 0, 0
    for line in run.work:
        if line.rounds > before:
            drawn += len(line.silos)
        before = line.rounds
    each = drawn or nan  # a run that did not count its work
    return {
        "steps": sum(map(attrgetter("steps"), run.work)) / each,
        "records": sum(map(attrgetter("records"), run.work)) / each,
        "MFLOPs": sum(map(attrgetter("flops"), run.work)) / each / 1e6,
        "MB up": sum(map(attrgetter("bytes_up"), run.work)) / 1e6,
        "MB down": sum(map(attrgetter("bytes_down"), run.work)) / 1e6,
    }


def _taken(groups: Mapping[str, Sequence[Recorded]]) -> dict[str, Taken]:
    return {label: _over_seeds(runs) for label, runs in groups.items()}


def _over_seeds(runs: Sequence[Recorded]) -> Taken:
    taken = list(map(work_taken, runs))
    return {name: fmean(own[name] for own in taken) for name in COLUMNS}


def _warnings(groups: Mapping[str, Sequence[Recorded]]) -> str:
    """A line per column in which some methods differ from most; empty where none does."""
    found = differences(groups)
    if not found:
        return ""
    lines = "".join(f"- **{name}**: {escaped(text)}\n" for name, text in found.items())
    return f"\n**Warning: {UNEQUAL}** {WHY_IT_MATTERS}\n\n{lines}"


def _usual(values: Sequence[float]) -> float:
    """The value that most methods have, about."""
    ordered = np.array(values)
    alike = np.abs(ordered[:, None] - ordered) <= ROUNDING * ordered  # [methods, methods]
    return float(ordered[alike.sum(1).argmax()])


def _cell(value: float, decimals: int) -> str:
    return NONE if isnan(value) else f"{value:,.{decimals}f}"
