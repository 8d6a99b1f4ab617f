"""The end of an error about an unknown name: the nearest known name, or all of them."""

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Such as ``did you mean 'fedper'?``; ``known: …`` where nothing is near.

    It follows a semicolon.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}"
