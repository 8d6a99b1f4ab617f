"""What a partition's clients are called in jobs: letters a-z, digits and hyphens, 64 of them at
most.
"""

import re
import unicodedata
from collections.abc import Sequence

from ...errors import LocalError

LONGEST = 64
DIGITS = 3  # of a number, at least: names then sort like numbers
FOREIGN = re.compile(r"[^a-z0-9]+")


def numbered(count: int) -> tuple[str, ...]:
    """So many: silo-000, silo-001 and so on."""
    return silo_names([str(number) for number in range(count)])


def silo_names(clients: Sequence[str], given: Sequence[str] | None = None) -> tuple[str, ...]:
    """One a client: those given, or silo-007 where all are numbers, or the client's own less what
    no name can have.
    """
    if given is not None:
        if len(given) != len(clients):
            raise LocalError(
                f"silos names {len(given)}, the partition has {len(clients)} clients; name each, or"
                " leave it out"
            )
        return tuple(given)
    if all(client.isdecimal() and client.isascii() for client in clients):
        digits = max(DIGITS, *map(len, clients))
        names = tuple(f"silo-{client:0>{digits}}" for client in clients)
    else:
        names = tuple(map(_name, clients))
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
    letters = unicodedata.normalize("NFKD", client).encode("ascii", "ignore").decode().lower()
    return FOREIGN.sub("-", letters).strip("-")


def _fix(clients: Sequence[str]) -> str:
    return f"name all {len(clients)} yourself, silos = […], in the order of the partition"
