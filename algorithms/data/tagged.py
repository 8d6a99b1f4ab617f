"""A table of a file that says by ``kind`` which of several it is; each kind has keys of its own."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from ...files.documents import Strict

KindT = TypeVar("KindT", bound=Strict)


def of_kind(value: Any, kinds: Mapping[str, type[KindT]], default: str | None = None) -> KindT:
    """The table of the kind that it names, or of ``default``.

    Keys of another kind are told apart from unknown ones.
    """
    for known_kind in kinds.values():
        if isinstance(value, known_kind):
            return value
    table = dict(value) if isinstance(value, dict) else {}
    kind = table.get("kind", default)
    if kind is None:
        raise ValueError(f"kind is missing; add one of: {', '.join(kinds)}")
    if kind not in tuple(kinds):  # compared, not hashed: a file may have a list there
        near = difflib.get_close_matches(str(kind), kinds, n=1)
        raise ValueError(
            f"kind = {kind!r}: no such kind; {f'did you mean {near[0]!r}? ' if near else ''}known:"
            f" {', '.join(kinds)}"
        )
    _check_keys(table, kind, kinds)
    return kinds[kind].model_validate(value)


def _check_keys(table: Mapping[str, Any], kind: str, kinds: Mapping[str, type[KindT]]) -> None:
    """ValueError for a key of other kinds; one that no kind has is for pydantic to name."""
    for key in table:
        owners = [name for name, other in kinds.items() if key in other.model_fields]
        if owners and kind not in owners:
            known = ", ".join(kinds[kind].model_fields)
            raise ValueError(
                f"{key!r} is a key of kind {' or '.join(owners)}, this is kind {kind!r} with keys"
                f" {known}"
            )
