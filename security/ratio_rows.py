"""Which rows of a ratio may be summed: of a class that few silos have, the sum would show the few (SECURITY.md rule 7).

A ratio is row by row, Σ w x / Σ w, and a silo that lacks a row's class weighs it with 0. So a count round goes before,
over the same cohort: the sum of each silo's presence, 0 or 1 (noisy, or released once). From its result every silo
works out the same rows, and sends zeros for all others; once a sum is open it is too late to leave a row out.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import LocalError
from .fixedpoint import Group, Reals, cut
from .masked_sum import Given
from .round_spec import RoundSpec


def shown_rows(spec: RoundSpec, members: Sequence[str], holders: Reals, min_holders: int) -> npt.NDArray[np.bool_]:
    """Rows [rows] whose holders are enough, whoever drops out: >= min_holders + (|U1| - t) + c.

    ``members`` are U1 and ``holders`` the opened count of each row; ``min_holders`` is by default the job's min_cohort.
    """
    if not np.isfinite(holders).all():
        raise LocalError("counts of holders are not finite; take the opened sum of the count round")
    lost = len(members) - spec.threshold
    return np.asarray(holders >= min_holders + lost + spec.colluders, np.bool_)


def hide_rows(group: Group, given: Given, shown: npt.NDArray[np.bool_]) -> Given:
    """The same with zeros, in values and weights, for the rows that are not shown."""
    if given.weights is None or shown.shape != (group.rows,):
        raise LocalError(f"group {group.name!r} has {group.rows} rows with private weights; {shown.shape} fit no ratio")
    values = cut(given.values, 0, group.elements).reshape(group.rows, -1).copy()
    values[~shown] = 0
    return replace(given, values=values.reshape(-1), weights=np.where(shown, given.weights, 0.0))
