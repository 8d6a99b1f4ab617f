"""A method whose rounds are one step each, summed over the silos under noise that they share.

A blind private job with ``noise = "shared"`` runs as this method around its own (job.py). Local
noise protects a silo's records from whoever sees what leaves, so each silo adds all of it. Where
nobody sees more than a sum over n silos, its noise is needed once, not n times. Of each parameter
that the method sums, silo i gives, in integers::

    G_i = Σ_r y_r + z_i     y_r  the gradient of a drawn record, cut to one clip, which is u units
                                 (training/clipped_sum.py)
                            z_i  a discrete Gaussian of variance (σ u)² / h

h is the number of silos that are not taken for dishonest. So the shares of any h silos add up to
all of the noise, and the others may know theirs, or leave them out (Kairouz, Liu, Steinke, "The
distributed discrete Gaussian mechanism for federated learning with secure aggregation", ICML 2021;
security/dp/discrete_gaussian.py has the bounds). No round opens without one of its silos: the sums
of such a job are over all silos or not at all (``Job.batches``). From the sum the coordinator
computes the mean of the models that the silos would have trained in one step, weighted by N_i, the
noisy number of records of silo i::

    θ ← θ − lr (C / u · Σ_i G_i / (q Σ_i N_i) + weight_decay · θ)

and the method takes it for its own sum. The silos keep the parameters that are summed as they came
down: a gradient under a share of the noise alone is nothing to train on from. Parameters that stay
move in the same step, by the silo's own gradient under all of the noise. One clip holds both
together, so one record moves everything that a step releases by one clip at most.

Rounds in which the method gives no weighted mean, such as pFedSim's of its second phase, are as the
method has them, with local noise.

With ``unit = "silo"`` what is protected is all that a silo uploads, not a record
(``SharedUpdates``). A silo trains without noise, for as many epochs as the job says, from θ to θ_i,
and y_r above is one vector, θ_i - θ. It is cut to the same clip, and θ moves by the silos' mean,
each of the n counting alike (McMahan, Ramage, Talwar, Zhang, "Learning differentially private
recurrent language models", ICLR 2018, with fixed-size rounds). Two such vectors lie up to two clips
apart, so z_i has the variance (2 σ u)² / h (training/whole_round.py)::

    θ ← θ + C / u · Σ_i G_i / n

=====================  ====  ================================================  ==========
round                  way   part                                              exchange
=====================  ====  ================================================  ==========
with a weighted mean   up    ``steps``: G_i by parameter, ``records``: N_i     Sum, total
                             where records are protected
with a weighted mean   down  what the method has                               -
any other              both  what the method has                               -
=====================  ====  ================================================  ==========
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from ...errors import LocalError
from ..course import (
    ContributionsAndState,
    Course,
    CourseStep,
    Effort,
    Facts,
    Parts,
    SiloState,
    Stage,
    settled,
)
from ..exchange.delivery import Combined, CoordinatorState, Delivery, Results
from ..exchange.parts import WEIGHT, Contribution, Exchange, Part, Sum, Tensors, TensorSpec
from ..method import Method, Setting, initial_state
from ..tasks.task import cells
from .privacy_table import PrivacyTable

STEPS, RECORDS = "steps", "records"
VALUES = "shared."  # in the coordinator's state: parameters as they went down last


class SharedSteps(Method):
    """``inner`` with one step a round, where it gives a weighted mean of what it trains."""

    weighs: ClassVar[bool] = True  # silos by their numbers of records
    means: ClassVar[frozenset[Exchange]] = frozenset({Sum("mean")})  # that a step may be

    def __init__(
        self, inner: Method, setting: Setting, table: PrivacyTable, lr: Callable[[int], float]
    ) -> None:
        """``lr`` is the learning rate of a round. LocalError for a method that cannot do so."""
        # The job's method digest is made of this name and version.
        self.name, self.version, self.product = inner.name, inner.version, inner.product
        self.addressed, self.census, self.tunes = inner.addressed, inner.census, inner.tunes
        self.by_rounds, self.directed_for = inner.by_rounds, inner.directed_for
        self.setting, self.options, self.template = setting, inner.options, inner.template
        self.loadable, self._inner, self._table, self._lr = inner.loadable, inner, table, lr
        self._check()

    def _check(self) -> None:
        """LocalError where a round is no single step of plain SGD from what came down."""
        where, rule = 'privacy.noise = "shared"', self.setting.optimiser
        shared = [round_ for round_ in self._rounds if self._meant(round_)]
        if not self._inner.sums_steps or not shared:
            raise LocalError(
                f"{where} with method {self.name!r} and its options: no round of it is a mean, by"
                ' records, of steps that all silos take from one model; write noise = "local", or'
                " choose another method"
            )
        if rule.rule != "sgd" or rule.clip is not None:
            raise LocalError(
                f"{where}: a step of all silos together is one of plain SGD; write optimiser ="
                ' "sgd" and leave training.clip out (methods such as fedadam adapt the step at the'
                " coordinator)"
            )
        if self.setting.epochs != 1:
            raise LocalError(
                f"{where} with training.epochs = {self.setting.epochs}: a round is one step of all"
                " silos together; write epochs = 1, and more rounds"
            )
        if rule.momentum and len(shared) == len(self._rounds):
            raise LocalError(
                f"{where} with training.momentum = {rule.momentum:g}: each round is one step, in"
                " which momentum does nothing; leave it out (method fedavgm has it at the"
                " coordinator)"
            )

        self._check_trained(where)
        # The course depends on nothing that a silo knows alone, but for what it trains.
        moved = self._trained(shared[0]) - set(self._summed(shared[0]))
        if self._table.local_rate != 1 and not moved and len(shared) == len(self._rounds):
            raise LocalError(
                f"privacy.local_rate = {self._table.local_rate:g} with method {self.name!r}: no"
                " step of it has local noise; take it out"
            )

    def _check_trained(self, where: str) -> None:
        """LocalError where a round sums what it does not train, such as running statistics."""
        # Most rounds are like the one before.
        first = {self._meant(round_): round_ for round_ in reversed(self._rounds)}
        first.pop((), None)
        for round_ in first.values():
            if still := sorted(set(self._summed(round_)) - self._trained(round_)):
                raise LocalError(
                    f"{where} with method {self.name!r}: round {round_} sums {still[0]!r}, which no"
                    " step of it trains, so there is no step to sum; of running statistics write"
                    ' model.buffers = "local", else choose another model or method'
                )

    def _trained(self, round_: int) -> set[str]:
        """The parameters that the one step of a round trains, named ``part.parameter``.

        LocalError where its stages are not what a step of all silos is.
        """
        silo = self.setting.silos[0]
        # Without values, which may take gigabytes.
        with torch.device("meta"):
            modules = self._inner.modules(silo)
        state = SiloState({part: dict(module.state_dict()) for part, module in modules.items()})
        counts = torch.ones(cells(self.setting.task, self.setting.outputs), dtype=torch.int64)
        course = self.stages(state, Facts(silo, round_, len(counts), counts))
        found: set[str] = set()
        for step in filter(_is_summed, course):
            for part in step.trains:
                found.update(f"{part}.{name}" for name, _ in modules[part].named_parameters())
        return found

    @property
    def _rounds(self) -> range:
        return range(self.setting.rounds + self.census + self.tunes)

    def _meant(self, round_: int) -> tuple[Part, ...]:
        """The parts that the method sums by weight; none in a round that gives anything else."""
        parts = self._inner.up(round_)
        return parts if all(part.exchange in self.means for part in parts) else ()

    def _summed(self, round_: int) -> dict[str, TensorSpec]:
        """The parameters that a round sums, by their names ``part.parameter``."""
        return {spec.name: spec for part in self._meant(round_) for spec in part.tensors}

    def up(self, round_: int) -> tuple[Part, ...]:
        """The silos' steps and their numbers of records; in other rounds the method's own."""
        means = self._meant(round_)
        if not means:
            return self._inner.up(round_)
        steps = [
            TensorSpec(name, "int64", spec.shape) for name, spec in self._summed(round_).items()
        ]
        # A number of records that was released before, with noise.
        if self.weighs:
            steps.append(TensorSpec(RECORDS, "int64", (), 1.0, None))
        return (Part(STEPS, means[0].kind, Sum("total"), tuple(steps)),)

    def down(self, round_: int) -> tuple[Part, ...]:
        """What the method delivers."""
        return self._inner.down(round_)

    def by_class(self, round_: int) -> tuple[str, ...]:
        """What the method sums class by class; nothing of a step."""
        return () if self._meant(round_) else self._inner.by_class(round_)

    def stream_round(self, round_: int) -> int:
        """The method's."""
        return self._inner.stream_round(round_)

    @property
    def compares_labels(self) -> bool:
        """True if the method does."""
        return self._inner.compares_labels

    # The silo half.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The method's modules."""
        return self._inner.modules(silo)

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The method's tensors."""
        return self._inner.initial_extra(silo)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """The method's outputs."""
        return self._inner.predict(parts, x)

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The method's statistics."""
        return self._inner.measure(parts, x, y)

    @property
    def measures(self) -> bool:
        """As the method."""
        return self._inner.measures

    def effort(self, round_: int) -> Effort:
        """The method's effort, of which the epoch of what is summed is one step."""
        effort = self._inner.effort(round_)
        if not self._meant(round_):
            return effort
        return replace(effort, epochs=effort.epochs - self.setting.epochs, shared=1)

    @property
    def private_fault(self) -> str:
        """The method's reason."""
        return self._inner.private_fault

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """As the method takes it."""
        return self._inner.deliver(state, delivered, facts)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """The method's stages; the one that trains what is summed is one step."""
        course = self._inner.stages(state, facts)
        summed = frozenset(self._summed(facts.round))
        if not summed:
            return course
        parts = {name.partition(".")[0] for name in summed}
        made = list(course)
        for number, step in enumerate(course):
            if isinstance(step, Stage) and not parts.isdisjoint(step.trains):
                made[number] = replace(step, summed=summed)
        self._check_stages(list(filter(_is_summed, made)))
        return tuple(made)

    def _check_stages(self, stages: list[Stage]) -> None:
        """LocalError where what is summed takes more than one step."""
        # The coordinator, which takes the step, knows no more than its gradient.
        single = [
            stage.penalty is None and not stage.full_batch and stage.epochs == 1 for stage in stages
        ]
        if single != [True]:
            raise LocalError(
                f'privacy.noise = "shared" with method {self.name!r} and its options: it trains'
                ' what it sums by more than one epoch of its loss; write noise = "local", or leave'
                " its options out"
            )

    def contribute(
        self, state: SiloState, facts: Facts
    ) -> Mapping[str, Contribution] | ContributionsAndState:
        """The sums of this silo's step with its share of the noise, and its number of records."""
        # A method that wrote to its share would give something else under the share's taint.
        made = self._inner.contribute(state, replace(facts, summed={}))
        summed = self._summed(facts.round)
        if not summed:
            return made
        # The method's own contribution is of parameters that did not move.
        _, kept = settled(self.name, state, made)
        tensors = {name: facts.summed[name] for name in summed}
        if self.weighs:
            tensors[RECORDS] = torch.tensor(facts.samples)
        contributions = {STEPS: Contribution(tensors)}
        return contributions if kept is state else ContributionsAndState(contributions, kept)

    # The coordinator half. Its state has the parameters that are summed, next to the method's own.

    def begin(self) -> CoordinatorState:
        """The method's state, and the initial values of what is summed."""
        names = {name for round_ in self._rounds for name in self._summed(round_)}
        # Every silo begins with the same values of what it shares.
        parts = initial_state(self._inner, self.setting.silos[0]).parts
        values = {}
        for name in sorted(names):
            part, _, leaf = name.partition(".")
            values[VALUES + name] = parts[part][leaf]
        return {**self._inner.begin(), **values}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Take the step of all silos, and let the method combine what comes of it."""
        values, inner = _apart(state)
        means = self._meant(round_)
        if not means:
            combined = self._inner.combine(inner, round_, cohort, results)
            return replace(combined, state={**values, **combined.state})
        steps = results[STEPS]
        divisor = self._divisor(round_, cohort, steps)
        factor = self._table.share_unit / (self._table.sample_rate * divisor)
        moved: dict[str, Tensor] = {}
        for name in self._summed(round_):
            mean = steps[name].double() * factor
            moved[name] = self._moved(values[VALUES + name], mean, self._lr(round_))
        weight = torch.tensor(float(divisor), dtype=torch.float64)
        summed = {
            part.name: {**{spec.name: moved[spec.name] for spec in part.tensors}, WEIGHT: weight}
            for part in means
        }
        combined = self._inner.combine(inner, round_, cohort, summed)
        # What goes down is where all silos take their next step from, under whatever name.
        for tensors in combined.published.values():
            moved |= {name: value for name, value in tensors.items() if name in moved}
        values |= {VALUES + name: value for name, value in moved.items()}
        return replace(combined, state={**values, **combined.state})

    def _divisor(self, round_: int, cohort: tuple[str, ...], steps: Tensors) -> int:
        """What the sum of a round is divided by: all silos' records."""
        records = int(steps[RECORDS])
        # A silo says that it has one record at least, so this many have been summed.
        if records < len(cohort):
            raise LocalError(
                f"round {round_}: {len(cohort)} silos say that they have {records} records"
                " together; one of them does not count as the job says: find it in its own log,"
                " and have the job signed without it"
            )
        return records

    def _moved(self, before: Tensor, mean: Tensor, lr: float) -> Tensor:
        """A parameter after a step by this mean gradient, of its own dtype."""
        value = before.double()
        decay = self.setting.optimiser.weight_decay
        return (value - lr * (mean + decay * value)).to(before.dtype)

    def unposted(self, state: CoordinatorState, silos: tuple[str, ...]) -> CoordinatorState:
        """The method's state, and what is summed."""
        values, inner = _apart(state)
        return {**values, **self._inner.unposted(inner, silos)}

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """What the method delivers."""
        return self._inner.deliveries(_apart(state)[1], round_, silo)

    def row_weights(self, round_: int, recipient: str) -> Mapping[str, float]:
        """The method's."""
        return self._inner.row_weights(round_, recipient)

    def member_weights(self, state: CoordinatorState, recipient: str) -> Mapping[str, float]:
        """The method's."""
        return self._inner.member_weights(_apart(state)[1], recipient)

    def mail_fault(self, round_: int, silo: str, shares: Mapping[str, float], keep: float) -> str:
        """The method's answer."""
        return self._inner.mail_fault(round_, silo, shares, keep)


class SharedUpdates(SharedSteps):
    """``inner`` in which silos upload updates, cut to the clip and under shares of the noise."""

    weighs = False
    # Each silo counts alike in any case, so a method may say so itself.
    means = frozenset({Sum("mean"), Sum("mean", most=1.0)})

    def _check(self) -> None:
        """LocalError where anything leaves but means of what silos train from one model."""
        where = 'privacy.unit = "silo"'
        given = chain.from_iterable(map(self._inner.up, self._rounds))
        exchanges = {part.exchange for part in given}
        if not (self._inner.sums_steps and exchanges and exchanges <= self.means):
            raise LocalError(
                f"{where} with method {self.name!r} and its options: silos upload something else"
                " than what each trained from one model, for a mean; choose a method that"
                ' docs/privacy.md lists under "A whole silo", or write unit = "record"'
            )
        self._check_trained(where)

    def effort(self, round_: int) -> Effort:
        """One release of a round that gives anything: records are used freely at the silo."""
        return Effort(shared=int(bool(self._meant(round_))))

    def _check_stages(self, stages: list[Stage]) -> None:
        """Nothing: a silo may train as it will."""

    def _divisor(self, round_: int, cohort: tuple[str, ...], steps: Tensors) -> int:
        """The number of silos: to weigh one by its records would tell of it."""
        return len(cohort)

    def _moved(self, before: Tensor, mean: Tensor, lr: float) -> Tensor:
        """A parameter moved by the mean of the silos' updates, of its own dtype."""
        return (before.double() + mean).to(before.dtype)


SHARED_BY_UNIT: Mapping[str, type[SharedSteps]] = {"record": SharedSteps, "silo": SharedUpdates}


def _apart(state: CoordinatorState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that are summed, and the method's own state."""
    own = dict(state)
    names = list(filter(_is_value, own))
    return {name: own.pop(name) for name in names}, own


def _is_value(name: str) -> bool:
    return name.startswith(VALUES)


def _is_summed(step: CourseStep) -> TypeGuard[Stage]:
    return bool(getattr(step, "summed", ()))
