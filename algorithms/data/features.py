"""What a job says of the features of a record, and what a silo's own declaration says otherwise.

A silo whose columns are in another order, in other units or with other categories fits the model's
shape all the same, and is averaged into nonsense. So the signed job may declare each feature, and a
silo compares its own declaration and its records with that before anything is trained.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import inf, isfinite, nan
from typing import Annotated

import pydantic
from pydantic import BeforeValidator, Field
from torch import Tensor

from ...files.documents import Real, Strict
from ..models.class_names import composed

MOST_SHOWN = 5  # faults, in one error
REACH = 50.0  # scales from the center
LONGEST_FAULT = 400  # characters
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

Text = Annotated[str, Field(min_length=1, max_length=200)]


def _as_text(value: object) -> object:
    """A number as the text of its shortest exact decimal, as a signed document has it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if number else value  # type: ignore[arg-type]


def _as_number(text: str) -> float | None:
    """A finite number that is written as one; None for any other text."""
    return float(text) if NUMBER.fullmatch(text) and isfinite(float(text)) else None


class Feature(Strict):
    """One feature of a record: a number, or with ``categories`` one number per category (one-hot).

    A record has (value - center) / scale. ``least`` and ``most`` bound the value itself.
    """

    name: Text
    unit: Annotated[str, Field(max_length=200)] = ""
    least: Real | None = None
    most: Real | None = None
    center: Real = 0.0
    scale: Annotated[Real, Field(gt=0)] = 1.0
    categories: Annotated[tuple[Text, ...], Field(min_length=1, max_length=10_000)] | None = None
    missing: Annotated[str, BeforeValidator(_as_text)] | None = None
    """What a missing value counts as, before it is centred and scaled; default: none may miss.

    It may lie outside the range.
    """

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Feature":
        if self.categories is None:
            self._check_number()
            return self
        numeric = ("unit", "least", "most", "center", "scale")
        idle = [key for key in numeric if getattr(self, key) != Feature.model_fields[key].default]
        if idle:
            raise ValueError(f"{idle[0]} does nothing for a feature with categories; take it out")
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("categories names one twice; name each once")
        if self.missing not in (None, *self.categories):
            raise ValueError(
                f"missing = {self.missing!r} is none of its categories; write one, as a text"
            )
        return self

    def _check_number(self) -> None:
        if self.low > self.high:
            raise ValueError(f"least = {self.least} is above most = {self.most}; lower it")
        if self.missing is None:
            return
        value = _as_number(self.missing)
        if value is None or self.missing != repr(value):
            raise ValueError(
                f"missing = {self.missing!r} is no number; declare categories, or give a number"
            )

    @property
    def low(self) -> float:
        """``least``, or minus infinity."""
        return -inf if self.least is None else self.least

    @property
    def high(self) -> float:
        """``most``, or infinity."""
        return inf if self.most is None else self.most

    @property
    def stand_in(self) -> float:
        """The number that a missing value counts as; NaN, which equals none, if none may miss."""
        return nan if self.missing is None else float(self.missing)

    @property
    def width(self) -> int:
        """Numbers of a record that it takes."""
        return 1 if self.categories is None else len(self.categories)

    def constants(self, wary: bool = True) -> dict[str, float | str]:
        """The center, scale and missing that a silo takes from the job where it states none.

        A silo is ``wary`` where a model trains. It then takes them only if the range ends within
        ``REACH`` scales of the center, and the stand-in lies in the range. An operator could choose
        others so that single records stand out, and the model would show their labels.
        """
        found: dict[str, float | str] = {}
        if self.categories is None:
            far = max(abs(self.low - self.center), abs(self.high - self.center))
            # NaN, if nothing stands in, is below and above nothing.
            beyond = self.stand_in < self.low or self.stand_in > self.high
            if wary and (beyond or not far < REACH * self.scale):
                return {}
            found = {"center": self.center, "scale": self.scale}
        if self.missing is not None:
            found["missing"] = self.missing if self.categories else self.stand_in
        return found


def stated(
    name: str,
    unit: str,
    center: float,
    scale: float,
    categories: tuple[str, ...] | None,
    missing: float | str | None,
) -> Feature:
    """A feature as a data source declares it, which has checked it by its own rules."""
    return Feature.model_construct(
        name=name,
        unit=unit,
        center=center,
        scale=scale,
        categories=categories,
        missing=_as_text(missing),
    )


def width(features: Iterable[Feature]) -> int:
    """Numbers of a record with these features."""
    return sum(feature.width for feature in features)


def declarations_differ(job: Sequence[Feature], own: Sequence[Feature] | None) -> list[str]:
    """What a silo's declaration says otherwise than the job's, feature by feature.

    Each text has both sides' values. A silo's unit may be unsaid, and nothing need be missing.
    """
    if own is None:
        why = f"the job declares {len(job)} features, and this data set names none"
        return [f'{why}; use a table that does (data.kind = "csv")']
    wanted, found = _names(job), _names(own)
    if wanted != found:
        return [_other_names(wanted, found)]
    return [
        f"feature {name!r}: {fault}"
        for name, one, other in zip(wanted, job, own, strict=True)
        for fault in _faults(one, other)
    ]


def _names(features: Iterable[Feature]) -> list[str]:
    return [composed(feature.name) for feature in features]


def _other_names(wanted: Sequence[str], found: Sequence[str]) -> str:
    lacking, more = _without(wanted, found), _without(found, wanted)
    said = {
        f"the job has {_listed(lacking)}, which this data set lacks": lacking,
        f"this data set has {_listed(more)}, which the job lacks": more,
    }
    if told := list(filter(said.get, said)):
        return f"{'; '.join(told)}; declare the job's features"
    place = next(
        i for i, names in enumerate(zip(wanted, found, strict=True)) if len(set(names)) > 1
    )
    return (
        f"feature {place} is {wanted[place]!r} in the job and {found[place]!r} here; put"
        " data.features in the job's order"
    )


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in names if name not in others]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:MOST_SHOWN]))
    return shown if len(names) <= MOST_SHOWN else f"{shown} and {len(names) - MOST_SHOWN} more"


def _faults(job: Feature, own: Feature) -> Iterable[str]:
    if own.unit and composed(own.unit) != composed(job.unit):
        yield (
            f"its unit is {job.unit!r} in the job and {own.unit!r} here; convert the column, and"
            " state the job's unit"
        )
    # Constants of numbers say nothing where one side has categories.
    yield from _categories_fault(_composed(job.categories), _composed(own.categories))
    for key in ("center", "scale"):
        wanted, found = getattr(job, key), getattr(own, key)
        if wanted != found:
            yield f"{key} is {wanted!r} in the job and {found!r} here; write the job's"
    # A silo need not have missing values.
    if own.missing is not None and composed(own.missing) != composed(job.missing or ""):
        yield (
            f"a missing value counts as {own.missing!r} here, in the job as"
            f" {job.missing or 'none at all'!r}; write what the job says"
        )


def _categories_fault(job: Sequence[str], own: Sequence[str]) -> Iterable[str]:
    """The first category that differs; empty if none does."""
    for place, (wanted, found) in enumerate(zip_longest(job, own)):
        if wanted != found:
            yield (
                f"category {place} is {wanted!r} in the job and {found!r} here; write the job's"
                " categories, in their order"
            )
            return


def _composed(categories: Sequence[str] | None) -> list[str]:
    return list(map(composed, categories or ()))


def outside(features: Sequence[Feature], x: Tensor) -> dict[str, tuple[int, int]]:
    """How many records [N, …] lie outside the range of a feature, and how many have a value.

    By the feature's name, and only where any lie outside. ``x`` has the numbers of the features in
    their order, centred and scaled. What stands in for a missing value is none.
    """
    found = {}
    for feature, beyond, here in beyond_range(features, x):
        if records := int(beyond.sum()):
            found[feature.name] = records, int(here.sum())
    return found


def beyond_range(
    features: Sequence[Feature], x: Tensor
) -> Iterator[tuple[Feature, Tensor, Tensor]]:
    """Each feature with a range: which records [N] are outside, and which have a value at all."""
    values, place = x.reshape(len(x), -1), 0
    for feature in features:
        column = values[:, place]
        place += feature.width
        if feature.categories is not None:
            continue
        # torch rounds bounds as the values were rounded, so that none at a bound falls outside.
        stand_in, low, high = (
            (value - feature.center) / feature.scale
            for value in (feature.stand_in, feature.low, feature.high)
        )
        here = column != stand_in
        yield feature, ((column < low) | (column > high)) & here, here


def out_of_range(features: Sequence[Feature], x: Tensor, share: float) -> list[str]:
    """The features of which more than a ``share`` of the records [N, …] lie outside the range.

    It says how many, and no value.
    """
    return range_faults(features, outside(features, x), share)


def range_faults(
    features: Sequence[Feature], found: Mapping[str, tuple[int, int]], share: float
) -> list[str]:
    """The same of records that were counted before, as ``outside`` counts them."""
    ranges = {feature.name: feature for feature in features}
    faults = []
    for name, (records, values) in found.items():
        # Never by a single record: an operator could find it by the ranges of several jobs.
        if records > max(share * values, 1):
            feature = ranges[name]
            unit = f" {feature.unit}" if feature.unit else ""
            faults.append(
                f"feature {name!r}: {records} of {values} records are outside {feature.low:g} to"
                f" {feature.high:g}{unit}; is it in another unit?"
            )
    return faults


def shown(faults: Sequence[str]) -> str:
    """The first few faults in one text, cut where what a job says makes them long."""
    text = "; ".join(fault[:LONGEST_FAULT] for fault in faults[:MOST_SHOWN])
    return text if len(faults) <= MOST_SHOWN else f"{text}; and {len(faults) - MOST_SHOWN} more"
