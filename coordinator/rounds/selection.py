"""Silos of a list that are in a set, or are not: the order of the list stays."""

from collections.abc import Collection, Iterable, Mapping


def among(silos: Iterable[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The silos that are chosen."""
    return tuple(silo for silo in silos if silo in chosen)


def without(silos: Iterable[str], out: Collection[str]) -> tuple[str, ...]:
    """The silos that are not out; ``out`` may hold others, too."""
    return tuple(silo for silo in silos if silo not in out)


def with_codes(silos: Mapping[str, str], codes: Collection[str]) -> dict[str, str]:
    """The silos with one of these codes, each with its code."""
    return {silo: code for silo, code in silos.items() if code in codes}
