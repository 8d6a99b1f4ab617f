"""Writing TOML: the little that our own files hold."""

import json
from collections.abc import Mapping
from typing import Any


def to_toml(document: Mapping[str, Any]) -> str:
    """TOML of strings, numbers, lists and one level of tables: all that our files hold.

    A list of mappings becomes an array of tables; deeper mappings become inline tables.
    """
    plain: dict[str, Any] = {}
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            tables.append((f"[{key}]", value))
        elif value and isinstance(value, list | tuple) and isinstance(value[0], Mapping):
            tables += [(f"[[{key}]]", each) for each in value]
        else:
            plain[key] = value

    # plain keys first: below a table's name they would be the table's
    lines = _assignments(plain)
    for head, table in tables:
        lines += ["", head, *_assignments(table)]
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    """TOML of one value, on one line.

    Mappings become inline tables, sequences arrays. The caller leaves out None, which TOML lacks.
    """
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_assignments(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    # strings, numbers and booleans read the same in TOML
    return json.dumps(value, ensure_ascii=False)


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {inline(value)}" for key, value in table.items()]
