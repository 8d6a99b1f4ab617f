"""Federated statistics: what the features of all silos' training records are like, added up once.

No model is trained. With the results people agree on a contract: how values are centred and scaled,
what stands in for missing ones, whether a silo's column is in another unit. Silo i has n_i training
records; value x of a feature is as in the file, before it is centred and scaled; the job's
``features`` declare its range [a, b], and ``missing``, a number outside by which a missing value
is known.

    (1) u = (x - a) / (b - a), brought into [0, 1] and rounded to steps of 2^-18
    (2) at silo i, of each number:    p_i = Σ 1,  s_i = Σ u,  q_i = Σ u²  over records that are not
                                      missing, and how many of these lie in each of ``bins`` equal
                                      parts of [a, b], below a and above b
    (3) of each category:             how many records have it
    (4) of what is true of a record:  how many records there are, and by class
    (5) at the coordinator:           the sums of all these over the silos
    (6) for the reader:               mean a + (b - a) s / p,  deviation (b - a) √(q/p - (s/p)²),
                                      missing n - p,  quantiles by the histogram

Differences from other software: NVIDIA FLARE's federated statistics have the coordinator see each
silo's, take a second round for histograms, and keep back features by thresholds. Here one round is
enough, since ranges are declared; nothing but sums need be seen; and a silo leaves out cells with
fewer than ``fewest`` of its records, from the histogram and from p, s and q. So neither shows where
single ones lie. How many are left out or missing follows from n, and so of two categories the
rarer one.

Wire list, in the only round: ``counts`` (COUNTS, Sum in whole numbers: n, classes, p, histogram and
categories) and ``values`` (STATISTICS, Sum: s and q in steps, as whole numbers) up; both down in
the final delivery, so that every silo keeps them. In a private job a record's share of (2) and (3)
has a norm of at most 1, so that a ``statistics_clip`` of 1 cuts nothing. There noise hides single
records, nothing is left out, and what is below 0 by noise counts as 0.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, inf, log2, nan, sqrt
from operator import attrgetter
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Course, Effort, Facts, Parts, SiloState
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import Contribution, Kind, Part, Sum, TensorSpec, picked
from ..method import FeatureSpec, Method, Setting
from ..tasks import task

STEPS = 2**18  # of a value within its range: sums of fewer than 2^22 records stay below 2^40
MOST_RECORDS = 2**22 - 1
MOST = 2.0**40
CONSTANTS = ("low", "high", "center", "scale", "stand_in")
PER_NUMBER = 4  # squares that one value adds to its record's norm, at most: 1, its bin, u and u²


class StatisticsOptions(Strict):
    """Options of the statistics."""

    bins: Annotated[int, Field(strict=True, ge=1, le=1000)] = 20
    """Equal parts of a number's range in its histogram."""
    fewest: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 5
    """A silo leaves out cells with fewer of its records; in a private job none, whatever it is."""


class Statistics(Method):
    """Counts, means, deviations and histograms of the features, by sums over the silos."""

    name = "statistics"
    version = 1
    product: Literal["delivered", "trained"] = "delivered"
    trains = False
    options_model = StatisticsOptions
    options: StatisticsOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        if fault := _fault(setting.features, setting.rounds):
            raise LocalError(f"statistics: {fault}")
        *starts, width = accumulate(map(attrgetter("width"), setting.features), initial=0)
        placed = zip(starts, setting.features, strict=True)
        numbers = {start: one for start, one in placed if one.categories is None}
        self.places = torch.tensor([*numbers], dtype=torch.int64)
        others = sorted({*range(width)} - numbers.keys())
        self.categories = torch.tensor(others, dtype=torch.int64)
        # [5, numbers]
        constants = list(map(attrgetter(*CONSTANTS), numbers.values()))
        self.constants = torch.tensor(constants, dtype=torch.float64).reshape(-1, len(CONSTANTS)).T
        squares = PER_NUMBER * len(numbers) + len(setting.features) - len(numbers)
        self.share = _share(squares)
        count = len(numbers)
        specs = _specs(
            records=(1,),
            classes=(task.cells(setting.task, setting.outputs),),
            present=(count,),
            histogram=(count, self.options.bins + 2),
            categories=(len(others),),
        )
        self.counts = Part("counts", Kind.COUNTS, Sum("total"), specs)
        moments = _specs(sums=(count,), squares=(count,))
        self.values = Part("values", Kind.STATISTICS, Sum("total"), moments)
        self.crossed = tuple(filter(attrgetter("tensors"), (self.counts, self.values)))

    def up(self, round_: int) -> tuple[Part, ...]:
        """Eqs. 2 to 4."""
        return self.crossed

    def down(self, round_: int) -> tuple[Part, ...]:
        """The sums of all."""
        return self.crossed

    @property
    def smallest_cell(self) -> int | None:
        """Option ``fewest``; None where cells have noise."""
        return None if self.setting.noised else max(self.options.fewest, 1)

    # The silo half. ``extra`` holds the sums of all silos, as they were delivered.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros: there are no sums yet."""
        specs = (*self.counts.tensors, *self.values.tensors)
        return {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in specs}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Keep the sums."""
        return SiloState(state.parts, {**state.extra, **ChainMap(*map(dict, delivered.values()))})

    def effort(self, round_: int) -> Effort:
        """Nothing trains; each record is counted once."""
        return Effort(measures=True)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """None."""
        return ()

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Eqs. 1 to 3 of records x [B, …], each number times ``share``."""
        rows = x.flatten(1)
        own = rows[:, self.places.to(x.device)]  # [B, numbers]
        low, high, center, scale, stand_in = self.constants.to(x.device)

        def as_read(value: Tensor) -> Tensor:
            # Rounded as a record's numbers are: a value at an edge falls on its right side.
            normal: Tensor = (value - center) / scale
            return normal.to(x.dtype)

        here = own != as_read(stand_in)
        within = (own.double() * scale + center - low) / (high - low)
        u = torch.where(here, (within.clamp(0, 1) * STEPS).round() / STEPS, 0)  # (1)
        bins = torch.arange(self.options.bins, dtype=torch.float64, device=x.device)[:, None]
        edges = as_read(low + (high - low) * (bins / self.options.bins))  # [bins, numbers]
        below = [here & (own < edge) for edge in edges]
        below += [here & (own <= as_read(high)), here]

        def by_cell(value: Tensor, ends: Sequence[Tensor]) -> Tensor:
            up_to = torch.stack([torch.where(end, value, 0).sum(0) for end in ends])
            return up_to.diff(dim=0, prepend=up_to[:1] * 0).T  # [numbers, cells]

        # Cell by cell, so that those of few records can be left out; with noise all at once.
        ends = below[-1:] if self.setting.noised else below
        one, squares = torch.ones_like(u), (u.square() * STEPS).round() / STEPS
        found = {  # (2) and (3)
            "histogram": by_cell(one, below),
            "present": by_cell(one, ends),
            "sums": by_cell(u, ends),
            "squares": by_cell(squares, ends),
            "categories": rows[:, self.categories.to(x.device)].double().sum(0),
        }
        return {name: self.share * value for name, value in found.items()}

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The sums, in whole numbers, without cells of few records."""
        if facts.samples > MOST_RECORDS:
            raise LocalError(
                f"statistics: {facts.samples:,} training records, {MOST_RECORDS:,} are the most;"
                " take the statistics of a part of them"
            )
        sums = {name: value / self.share for name, value in facts.measured.items()}
        sums["classes"] = facts.class_counts.double()
        sums["records"] = sums["classes"].sum(0, keepdim=True)
        noised = self.setting.noised
        few = (self.smallest_cell or 1) - 0.5
        # The values of few records would show in sums, and their number in p.
        kept = (sums["histogram"] > few) | noised
        for name, unit in (("present", 1), ("sums", STEPS), ("squares", STEPS)):
            cells = sums[name] * kept[:, : sums[name].shape[1]] * unit
            sums[name] = cells.sum(1).clamp(min=0).round().long()
        for spec in self.counts.tensors:
            cells = sums[spec.name]
            sums[spec.name] = torch.where(cells > few, cells, 0).round().long()
        return {part.name: Contribution(picked(part.tensors, sums)) for part in self.crossed}

    # The coordinator half. Its state has the sums.

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 5: they are kept, and published."""
        published = super().combine(state, round_, cohort, results).published
        return Combined({**state, **ChainMap(*map(dict, published.values()))}, published)


@dataclass(frozen=True)
class Summary:
    """Eq. 6 of one feature that is a number, over all silos; NaN where none has a value.

    ``left_out`` have no value, or one in a cell of few records; ``outside`` one beyond the range.
    ``quantiles`` are as exact as a bin is wide.
    """

    left_out: int
    outside: int
    mean: float
    deviation: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """What the sums of all silos say: of each number, and how many records have each category."""

    numbers: Mapping[str, Summary]
    categories: Mapping[str, Mapping[str, int]]


def summaries(
    features: Sequence[FeatureSpec], sums: Mapping[str, Tensor], quantiles: Sequence[float]
) -> Found:
    """What the sums say, by feature; they are named as they cross.

    KeyError without ``records``, ValueError for other shapes or where others are missing.
    """
    numbers = [one for one in features if one.categories is None]
    coded = {one.name: one.categories for one in features if one.categories is not None}
    records, none = int(sums["records"]), torch.zeros(0)  # what nothing has does not cross
    given = (sums.get(name, none).tolist() for name in ("present", "sums", "squares", "histogram"))
    rows: Iterable[tuple[Any, ...]] = zip(numbers, *given, strict=True)
    found = {one.name: _summary(one, quantiles, records, *own) for one, *own in rows}
    counted = sums.get("categories", none).tolist()
    if len(counted) != sum(map(len, coded.values())):
        raise ValueError(f"{len(counted)} categories")
    cells = iter(counted)
    counts = {name: dict(zip(own, cells, strict=False)) for name, own in coded.items()}
    return Found(found, counts)


def _summary(
    one: FeatureSpec,
    quantiles: Sequence[float],
    records: int,
    present: int,
    total: int,
    squares: int,
    histogram: Sequence[int],
) -> Summary:
    span, up_to = one.high - one.low, np.cumsum(histogram)
    edges = np.linspace(one.low, one.high, len(histogram) - 1)
    with np.errstate(invalid="ignore"):  # NaN where nobody has a value
        mean, square = np.array([total, squares]) / np.array(present * STEPS)
        found = np.interp(np.array(quantiles) * up_to[-1], up_to[:-1], edges)
        return Summary(
            left_out=records - present,
            outside=histogram[0] + histogram[-1],
            mean=float(one.low + span * mean),
            deviation=float(span * np.sqrt(np.maximum(square - mean * mean, 0))),
            quantiles=tuple(np.where(up_to[-1] > 0, found, nan).tolist()),
        )


def _share(squares: int) -> float:
    """At most 1 / √squares, to a 128th: what brings a record's norm to 1 at most.

    It has eight bits, so that sums of records in steps stay exact.
    """
    power = 2.0 ** -ceil(log2(squares) / 2)
    return power * floor(128 / (sqrt(squares) * power)) / 128


def _fault(features: tuple[FeatureSpec, ...], rounds: int) -> str:
    """Why there are no statistics of these features; empty if there are."""
    if not features:
        return "the job declares no features; add [[features]], one entry per feature"
    for one in (one for one in features if one.categories is None):
        if not 0 < one.high - one.low < inf:
            return (
                f"feature {one.name!r} has no range; give it least and most, between which the bins"
                " of its histogram lie"
            )
        if one.low <= one.stand_in <= one.high:
            return (
                f"feature {one.name!r}: missing = {one.stand_in:g} is in its range, so values that"
                " are there would count as missing; give a number outside"
            )
    return "" if rounds == 1 else f"records are counted once, not {rounds} times; write rounds = 1"


def _specs(**shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """Specs of whole numbers from 0 on, without those that have none."""
    specs = (TensorSpec(name, "int64", shape, 0.0, MOST) for name, shape in shapes.items())
    return tuple(filter(attrgetter("elements"), specs))
