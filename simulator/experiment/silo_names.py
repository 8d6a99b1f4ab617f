"""The names of a partition's clients in jobs: at most 64 letters a-z, digits and hyphens."""

import re
import unicodedata
from collections.abc import Sequence

from ...errors import LocalError, check_local

# As in a roster.
LONGEST = 64
DIGITS = 3  # of a number, at least: names then sort like numbers
NUMBER = re.compile(r"[0-9]+")
FOREIGN = re.compile(r"[^a-z0-9]+")


def numbered(count: int) -> tuple[str, ...]:
    """``count`` names: silo-000, silo-001 and so on."""
    return silo_names(list(map(str, range(count))))


def silo_names(clients: Sequence[str], chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """A name per client, in the clients' order.

    ``chosen`` are a person's own. Without them a number becomes silo-007 where all clients are
    numbers; otherwise the client's own name loses what no silo's name can have.
    """
    if chosen is None:
        return _derived(clients)
    check_local(
        len(chosen) == len(clients),
        f"silos names {len(chosen)}, the partition has {len(clients)} clients; name each, or"
        " leave it out",
    )
    return tuple(chosen)


def _derived(clients: Sequence[str]) -> tuple[str, ...]:
    # Only if all are numbers, so that all names look alike.
    are_numbers = all(map(NUMBER.fullmatch, clients))
    if are_numbers:
        digits = max(DIGITS, *map(len, clients))
        names = tuple(f"silo-{client:0>{digits}}" for client in clients)
    else:
        names = tuple(map(_name, clients))

    # what a name loses may be all of it, or all that told two clients apart
    first: dict[str, str] = {}
    for client, name in zip(clients, names, strict=True):
        if not name or len(name) > LONGEST:
            raise LocalError(
                f"partition: client {client[:200]!r} makes no name of a silo; {_fix(clients)}"
            )
        before = first.setdefault(name, client)
        if before != client:
            raise LocalError(
                f"partition: clients {before!r} and {client!r} are both named {name!r};"
                f" {_fix(clients)}"
            )
    return names


def _name(client: str) -> str:
    # Accents are removed; letters without an ASCII form are lost.
    letters = unicodedata.normalize("NFKD", client).encode("ascii", "ignore").decode().lower()
    return FOREIGN.sub("-", letters).strip("-")


def _fix(clients: Sequence[str]) -> str:
    return f"name all {len(clients)} yourself, silos = […], in the order of the partition"
