"""FedEM: models for all silos, of which each silo has a mixture of its own.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of
distributions", NeurIPS 2021, arXiv:2108.10252, Algorithm 1.

There are M models θ_m, and silo t has weights π_t, 1/M each at first. ℓ is a record's loss.

    (1) at silo t, of each record:  q(m) = π_tm exp(−ℓ(θ_m; x, y)) / Σ_m' π_tm' exp(−ℓ(θ_m'; x, y))
    (2)                             π_tm ← mean of q(m) over its records
    (3) for E epochs:               θ_tm ← SGD of the mean of q(m) ℓ(θ_tm; x, y), from θ_m
    (4) at the coordinator:         θ_m ← Σ_t n_t θ_tm / Σ_t n_t
    (5) at silo t:                  p(c | x) = Σ_m π_tm p(c | x; θ_m)

Where this differs from the paper:
- (1) is of the delivered models in evaluation mode, and by the π_t of before (2), as in the code of
  the authors. Each batch computes it again, since a method keeps nothing of single records: a step
  has M more forward passes.
- M is 3 unless set, as in the paper. Models begin with different values, drawn by the job's seed.
- Batch norm's running statistics stay at each silo, unless ``model.buffers = "global"``.

Wire list: ``models`` (M whole models, Sum weighted by n_t) up and down in every round, so M times
FedAvg's bytes. π_t and q never leave. The coordinator sees each silo's models, and where training
moved none of them much its π_t. A silo's model in the end is (5) of what was delivered last. (2) is
surveyed without noise, so a private job is refused.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Kind, Part, Sum, Tensors
from ..method import Method, Setting
from ..methods.common.second_model import MODEL

SHARES = "mixture"  # the part that holds π_t


class FedEMOptions(Strict):
    """Options of FedEM."""

    models: Annotated[int, Field(strict=True, ge=2, le=64)] = 3
    """M, the models of which each silo has a mixture."""


class MixtureOfModels(nn.Module):
    """π_t [M], whose logarithms it adds to what each model says."""

    shares: Tensor

    def __init__(self, models: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("shares", torch.full((models,), 1 / models, dtype=dtype))

    def forward(self, scores: Tensor) -> Tensor:
        """Scores of each model [M, …] plus log π_t."""
        return scores + self.shares.log().view(-1, *(1,) * (scores.ndim - 1))


class FedEM(Method):
    """A few models for all, and a mixture of them for each silo."""

    name = "fedem"
    version = 1
    needs_classes = "mixes the class probabilities of several models"
    options_model = FedEMOptions
    product = "delivered"
    options: FedEMOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # The first is the job's own model; parts of the others have a name before theirs.
        numbers = range(1, self.options.models)
        self.prefixes = ("", *(f"model{number}_" for number in numbers))
        specs = self.flat_specs(*MODEL)
        named = [replace(spec, name=p + spec.name) for p in self.prefixes for spec in specs]
        self.models = Part("models", Kind.WHOLE_MODEL, Sum("mean"), tuple(named))

    def up(self, round_: int) -> tuple[Part, ...]:
        """All models."""
        return (self.models,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged models."""
        return (self.models,)

    @property
    def private_fault(self) -> str:
        """Eq. 2."""
        return "it surveys which model suits a silo's records without noise; choose fedavg"

    # The silo half. ``frozen_…`` are copies of the delivered models, for Eq. 1.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The models, their frozen copies, and π_t."""
        found: dict[str, nn.Module] = {}
        for prefix in self.prefixes:
            for part in ("", "frozen_"):
                built = self.setting.build(f"fedem/{prefix}" if prefix else "")
                found |= {f"{part}{prefix}{name}": module for name, module in built.items()}
        dtype = next(found["classifier"].parameters()).dtype
        return {**found, SHARES: MixtureOfModels(self.options.models, dtype)}

    def trained(self) -> list[str]:
        """The parts that are trained."""
        return [prefix + part for prefix in self.prefixes for part in MODEL]

    def logits(self, parts: Parts, x: Tensor, frozen: str = "") -> Tensor:
        """Logits [M, B, C] of the models, or of their frozen copies."""
        made = []
        for prefix in self.prefixes:
            extractor, classifier = (parts[f"{frozen}{prefix}{part}"] for part in MODEL)
            made.append(classifier(extractor(x)))
        return torch.stack(made)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logarithms of (5) [B, C]."""
        return parts[SHARES](self.logits(parts, x).log_softmax(2)).logsumexp(0)  # (5)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the models, and freeze copies of them."""
        taken = super().deliver(state, delivered, facts)
        frozen = {f"frozen_{part}": taken.parts[part] for part in self.trained()}
        return SiloState({**taken.parts, **frozen}, taken.extra)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Eq. 1 and 2, then Eq. 3 by the weights of before."""
        stage = replace(self.stage(*self.trained()), loss=self.objective)
        shares = {"shares": state.parts[SHARES]["shares"]}
        return (Survey(self.survey), Change(self.weighed), replace(stage, context=shares))

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The task's losses [M, B] of the models."""
        return torch.stack([self.setting.task.losses(each, y) for each in logits])

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """Σ_m q(m) ℓ(θ_tm) by record [B]; no gradient goes through q."""
        frozen = self.losses(self.logits(parts, x, "frozen_"), y).detach()
        # By π_t of before Eq. 2, which the part has no more.
        q = (context["shares"].log()[:, None] - frozen).softmax(0)  # (1)
        return (q * self.losses(self.logits(parts, x), y)).sum(0)  # (3)

    def survey(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of q [M] over records, by the delivered models."""
        losses = self.losses(self.logits(parts, x), y)
        return {"assigned": parts[SHARES](-losses).softmax(0).sum(1)}  # (1)

    def weighed(self, state: SiloState, facts: Facts) -> SiloState:
        """Eq. 2."""
        held = state.parts[SHARES]["shares"]
        shares = (facts.measured["assigned"] / facts.samples).to(held.dtype)  # (2)
        return replace(state, parts={**state.parts, SHARES: {"shares": shares}})

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained models, weighted by samples."""
        tensors: dict[str, Tensor] = {}
        for spec in self.models.tensors:
            part, _, leaf = spec.name.partition(".")
            tensors[spec.name] = state.parts[part][leaf]
        return {"models": Contribution(tensors, float(facts.samples))}  # (4)
