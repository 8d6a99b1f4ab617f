"""Makes the folder of a model when a job ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.course import SiloState
from ..algorithms.data.dataset import Dataset, forgiving
from ..algorithms.job.job import Job
from ..algorithms.models.build import input_shape, vocabularies
from ..algorithms.numerics.devices import exact
from ..algorithms.tasks.registry import guard
from ..algorithms.tasks.task import histogram
from ..algorithms.training.loop import never
from ..algorithms.training.silo_round import state_to_bytes
from ..security.identity.keys import Keys
from . import folder
from .card import card
from .description import Description, Origin, PrivacyCost, Releases, SelfTest, SplitSizes
from .measuring import counting_of, measured, thresholds
from .predictor import Predictor

FORMAT = "staddle.model/1"


@dataclass(frozen=True)
class ModelMaker:
    """Who makes a model, and of which job.

    ``key`` is the secret that draws the test records which choose thresholds, ``keys`` sign the
    folder; None in a simulation. ``contract`` is that of the records' source.
    """

    job: Job
    origin: Origin
    contract: Mapping[str, Any]
    key: bytes
    keys: Keys | None = None

    def write(
        self,
        path: Path,
        state: SiloState,
        train: Dataset,
        test: Dataset,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Measure the model of a state on the test records, and write its folder.

        ``train`` is looked at for its size and the names of its classes. LocalError if something
        lies there already, CancelledError once ``cancelled()`` holds.
        """
        with exact(), guard(self.job.task):
            description = self._describe(state, train, forgiving(test), cancelled)
        write_folder(path, self.job, description, state, self.keys)

    def _describe(
        self, state: SiloState, train: Dataset, test: Dataset, cancelled: Callable[[], bool]
    ) -> Description:
        job, task, width = self.job, self.job.task, self.job.model.width
        predictor = Predictor.of(job, self.origin.name, state)
        names = output_names(job, train.class_names)
        counting = counting_of(task, width, job.metrics, len(test))
        classes = histogram(task, train.y, width).tolist() if task.has_classes else ()
        return described(
            job,
            self.origin,
            self.contract,
            names,
            self_test(predictor, job),
            records=SplitSizes(train=len(train), test=len(test), train_by_class=tuple(classes)),
            measured=measured(predictor, test, counting, cancelled),
            thresholds=thresholds(predictor, test, self._half_key, names, cancelled),
            privacy=self._spent(state),
        )

    @property
    def _half_key(self) -> bytes:
        # Another one than that of the split: with the same, all test records would be on one side.
        return sha256(b"staddle/thresholds/1" + self.key).digest()

    def _spent(self, state: SiloState) -> PrivacyCost | None:
        privacy = self.job.privacy
        if privacy is None:
            return None
        exact_parts = sorted(
            {
                part
                for part, tensors in state.parts.items()
                for name in tensors
                if state.taint(f"part/{part}/{name}").exact
            }
        )
        return PrivacyCost(epsilon=privacy.epsilon, delta=privacy.delta, exact=tuple(exact_parts))


def described(
    job: Job,
    origin: Origin,
    contract: Mapping[str, Any],
    names: tuple[str, ...],
    tried: SelfTest,
    **known: Any,
) -> Description:
    """The description of a model that is made now; ``known`` are its fields that may be missing."""
    return Description(
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        releases=Releases(staddle=metadata.version("staddle"), torch=torch.__version__),
        origin=origin,
        job=job.document(),
        job_digest=job.digest,
        contract=dict(contract),
        output_names=names,
        self_test=tried,
        **known,
    )


def write_folder(
    path: Path, job: Job, description: Description, state: SiloState, keys: Keys | None
) -> None:
    """Write a model's folder; LocalError if something lies there already."""
    texts = {"format": FORMAT, "job": job.digest, "maker": description.origin.name}
    folder.write(
        path,
        {
            folder.DESCRIPTION: (description.model_dump_json(indent=1) + "\n").encode(),
            folder.WEIGHTS: state_to_bytes(state, texts),
            folder.CARD: card(description, job).encode(),
        },
        keys,
    )


def output_names(job: Job, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names of the classes or labels: from the job, or else those ``known`` of the records."""
    return tuple(job.model.class_names or known or map(str, range(job.model.width)))


def self_test(predictor: Predictor, job: Job) -> SelfTest:
    """What the model says of made-up records."""
    outputs = tuple(trial_answers(predictor, job).tolist())
    return SelfTest(records=len(trial_records(job)), outputs=outputs)


def trial_answers(predictor: Predictor, job: Job) -> Tensor:
    """The answers for made-up records, one after another; 0 in place of what is no number."""
    found = predictor.answers(trial_records(job)).double().reshape(-1)
    # A volume has millions of positions.
    return found[:: max(1, len(found) // 4096)].nan_to_num(0, 0, 0)


def trial_records(job: Job) -> Tensor:
    """Two made-up records [2, …] as the model takes them: tokens where it takes tokens."""
    shape = input_shape(job.model)
    x = torch.linspace(-1, 1, 2 * prod(shape)).reshape(2, *shape)
    for place, tokens in vocabularies(job.model):
        x[:, place] = ((x[:, place] + 1) / 2 * (tokens - 1)).round()
    return x
