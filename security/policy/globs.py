"""Globs over dotted tensor names.

A glob is matched against the whole name, segment by segment: ``*`` stands for any characters within
one segment, ``**`` for any number of segments::

    features.*     features.0               not features.0.weight
    features.**    features, features.0.weight
    **.running_*   bn.running_mean, running_var
"""


def check_glob(glob: str) -> str:
    """The glob itself; ValueError if it is none."""
    for segment in glob.split("."):
        if not segment or ("**" in segment and segment != "**"):
            raise ValueError(
                "is not a glob: '**' stands alone between dots, and no segment is empty"
            )
    return glob


def matches(glob: str, name: str) -> bool:
    """Whether a glob matches a whole dotted name.

    Time grows with the product of their lengths at most.
    """
    segments = name.split(".")
    eaten = {0}  # how many segments of the name the glob so far can stand for
    for wanted in glob.split("."):
        if wanted == "**":
            eaten = set(range(min(eaten), len(segments) + 1)) if eaten else eaten
        else:
            eaten = {n + 1 for n in eaten if n < len(segments) and _segment(wanted, segments[n])}
    return len(segments) in eaten


def _segment(wanted: str, segment: str) -> bool:
    first, *rest = wanted.split("*")
    if not rest:
        return wanted == segment
    if not segment.startswith(first):
        return False
    at = len(first)
    for piece in rest[:-1]:
        if (found := segment.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return len(segment) - at >= len(rest[-1]) and segment.endswith(rest[-1])
