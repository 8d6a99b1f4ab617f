"""The engine that trains silos at once: ``local_round`` of each, along a first axis of values.

vmap_training.py has the local loop. States and contributions lie on the host, where the method's
own functions work on them silo by silo. Records lie on the device, for the time of a call the
values of as many silos as go at once, and between rounds copies of these (device_copies.py).
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, starmap
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import LocalError
from ..course import Change, Course, Facts, SiloState, Stage, Survey, settled
from ..exchange.parts import nbytes_of
from ..job.job import Job
from ..method import Method
from ..models.build import draws_randomly, input_shape, maps
from ..numerics.devices import Precision, exact, on_host, room, stacked
from ..tasks.counting import Tally
from ..training.loop import PLAIN, Modules, batch_coupled, check_loss, check_trains
from ..training.silo_round import (
    Evaluation,
    RoundOutcome,
    RoundReport,
    Seen,
    facts_of,
    handed,
    local_work,
    metrics,
    stage_stream,
    take_delivery,
)
from .alignment import joined, put_back, shapes
from .convolutions import Form, in_parallel, prepare
from .cuda_graphs import AsItIs, Recorder
from .device_copies import DeviceCopies
from .engine import Records, Shortened, SiloWork
from .grouping import architecture, course, specs
from .vmap_batches import Pieces, Resident
from .vmap_evaluation import chunk, evaluate, measure, over_one_silo, saved_bytes
from .vmap_training import Bench, Silos, Trained, check_odd, rows_of, train

# Copies of a silo's values that a step has at a time: two at places that stay, momentum, gradients,
# before and after the step, two on the way.
COPIES = 8
NO_ENGINE = "unable to find an engine"  # in cuDNN's error, by torch

T = TypeVar("T", Stage, Change)
Side: TypeAlias = Literal["train", "test", "validation"]
States: TypeAlias = Mapping[str, SiloState]


@dataclass(frozen=True, eq=False)
class _Template:
    """Modules of one architecture without values, and the memory that they take.

    ``value_bytes`` per silo, ``record_bytes`` per record of a backward pass; ``looked`` is how many
    of a silo's records are evaluated at once. ``parallel``: each silo's step is computed by itself.
    """

    key: Hashable
    modules: Modules
    value_bytes: int
    record_bytes: int
    looked: int
    parallel: bool


class Stacked:
    """Trains silos on a device at once, at most ``at_once`` of them; None: as many as fit.

    With a ``recorder`` the device replays steps; ``precision`` is that of training steps alone,
    ``convolutions`` are computed in that form. Silos of another architecture or with other stages
    go in groups of their own. One job gives the same bits again where ``at_once`` is the same.
    LocalError for a private job.
    """

    def __init__(
        self,
        job: Job,
        records: Mapping[str, Records],
        device: str = "cpu",
        at_once: int | None = None,
        recorder: Recorder | None = None,
        precision: Precision = "float32",
        convolutions: Form = "faster",
    ) -> None:
        # DP-SGD clips record by record, in calls of one size, and draws from a generator per silo.
        if job.privacy is not None:
            raise LocalError(
                f"job {job.name!r} is private: each silo pays for its own steps, and so trains by"
                " itself; simulate it with silos one by one"
            )
        # Under ``vmap`` layers would draw other numbers than where silos train one by one.
        if draws_randomly(job.model) or not maps(job.model):
            why = f"torch.vmap cannot run a layer of model {job.model.name!r}"
            if draws_randomly(job.model):
                why = f"layers of model {job.model.name!r} draw, as dropout does"
            raise LocalError(
                f"job {job.name!r} cannot be stacked: {why}; simulate it with silos one by one"
            )
        if at_once is not None and at_once < 1:
            raise LocalError(
                f"at_once = {at_once}: at least one silo trains at a time; raise it or leave it out"
            )

        self._job, self._method, self._records, self._at_once = job, job.method(), records, at_once
        self._shortened = Shortened(job)
        self._resident = Resident(records, device)
        self._copies = DeviceCopies(self.device)
        self._bench = Bench(recorder or AsItIs(), precision)
        self._precision: Precision = precision
        self._convolutions: Form = convolutions
        self._by_itself = False  # whatever the form of convolutions
        self._known: dict[Hashable, _Template] = {}
        self._templates: dict[str, _Template] = {}

    @property
    def device(self) -> torch.device:
        """Where silos train."""
        return self._resident.x.device

    def train(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, RoundOutcome]:
        """The outcome of ``local_round`` at each silo.

        LocalError for silos that cannot train at once, for a loss that is not finite, and if the
        device runs out of memory; it says what to do.
        """
        method = self._method
        # ``deliver`` runs on the host, silo by silo.
        facts, states = self._delivered(round_, work)

        # Each silo's facts must be whole before its method chooses stages by them.
        before: dict[str, Tally] = {}
        for group in self._groups(states, {}):
            silos = self._silos(group, states)
            # They stay on the device until the round ends: those of one group, so that they fit.
            there = group, silos
            before |= self._counts(group, silos, "test")
            if method.measures:
                facts |= self._surveyed(Survey(method.measure), group, silos, facts)
        # A silo's half may train fewer epochs, and then has other stages than the others.
        halves: dict[str, Method] = {}
        for one in work:
            halves[one.silo] = self._shortened.of(one, len(self._records[one.silo].train)).method()
        courses: dict[str, Course] = {}
        for silo, state in states.items():
            courses[silo] = self._job.paced(halves[silo].stages(state, facts[silo]), round_)

        outcomes: dict[str, RoundOutcome] = {}
        # Grouped again, since silos with different stages cannot share calls.
        for group in self._groups(states, courses):
            loss: dict[str, float] = {}
            silos = _taken(group, there) or self._silos(group, states)
            for number, first in enumerate(courses[group[0]]):
                match first:
                    case Stage():
                        stages = _steps(Stage, group, courses, number)
                        loss = self._train(round_, number, silos, stages)
                    case Survey():
                        facts |= self._surveyed(first, group, silos, facts)
                    case Change():
                        changes = _steps(Change, group, courses, number)
                        states |= _changed(changes, self._apart(silos), states, facts)
                        silos = self._silos(group, states)
            after = self._counts(group, silos, "test")
            for silo, parts in zip(group, self._apart(silos), strict=True):
                own, state = self._records[silo], SiloState(parts, states[silo].extra)
                taken = local_work(method, self._job, courses[silo], silos.modules, len(own.train))
                report = RoundReport(
                    round_,
                    len(own.train),
                    before[silo],
                    after[silo],
                    loss.get(silo),
                    taken,
                )
                made = halves[silo].contribute(state, facts[silo])
                own_parts, kept = settled(method.name, state, made)
                contributions = {**own_parts, **metrics(self._job, report)}
                outcomes[silo] = RoundOutcome(kept, contributions, report)
                done()
        # In the order of ``work``, not of the groups.
        return {one.silo: outcomes[one.silo] for one in work}

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, Evaluation]:
        """The outcome of ``silo_round.look`` at each silo.

        Both models of a group's silos are on the device at the same time.
        """
        # Each state is loaded once.
        work = [one.loaded() for one in work]
        own = {one.silo: one.state for one in work}
        _, fresh = self._delivered(round_, work)
        looks: dict[str, Evaluation] = {}
        for group in self._groups(own, {}):
            new, old = self._silos(group, fresh), self._silos(group, own)
            test = self._seen(group, new, old, "test")
            validation = self._seen(group, new, old, "validation")
            for silo in group:
                looks[silo] = Evaluation(fresh[silo], test[silo], validation.get(silo))
                done()
        return {one.silo: looks[one.silo] for one in work}

    def close(self) -> None:
        """Drop the recorded steps; the records leave the device with the engine."""
        self._bench.clear()

    def _delivered(
        self, round_: int, work: Sequence[SiloWork]
    ) -> tuple[dict[str, Facts], dict[str, SiloState]]:
        facts: dict[str, Facts] = {}
        states: dict[str, SiloState] = {}
        for one in work:
            train_records = self._records[one.silo].train
            own = facts[one.silo] = facts_of(self._job, one.silo, round_, train_records)
            states[one.silo] = take_delivery(self._method, self._job, one.state, own, one.delivered)
        return facts, states

    # Work that the silos of a group do at once.

    def _train(
        self, round_: int, number: int, silos: Silos, stages: Mapping[str, Stage]
    ) -> dict[str, float]:
        """Train one stage of a group in place; the mean loss of the last epoch by silo."""
        # The stages of a group differ only in their contexts and in the parts that they align, so
        # the first stands for all.
        group, own = list(stages), [*stages.values()]
        common = [stage.common for stage in own]
        stage, whole = common[0], joined(silos, own)
        modules = handed(whole.modules, stage)
        with _named(round_, group[0]):
            check_trains(modules, stage)
        pieces = self._pieces(round_, number, group, stage, batch_coupled(modules))
        context: dict[str, Tensor] = {}
        for name in stage.context:
            context[name] = stacked([one.context[name] for one in common], silos.x.device)
        values = {part: whole.values[part] for part in modules}
        # The loss sees only the parts that the stage may read, as where silos train one by one.
        stack = replace(silos, modules=modules, values=values)
        draws = [(self._method, self._job, silo, round_, number, "draw") for silo in group]

        def run(stack: Silos) -> Trained:
            streams = list(starmap(stage_stream, draws))
            return train(stack, stage, context, pieces, self._bench, streams)

        with self._running(group):
            trained = self._with_an_engine(run, stack)
            losses = trained.losses.T.tolist()
            check_odd(trained.oddness)
        put_back(silos, own, values)

        # A silo with fewer batches than others has NaN for the rest.
        own_losses: dict[str, list[float]] = {}
        for silo, row, batches in zip(group, losses, pieces, strict=True):
            own_losses[silo] = row[: len(batches)]
        # In job order, as silos that train one by one are checked.
        for silo in sorted(group, key=self._job.silos.index):
            with _named(round_, silo):
                for loss in own_losses[silo]:
                    check_loss(loss, stage.optimiser)
        # ``training.train`` reports the mean over the last epoch, too.
        means: dict[str, float] = {}
        for silo, steps in own_losses.items():
            # All epochs have equally many batches.
            epoch = len(steps) // stage.epochs
            last = steps[len(steps) - epoch :]
            means[silo] = sum(last) / len(last)
        return means

    def _with_an_engine(self, run: Callable[[Silos], Trained], stack: Silos) -> Trained:
        """What ``run`` trains; each silo by itself, from now on, where cuDNN cannot compute all.

        It tells so in a warning.
        """
        try:
            return run(stack)
        # cuDNN has no kernel that is deterministic for some grouped convolutions and types.
        except RuntimeError as error:
            if stack.parallel or NO_ENGINE not in str(error).lower():
                raise
            why = f"each silo's step is computed by itself from now on: {error}"
        warnings.warn(why, RuntimeWarning, stacklevel=2)
        # What it keeps was recorded, or begun, for all silos in one call.
        self._bench.clear()
        self._by_itself = True
        return run(replace(stack, parallel=True))

    def _surveyed(
        self, survey: Survey, group: Sequence[str], silos: Silos, facts: Mapping[str, Facts]
    ) -> dict[str, Facts]:
        """The facts of the group with what a survey finds."""
        with self._running(group):
            found = measure(survey.measure, silos, self._places(group, "train"), survey.rows)
        surveyed: dict[str, Facts] = {}
        for silo, own in zip(group, found, strict=True):
            measured = {**facts[silo].measured, **own}
            surveyed[silo] = replace(facts[silo], measured=measured)
        return surveyed

    def _pieces(
        self, round_: int, number: int, group: Sequence[str], stage: Stage, wrap: bool
    ) -> list[Pieces]:
        """The batches of all epochs by silo, as ``local_round`` draws them."""
        pieces: list[Pieces] = []
        for silo, places in zip(group, self._places(group, "train"), strict=True):
            rng = stage_stream(self._method, self._job, silo, round_, number)
            size = self._job.training.batch_size
            own: list[NDArray[np.int64]] = []
            for _ in range(stage.epochs):
                batches = PLAIN.batches(stage, len(places), size, rng, wrap)
                own.extend(places.start + batch for batch in batches)
            pieces.append(own)
        return pieces

    def _counts(self, group: Sequence[str], silos: Silos, side: Side) -> dict[str, Tally]:
        with self._running(group):
            places = self._places(group, side)
            counts = evaluate(self._method, silos, places, self._job.counting)
            return dict(zip(group, counts, strict=True))

    def _seen(self, group: Sequence[str], new: Silos, old: Silos, side: Side) -> dict[str, Seen]:
        """Both models' counts by silo, for the silos that have records of the side."""
        delivered, trained = self._counts(group, new, side), self._counts(group, old, side)
        seen: dict[str, Seen] = {}
        for silo, places in zip(group, self._places(group, side), strict=True):
            if places:
                seen[silo] = Seen(delivered[silo], trained[silo])
        return seen

    def _places(self, group: Sequence[str], side: Side) -> list[range]:
        return [self._resident.places(getattr(self._records[silo], side)) for silo in group]

    def _silos(self, group: Sequence[str], states: States) -> Silos:
        """The group's values on the device; LocalError where a state does not fit the model."""
        template = self._template(group[0])
        modules = template.modules
        # Checked first: stacking tensors of other shapes would fail without naming the silo.
        for silo in group:
            _check_fit(silo, modules, states[silo])
        # Stacked on the host first: one transfer of all silos' values.
        held = [states[silo].parts for silo in group]
        values = {
            part: {
                name: self._copies.stacked([own[part][name] for own in held])
                for name in module.state_dict()
            }
            for part, module in modules.items()
        }
        parallel = template.parallel or self._by_itself
        return Silos(modules, values, self._resident.x, self._resident.y, parallel)

    def _apart(self, silos: Silos) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Each silo's own values, on the host; they stay on the device as well."""
        # Each tensor crosses to the host once, for all silos. The clones let go of the whole.
        own: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(silos.count)]
        for part, named in silos.values.items():
            host = dict(zip(named, on_host(named.values()), strict=True))
            for silo, parts in enumerate(own):
                parts[part] = {name: rows[silo].clone() for name, rows in host.items()}
            self._copies.keep([parts[part] for parts in own], named)
        return iter(own)

    # The choice of the silos that go at once.

    def _groups(self, states: States, courses: Mapping[str, Course]) -> Iterator[list[str]]:
        """Silos that train at once, those with more records first."""
        # Then the silos that still have a batch at a step are the first of their group: a slice,
        # which is a view and can be recorded, where others would be copied.
        alike: dict[Hashable, list[str]] = {}
        for silo in sorted(states, key=lambda silo: -len(self._records[silo].train)):
            template, steps = self._template(silo), courses.get(silo, ())
            key = template.key, course(steps), shapes(steps, template.modules)
            alike.setdefault(key, []).append(silo)

        # Memory is planned for the silo with the most records, which comes first.
        for silos in alike.values():
            largest = silos[0]
            size = self._at_once or self._fitting(largest, courses.get(largest, ()))
            for start in range(0, len(silos), size):
                yield silos[start : start + size]

    def _fitting(self, largest: str, steps: Course) -> int:
        """How many silos go at once if this one has the most records of them."""
        return max(1, room(self.device) // self.silo_bytes(largest, steps))

    def silo_bytes(self, silo: str, steps: Course = ()) -> int:
        """About how many bytes of the device a silo takes while it trains and is evaluated.

        It counts values, their copies, and the activations of the largest call.
        """
        template = self._template(silo)
        records = self._job.training.batch_size
        if any(isinstance(step, Stage) and step.full_batch for step in steps):
            records = len(self._records[silo].train)
        # Silos are evaluated at once, in calls as long as the largest side of any allows.
        sides = chain.from_iterable(own.sides for own in self._records.values())
        looked = min(template.looked, max(map(len, sides)))
        return COPIES * template.value_bytes + max(2 * records, looked) * template.record_bytes

    def _template(self, silo: str) -> _Template:
        if silo in self._templates:
            return self._templates[silo]
        # Without values: those are the silos' own, stacked.
        with torch.device("meta"):
            modules = self._method.modules(silo)
        kept = _own_tensors(silo, modules)
        key = architecture(modules)
        if key not in self._known:
            # With values, since ``saved_bytes`` runs a forward pass.
            whole = self._method.modules(silo)
            own = (*modules.values(), *whole.values())
            prepare(own, self._convolutions, self.device)
            shape = input_shape(self._job.model)
            record, value_bytes = saved_bytes(self._method.predict, whole, shape), nbytes_of(kept)
            looked = chunk(whole, self._resident.x.shape)
            parallel = in_parallel(self._convolutions, self.device, self._precision, record)
            # Unfolded convolutions keep more, and are unfolded where silos are computed at once.
            if not parallel:
                record = saved_bytes(over_one_silo(self._method.predict), whole, shape)
            self._known[key] = _Template(key, modules, value_bytes, record, looked, parallel)
        self._templates[silo] = self._known[key]
        return self._templates[silo]

    @contextmanager
    def _running(self, group: Sequence[str]) -> Iterator[None]:
        """Reproducible sums; LocalError for silos that cannot train at once."""
        try:
            with exact():
                yield
        # It is a RuntimeError too, so it comes first.
        except torch.OutOfMemoryError as error:
            raise LocalError(
                f"{len(group)} silos at once take more memory than {self._resident.x.device} has:"
                f" {error}; free memory there, or train them one by one (--one-by-one)"
            ) from error
        # A RuntimeError as well.
        except torch.AcceleratorError as error:
            # The device found a mistake of the code, such as an index beyond a tensor.
            if "device-side assert" in str(error):
                raise LocalError(
                    f"method {self._method.name!r}, or the model, failed on the GPU: {error};"
                    " simulate it with --device cpu to see where"
                ) from error
            raise LocalError(
                f"{self._resident.x.device} or its driver failed: {error}; start the same run"
                " again, and it resumes after the last round that was saved"
            ) from error
        # ``vmap`` raises this for code that it cannot map, such as a branch on a value.
        except RuntimeError as error:
            raise LocalError(
                f"method {self._method.name!r} cannot train silos at once: {error}; simulate it"
                " with silos one by one (--one-by-one)"
            ) from error


def _taken(group: Sequence[str], there: tuple[list[str], Silos]) -> Silos | None:
    """The group's values out of those on the device; None if they are not there."""
    held, silos = there
    if group == held:
        return silos
    if not set(group) <= set(held):
        return None
    rows = torch.tensor([*map(held.index, group)], device=silos.x.device)
    return replace(silos, values=rows_of(silos.values, rows))


@contextmanager
def _named(round_: int, silo: str) -> Iterator[None]:
    try:
        yield
    except LocalError as error:
        raise LocalError(f"round {round_} at silo {silo!r}: {error}") from error


def _own_tensors(silo: str, modules: Modules) -> list[Tensor]:
    """The tensors of a model's state; LocalError unless it has each once, and no others."""
    kept: list[Tensor] = []
    held: set[int] = set()
    for module in modules.values():
        kept.extend(module.state_dict(keep_vars=True).values())
        held.update(map(id, module.parameters()))
        held.update(map(id, module.buffers()))
    # By identity: a tensor that two layers share would be stacked twice, and then differ.
    if len(kept) != len(held) or set(map(id, kept)) != held:
        raise LocalError(
            f"the model of silo {silo!r} shares tensors between layers, or keeps some out"
            " of its state, so silos cannot train at once; simulate it with silos one"
            " by one"
        )
    return kept


def _check_fit(silo: str, modules: Modules, state: SiloState) -> None:
    # A part without tensors may be absent from the state.
    nothing = specs({})
    wanted = {part: specs(module.state_dict()) for part, module in modules.items()}
    held = {part: specs(tensors) for part, tensors in state.parts.items()}
    for part in wanted.keys() | held.keys():
        if wanted.get(part, nothing) == held.get(part, nothing):
            continue
        raise LocalError(
            f"the state of silo {silo!r} is not of the job's model; start the simulation again"
        )


def _steps(
    kind: type[T], group: Sequence[str], courses: Mapping[str, Course], number: int
) -> dict[str, T]:
    """One step of each silo's course, which are of one kind (``grouping.course``)."""
    steps: dict[str, T] = {}
    for silo in group:
        step = courses[silo][number]
        if isinstance(step, kind):
            steps[silo] = step
    return steps


def _changed(
    changes: Mapping[str, Change],
    own: Iterator[dict[str, dict[str, Tensor]]],
    states: States,
    facts: Mapping[str, Facts],
) -> dict[str, SiloState]:
    """The states of a group after each silo's change; ``own`` are the silos' values."""
    changed: dict[str, SiloState] = {}
    for (silo, step), parts in zip(changes.items(), own, strict=True):
        trained = SiloState(parts, states[silo].extra)
        changed[silo] = step.change(trained, facts[silo])
    return changed
