"""The cost of releases by a tighter accountant, for reports only: no budget is enforced by it.

Opacus's PRV accountant composes the privacy loss itself (Gopi, Lee, Wutschitz, "Numerical
composition of differential privacy", 2021) and lands a few per cent under Rényi's bounds (rdp.py).
But it holds for a plan that was made before, not for events that were chosen in view of earlier
ones. It assumes that a record is taken away, which for Gaussian noise costs no less than one that
is added as far as anybody has found. With many different events it takes minutes and gigabytes, or
fails. So a process of its own answers (prv_program.py), with little time and memory, and often
there is no answer; for noise that silos share (rdp.py) there never is. Both are upper bounds, so
the smaller one is shown.
"""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from ...files.documents import canonical_json
from .rdp import Priced, cost, shown

PROGRAM = Path(__file__).with_name("prv_program.py")
SEGMENTS = 8  # different events that are put to it
LEAST_DELTA = 1e-9  # below, what float64 loses in a Fourier transform counts
NONE = "not computed"
_ANSWER = re.compile(rb"[0-9]{1,9}\.[0-9]{12}")


@dataclass(frozen=True, slots=True)
class Question:
    """Asks what these events together cost at this δ.

    There is no answer for a ``delta`` below LEAST_DELTA.
    """

    events: tuple[Priced, ...]
    delta: float


@dataclass(frozen=True, slots=True)
class PrvLimits:
    """Limits on all questions together."""

    seconds: int = 30
    memory: int = 3 * 1024**3  # bytes, besides the libraries


def opinion(
    events: Iterable[Priced], delta: float, limits: PrvLimits | None = None
) -> float | None:
    """The smaller of the two bounds on ε.

    None where the tighter accountant gave none within its limits.
    """
    return opinions([Question(tuple(events), delta)], limits)[0]


def opinions(questions: Sequence[Question], limits: PrvLimits | None = None) -> list[float | None]:
    """The same for several questions, by one process.

    A question that runs into a limit takes the later ones with it.
    """
    found: list[float | None] = []
    put: list[tuple[int, float]] = []  # place, and Rényi's bound
    texts: list[object] = []  # what the program reads of each
    for question in questions:
        bound = cost(question.events, question.delta)
        segments = _segments(question.events)

        # Opacus's accountant fails for an empty history and for noise of 0; with more segments it
        # takes minutes and gigabytes.
        trivial = bound in (0, math.inf)
        possible = len(segments) <= SEGMENTS and question.delta >= LEAST_DELTA
        # Its proof is for continuous noise.
        shared = any(one.shared for one in question.events)
        if not trivial and possible and not shared:
            put.append((len(found), bound))
            texts.append({"delta": repr(question.delta), "events": segments})
        found.append(bound if trivial else None)
    if not texts:
        return found

    # The process may have ended early: questions without an answer stay without one.
    answers = _answers(texts, limits or PrvLimits())
    for (place, bound), answer in zip(put, answers, strict=False):
        if answer is not None:
            found[place] = min(answer, bound)
    return found


def shown_bound(value: float | None) -> str:
    """An opinion in words: ε in decimals, rounded up, or that there is none."""
    return NONE if value is None else shown(value)


def _segments(events: Iterable[Priced]) -> list[list[object]]:
    """Steps of each noise and rate, however they are written."""
    steps: Counter[tuple[Decimal, Decimal]] = Counter()
    for one in events:
        steps[Decimal(one.sigma), Decimal(one.q)] += one.steps
    return [[str(sigma), str(q), taken] for (sigma, q), taken in steps.items() if taken]


def _answers(questions: Sequence[object], limits: PrvLimits) -> list[float | None]:
    """The answers as far as the process came, line by line.

    A line that was cut short has too few digits for an answer.
    """
    # -P: modules next to the program must not pass for libraries. With one thread, the limit on
    # processor time is one on time.
    asked = {"questions": questions, "seconds": limits.seconds, "memory": limits.memory}
    try:
        out = subprocess.run(  # noqa: S603 our own interpreter and program
            [sys.executable, "-P", "-W", "ignore", str(PROGRAM)],
            input=canonical_json(asked),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Wall-clock time, next to the limit on processor time: a process that waits uses none.
            timeout=limits.seconds,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
    return [float(line) if _ANSWER.fullmatch(line) else None for line in out.splitlines()]
