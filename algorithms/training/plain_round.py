"""The steps of a silo's round that differ between plain and private jobs, and their plain form.

private_round.py has the private form.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias

from torch import Tensor

from ..course import Course, Facts, SiloState, Stage, Survey, settled
from ..data.dataset import Dataset
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Tensors
from ..leaks.taint import Taint
from ..method import Method
from .accountant import ReservedSteps
from .loop import Modules, Stepper, measure

ContributionTaints = dict[str, dict[str, Taint]]  # by part and tensor; empty in a plain job
# contributions by part, their taints, the state that the silo keeps
Made: TypeAlias = tuple[dict[str, Contribution], ContributionTaints, SiloState]
# the state before a delivery, and the parts after it
Judged: TypeAlias = tuple[SiloState, Mapping[str, Tensors]]


class Side(Protocol):
    """One round at one silo, as silo_round.py goes through it."""

    @property
    def facts(self) -> Facts:
        """The facts about the records that the method knows so far.

        ``measure`` adds its sums, and each survey its results.
        """
        ...

    @property
    def spending(self) -> ReservedSteps | None:
        """The round's reservation in the privacy account; None in a plain job.

        The caller commits it when the round's outcome is durable.
        """
        ...

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """The state after the method's ``deliver`` of a checked delivery.

        The caller has checked it against the job's schema.
        """
        ...

    def judged(self, held: SiloState, began: Mapping[str, Tensors], delivered: Results) -> Judged:
        """By what a delivery is judged, which may be made to leak records.

        ``held`` is the silo's state before it, ``began`` the parts after it. Others see a refusal.
        """
        ...

    def evaluated(self, modules: Modules) -> None:
        """The model was evaluated on the test records as it is now.

        A private round then knows that test counts depend on these modules.
        """
        ...

    def measure(self, modules: Modules, data: Dataset) -> None:
        """Add the sums of the method's ``measure`` to the facts.

        It is called once, with the model as delivered, before ``stages``.
        """
        ...

    def survey(self, survey: Survey, modules: Modules, data: Dataset) -> None:
        """Add the results of a survey to the facts.

        LocalError in a private job.
        """
        ...

    def stages(self, state: SiloState) -> Course:
        """The method's course for this round.

        It is called once, after ``measure``.
        """
        ...

    def way(self, stage: Stage) -> Stepper:
        """The stepper that trains a stage."""
        ...

    def trained(self, stage: Stage, handed: Modules, before: Mapping[str, Tensor]) -> None:
        """A stage was trained that was handed these modules; ``before`` are their old buffers.

        A private round sets the taints of the tensors that the stage changed.
        """
        ...

    def keep(self, state: SiloState) -> SiloState:
        """The state after training, as it is kept.

        In a private job it has taints.
        """
        ...

    def contribute(self, state: SiloState) -> Made:
        """The method's contributions, the taint of each tensor and ``@weight``, and the state.

        Contributions are for all parts of ``Job.up`` except the metrics. The state is the one that
        the silo keeps.
        """
        ...

    def metrics(
        self, exact: Mapping[str, Contribution]
    ) -> tuple[Mapping[str, Contribution], ContributionTaints]:
        """The test counts, by part, in the form that leaves the silo.

        In a private job they have noise, or are zeros.
        """
        ...


class ClearRound:
    """The plain form: records are used as they are.

    It reserves no budget and sets no taints.
    """

    def __init__(
        self, method: Method, facts: Facts, way: Stepper, cancelled: Callable[[], bool]
    ) -> None:
        self._method, self.facts, self._way = method, facts, way
        self._cancelled = cancelled
        self.spending: ReservedSteps | None = None

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """The state after the method's ``deliver``."""
        return self._method.deliver(state, delivered, self.facts)

    def judged(self, held: SiloState, began: Mapping[str, Tensors], delivered: Results) -> Judged:
        """By what the silo holds and begins from."""
        return held, began

    def evaluated(self, modules: Modules) -> None:
        """Nothing to do."""

    def measure(self, modules: Modules, data: Dataset) -> None:
        """Add the exact sums over all records to the facts."""
        # Most methods measure nothing, and reading all records for it may take long.
        if not self._method.measures:
            return
        measured = measure(self._method.measure, modules, data, cancelled=self._cancelled)
        self.facts = replace(self.facts, measured=measured)

    def survey(self, survey: Survey, modules: Modules, data: Dataset) -> None:
        """Add the exact sums or rows of all records to the facts."""
        found = measure(survey.measure, modules, data, survey.rows, self._cancelled)
        self.facts = replace(self.facts, measured={**self.facts.measured, **found})

    def stages(self, state: SiloState) -> Course:
        """The method's course for this round."""
        return self._method.stages(state, self.facts)

    def way(self, stage: Stage) -> Stepper:
        """The same stepper for all stages."""
        return self._way

    def trained(self, stage: Stage, handed: Modules, before: Mapping[str, Tensor]) -> None:
        """Nothing to do."""

    def keep(self, state: SiloState) -> SiloState:
        """The state, unchanged."""
        return state

    def contribute(self, state: SiloState) -> Made:
        """The method's contributions and the state to keep; a plain job has no taints."""
        made = self._method.contribute(state, self.facts)
        contributions, kept = settled(self._method.name, state, made)
        return contributions, {}, kept

    def metrics(
        self, exact: Mapping[str, Contribution]
    ) -> tuple[Mapping[str, Contribution], ContributionTaints]:
        """The exact test counts; a plain job has no taints."""
        return exact, {}
