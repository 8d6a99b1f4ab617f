"""All silos of a job on one machine, without a network: the same functions as the federation.

A simulation runs round by round. Between two rounds its whole state can be saved (``Snapshot``) and
resumed from: the same job, records and engine then end in the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import filterfalse

from torch import Tensor

from ...errors import LocalError
from ..course import SiloState
from ..data.dataset import Dataset
from ..exchange.delivery import CoordinatorState
from ..exchange.parts import WEIGHT, Exchanges, Mix, Part, Tensors
from ..exchange.plain import PLAIN, PlainExchange
from ..job.job import Job
from ..method import Method, initial_state
from ..numerics.devices import CPU, in_memory, room
from ..training.accountant import PrivateSilo
from ..training.left_out import apart, encoded, with_left
from ..training.loop import silent
from ..training.record_checks import check_records, check_training
from ..training.silo_round import Evaluation, RoundReport, final_report, kept
from .aggregation import MemoryArchive, Shelved, close_round, deliver_all
from .attendance import EVERYONE, Attendance
from .engine import Engine, Records, Serial, SiloWork
from .states import Beginnings, Held, States, load

IN_MEMORY = 2**29  # bytes of states, and of states before a first round, that stay in memory
AT_ONCE = 2**30  # bytes of states that one look takes at a time
NO_STATE = SiloState({})
Shards = Mapping[str, tuple[Dataset, Dataset]]  # silo → (training records, test records)


def nothing() -> None:
    """No progress shown.

    It is the default of ``done``, which is called after each silo.
    """


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A simulation between two rounds: ``round`` is the next.

    ``held`` are the states of silos that are not as at the beginning, ``trained`` the silos that
    ever trained. Later rounds do not change a snapshot.
    """

    round: int
    held: Mapping[str, Held]
    trained: frozenset[str]
    coordinator: CoordinatorState
    shelved: Shelved


@dataclass(frozen=True, eq=False)
class Round:
    """The outcome of one round: a report per silo of its cohort, and the coordinator's sums.

    ``metrics`` are the cohort's sums of METRICS. In a federation ``reports`` stay at the silos.
    ``bytes_up`` and ``bytes_down`` are those of all tensors that the cohort uploaded and received:
    in the clear, as the job's codec makes them, without weights and what frames them. ``absent``
    are drawn silos that were away, ``late`` those whose uploads came too late; ``seconds`` are
    simulated, None without a clock.
    """

    reports: Mapping[str, RoundReport]
    metrics: Mapping[str, Tensor]
    bytes_up: int = 0
    bytes_down: int = 0
    absent: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    seconds: float | None = None


class Simulation:
    """A job between its first round and its last, trained by an engine.

    ``weights``, by silo and part, are initial values of personal parts (pretrained.load_weights).
    ``exchanges`` folds the contributions. ``begun`` is the snapshot to resume from; None: round 0.
    ``attendance`` says who is there; ``check_attendance`` must accept it for the job.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        weights: Mapping[str, Mapping[str, Tensors]] | None = None,
        exchanges: Exchanges = PLAIN,
        begun: Snapshot | None = None,
        attendance: Attendance = EVERYONE,
    ) -> None:
        self._job, self._method, self._engine = job, job.method(), engine
        self._attendance = attendance
        # Parts are folded on the GPU if all silos' versions fit there; the bits are the same.
        self._exchanges, self._device = exchanges, CPU
        if exchanges is PLAIN and versions_bytes(job) <= room(engine.device):
            self._device = engine.device
        if self._device != CPU:
            self._exchanges = PlainExchange(self._device)
        begun = begun or Snapshot(
            0, {}, frozenset(), self._method.begin(), MemoryArchive().shelved()
        )
        self._round = begun.round
        made = partial(_beginning, job, self._method, weights or {})
        beginning = Beginnings(made, len(job.silos), IN_MEMORY)
        self._states = States(job.silos, beginning, begun.held)
        self._trained = set(begun.trained)
        self._coordinator = begun.coordinator
        self._last_delivery = 0
        with in_memory():
            self._archive = MemoryArchive(begun.shelved, self._device)

    @property
    def round(self) -> int:
        """The next round; ``job.length`` after the last.

        A simulation that resumes a snapshot starts at the snapshot's round.
        """
        return self._round

    @property
    def states(self) -> Mapping[str, SiloState]:
        """The state of each silo, loaded when it is asked for.

        A round replaces the states of its cohort, and changes none in place.
        """
        return self._states

    def rest(self, lying: Mapping[str, Callable[[], SiloState]]) -> None:
        """Let go of states that lie elsewhere by now; each function reads one."""
        self._states = self._states.replaced(lying)

    @property
    def coordinator(self) -> CoordinatorState:
        """The state of the coordinator half.

        Each round replaces it.
        """
        return self._coordinator

    def snapshot(self) -> Snapshot:
        """Everything that a later run needs to resume; no later round changes it."""
        held, trained = self._states.held, frozenset(self._trained)
        return Snapshot(self._round, held, trained, self._coordinator, self._archive.shelved())

    @in_memory()
    def step(self, done: Callable[[], None] = nothing) -> Round:
        """Run the next round; ``done`` is called for each silo that has trained.

        An exception leaves the simulation as it was before the round.
        """
        round_, method, exchanges = self._round, self._method, self._exchanges
        up, present = self._job.up(round_), self._attendance.present(self._job, round_)
        # Outcomes are kept apart until the round is closed, so an exception changes nothing.
        work = self._work(present, self._attendance.most_steps(self._job))
        outcomes = self._engine.train(round_, work, done)
        # Whoever is late has trained for nothing, as in a federation.
        steps = {silo: _steps(outcomes[silo].report) for silo in present}
        end = self._attendance.closed(self._job, round_, steps)
        cohort = end.members
        spool: dict[tuple[str, str], Mapping[str, Tensor]] = {}
        uploaded = 0
        states: dict[str, SiloState] = {}
        delivered = {one.silo: one.delivered for one in work}
        for silo in cohort:
            own = outcomes[silo].contributions
            laid = {part.name: exchanges.contribute(part, own[part.name]) for part in up}
            # States may lie on the disk: they are read again only where a codec left something out.
            before = {} if self._job.transport is None else apart(self._states[silo])[1]
            given, left = encoded(up, laid, before, delivered[silo])
            states[silo] = with_left(outcomes[silo].state, left)
            for part in up:
                uploaded += _bytes(given[part.name]) - _weight_bytes(part)
                spool[part.name, silo] = self._spooled(part, given[part.name])

        # A coordinator reads the same from files.
        def read(part: str, silo: str, name: str) -> Tensor:
            return spool[part, silo][name]

        closed = close_round(
            method, exchanges, self._coordinator, round_, cohort, up, read, self._archive
        )

        # From here on nothing raises.
        self._coordinator, metrics = closed
        self._states = self._states.replaced(states)
        self._trained |= set(cohort)
        self._round += 1
        reports = {silo: outcomes[silo].report for silo in cohort}
        admitted = self._attendance.admitted(self._job, round_)
        absent = tuple(filterfalse(present.__contains__, admitted))
        return Round(reports, metrics, uploaded, _delivered(work), absent, end.late, end.seconds)

    def look(self, done: Callable[[], None] = nothing) -> Mapping[str, Evaluation]:
        """Evaluate every silo with its next delivery, and as it is now; nothing changes.

        ``done`` is called for each silo. Silos that never took part are evaluated, too.
        """
        found: dict[str, Evaluation] = {}
        for some in self.looks(done):
            found |= some
        return found

    def looks(self, done: Callable[[], None] = nothing) -> Iterator[Mapping[str, Evaluation]]:
        """``look``, for as many silos at a time as have a place in memory with their states."""
        self._last_delivery = 0
        for silos in self._batches():
            yield self._look(silos, done)

    @in_memory()
    def _look(self, silos: Sequence[str], done: Callable[[], None]) -> Mapping[str, Evaluation]:
        work = self._work(silos)
        self._last_delivery += _delivered(work)
        return self._engine.look(self._round, work, done)

    def _batches(self) -> Iterator[Sequence[str]]:
        """All silos, in job order, by what their states take together; usually all at once."""
        silos = self._job.silos
        # Silos of one job have models of much the same size.
        each = max(1, self._states[silos[0]].nbytes)
        count = max(1, AT_ONCE // each)
        for first in range(0, len(silos), count):
            yield silos[first : first + count]

    def finish(self, last: Mapping[str, Evaluation]) -> None:
        """Let every silo keep its model, according to a ``look`` after the last round.

        ``silo_round.kept`` chooses the model. LocalError before the last round is over.
        """
        if self._round != self._job.length:
            raise LocalError(
                f"job {self._job.name!r} has done {self._round} of {self._job.length} rounds; run"
                " the rest"
            )
        states = {silo: self.kept(silo, seen) for silo, seen in last.items()}
        self._states = self._states.replaced(states)

    def kept(self, silo: str, seen: Evaluation) -> SiloState:
        """The model that a silo keeps, by its part of a ``look`` after the last round."""
        return kept(self._method, apart(self._states[silo])[0], seen, silo in self._trained)

    def _lying(self, silo: str) -> Held:
        """A silo's state without what a codec left out, which methods do not know."""
        held = self._states.lying(silo)
        return held if self._job.transport is None else partial(_bare, held)

    def _spooled(self, part: Part, contribution: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A contribution where it is folded."""
        # The GPU may run out of memory: that must happen before the archive changes.
        if part.exchange != Mix():
            return contribution
        return {name: tensor.to(self._device) for name, tensor in contribution.items()}

    @property
    def last_delivery(self) -> int:
        """Bytes of the tensors that the last ``look`` delivered, to all silos; at first 0."""
        return self._last_delivery

    @in_memory()
    def work(self, silos: Sequence[str]) -> list[SiloWork]:
        """The silos with what the next round would deliver to them; nothing changes."""
        return self._work(silos)

    def _work(
        self, silos: Sequence[str], most_steps: Mapping[str, int] | None = None
    ) -> list[SiloWork]:
        delivered = deliver_all(
            self._method, self._exchanges, self._coordinator, self._round, silos, self._archive
        )
        limits = most_steps or {}
        return [
            SiloWork(silo, self._lying(silo), down, limits.get(silo))
            for silo, down in delivered.items()
        ]


def _bare(held: Held) -> SiloState:
    return apart(load(held))[0]


def _steps(report: RoundReport) -> int:
    """Optimiser steps; a private round, which has no clock, does not count them."""
    return report.work.steps if report.work is not None else 0


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _weight_bytes(part: Part) -> int:
    return sum(spec.nbytes for spec in part.given if spec.name == WEIGHT)


def _delivered(work: Sequence[SiloWork]) -> int:
    """Bytes of all tensors of these deliveries."""
    return sum(_bytes(part) for one in work for part in one.delivered.values())


def _beginning(
    job: Job, method: Method, weights: Mapping[str, Mapping[str, Tensors]], silo: str
) -> SiloState:
    """The state of a silo before its first round."""
    # In a private job a silo's own weights may have been trained on its records.
    public = None if job.privacy is None else ()
    return initial_state(method, silo, weights.get(silo), public)


def without_state(seen: Evaluation) -> Evaluation:
    """What a look counted, without the model, of which thousands need not be kept."""
    return replace(seen, delivered=NO_STATE)


def versions_bytes(job: Job) -> int:
    """Bytes of all silos' versions that a Mix keeps by the last round."""
    per_silo = 0
    for part in job.up(job.length - 1):
        if part.exchange == Mix():
            per_silo += sum(spec.nbytes for spec in part.tensors)
    return len(job.silos) * per_silo


@dataclass(frozen=True)
class SimulationResult:
    """The results of a simulated job.

    ``history`` has for each silo one report per round in which it trained, and one of the final
    delivery.
    """

    # by silo: the rounds in which it trained, then the final delivery
    history: Mapping[str, tuple[RoundReport, ...]]
    metrics: tuple[Mapping[str, Tensor], ...]  # by round: the sums that the coordinator sees
    states: Mapping[str, SiloState]  # the model that each silo keeps
    coordinator: CoordinatorState

    def scores(self, product: str) -> dict[str, float]:
        """The task's score by silo after the last round; ``product`` is "delivered" or "trained".

        In a classification it is the share of the silo's test records that are right.
        """
        return {silo: getattr(reports[-1], product).score for silo, reports in self.history.items()}


def simulate(
    job: Job,
    shards: Shards,
    progress: Callable[[int, int], None] = silent,
    weights: Mapping[str, Mapping[str, Tensors]] | None = None,
    exchanges: Exchanges | None = None,
    private: Callable[[str], PrivateSilo] | None = None,
) -> SimulationResult:
    """Run a job to its end in this process; ``progress`` receives the rounds done and their total.

    ``weights`` and ``exchanges`` are those of ``Simulation``. ``private`` makes each silo's privacy
    account in a private job; LocalError in other jobs.
    """
    if job.privacy is None and private is not None:
        raise LocalError(f"job {job.name!r} has no [privacy] table; pass no accounts")
    if job.privacy is not None and private is None:
        raise LocalError(
            f"job {job.name!r} has a [privacy] table; pass simulate() the accounts of its silos"
        )

    records = {silo: Records(*sides) for silo, sides in shards.items()}
    check_population(job, records)
    paying = None
    if private is not None:
        paying = {silo: private(silo) for silo in job.silos}
    simulation = Simulation(job, Serial(job, records, paying), weights, exchanges or PLAIN)
    history: dict[str, list[RoundReport]] = {silo: [] for silo in job.silos}
    # Round by round, the sums of test counts that a coordinator would see.
    metrics: list[Mapping[str, Tensor]] = []
    while simulation.round < job.length:
        round_ = simulation.step()
        for silo, report in round_.reports.items():
            history[silo].append(report)
        metrics.append(round_.metrics)
        progress(simulation.round, job.length)

    # The last evaluation is of what one more delivery would bring, as a silo keeps its model.
    last = simulation.look()
    simulation.finish(last)
    for silo, seen in last.items():
        history[silo].append(final_report(job, seen))
    reports = {silo: tuple(own) for silo, own in history.items()}
    return SimulationResult(reports, tuple(metrics), simulation.states, simulation.coordinator)


def check_population(job: Job, records: Mapping[str, Records]) -> None:
    """LocalError unless these are the records of the job's silos, and fit it.

    In a federation each silo checks its own records in the same way.
    """
    if set(records) != set(job.silos):
        raise LocalError(
            f"data was given for silos {sorted(records)}, the job names {sorted(job.silos)}"
        )
    for silo in job.silos:
        own = records[silo]
        check_records(job, own.train, f"training records of silo {silo!r}")
        check_records(job, own.test, f"test records of silo {silo!r}")
        if own.validation is not None:
            check_records(job, own.validation, f"validation records of silo {silo!r}")
        check_training(job, own.train, silo, f"silo {silo!r}")
