"""The [sweep] table: settings that each method tries with several values.

::

    [sweep]                                  # a grid: each method with all combinations
    "training.lr" = [0.01, 0.05]
    "options.rho" = [0.3, 0.5]               # for the methods that have this option

    [sweep]                                  # random search: each method with 20 draws
    draws = 20
    seed = 0
    "training.lr" = { low = 1e-4, high = 1e-1, log = true }
    "training.epochs" = { low = 1, high = 5 }    # whole numbers, both ends included
    "options.rho" = [0.3, 0.5]

A method becomes several, its variants, whose labels say the values: ``fedavg+lr=0.05``. So each
variant has folders and runs of its own. A value follows from its key and its number among the draws
alone: more values, draws or methods leave the others' runs as they are.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from operator import attrgetter
from typing import Annotated, Any, TypeAlias

import pydantic
from pydantic import Field, PlainValidator

from ...algorithms.catalog import method_class
from ...algorithms.job.job import JobSettings, Seed
from ...algorithms.job.training_table import TrainingTable
from ...algorithms.models.build import ModelOptions
from ...algorithms.numerics.streams import stream, uniform
from ...errors import LocalError, check_local
from ...files.documents import Strict
from .chosen_method import LONGEST_LABEL, ChosenMethod
from .hints import hint

MOST_VARIANTS = 1000  # of a method
DIGITS = 3  # of a drawn number, so that its label has all of them
BOUNDS = {"low", "high"}
TABLES = {"training", "model", "options"}  # whose keys a method may have for itself
# Keys that all methods have; those of options differ.
SHARED = (
    "rounds",
    *(f"training.{key}" for key in TrainingTable.model_fields),
    *(f"model.{key}" for key in ModelOptions.model_fields),
)
# Strict: no text and no truth value is a number, and a whole number stays one.
Number: TypeAlias = Annotated[
    Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True, allow_inf_nan=False)],
    Field(union_mode="left_to_right"),
]


class Range(Strict):
    """Numbers from ``low`` to ``high``, drawn uniformly, or where ``log`` their logarithms."""

    low: Number
    high: Number
    log: Annotated[bool, Field(strict=True)] = False

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> "Range":
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError("low must be below high, and above 0 where log = true")
        return self

    @property
    def whole(self) -> bool:
        """True if whole numbers are drawn, since both ends are such."""
        return {type(self.low), type(self.high)} == {int}

    def at(self, share: float) -> float:
        """The number at a share in [0, 1) of the way."""
        # The last whole number has a share of its own, as wide as the others'.
        end = self.high + self.whole
        found = self.low + (end - self.low) * share
        if self.log:
            found = self.low * (end / self.low) ** share
        if self.whole:
            return min(int(found // 1), int(self.high))
        rounded = float(f"{found:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)


def _values(given: Any) -> tuple[Any, ...] | Range:
    if isinstance(given, Mapping):
        return Range.model_validate(given)
    if not isinstance(given, list | tuple) or not given:
        raise ValueError("give a list of values, or { low = 1e-4, high = 0.1 }")
    return tuple(given)


Values: TypeAlias = Annotated[tuple[Any, ...] | Range, PlainValidator(_values)]


class SweepTable(pydantic.BaseModel):
    """The table; without ``draws`` it is a grid."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Values]

    draws: Annotated[int, Field(strict=True, ge=1, le=MOST_VARIANTS)] | None = None
    """Variants of each method, drawn at random."""
    seed: Seed = 0
    """Of the draws."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_dotted_key(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        table: dict[str, Any] = {}
        for key, value in _flat(given):
            # "training.lr" in quotes and training.lr without are one key.
            if key in table:
                raise ValueError(f"{key} stands twice; keep one")
            table[key] = value
        return table

    @pydantic.model_validator(mode="after")
    def _grid_or_random(self) -> "SweepTable":
        if not self.settings:
            raise ValueError('name a setting, such as "training.lr" = [0.01, 0.05]')
        if self.draws is not None:
            return self
        # What only random search uses would do nothing in a grid.
        for key, values in self.settings.items():
            if isinstance(values, Range):
                raise ValueError(f"{key}: a range is for random search; add draws = 20")  # noqa: TRY004 - pydantic reports ValueError only
        if "seed" in self.model_fields_set:
            raise ValueError("seed is for random search; add draws = 20, or take it out")
        return self

    @property
    def settings(self) -> Mapping[str, tuple[Any, ...] | Range]:
        """The values to try by dotted key."""
        return self.__pydantic_extra__

    def choices(self, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Values for these keys, choice after choice; draws may repeat."""
        if self.draws is not None:
            for number in range(self.draws):
                yield {key: self._drawn(key, number) for key in keys}
            return
        for choice in product(*map(self._listed, keys)):
            yield dict(zip(keys, choice, strict=True))

    def size(self, keys: Sequence[str]) -> int:
        """How many choices there are at most."""
        return self.draws or prod(map(len, map(self._listed, keys)))

    def _listed(self, key: str) -> tuple[Any, ...]:
        values = self.settings[key]
        # A grid has no ranges.
        return () if isinstance(values, Range) else values

    def _drawn(self, key: str, number: int) -> Any:
        rng = stream(self.seed, "", number, f"sweep/{key}")
        share = float(uniform(rng, (), 0, 1))
        values = self.settings[key]
        if isinstance(values, Range):
            return values.at(share)
        return values[int(share * len(values))]


def _flat(table: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; TOML makes tables of dots outside quotes."""
    for name, value in table.items():
        key = f"{within}{name}"
        if isinstance(value, Mapping) and not BOUNDS & value.keys():
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


@dataclass(frozen=True)
class Variant:
    """A choice of values for a method: ``method`` is its label in the file, ``label`` the new one.

    ``values`` are by dotted key; empty for a method that no setting of the sweep is for.
    """

    method: str
    label: str
    values: Mapping[str, Any]


def expanded(
    methods: Sequence[ChosenMethod], sweep: SweepTable, tables: Sequence[str], origin: str
) -> tuple[tuple[ChosenMethod, ...], tuple[Variant, ...]]:
    """Each method as its variants, in order; one without any swept setting stays as it is.

    ``tables`` are the keys of a simulation's file. LocalError, which begins with ``origin``, for a
    key that no method has.
    """
    own = {method.title: _keys_of(method, origin) for method in methods}
    known = set().union(*own.values())
    for key in sweep.settings:
        _check_key(key, known, tables, origin)

    found: list[ChosenMethod] = []
    variants: list[Variant] = []
    idle = set(sweep.settings)
    for method in methods:
        # What a method's entry sets itself is fixed for it.
        free = own[method.title] - _fixed(method)
        keys = list(filter(free.__contains__, sweep.settings))
        idle.difference_update(keys)
        own_variants = _variants(method, sweep, keys, origin)
        found += map(partial(_changed, method), own_variants)
        variants += own_variants
    if idle:
        raise LocalError(
            f"{origin}: all methods set {min(idle)!r} themselves, so there is nothing to sweep;"
            " take it out of the sweep, or out of a method"
        )
    _check_labels(list(map(attrgetter("label"), variants)), origin)
    return tuple(found), tuple(variants)


def _variants(
    method: ChosenMethod, sweep: SweepTable, keys: Sequence[str], origin: str
) -> list[Variant]:
    size = sweep.size(keys)
    if size > MOST_VARIANTS:
        raise LocalError(
            f"{origin}: {method.title} would have {size:,} variants, {MOST_VARIANTS:,} are the"
            " most; sweep less, or draw some of them by draws = 20"
        )
    # By label: a draw that comes again is the same run.
    found = {}
    last_parts = Counter(map(_last_part, sweep.settings))
    for values in sweep.choices(keys):
        label = _label(method.title, values, last_parts, origin)
        found[label] = Variant(
            method=method.title,
            label=label,
            values=values,
        )
    return list(found.values())


def _check_labels(labels: Sequence[str], origin: str) -> None:
    # Some disks tell no case apart.
    label, times = Counter(map(str.lower, labels)).most_common(1)[0]
    if times > 1:
        raise LocalError(
            f"{origin}: {times} variants would be labelled {label!r}; give their methods other"
            " labels, or sweep values that differ in letters and digits"
        )


def _keys_of(method: ChosenMethod, origin: str) -> set[str]:
    """The settings that a method has."""
    where = f"{origin}, method {method.title!r}"
    options = method_class(method.name, where).options_model.model_fields
    return {*SHARED, *map("options.{}".format, options)}


def _check_key(key: str, known: set[str], tables: Sequence[str], origin: str) -> None:
    """LocalError for a key that cannot be swept."""
    if key in known:
        return
    table = key.partition(".")[0]
    check_local(
        table not in {"seed", "seeds"},
        f"{origin}: {key!r} is no setting of a method: all variants run with each seed of the"
        " file; list them there, as seeds = [1, 2]",
    )
    check_local(
        table not in {*tables, *JobSettings.model_fields} - TABLES,
        f"{origin}: {key!r} is the same for all runs of a folder; run the file once per value,"
        f" each with --set {key}=… and an --out of its own",
    )
    nearest = hint(key, sorted(known))
    raise LocalError(f"{origin}: no method has a setting {key!r}; {nearest}")


def _fixed(method: ChosenMethod) -> set[str]:
    """The settings that a method's own entry has."""
    found = method.model_fields_set - TABLES
    for table in TABLES:
        found |= set(map(f"{table}.{{}}".format, getattr(method, table)))
    return found


def _changed(method: ChosenMethod, variant: Variant) -> ChosenMethod:
    """The method with a variant's values for its own."""
    changes: dict[str, Any] = {"label": variant.label}
    for key, value in variant.values.items():
        table, dot, name = key.partition(".")
        if dot:
            before = changes.get(table, getattr(method, table))
            changes[table] = {**before, name: value}
        else:
            changes[table] = value
    return method.model_copy(update=changes)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _label(
    title: str, values: Mapping[str, Any], last_parts: Mapping[str, int], origin: str
) -> str:
    """The label of a variant; ``last_parts`` says how many keys of the sweep end alike."""
    label = title
    for key, value in values.items():
        name = _last_part(key)
        if last_parts[name] > 1:
            name = key
        label += f"+{name}={_text(value)}"
    # A method's own label was checked with the file.
    check_local(
        len(label) <= max(LONGEST_LABEL, len(title)),
        f"{origin}: the label {label!r} is longer than {LONGEST_LABEL} characters; give the"
        " method a shorter label, or sweep fewer settings at once",
    )
    return label


def _text(value: Any) -> str:
    """A value in letters that the name of a folder may have."""
    written = value
    if not isinstance(value, str):
        # 1.0 and 1 are one setting, and must be one run.
        written = json.dumps(value, default=str).removesuffix(".0")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", written.strip('{}[]" '))
