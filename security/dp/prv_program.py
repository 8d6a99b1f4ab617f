"""A program of its own for prv.py: costs by Opacus's PRV accountant, under limits that end it.

Questions come on standard input as JSON; for each a line goes to standard output, ε in decimals or
``none``. It imports nothing of ours, so that it runs wherever its file lies.
"""

import json
import math
import sys
from pathlib import Path

from opacus.accountants import PRVAccountant

STATM = Path("/proc/self/statm")


def limit(seconds: int, memory: int) -> None:
    """End with a signal after so much time on a processor.

    Refuse memory beyond this, the libraries aside. Only Linux says how much these take; elsewhere
    the time-out of prv.py alone ends the process.
    """
    if not STATM.exists():
        return
    import resource  # noqa: PLC0415 - Windows has none

    # The kernel enforces both: a computation inside a library cannot be interrupted otherwise.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    libraries = int(STATM.read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (libraries + memory, libraries + memory))


def answer(delta: float, events: list[tuple[float, float, int]]) -> str:
    """The ε of all events together; ``none`` where the accountant finds none.

    It has 12 digits after the point, so that prv.py recognises a line that was cut short.
    """
    accountant = PRVAccountant()
    accountant.history = events
    try:
        found = float(accountant.get_epsilon(delta))
    except (ArithmeticError, IndexError, MemoryError, RuntimeError, ValueError):
        return "none"  # it does so for noise that is very weak or very strong
    return f"{found:.12f}" if 0 <= found < math.inf else "none"


def main() -> None:
    """Answer what is asked.

    One line per question, flushed at once: earlier answers survive when a later question runs into
    a limit.
    """
    asked = json.load(sys.stdin)
    # After the imports: the bound on memory comes on top of what the libraries take. The processor
    # time that they took counts.
    limit(asked["seconds"], asked["memory"])
    for question in asked["questions"]:
        events = [(float(sigma), float(q), steps) for sigma, q, steps in question["events"]]
        sys.stdout.write(answer(float(question["delta"]), events) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
