"""Sizes in units that people read."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``2048`` as ``2 KiB``; four digits at most."""
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {UNITS[-1]}"
