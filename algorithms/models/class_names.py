"""Names of classes in the order of the labels: label 1 must mean the same at every silo.

Nothing else notices silos that number their classes differently; the models are then averaged into
nonsense.
"""

import unicodedata
from collections.abc import Sequence

LONGEST = 200


def names_fault(names: Sequence[str], classes: int, key: str, counted: str) -> str:
    """Why these cannot name the classes 0 … classes - 1; empty if they can.

    ``key`` is where they are listed, and ``counted`` the key that says how many classes there are.
    A name has 1 to ``LONGEST`` printable characters. No two may be equal in composed Unicode.
    """
    if len(names) != classes:
        return (
            f"{key} has {len(names)} names, {counted} says {classes} classes; give one name per"
            " class, in the order of the labels"
        )
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if not _sound(name):
            return (
                f"class {number} is named {name[:LONGEST]!r}; give 1 to {LONGEST} printable"
                " characters, trimmed"
            )
        # Composed, so that names that look the same are equal.
        before = first.setdefault(composed(name), number)
        if before != number:
            return f"classes {before} and {number} are both named {name!r}; name them apart"
    return ""


def names_differ(job: Sequence[str], data: Sequence[str]) -> str:
    """The first class that a job and a data file, both of sound names, name differently.

    Empty if none.

    Both have one name per class of the job.
    """
    in_job, in_data = list(map(composed, job)), list(map(composed, data))
    for number, (wanted, found) in enumerate(zip(in_job, in_data, strict=True)):
        if wanted != found:
            fix = "rename it, or have the job changed"
            # The same names in another order: only the labels are numbered differently.
            if set(in_job) == set(in_data):
                fix = "reorder y and class_names as the job has them"
            return f"class {number} is {wanted!r} in the job and {found!r} here; {fix}"
    return ""


def _sound(name: str) -> bool:
    return 0 < len(name) <= LONGEST and name == name.strip() and name.isprintable()


def composed(name: str) -> str:
    """One spelling of letters with marks, of which files of different systems have two."""
    return unicodedata.normalize("NFC", name)
