"""The engine that trains silos at once: ``local_round`` of each, with its values along a first axis (stacked.py).

States and gifts lie on the host, where the method's own functions work on them silo by silo. Records lie on the device,
and for the time of a call the values of as many silos as go at once.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import LocalError
from .alike import architecture, course, specs
from .engine import Records, Work
from .job import Job
from .local_round import Look, Outcome, Report, Seen, facts_of, handed, metrics, stage_stream, take_delivery
from .method import METRICS, Facts, SiloState, Stage
from .models import input_shape
from .resident import Resident
from .stacked import Silos, evaluate, measure, saved_bytes, train
from .training import PLAIN, Modules, batch_coupled, check_loss, check_trains

BYTES_AT_ONCE = 4 * 2**30  # of values and of what a backward pass keeps, roughly
COPIES = 5  # of a silo's values: themselves, their gradients, momentum, and two on the way

Side = Literal["train", "test", "validation"]


class Stacked:
    """Trains silos on a device at once, ``at_once`` of them at most; left out, as many as take about 4 GiB.

    Silos of another architecture or with other stages go in groups of their own. One job gives the same bits again
    where ``at_once`` is the same.
    """

    def __init__(
        self, job: Job, records: Mapping[str, Records], device: str = "cpu", at_once: int | None = None
    ) -> None:
        if job.privacy is not None:
            raise LocalError(
                f"job {job.name!r} is private: each silo pays for its own steps, and so trains by itself; simulate it "
                "with silos one by one"
            )
        if at_once is not None and at_once < 1:
            raise LocalError(f"at_once = {at_once}: at least one silo trains at a time; raise it or leave it out")
        self._job, self._method, self._records, self._at_once = job, job.method(), records, at_once
        self._resident = Resident(records, device)
        self._templates: dict[Hashable, Modules] = {}
        self._architectures: dict[str, Hashable] = {}

    def train(self, round_: int, work: Sequence[Work], done: Callable[[], None]) -> dict[str, Outcome]:
        """``local_round`` of each."""
        method = self._method
        facts, states = self._delivered(round_, work)
        before: dict[str, int] = {}
        for group in self._groups(states, {}):
            silos = self._silos(group, states)
            before |= self._correct(silos, group, "test")
            with self._running(group):
                sums = measure(method, silos, self._places(group, "train"))
            facts |= {silo: replace(facts[silo], measured=own) for silo, own in zip(group, sums, strict=True)}
        stages = {silo: method.stages(state, facts[silo]) for silo, state in states.items()}
        outcomes: dict[str, Outcome] = {}
        for group in self._groups(states, stages):
            silos = self._silos(group, states)
            loss: Mapping[str, float] = {}
            for number in range(len(stages[group[0]])):
                loss = self._train(round_, number, silos, {silo: stages[silo][number] for silo in group})
            after = self._correct(silos, group, "test")
            for silo, parts in zip(group, _apart(silos), strict=True):
                own, trained = self._records[silo], SiloState(parts, states[silo].extra)
                counts = (len(own.train), len(own.test), before[silo], after[silo])
                report = Report(round_, *counts, loss.get(silo))
                gifts = {**method.give(trained, facts[silo]), METRICS.name: metrics(report)}
                outcomes[silo] = Outcome(trained, gifts, report)
                done()
        return {one.silo: outcomes[one.silo] for one in work}

    def look(self, round_: int, work: Sequence[Work], done: Callable[[], None]) -> dict[str, Look]:
        """``local_round.look`` at each."""
        own = {one.silo: one.state for one in work}
        _, fresh = self._delivered(round_, work)
        looks: dict[str, Look] = {}
        for group in self._groups(own, {}):
            new, old = self._silos(group, fresh), self._silos(group, own)
            test = self._seen(new, old, group, "test")
            validation = self._seen(new, old, group, "validation")
            for silo in group:
                looks[silo] = Look(fresh[silo], test[silo], validation.get(silo))
                done()
        return {one.silo: looks[one.silo] for one in work}

    def close(self) -> None:
        """Nothing was begun; the records leave the device with the engine."""

    def _delivered(self, round_: int, work: Sequence[Work]) -> tuple[dict[str, Facts], dict[str, SiloState]]:
        facts = {one.silo: facts_of(self._job, one.silo, round_, self._records[one.silo].train) for one in work}
        states = {
            one.silo: take_delivery(self._method, self._job, one.state, facts[one.silo], one.delivered) for one in work
        }
        return facts, states

    def _train(self, round_: int, number: int, silos: Silos, stages: Mapping[str, Stage]) -> dict[str, float]:
        """One stage of all, in place; the mean loss of the last epoch by silo."""
        group, stage = list(stages), next(iter(stages.values()))
        modules = handed(silos.modules, stage)
        try:
            check_trains(modules, stage)
        except LocalError as error:
            raise LocalError(f"round {round_} at silo {group[0]!r}: {error}") from error
        wrap, size, pieces = batch_coupled(modules), self._job.batch_size, []
        for silo, places in zip(group, self._places(group, "train"), strict=True):
            rng = stage_stream(self._method, self._job, silo, round_, number)
            drawn = (PLAIN.batches(stage, len(places), size, rng, wrap) for _ in range(stage.epochs))
            pieces.append([places.start + batch for epoch in drawn for batch in epoch])
        device = self._resident.x.device
        context = {
            name: torch.stack([own.context[name] for own in stages.values()]).to(device) for name in stage.context
        }
        values = {part: silos.values[part] for part in modules}
        with self._running(group):
            losses = train(replace(silos, modules=modules, values=values), stage, context, pieces).T.tolist()
        found = {}
        for silo, own, batches in zip(group, losses, pieces, strict=True):
            steps = len(batches)
            found[silo] = own[:steps]
        for silo in sorted(group, key=self._job.silos.index):
            for loss in found[silo]:
                try:
                    check_loss(loss, stage.optimiser)
                except LocalError as error:
                    raise LocalError(f"round {round_} at silo {silo!r}: {error}") from error
        return {silo: _last(own, stage.epochs) for silo, own in found.items()}

    def _seen(self, new: Silos, old: Silos, group: Sequence[str], side: Side) -> dict[str, Seen]:
        """Of the silos that have records of the side."""
        delivered, trained = self._correct(new, group, side), self._correct(old, group, side)
        counts = {silo: len(places) for silo, places in zip(group, self._places(group, side), strict=True)}
        return {silo: Seen(n, delivered[silo], trained[silo]) for silo, n in counts.items() if n}

    def _correct(self, silos: Silos, group: Sequence[str], side: Side) -> dict[str, int]:
        with self._running(group):
            return dict(zip(group, evaluate(self._method, silos, self._places(group, side)), strict=True))

    def _places(self, group: Sequence[str], side: Side) -> list[range]:
        return [self._resident.places(getattr(self._records[silo], side)) for silo in group]

    def _groups(self, states: Mapping[str, SiloState], stages: Mapping[str, Sequence[Stage]]) -> Iterator[list[str]]:
        """Silos that go at once, those with more records first: in each step those that still train come first."""
        alike: dict[Hashable, list[str]] = {}
        for silo in sorted(states, key=lambda silo: -len(self._records[silo].train)):
            key = self._architecture(silo), course(stages.get(silo, ()))
            alike.setdefault(key, []).append(silo)
        for silos in alike.values():
            size = self._at_once or self._fitting(silos, stages.get(silos[0], ()))
            yield from (silos[start : start + size] for start in range(0, len(silos), size))

    def _architecture(self, silo: str) -> Hashable:
        if silo not in self._architectures:
            modules = {part: module.to("meta") for part, module in self._method.modules(silo).items()}
            kept = [id(t) for module in modules.values() for t in module.state_dict(keep_vars=True).values()]
            held = {id(t) for module in modules.values() for t in (*module.parameters(), *module.buffers())}
            if len(kept) != len(held) or set(kept) != held:
                raise LocalError(
                    f"the model of silo {silo!r} shares tensors between layers, or keeps some out of its state, so "
                    "silos cannot train at once; simulate it with silos one by one"
                )
            key = self._architectures[silo] = architecture(modules)
            self._templates.setdefault(key, modules)
        return self._architectures[silo]

    def _fitting(self, group: Sequence[str], stages: Sequence[Stage]) -> int:
        """How many silos of a group go at once."""
        modules = self._templates[self._architecture(group[0])]
        most = len(self._records[group[0]].train)
        records = max([self._job.batch_size, *(most for stage in stages if stage.full_batch)])
        values = sum(tensor.nbytes for module in modules.values() for tensor in module.state_dict().values())
        kept = saved_bytes(self._method.predict, modules, input_shape(self._job.model))
        each: int = COPIES * values + 2 * records * kept
        return max(1, BYTES_AT_ONCE // each)

    def _silos(self, group: Sequence[str], states: Mapping[str, SiloState]) -> Silos:
        """Their values on the device; LocalError where a state and the model do not fit."""
        modules, device = self._templates[self._architecture(group[0])], self._resident.x.device
        for silo in group:
            _check_fit(silo, modules, states[silo])
        values = {
            part: {
                name: torch.stack([states[silo].parts[part][name] for silo in group]).to(device)
                for name in module.state_dict()
            }
            for part, module in modules.items()
        }
        return Silos(modules, values, self._resident.x, self._resident.y)

    @contextmanager
    def _running(self, group: Sequence[str]) -> Iterator[None]:
        """Sums as exact as the tensors, the same again in the next run; LocalError for what cannot be run at once."""
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False, fp32_precision="ieee")
        try:
            with exact:
                yield
        except torch.OutOfMemoryError as error:
            raise LocalError(
                f"{len(group)} silos at once take more memory than {self._resident.x.device} has: {error}; have fewer "
                "train at once"
            ) from error
        except RuntimeError as error:
            raise LocalError(
                f"method {self._method.name!r} cannot train many silos at once: {error}; simulate it with silos one "
                "by one"
            ) from error


def _check_fit(silo: str, modules: Modules, state: SiloState) -> None:
    wanted = {part: specs(module.state_dict()) for part, module in modules.items() if module.state_dict()}
    if {part: specs(held) for part, held in state.parts.items() if held} != wanted:
        raise LocalError(f"the state of silo {silo!r} does not fit the job's model; begin the simulation anew")


def _last(losses: Sequence[float], epochs: int) -> float:
    """The mean over the last epoch."""
    own = losses[len(losses) - len(losses) // epochs :]
    return sum(own) / len(own)


def _apart(silos: Silos) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Each silo's own values, on the host."""
    host = {part: {name: tensor.cpu() for name, tensor in named.items()} for part, named in silos.values.items()}
    for silo in range(silos.count):
        yield {part: {name: tensor[silo].clone() for name, tensor in named.items()} for part, named in host.items()}
