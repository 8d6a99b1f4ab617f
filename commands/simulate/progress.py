"""Progress of ``staddle simulate``: bars on a terminal, a line every few seconds elsewhere.

A notebook shows one line per run, which is replaced as the run proceeds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from ...algorithms.tasks.class_counting import ACCURACY
from ...algorithms.tasks.counting import ScoreForm
from ...simulator.experiment.plan import Run
from ...simulator.run.history import Measure, Measured
from ...simulator.run.progress import Doing, Pace, RunProgress
from ..terminal.printer import Progress, Screen, TaskID

EVERY_SECONDS = 10.0  # between two lines of a run, where there is no terminal
NOTEBOOK_SECONDS = 0.5  # between two states of a line in a notebook

SHOWN: dict[str, Measure] = {"trained": "all/trained", "aggregated": "all/aggregated"}


@contextmanager
def shown(screen: Screen, runs: Sequence[Run]) -> Iterator[RunProgress]:
    """Show the progress of these runs, in this order: bars on a terminal, else lines."""
    if screen.in_notebook:
        yield ReplacedLines(screen.replacing())
        return
    if not screen.is_terminal:
        yield Lines(screen.show)
        return
    with screen.progress() as progress:
        yield Bars(progress, runs)


class Bars:
    """One bar for all runs where there are several, one for the run and one for its round.

    ``clock`` returns seconds; tests bring their own.
    """

    def __init__(
        self, progress: Progress, runs: Sequence[Run], clock: Callable[[], float] = monotonic
    ) -> None:
        self._progress, self._clock = progress, clock
        self._pace, self._own = Pace(clock), Pace(clock)
        # Rounds of all runs; ``begin`` subtracts those that were done before.
        self._left = sum(run.job.rounds for run in runs)
        self._all = None
        if len(runs) > 1:
            self._all = self._bar(f"all {len(runs)} runs", self._left)
        self._run = self._bar("", None)
        self._round = self._bar("", None)
        self._rounds, self._seen, self._form = 0, "", ACCURACY

    def begin(self, run: Run, rounds: int) -> None:
        """A run begins, or resumes after ``rounds``."""
        self._own, self._seen, self._rounds = Pace(self._clock), "", run.job.rounds
        self._form = run.job.counting.score
        # Rounds that an earlier process finished.
        self._left -= rounds
        self._progress.reset(
            self._run, total=run.job.rounds, completed=rounds, description=run.title, note=""
        )
        if self._all is not None:
            self._progress.update(self._all, advance=rounds)

    def work(self, doing: Doing, silos: int) -> None:
        """The next round, or an evaluation, over so many silos."""
        self._progress.reset(self._round, total=silos, description=f"  {doing}", note="silos")

    def silo(self) -> None:
        """One of its silos is done."""
        self._progress.update(self._round, advance=1)

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """A round is done.

        ``rounds`` counts those done in this run; ``measured`` is empty if nothing was evaluated.
        """
        self._pace.tick()
        self._own.tick()
        self._left -= 1
        # Not every round is evaluated: the last figures stay on screen.
        self._seen = scores(measured, self._form) or self._seen
        pace = f"{self._own.rate()}, {self._own.left(self._rounds - rounds)} left"
        note = f"rounds, {pace}"
        if self._seen:
            note = f"{note}; {self._seen}"
        self._progress.update(self._run, completed=rounds, note=note)
        if self._all is not None:
            self._progress.update(
                self._all, advance=1, note=f"rounds, {self._pace.left(self._left)} left"
            )

    def _bar(self, description: str, total: int | None) -> TaskID:
        return self._progress.add_task(description, total=total, note="")


class Lines:
    """A line when a run begins, every few seconds, and when it ends; for logs and pipes."""

    _every = EVERY_SECONDS

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._tell, self._clock, self._pace = tell, clock, Pace(clock)
        self._name, self._rounds, self._seen, self._shown_at = "", 0, "", 0.0
        self._form = ACCURACY

    def begin(self, run: Run, rounds: int) -> None:
        """A run begins, or resumes."""
        self._name, self._rounds, self._seen = run.title, run.job.rounds, ""
        self._form = run.job.counting.score
        self._pace, self._shown_at = Pace(self._clock), self._clock()
        state = f"resumes after round {rounds}" if rounds else "begins"
        # A finished run is not run again: no line.
        if rounds < run.job.rounds:
            self._tell(f"{self._name}: {state}, of {self._rounds}")

    def work(self, doing: Doing, silos: int) -> None:
        """Not shown."""

    def silo(self) -> None:
        """Not shown."""

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """A round is done."""
        self._pace.tick()
        self._seen = scores(measured, self._form) or self._seen
        now = self._clock()
        # The last line has the result, so it is always written.
        last = rounds == self._rounds
        if last or now - self._shown_at >= self._every:
            self._shown_at = now
            line = f"{self._name}: round {rounds} of {self._rounds}, {self._pace.rate()}"
            if not last:
                line += f", {self._pace.left(self._rounds - rounds)} left"
            if self._seen:
                line += f"; {self._seen}"
            self._tell(line)


class ReplacedLines(Lines):
    """A line per run, for a notebook, which is replaced as the run proceeds.

    It also says how many silos of the round are done.
    """

    _every = NOTEBOOK_SECONDS

    def __init__(
        self, replace: Callable[[Sequence[str]], None], clock: Callable[[], float] = monotonic
    ) -> None:
        """``replace`` shows lines in place of those before."""
        super().__init__(self._retell, clock)
        self._replace = replace
        self._lines: dict[str, str] = {}  # by run
        self._doing, self._done, self._silos = "", 0, 0

    def work(self, doing: Doing, silos: int) -> None:
        """The next round, or an evaluation, over so many silos."""
        self._doing, self._done, self._silos = doing, 0, silos

    def silo(self) -> None:
        """One of its silos is done."""
        self._done += 1
        now = self._clock()
        if now - self._shown_at >= self._every:
            self._shown_at = now
            *others, line = self._lines.values()
            work = f"{self._doing} {self._done} of {self._silos} silos"
            self._replace([*others, f"{line}; {work}"])

    def _retell(self, line: str) -> None:
        self._lines[self._name] = line
        self._replace([*self._lines.values()])


def scores(measured: Sequence[Measured], form: ScoreForm) -> str:
    """Scores of an evaluation, as means over silos ("macro"); empty if there was none.

    The last of them is of the same answer for all records of a silo.
    """
    found = {one.measure: one for one in measured}
    looks = {name: found[measure] for name, measure in SHOWN.items() if measure in found}
    shown = [f"{name} {form.text(look.macro)}" for name, look in looks.items()]
    if not looks:
        return ""
    constant = form.text(next(iter(looks.values())).constant)
    return f"{form.name} {', '.join(shown)}, the same answer for all {constant} (macro)"
