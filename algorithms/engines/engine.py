"""Who trains the silos of a simulated round: the simulation says what, an engine how.

One after another in this process (``Serial``, here), in one worker process a core, or stacked on a
device: all give the same, but for the last bits of floating-point sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from ..course import SiloState
from ..data.dataset import Dataset
from ..exchange.delivery import Results
from ..job.job import Job
from ..numerics.devices import CPU, in_memory
from ..training.accountant import PrivateSilo
from ..training.loop import PLAIN, Stepper
from ..training.silo_round import Evaluation, RoundOutcome, local_round, look
from .states import Held, load


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one silo by side; ``validation`` is None where the split lacks that side.

    Several silos may share one side, such as test records.
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None

    @property
    def sides(self) -> tuple[Dataset, ...]:
        """The sides that the split has.

        They are in the order train, test, validation.
        """
        if self.validation is None:
            return (self.train, self.test)
        return (self.train, self.test, self.validation)

    def to(self, device: torch.device) -> "Records":
        """The records on a device.

        Records that are there already are not copied.
        """
        validation = None if self.validation is None else self.validation.to(device)
        return Records(self.train.to(device), self.test.to(device), validation)


@dataclass(frozen=True, eq=False)
class SiloWork:
    """One silo at the start of a round: its state and its delivery, which no engine changes.

    ``held`` may be what loads the state, so that the states of thousands need not be in memory at
    the same time. ``delivered`` comes from ``aggregation.deliver``. A silo that has time for
    ``most_steps`` trains fewer epochs where those of the job take more (``Shortened``).
    """

    silo: str
    held: Held
    delivered: Results
    most_steps: int | None = None

    @property
    def state(self) -> SiloState:
        """The state; loaded each time where it is not in memory."""
        return load(self.held)

    def loaded(self) -> "SiloWork":
        """The same with its state in memory."""
        return replace(self, held=self.state)


class Shortened:
    """A job with fewer epochs, for silos that have no time for all.

    Both halves of a method compute with the job's epochs, so the silo's half is that of a job with
    so many: FedNova's number of steps, for example, is that of the steps taken.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._known = job, {job.training.epochs: job}

    def of(self, one: SiloWork, records: int) -> Job:
        """The job for a silo with so many training records: as many epochs as fit, at least one."""
        epochs = self._job.training.epochs
        if one.most_steps is not None:
            fit = one.most_steps // self._job.training.steps(records)
            epochs = min(epochs, max(fit, 1))
        # One object per number, since a job keeps what is derived from it.
        if epochs not in self._known:
            training = self._job.training.model_copy(update={"epochs": epochs})
            self._known[epochs] = replace(self._job, training=training)
        return self._known[epochs]


class Engine(Protocol):
    """Trains and evaluates silos; it holds their records, and nothing else outlives a call."""

    @property
    def device(self) -> torch.device:
        """Where silos train."""
        ...

    def train(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, RoundOutcome]:
        """The outcome of ``local_round`` at each silo; ``done`` is called after each.

        States and contributions are on the host. LocalError names the silo.
        """
        ...

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, Evaluation]:
        """The outcome of ``silo_round.look`` at each silo; nothing is trained.

        ``round_`` is the round of the deliveries in ``work``; ``Job.length`` is the final one.
        """
        ...

    def close(self) -> None:
        """End what the engine began, such as processes; no call follows."""
        ...


class Serial:
    """One silo after another, in this process.

    It is the only engine for private jobs; ``paying`` has their silos' accounts. ``way`` trains the
    silos of other jobs.
    """

    def __init__(
        self,
        job: Job,
        records: Mapping[str, Records],
        paying: Mapping[str, PrivateSilo] | None = None,
        device: torch.device = CPU,
        way: Stepper = PLAIN,
    ) -> None:
        self._job, self._method, self._paying = job, job.method(), paying or {}
        self._device, self._way = device, way
        self._shortened = Shortened(job)
        self._records = records
        # Records are copied to the device once, not in each round.
        if device != CPU:
            with in_memory():
                self._records = {silo: own.to(device) for silo, own in records.items()}

    @property
    def device(self) -> torch.device:
        """Where silos train."""
        return self._device

    def train(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, RoundOutcome]:
        """The outcome of ``local_round`` at each silo, in turn."""
        return {one.silo: _then(done, self._train(round_, one)) for one in work}

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> dict[str, Evaluation]:
        """The outcome of ``silo_round.look`` at each silo, in turn."""
        return {one.silo: _then(done, self._look(round_, one)) for one in work}

    def close(self) -> None:
        """Nothing to end."""

    def _train(self, round_: int, one: SiloWork) -> RoundOutcome:
        own, payer = self._records[one.silo], self._paying.get(one.silo)
        job = self._shortened.of(one, len(own.train))
        outcome = local_round(
            job.method(),
            job,
            one.state,
            round_,
            one.delivered,
            own.train,
            own.test,
            one.silo,
            way=self._way,
            private=payer,
            device=self._device,
        )
        # The outcome is complete, so steps that it did not take can be released.
        if payer is not None and outcome.spending is not None:
            payer.account.commit(outcome.spending)
        return outcome

    def _look(self, round_: int, one: SiloWork) -> Evaluation:
        own, payer = self._records[one.silo], self._paying.get(one.silo)
        sides = (own.train, own.test, one.silo, own.validation)
        return look(
            self._method,
            self._job,
            round_,
            one.state,
            one.delivered,
            *sides,
            private=payer,
            device=self._device,
        )


T = TypeVar("T")


def _then(done: Callable[[], None], result: T) -> T:
    done()
    return result
