"""Settings of an experiment's file that the command line replaces: ``training.lr=0.05``."""

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from ...errors import LocalError


def overridden(document: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the file's document with these settings, each ``key=value``.

    A key names tables by dots; missing ones are made. A value is as in TOML, and text that is none,
    such as ``lenet5``, stands for itself. LocalError for a setting that is not of this form.
    """
    changed = deepcopy(document)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *tables, last = key.strip().split(".")
        if not equals or not all((*tables, last)):
            raise LocalError(
                f"--set {setting}: not a key and a value; write --set training.lr=0.05"
            )
        table = changed
        for name in tables:
            table = table.setdefault(name, {})
            # Such as a number, or the list of [[methods]].
            if not isinstance(table, dict):
                raise LocalError(
                    f"--set {setting}: {name!r} is not a table of the file; change it there"
                )
        table[last] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    # A word without quotes, which a shell would take away.
    except ValueError:
        return text
    return value
