"""A round of an admitted job at this silo, without the network: deliver, train, keep.

Blocking, in the trainer. The round itself is computed in this process or in others (launched.py);
all that is kept is kept here.

All of it begins from the state after the last round that counted; the coordinator says which that
is (silo/job_folder.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import log
from ...algorithms.course import SiloState
from ...algorithms.exchange.parts import Part, fits, laid_out
from ...algorithms.exchange.plain import PLAIN
from ...algorithms.leaks.traps import Caution
from ...algorithms.method import initial_state
from ...algorithms.tasks.task import histogram
from ...algorithms.training.accountant import PrivateSilo
from ...algorithms.training.left_out import apart, encoded, with_left
from ...bundle.making import ModelMaker
from ...errors import CancelledError, LocalError, StaddleError, UnwritableError
from ...files.packages import others_code
from ...security.arithmetic.fixedpoint import Flat
from ..admission.checks import Admitted
from ..job_folder import JobFolder
from ..parts.contributions import Contributions
from ..parts.tensors import flat
from .trainer import SiloRound, TrainingDevice, TrainingPlace

Delivered = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class JobTraining:
    """The training of one job at one silo.

    ``train`` and ``finish`` run in the trainer's thread.
    """

    admitted: Admitted
    folder: JobFolder
    silo: str
    threads: int
    cancelled: Callable[[], bool]
    private: PrivateSilo | None = None  # what pays for a private job
    place: TrainingPlace = field(default_factory=TrainingDevice)
    caution: Caution = field(default_factory=Caution)

    def train(self, round_: int, counted: int, delivered: Delivered) -> Contributions:
        """Train a round and keep what came of it; returns its contributions.

        State and contributions are on the disk when it returns. CancelledError if it was stopped.
        """
        job = self.admitted.job
        # Starts from the last round that counted, as if the silo had been away since.
        state, before = apart(self._state(counted))
        outcome = self.place.outcome(self._asked(round_, state, counted, delivered))

        # The gate hides the parts of a blind job, and takes them whole.
        parts = {part.name: part for part in job.up(round_)}
        contribute = laid_out if job.security.required else PLAIN.contribute
        laid = {
            name: contribute(parts[name], contribution)
            for name, contribution in outcome.contributions.items()
        }
        given, left = encoded(parts.values(), laid, before, delivered)
        kept_state = with_left(outcome.state, left)
        contributions = Contributions(given, outcome.taints)
        if self.private is None:
            # The report first: a round that cannot be kept is trained again, and its line replaced.
            self.folder.add_round(outcome.report, self._facts())
            self.folder.save_round(round_, counted, kept_state, contributions)
            return contributions

        # The round first: what was paid for is not trained again. After a crash in between, all
        # that was reserved counts as spent, never less than was taken.
        self.folder.save_round(round_, counted, kept_state, contributions)
        if outcome.spending is not None:
            self.private.account.commit(outcome.spending)
        self.folder.add_round(outcome.report, self._facts())
        return contributions

    def finish(self, counted: int, delivered: Delivered, maker: Callable[[], ModelMaker]) -> None:
        """Take the last results, evaluate, keep the model.

        The job is finished here once its model is on the disk. CancelledError if it was stopped.
        """
        state, _ = apart(self._state(counted))
        outcome = self.place.outcome(
            self._asked(self.admitted.job.length, state, counted, delivered)
        )
        # The model is measured here, wherever it was trained.
        torch.set_num_threads(self.threads)
        self._keep(outcome.state, maker)
        self.folder.finish(outcome.report, self._facts())

    def _asked(
        self, round_: int, state: SiloState, counted: int, delivered: Delivered
    ) -> SiloRound:
        return SiloRound(
            self.admitted,
            self.silo,
            round_,
            state,
            delivered,
            self.threads,
            trained=counted > 0,
            private=self.private,
            caution=self.caution,
            cancelled=self.cancelled,
        )

    def _keep(self, state: SiloState, maker: Callable[[], ModelMaker]) -> None:
        admitted = self.admitted
        if not admitted.job.method().trains:
            self.folder.save_values(state)
            return
        try:
            model, sides = self.folder.model, (admitted.train, admitted.test)
            # A task, a metric or torch may fail in any way, and the ledger or a key be damaged.
            with others_code("its model cannot be described", "report it"):
                maker().write(model, state, *sides, self.cancelled)
            log.event("model.kept", job=admitted.job.name, folder=str(model))
        except (UnwritableError, CancelledError):
            raise
        # Nothing that is said about a model may cost the model.
        except StaddleError as error:
            log.problem("model.undescribed", job=admitted.job.name, why=str(error))
            self.folder.save_values(state)

    def own(self, counted: int, part: Part) -> Flat:
        """The values of a Mix part that this silo uploaded in the last round that counted.

        LocalError if the state lacks one of them.
        """
        # From the state on disk, not from what the delivery says: the row mixes what was uploaded.
        state = self._state(counted)
        # In the order of the part's tensors, as in a row.
        values = []
        for spec in part.tensors:
            module, _, leaf = spec.name.partition(".")
            value = state.parts.get(module, {}).get(leaf)
            if value is None or not fits(spec, value):
                raise LocalError(
                    f"part {part.name!r}: tensor {spec.name!r} is not part of this silo's state, so"
                    " its share of a row is not known; the method must name what it mixes by its"
                    " own parameters"
                )
            values.append(value)
        return flat(values)

    def _state(self, counted: int) -> SiloState:
        if (kept := self.folder.state(counted)) is not None:
            return kept
        # Only private jobs need to know which weights were trained on none of this silo's records.
        public = None if self.private is None else self.admitted.public
        return initial_state(self.admitted.job.method(), self.silo, self.admitted.weights, public)

    def _facts(self) -> dict[str, object]:
        """What the silo's own report says about the job and its data."""
        job, train = self.admitted.job, self.admitted.train
        return {
            "silo": self.silo,
            "job": job.name,
            "method": job.method_name,
            "product": job.method().product,
            "samples": len(train),
            **self._classes(),
        }

    def _classes(self) -> dict[str, object]:
        """One number per class of the job, 0 included; nothing in a task without classes."""
        job = self.admitted.job
        if not job.task.has_classes:
            return {}
        return {"classes": histogram(job.task, self.admitted.train.y, job.model.width).tolist()}
