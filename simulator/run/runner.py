"""Runs one run from where its folder left off to its end."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic

from ...algorithms.engines.engine import Engine
from ...algorithms.engines.simulation import Simulation, Snapshot, without_state
from ...algorithms.job.job import Job
from ...algorithms.training.silo_round import Evaluation
from ...errors import CancelledError
from ..engines.device import Device
from ..engines.signals import Stoppable, StopSignal
from ..experiment.plan import Population, Run, Schedule
from .flops import FlopMeter
from .folder import RunFolder, opened
from .history import Measured, of_look, of_round
from .progress import Follow, RunProgress, Track, untracked
from .work_file import RoundWork, work_line


def complete(
    out: Path,
    run: Run,
    population: Population,
    schedule: Schedule,
    engine: Callable[[Job], Engine],
    watch: RunProgress,
    stop: StopSignal,
    *,
    device: Device = "cpu",
    track: Track = untracked,
) -> None:
    """Run the rest of a run: all of it in a new folder, nothing in that of a finished run.

    ``device`` is the engine's; ``track`` tells a tool what is measured. CancelledError where
    ``stop`` was set; the snapshot then holds the rounds that were complete.

    The folder is locked meanwhile. LocalError if it belongs to another run, or a method fails.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(opened(out, run, population, schedule, device))
        kept = (folder.history, folder.work)
        follow = stack.enter_context(track(folder.path, run, *kept))
        # Report it, so that the bar of all runs advances.
        if folder.finished:
            watch.begin(run, run.job.rounds)
            return

        # an engine may take a GPU's memory, which a finished run has no need of
        # A signal may interrupt training, but never a write.
        trainer = stack.enter_context(closing(Stoppable(engine(run.job), stop)))
        simulation = Simulation(run.job, trainer, begun=folder.begun(), attendance=run.attendance)
        meter = FlopMeter(run.job, population.records, trainer.device)

        # the last round ends with a look, so a run that lacks only that is not shown as finished
        done = run.job.rounds_before(simulation.round)
        watch.begin(run, min(done, run.job.rounds - 1))
        _Rounds(run, simulation, folder, schedule, watch, follow, meter).to_the_end()


class _Rounds:
    def __init__(
        self,
        run: Run,
        simulation: Simulation,
        folder: RunFolder,
        schedule: Schedule,
        watch: RunProgress,
        follow: Follow,
        meter: FlopMeter,
    ) -> None:
        self._meter = meter
        self._run, self._job, self._simulation = run, run.job, simulation
        self._folder, self._schedule, self._watch, self._follow = folder, schedule, watch, follow

    def to_the_end(self) -> None:
        # ``whole``: after the last complete round; ``kept``: the round of the last snapshot.
        whole, kept = self._simulation.snapshot(), self._simulation.round
        try:
            self._look_again()
            while self._simulation.round < self._job.length:
                self._next(whole)
                whole = self._simulation.snapshot()
                if self._is_due(whole):
                    self._simulation.rest(self._folder.save_snapshot(whole))
                    # What was let go of must not stay in memory by the name of the last round.
                    whole, kept = self._simulation.snapshot(), whole.round
            # Outside the loop: a resumed run may lack only this.
            self._finish()
        except CancelledError:
            # only complete rounds are kept; the one that was cut short is trained again
            if whole.round > kept:
                self._folder.save_snapshot(whole)
            rounds = self._job.rounds_before(whole.round)
            raise CancelledError(
                f"{self._run.title}: stopped; the same command resumes after"
                f" round {rounds} of {self._job.rounds}"
            ) from None

    def _look_again(self) -> None:
        """The look at which a run ended that was then lengthened, where it is one of these looks.

        ``_next`` takes it with the round, so that the history is that of a run that never ended.
        """
        rounds = self._job.rounds_before(self._simulation.round)
        if rounds and self._is_looked_after(rounds) and not self._folder.has_look(rounds):
            looked = self._look()
            self._folder.record(looked)
            # What its round took was told with the round.
            self._follow(looked, RoundWork(self._simulation.round, rounds, 0, 0, {}))

    def _is_looked_after(self, rounds: int) -> bool:
        # Newcomers are evaluated as they join, too.
        due = rounds % self._schedule.look_every == 0 or rounds == self._run.attendance.join_after
        # After the last round, ``_finish`` evaluates, once tuning is done.
        return due and rounds < self._job.rounds

    def _is_due(self, whole: Snapshot) -> bool:
        """Whether a snapshot is written after this round."""
        rounds = self._job.rounds_before(whole.round)
        # Always after the last round: ``finish`` needs that snapshot.
        return rounds % self._schedule.snapshot_every == 0 or whole.round == self._job.length

    def _next(self, whole: Snapshot) -> None:
        """A round and its measures; ``_finish`` takes the look after the last.

        ``whole`` is the simulation before the round.
        """
        job, round_ = self._job, self._simulation.round
        # Equal for a round that does not count as training, such as a census.
        before, rounds = job.rounds_before(round_), job.rounds_before(round_ + 1)
        # Only the silos of the cohort that are there train.
        self._watch.work("training", len(self._run.attendance.present(job, round_)))
        begun, states = monotonic(), self._simulation.states
        done = self._simulation.step(self._watch.silo)
        seconds, reports = monotonic() - begun, done.reports
        flops = self._meter.count(whole, states, reports)
        work = work_line(round_, rounds, done, flops)
        self._folder.record_work(work, seconds)
        if rounds == before:
            return  # a census, or what tunes after the last round
        measured = of_round(rounds, reports)
        if self._is_looked_after(rounds):
            measured += self._look()

        # written before it is shown: nobody sees a measure that the history does not have
        self._folder.record(measured)
        self._follow(measured, work)
        if rounds < job.rounds:
            self._watch.round(rounds, measured)

    def _finish(self) -> None:
        self._watch.work("looking", len(self._job.silos))
        last: dict[str, Evaluation] = {}
        for some in self._simulation.looks(self._watch.silo):
            self._folder.keep_models(
                (silo, self._simulation.kept(silo, look)) for silo, look in some.items()
            )
            last |= {silo: without_state(look) for silo, look in some.items()}
            # These models must be gone from memory before the next are made.
            del some
        # Every silo receives the last results, though nothing trains on them.
        down = self._simulation.last_delivery
        work = RoundWork(self._job.length, self._job.rounds, 0, down, {})
        self._folder.record_work(work, 0.0)
        measured = of_look(self._job.rounds, last)
        seen = {silo: look.test for silo, look in last.items()}
        self._folder.finish(measured, self._simulation.coordinator, seen)
        self._follow(measured, work)
        self._watch.round(self._job.rounds, measured)

    def _look(self) -> tuple[Measured, ...]:
        self._watch.work("looking", len(self._job.silos))
        rounds = self._job.rounds_before(self._simulation.round)
        looks: dict[str, Evaluation] = {}
        for some in self._simulation.looks(self._watch.silo):
            looks |= {silo: without_state(look) for silo, look in some.items()}
            # as in ``_finish``
            del some
        return of_look(rounds, looks)
