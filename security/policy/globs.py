"""Globs over dotted tensor names.

A glob is matched against the whole name, segment by segment: ``*`` stands for any characters within
one segment, ``**`` for any number of segments::

    features.*     features.0               not features.0.weight
    features.**    features, features.0.weight
    **.running_*   bn.running_mean, running_var
"""


def check_glob(glob: str) -> str:
    """The glob itself; ValueError if it is none."""
    segments = glob.split(".")
    # Inside a segment, "**" would look as if it crossed dots, but match like "*".
    mixed = [segment for segment in segments if "**" in segment and segment != "**"]
    if mixed or "" in segments:
        raise ValueError("is not a glob: '**' stands alone between dots, and no segment is empty")
    return glob


def matches(glob: str, name: str) -> bool:
    """True if a glob matches a whole dotted name.

    Time grows at most with the product of their lengths.
    """
    # All that the glob so far can stand for, at once: no backtracking over "**" either.
    segments = name.split(".")
    end = len(segments)
    eaten = {0}  # how many segments of the name the glob so far can stand for
    for wanted in glob.split("."):
        if wanted == "**":
            eaten = set(range(min(eaten, default=end + 1), end + 1))
        else:
            # ``end`` has no next segment.
            eaten = {n + 1 for n in eaten - {end} if _matches_segment(wanted, segments[n])}
    return end in eaten


def _matches_segment(wanted: str, segment: str) -> bool:
    """Take each piece between stars at its first place: a later one leaves less for the rest.

    So there is no backtracking, which a hostile name could make exponential.
    """
    first, *rest = wanted.split("*")
    if not rest:
        return wanted == segment
    if not segment.startswith(first):
        return False

    *middle, last = rest
    at = len(first)
    for piece in middle:
        found = segment.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return segment.endswith(last, at)
