"""``staddle data statistics``: what a job of this method found, and a contract made of it."""

from collections.abc import Mapping
from math import ceil, log10
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.data.features import Feature
from ...algorithms.methods.statistics import Summary, summaries
from ...errors import LocalError
from ...files import tensor_file
from ..terminal import printer
from ..terminal.toml import to_toml
from .data import contract_of

QUANTILES = (0.05, 0.5, 0.95)
COLUMNS = ("feature", "left out", "outside", "mean", "deviation", "5 %", "median", "95 %")
RIGHT = tuple(range(1, len(COLUMNS)))  # columns of numbers
PREFIX = "extra/"  # of a silo's tensors that are none of its model
SHORT = "{:.4g}".format


def statistics(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A silo's model.safetensors of the job, the coordinator's result.safetensors, or a"
            " simulation's coordinator.safetensors.",
        ),
    ],
    job: Annotated[
        Path, typer.Option(metavar="JOB", help="The job file or the signed job that found it.")
    ],
) -> None:
    """Show the statistics of all silos' records, and draft the features of the next job.

    Quantiles are as exact as a bin of the histogram is wide. In the draft, values are centred by
    their mean and scaled by their deviation, and the mean stands in for a missing one.
    """
    contract = contract_of(job)
    tensors, _ = tensor_file.read(file)
    sums = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    try:
        found = summaries(contract.features, sums, QUANTILES)
        records, classes = int(sums["records"]), sums["classes"].tolist()
        by_class = dict(zip(contract.class_names or ("all",), classes, strict=True))
    except (KeyError, ValueError, TypeError) as error:
        raise LocalError(
            f"{file}: has no statistics of the features of {job}; give the file and the job of one"
            " run of the method statistics"
        ) from error
    rows = list(map(_row, *zip(*found.numbers.items(), strict=True)))
    printer.show(
        printer.PrintedTable(
            COLUMNS, rows, RIGHT, title=f"{records:,} training records: {_counted(by_class)}"
        )
    )
    for name, counts in found.categories.items():
        printer.show(f"{name}: {_counted(counts)}")
    printer.show(
        "Left out: values that are missing, or in cells of few records of a silo (the job's option"
        " fewest).",
        "",
        "# The features of the next job, as these records have them.",
    )
    for feature in contract.features:
        drafted = to_toml(_drafted(feature, found.numbers.get(feature.name)))
        printer.show("[[features]]", *drafted.strip().split("\n"), "")


def _row(name: str, one: Summary) -> tuple[str, ...]:
    values = map(SHORT, (one.mean, one.deviation, *one.quantiles))
    return name, f"{one.left_out:,}", f"{one.outside:,}", *values


def _counted(counts: Mapping[str, int]) -> str:
    total = max(sum(counts.values()), 1)
    return ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in counts.items())


def _drafted(feature: Feature, found: Summary | None) -> dict[str, Any]:
    """The keys of a feature in a job file, with center, scale and missing as they were found."""
    said = feature.model_dump(exclude_defaults=True)
    if found is None:
        return said
    stands = said.pop("missing", None)
    # Nothing is known of a feature that nobody has, or that is the same everywhere.
    if not found.deviation > 0:
        return said
    # A mean may be many deviations from 0: it is given to a thousandth of one.
    mean = round(found.mean, 3 - ceil(log10(found.deviation)))
    drafted = {**said, "center": mean, "scale": float(SHORT(found.deviation))}
    return {**drafted, "missing": mean} if stands else drafted
