"""The module that a silo's parts and its method make together."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..algorithms.catalog import configure
from ..algorithms.course import SiloState
from ..algorithms.job.job import Job
from ..algorithms.method import Method
from ..algorithms.training.silo_round import to_modules


class Predictor(nn.Module):
    """A trained model in evaluation mode: records as the model takes them → answers of its task.

    ``forward`` takes [B, …] float32 and gives [B, answers], or [B, answers, …] for each position.
    """

    def __init__(self, job: Job, method: Method, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.task = job.task
        self._method, self._names = method, tuple(parts)
        # A name of a part may hold what a name of a module may not.
        self._parts = nn.ModuleList(parts.values())
        self.eval().requires_grad_(False)

    @classmethod
    def of(cls, job: Job, maker: str, state: SiloState) -> "Predictor":
        """The model of a silo's state; LocalError where the two do not fit."""
        # Not ``job.method``: what may cross is no matter any more.
        method = configure(job.method_name, job.method_options, job.setting())
        # A coordinator's model has nothing by which silos differ.
        silo = maker if maker in job.silos else job.silos[0]
        return cls(job, method, to_modules(method, silo, state))

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The parts by name."""
        return dict(zip(self._names, self._parts, strict=True))

    @property
    def learned(self) -> bool:
        """True if a model was trained; False where records were only counted."""
        return self._method.trains

    def outputs(self, parts: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        """What the method's model gives for records, such as logits [B, outputs]."""
        return self._method.predict(parts, x)

    def forward(self, x: Tensor) -> Tensor:
        """Answers, such as the probability of each class."""
        return self.task.answers(self.outputs(self.parts, x))

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        """The same, without what gradients would need."""
        found: Tensor = self(x)
        return found
