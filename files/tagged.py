"""A table of a file that says by ``kind`` which of several it is; each kind has keys of its own."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from .documents import Strict

KindT = TypeVar("KindT", bound=Strict)


def of_kind(value: Any, kinds: Mapping[str, type[KindT]], default: str | None = None) -> KindT:
    """The table of the kind that it names, or of ``default``.

    ValueError for an unknown kind, and for keys of another kind.
    """
    # An instance, such as a copied table's, was checked when it was made.
    for table_class in kinds.values():
        if isinstance(value, table_class):
            return value
    table = dict(value) if isinstance(value, dict) else {}
    kind: Any = table.get("kind", default)
    _check_kind(kind, kinds)
    for key in table:
        _check_key(key, kind, kinds)
    # Only this kind's model sees the table, so its errors name no key of another kind.
    return kinds[kind].model_validate(value)


def _check_kind(kind: Any, kinds: Mapping[str, type[KindT]]) -> None:
    known = ", ".join(kinds)
    if kind is None:
        raise ValueError(f"kind is missing; add one of: {known}")
    if kind not in tuple(kinds):  # compared, not hashed: a file may have a list there
        near = difflib.get_close_matches(str(kind), kinds, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"kind = {kind!r}: no such kind; {hint}known: {known}")


def _check_key(key: str, kind: str, kinds: Mapping[str, type[KindT]]) -> None:
    """A key of another kind gets an error that says so; unknown keys are pydantic's to find."""
    if key in kinds[kind].model_fields:
        return
    owners = [name for name, other in kinds.items() if key in other.model_fields]
    if owners:
        known = ", ".join(kinds[kind].model_fields)
        raise ValueError(
            f"{key!r} is a key of kind {' or '.join(owners)}, this is kind {kind!r} with keys"
            f" {known}"
        )
