"""Further arguments of other projects' code, ``options`` of a table: plain values by name.

In a document a decimal is ``{"decimal": "0.5"}``, which no text can be taken for.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from .documents import MAX_SAFE_INTEGER

OPTION_NAME = r"^[A-Za-z_]\w{0,63}$"
OptionName = Annotated[str, Field(pattern=OPTION_NAME)]
Option: TypeAlias = Any  # of the kinds that ``_option`` takes
MOST_OPTIONS = 64  # and entries of one list or table
DEEPEST_OPTION = 3  # lists and tables within one another
LONGEST_OPTION = 1024  # characters


def read_options(options: Mapping[Any, object]) -> dict[str, Option]:
    """Options, whether as a person writes them or as a document has them; ValueError for others."""
    return {str(name): _option(str(name), value) for name, value in options.items()}


def written_options(options: Mapping[str, Option]) -> dict[str, Any]:
    """Options as a document has them."""
    return dict(zip(options, map(_written, options.values()), strict=True))


def _option(name: str, value: object, depth: int = DEEPEST_OPTION) -> Option:
    inner = partial(_option, name, depth=depth - 1)
    most = MOST_OPTIONS if depth else 0
    match value:
        case {"decimal": str(text), **rest} if not rest:
            value = float(text[:32])
    match value:
        case float() if not isfinite(value):
            raise ValueError(f"{name[:64]} = {value}; give a finite number")
        case int() if abs(value) > MAX_SAFE_INTEGER:
            raise ValueError(
                f"{name[:64]} is a whole number beyond ±{MAX_SAFE_INTEGER:,}; lower it"
            )
        case str() if len(value) > LONGEST_OPTION:
            raise ValueError(f"{name[:64]} has over {LONGEST_OPTION:,} characters; shorten it")
        case bool() | int() | float() | str():
            return value
        case [*entries] if len(entries) <= most:
            return tuple(map(inner, entries))
        # In the order of a signed job's keys: other people's code may go by it.
        case dict() if len(value) <= most and all(map(_is_name, value)):
            return {key: inner(value[key]) for key in sorted(value)}
        case _:
            raise ValueError(
                f"{name[:64]}: give true, false, a number, a text, or a list or table of up to"
                f" {MOST_OPTIONS} of these, {DEEPEST_OPTION} deep at most"
            )


def _is_name(key: object) -> bool:
    return re.fullmatch(OPTION_NAME, str(key)) is not None


def _written(value: Any) -> Any:
    return WRITTEN.get(type(value), lambda same: same)(value)


# By type: an option's value as a document has it.
WRITTEN: dict[type, Callable[[Any], Any]] = {
    float: lambda value: {"decimal": repr(value)},
    tuple: lambda value: tuple(map(_written, value)),
    dict: written_options,
}
