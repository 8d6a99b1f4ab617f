"""Sizes and numbers as people read them."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``2048`` as ``2 KiB``; four digits at most."""
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {UNITS[-1]}"


def number(count: int, of: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{count:,} {of}" + ("" if count == 1 else "s")
