"""Checks of a downloaded model, before training, for signs that it was made to leak records.

A model made to leak (Fowl et al., "Robbing the Fed", ICLR 2022; Boenisch et al., "When the
Curious Abandon Honesty", EuroS&P 2023) makes each step of training a copy of single records, which
the sum of all silos' steps shows as well. Two things tell it from what training leads to:

- It lies many of a silo's own steps away. So a silo notes how far each round of its training moved
  each part of its model, and bounds the way of a delivery by the longest of these steps. The
  longest, since a silo's own steps shorten while those of others may not.
- Its rows are alike: a layer that sorts records into bins has the same weights in many rows, which
  differ in their bias. Rows of an honest layer are nowhere near each other's multiples.

Neither proves a model honest. Whoever moves it a little in each round comes as far in more rounds,
and traps of other shapes are known; what bounds them all is differential privacy.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import fsum, inf, isfinite, sqrt

from torch import Tensor

from ...errors import LocalError

# Two rows count as multiples from this cosine on, of one and the other or its opposite.
ALIKE = 0.99
LEAST_WIDTH = 16  # rows of fewer numbers are not checked: filters of 3 x 3 are similar by nature
CHUNK = 1024  # rows compared with all others at a time: the product must not fill the memory

Parts = Mapping[str, Mapping[str, Tensor]]


class TrapError(LocalError):
    """A delivery may be made to leak; nothing was trained on it."""


@dataclass(frozen=True)
class LongestSteps:
    """The longest step of each part in a silo's training up to ``round``, Euclidean.

    ``round`` is the silo's last round that trained. A part that never moved has 0, or is missing.
    """

    round: int
    longest: Mapping[str, float] = field(default_factory=dict)

    def to_text(self) -> str:
        """JSON, for the metadata of a state file.

        Keys are sorted, so that equal steps have equal texts.
        """
        return json.dumps({"round": self.round, "longest": dict(self.longest)}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> "LongestSteps":
        """Read what ``to_text`` wrote; ValueError or KeyError where it is none."""
        found = json.loads(text)
        table = found.get("longest") if isinstance(found, dict) else None
        if not isinstance(table, dict):
            raise ValueError("its steps are not a table")  # noqa: TRY004 - callers expect one error of what is no state
        longest = {str(part): float(step) for part, step in table.items()}
        return cls(int(found["round"]), longest)


@dataclass(frozen=True)
class Caution:
    """A policy's bounds on how far a delivery may change a model; ``inf``: no bound."""

    max_step: float = inf  # in the silo's longest steps, for each part
    max_parallel: float = inf  # rows of a layer that are multiples of others

    @classmethod
    def of(cls, max_step: float | None, max_parallel: float | None) -> "Caution":
        """The bounds of a policy, where None is no bound."""
        return cls(*(inf if bound is None else bound for bound in (max_step, max_parallel)))

    def check(
        self,
        steps: LongestSteps | None,
        held: Parts,
        fresh: Parts,
        parts: frozenset[str],
        round_: int,
        computed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    ) -> None:
        """TrapError if ``fresh``, which a delivery makes of ``held``, may be made to leak.

        The delivery replaces ``parts`` in round ``round_``. A part that the silo never trained has
        no steps to measure by, and passes. ``computed`` makes of a part's values those that its
        layers compute with (lora.py).
        """
        # The bound grows with the rounds since the silo's last: the others trained on meanwhile,
        # and a model that is led astray slowly moves as far in as many rounds.
        rounds = 1
        longest: Mapping[str, float] = {}
        if steps is not None:
            rounds = max(round_ - steps.round, 1)
            longest = steps.longest
        # Only parts that came down can have been replaced.
        for part in sorted(parts & held.keys() & fresh.keys()):
            self.check_rows(part, computed(held[part]), computed(fresh[part]))
            moved = _distance(held[part], fresh[part])
            self._check_step(part, moved, longest.get(part, 0.0), rounds)

    def _check_step(self, part: str, moved: float, step: float, rounds: int) -> None:
        # Without a step of its own the silo has no unit to measure by.
        if not step > 0:
            return
        # A distance that is NaN passes no comparison, and so is too far as well.
        if moved <= self.max_step * step * rounds:
            return
        over = "" if rounds == 1 else f" in each of {rounds} rounds"
        raise TrapError(
            f"the delivery moves part {part!r} by {moved:.3g},"
            f" {moved / (step * rounds):.1f} times the longest step of this silo's own"
            f" training, {step:.3g}{over}; limits.max_step = {self.max_step:g}. A model"
            " that is made to leak records lies so far away. So may an honest one, where"
            " other silos have many times more records. Look into it, and raise max_step"
            " if the model is honest"
        )

    def check_rows(
        self,
        part: str,
        held: Mapping[str, Tensor],
        fresh: Mapping[str, Tensor],
        what: str = "the delivery",
    ) -> None:
        """TrapError if more rows of ``fresh`` than the bound are multiples of others.

        ``what`` brought them; rows that were so in ``held`` count for nothing.
        """
        # Comparing all rows is costly, and without a bound it is of no use.
        if self.max_parallel == inf:
            return
        for name, weights in fresh.items():
            found = parallel_rows(weights)
            if found <= self.max_parallel:
                continue
            # Rows that the silo's own model had already are not this delivery's doing.
            if name not in held or found > parallel_rows(held[name]):
                raise TrapError(
                    f"{what} has {found} rows of {part}.{name} that are multiples of"
                    " others, as in a model that is made to leak records; limits.max_parallel ="
                    f" {self.max_parallel:g}. Look into it, and raise max_parallel if the model is"
                    " honest"
                )


def replaced(delivered: Parts) -> frozenset[str]:
    """Parts that a delivery replaces: their tensors come down under their own names.

    A name without a dot, such as that of a count, names no part.
    """
    parts: set[str] = set()
    for name in chain.from_iterable(delivered.values()):
        part, dot, _ = name.partition(".")
        if dot:
            parts.add(part)
    return frozenset(parts)


def lengthened(
    steps: LongestSteps | None, round_: int, began: Parts, trained: Parts
) -> LongestSteps:
    """The longest steps, with the step of a round that was trained from ``began``.

    Steps are Euclidean distances, in float64. A part that diverged adds nothing.
    """
    longest = {} if steps is None else dict(steps.longest)
    for part in sorted(began.keys() & trained.keys()):
        step = _distance(began[part], trained[part])
        # A training that diverged must not allow every later delivery.
        if not isfinite(step):
            step = 0.0
        longest[part] = max(longest.get(part, 0.0), step)
    return LongestSteps(round_, longest)


def parallel_rows(weights: Tensor) -> int:
    """Rows of a layer's weights [out, ...] that are multiples of another row.

    0 for what has no such rows.
    """
    # Vectors, such as biases, have no rows.
    if weights.ndim < 2 or not weights.is_floating_point():
        return 0
    # In float64 even the smallest float32 row has a length above 0.
    rows = weights.detach().double().flatten(1)
    if rows.shape[1] < LEAST_WIDTH:
        return 0
    lengths = rows.norm(dim=1)
    # A row of zeros is a multiple of every row, and is no sign of a trap.
    nonzero = lengths > 0
    directions = rows[nonzero] / lengths[nonzero, None]
    return sum(_twins(directions.float()))


def _twins(rows: Tensor) -> Iterator[int]:
    # In pieces, since the whole product would have rows² numbers.
    for start in range(0, len(rows), CHUNK):
        piece = rows[start : start + CHUNK]
        near = (piece @ rows.T).abs() > ALIKE  # [piece, rows]; each row is near itself
        yield int((near.sum(dim=1) > 1).sum())


def _distance(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two models, without counters and other integers."""
    squares = []
    for name, value in before.items():
        other = after.get(name)
        if other is None or other.shape != value.shape or not value.is_floating_point():
            # Integers, such as batch norm's count of batches, are not weights.
            continue
        difference = other.double() - value.double()
        squares.append(float(difference.square().sum()))
    # Rounded once: the order of tensors, which a file changes, must not show in the last bit.
    return sqrt(fsum(squares))
