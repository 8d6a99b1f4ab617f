"""The model that silos share, as a folder: from the parts that a job published last.

Its maker is the coordinator, which has no records: the folder has no figures of its own, and the
contract says what the job says. It is the model of a silo that never took part, so there is one
only where the published parts make all of a model, whatever stays at silos.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.course import Facts, SiloState
from ..algorithms.exchange.delivery import Results
from ..algorithms.job.job import Job
from ..algorithms.method import Method, initial_state
from ..algorithms.numerics.devices import exact
from ..algorithms.numerics.frozen import frozen_names
from ..algorithms.tasks.registry import guard
from ..algorithms.training.silo_round import check_delivered
from ..errors import LocalError
from ..security.identity.keys import Keys
from .description import Origin, PrivacyCost, Reported
from .making import described, output_names, self_test, trial_records, write_folder
from .predictor import Predictor

RECORDS = 1  # a silo with none would divide by their number


@dataclass(frozen=True)
class SharedModelMaker:
    """Who makes the model, and of which job; ``reported`` is what silos measured last."""

    job: Job
    origin: Origin
    keys: Keys
    reported: Reported | None = None

    def write(self, path: Path, published: Results) -> None:
        """Write the folder of the model that the ``published`` parts make.

        LocalError where they are not all of it, says which parts are with the silos. LocalError,
        too, if something lies there already.
        """
        job = self.job
        with exact(), guard(job.task):
            state = shared_state(job, published)
            predictor = Predictor.of(job, self.origin.name, state)
            description = described(
                job,
                self.origin,
                contract_of(job),
                output_names(job),
                self_test(predictor, job),
                reported=self.reported,
                privacy=_spent(job),
            )
        write_folder(path, job, description, state, self.keys)


def shared_state(job: Job, published: Results) -> SiloState:
    """The state of a silo that never took part, with what a job published last.

    LocalError where the model's answers depend on anything else that is trained.
    """
    method, silo = job.method(), job.silos[0]
    if not method.trains:
        raise LocalError(f"method {method.name} trains no model")
    # A part of which each silo gets a value of its own is no silo's model here.
    known = {part.name for part in job.down(job.length)} - set(method.addressed)
    delivered = {name: tensors for name, tensors in published.items() if name in known}
    check_delivered(job, job.length, delivered)
    begun, facts = initial_state(method, silo), _facts(job, silo)

    # Whatever silos keep is unknown, and what depends on it becomes NaN.
    unknown = method.deliver(_forgotten(method, silo, begun), delivered, facts)
    answers = Predictor.of(job, silo, unknown).answers(trial_records(job))
    own = [name for name, tensors in unknown.parts.items() if any(map(_unknown, tensors.values()))]
    if own and answers.isnan().any():
        raise LocalError(
            f"by method {method.name}, the values of {', '.join(sorted(own))} stay at silos; each"
            f" silo has its own model, in jobs/{job.name}/model of its folder"
        )
    return method.deliver(begun, delivered, facts)


def contract_of(job: Job) -> dict[str, Any]:
    """How records are read, as far as a job says: a table of its features, or tensors.

    What is true of a record is in columns of the names below.
    """
    if not job.features:
        return {"kind": "npz"}
    taken, names = list(map(attrgetter("name"), job.features)), output_names(job)
    truths: dict[str, dict[str, Any]] = {
        "classification": {"label": _apart("label", taken), "classes": names},
        "multilabel": {"labels": list(map(partial(_apart, taken=taken), names))},
        "regression": {"target": _apart("target", taken)},
        "survival": {"survival": [_apart("time", taken), _apart("event", taken)]},
    }
    if job.task.kind not in truths:
        raise LocalError(
            f"silos alone know how records of task {job.task.kind} are read; take a silo's model"
        )
    return {
        "kind": "csv",
        "features": taken,
        "categories": {own.name: own.categories for own in job.features if own.categories},
        **truths[job.task.kind],
    }


def _spent(job: Job) -> PrivacyCost | None:
    # What a private job publishes has its noise, all of it.
    spent = job.privacy
    return None if spent is None else PrivacyCost(epsilon=spent.epsilon, delta=spent.delta)


def _apart(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _facts(job: Job, silo: str) -> Facts:
    classes = job.model.width if job.task.has_classes else 1
    return Facts(silo, job.length, RECORDS, torch.zeros(classes, dtype=torch.int64))


def _forgotten(method: Method, silo: str, state: SiloState) -> SiloState:
    """The state with NaN for all numbers that training changes."""
    with torch.device("meta"):
        modules = method.modules(silo)
    still = {part: frozen_names(module) for part, module in modules.items()}
    parts = {
        part: {name: own if name in still[part] else _nan(own) for name, own in tensors.items()}
        for part, tensors in state.parts.items()
    }
    return SiloState(parts, {name: _nan(own) for name, own in state.extra.items()})


def _nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


def _unknown(tensor: Tensor) -> bool:
    return bool(tensor.isnan().any())
