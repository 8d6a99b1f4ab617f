"""Splits along what the records carry besides their label: a source, a person, a hospital.

- ``by_source``: covariate shift; the same classes look different in each source (MNIST and USPS,
  photos and sketches), and a silo holds records of one source, as in FedBN (Li et al., 2021,
  arXiv:2102.07623, section 5).
- ``by_column``: one silo per value, such as a subject of UCI HAR or a hospital of UCI heart
  disease.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError
from ..numerics.streams import permutation, stream
from .draw import check_enough

Indices = NDArray[np.int64]


def by_source(
    sources: Sequence[str], silos: Mapping[str, int], seed: int, minimum: int = 10
) -> dict[str, Indices]:
    """``silos`` says how many silos each source has; they get even random shares of its records.

    They are named ``mnist-0``, ``mnist-1`` …. Ascending record indices per silo, no record twice;
    records of a source that ``silos`` does not name are left over.
    """
    if not silos:
        raise LocalError(
            "partition: no source; say how many silos each has, such as mnist = 5, usps = 5"
        )
    names = np.array(sources, dtype=np.str_)
    parts: dict[str, Indices] = {}
    for source, count in silos.items():
        records = np.flatnonzero(names == source)
        if not len(records):
            raise LocalError(
                f"partition: no record is of source {source!r}; known: {sorted(set(sources))}"
            )
        if count < 1:
            raise LocalError(
                f"partition: {count} silos for source {source!r}; give 1 or more, or leave it out"
            )
        check_enough(len(records), count, minimum)
        # A stream per source: a further source leaves the others as they are.
        rng = stream(seed, source, 0, "partition/source")
        mixed = records[permutation(rng, len(records))]
        for number, part in enumerate(np.array_split(mixed, count)):
            parts[f"{source}-{number}"] = np.sort(part)
    return parts


def by_column(values: Sequence[str | int], minimum: int = 10) -> dict[str, Indices]:
    """Ascending record indices per value, in ascending order of the values.

    Each record exactly once.
    """
    # NumPy would make texts of numbers among texts.
    column = np.array(values)
    one_type = len(set(map(type, values))) == 1
    if not one_type or column.dtype.kind not in "Uiu":
        raise LocalError(
            "partition: the column is empty, or not of texts or of whole numbers alone; give one a"
            " record"
        )
    # ``unique`` sorts, so the order of silos does not depend on the order of records.
    parts = {str(value): np.flatnonzero(column == value) for value in np.unique(column)}
    small = {value: len(part) for value, part in parts.items() if len(part) < minimum}
    if small:
        raise LocalError(
            f"partition: {len(small)} of {len(parts)} values have fewer than {minimum} records:"
            f" {small}; lower the minimum or leave these records out"
        )
    return parts
