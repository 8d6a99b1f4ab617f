"""What a silo's round does with records at each place where a private job's does otherwise
(private_round.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..course import Course, Facts, SiloState, Stage, Survey
from ..data.dataset import Dataset
from ..delivery import Results
from ..exchange.parts import Contribution
from ..leaks.taint import Taint
from ..method import Method
from .accountant import ReservedSteps
from .loop import Modules, Stepper, measure

ContributionTaints = dict[str, dict[str, Taint]]  # by part and tensor; empty in a plain job


class Side(Protocol):
    """One round at one silo, as silo_round.py goes through it."""

    @property
    def facts(self) -> Facts:
        """What the method knows of the records so far."""
        ...

    @property
    def spending(self) -> ReservedSteps | None:
        """What the round takes out of the account."""
        ...

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """The method's ``deliver``, of what was checked."""
        ...

    def evaluated(self, modules: Modules) -> None:
        """The test records were looked at, with all of the model as it is now."""
        ...

    def measure(self, modules: Modules, data: Dataset) -> None:
        """What the method's ``measure`` adds up becomes part of the facts."""
        ...

    def survey(self, survey: Survey, modules: Modules, data: Dataset) -> None:
        """What a survey finds becomes part of the facts."""
        ...

    def stages(self, state: SiloState) -> Course:
        """The method's."""
        ...

    def way(self, stage: Stage) -> Stepper:
        """How a stage is trained."""
        ...

    def trained(self, stage: Stage, handed: Modules, before: Mapping[str, Tensor]) -> None:
        """A stage was trained, which was handed these modules.

        ``before`` are their buffers from before it.
        """
        ...

    def keep(self, state: SiloState) -> SiloState:
        """The state after training, as it is kept."""
        ...

    def give(self, state: SiloState) -> tuple[dict[str, Contribution], ContributionTaints]:
        """The method's contributions, and the taint of each tensor of them, ``@weight``
        included.
        """
        ...

    def metrics(self, exact: Contribution) -> tuple[Contribution, ContributionTaints]:
        """What leaves of the test counts."""
        ...


class ClearRound:
    """A plain job's: records as they are."""

    def __init__(self, method: Method, facts: Facts, way: Stepper) -> None:
        self._method, self.facts, self._way = method, facts, way
        self.spending: ReservedSteps | None = None

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """As it is."""
        return self._method.deliver(state, delivered, self.facts)

    def evaluated(self, modules: Modules) -> None:
        """Nothing follows."""

    def measure(self, modules: Modules, data: Dataset) -> None:
        """All records' sums."""
        self.facts = replace(self.facts, measured=measure(self._method.measure, modules, data))

    def survey(self, survey: Survey, modules: Modules, data: Dataset) -> None:
        """All records' sums or rows, beside those of before."""
        found = {**self.facts.measured, **measure(survey.measure, modules, data, survey.rows)}
        self.facts = replace(self.facts, measured=found)

    def stages(self, state: SiloState) -> Course:
        """As they are."""
        return self._method.stages(state, self.facts)

    def way(self, stage: Stage) -> Stepper:
        """The same for all."""
        return self._way

    def trained(self, stage: Stage, handed: Modules, before: Mapping[str, Tensor]) -> None:
        """Nothing follows."""

    def keep(self, state: SiloState) -> SiloState:
        """As it is."""
        return state

    def give(self, state: SiloState) -> tuple[dict[str, Contribution], ContributionTaints]:
        """As it is."""
        return self._method.give(state, self.facts), {}

    def metrics(self, exact: Contribution) -> tuple[Contribution, ContributionTaints]:
        """As they are."""
        return exact, {}
