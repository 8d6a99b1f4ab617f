"""Silos of a list that are in a set, or are not: the order of the list stays."""

from collections.abc import Container, Iterable, Mapping


def among(silos: Iterable[str], chosen: Container[str]) -> tuple[str, ...]:
    """The silos that are chosen."""
    return tuple(silo for silo in silos if silo in chosen)


def without(silos: Iterable[str], out: Container[str]) -> tuple[str, ...]:
    """The silos that are not out; ``out`` may hold others, too."""
    return tuple(silo for silo in silos if silo not in out)


def all_but(silos: Iterable[str], silo: str) -> tuple[str, ...]:
    """The silos but this one."""
    return without(silos, (silo,))


def with_codes(silos: Mapping[str, str], codes: Container[str]) -> dict[str, str]:
    """The silos with one of these codes, each with its code."""
    return {silo: code for silo, code in silos.items() if code in codes}
