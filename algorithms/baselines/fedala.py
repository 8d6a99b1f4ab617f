"""FedALA: each silo learns, number by number, how much of the global model's upper layers it takes.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for personalized
federated learning", AAAI 2023, arXiv:2212.01197, Algorithm 1.

Silo i has its old model Θ_i and gets the global one Θ; W_i has a number in [0, 1] for each of the p
upper layers:

    (1) Θ̂_i ← Θ_i + (Θ - Θ_i) ⊙ [1, W_i]         all of Θ in the lower layers
    (2) W_i ← clip(W_i - η ∇_W ℓ(Θ̂_i), 0, 1)     Θ_i and Θ frozen; W_i is 1 at first, and kept from
                                                  round to round
    (3) Θ_i ← Θ̂_i, then trained on the silo's records
    (4) at the coordinator: Θ ← Σ_i (n_i / Σ_j n_j) Θ_i

In the first round there is no global model, and (3) begins with the common initial one.

Where this differs from the paper:
- W_i is learned on all training records. The paper draws s = 80% of them each time, which the
  runner does not do.
- The first time, W_i is learned until the losses of ten epochs deviate by less than 0.1 in the
  authors' code, so for 11 epochs at least. Here it is ``start_epochs``, 11, known before; from then
  on it is one epoch, as in the paper. In a round that learns W_i (3) takes one epoch less than the
  job's, at least one, unless ``training_epochs`` says otherwise: an epoch of W_i is not one more
  than the other methods take. Those of the first time are.
- ``layers`` counts p in layers with parameters, the classifier being the last; the code counts
  tensors, two a layer.
- While W_i is learned batch norm runs in evaluation mode, and never does W_i mix running
  statistics: these stay at each silo, or come down whole under ``model.buffers = "global"``.
- A silo that comes first in a later round has the initial model for its old one, and learns for
  ``start_epochs``.
- (4) is over the round's cohort. A model counts as delivered with the W_i of the round before.

Wire list: ``model`` (whole model, Sum weighted by n_i) up and down in every round. W_i stays. A
silo's model in the end is the one it trained last. The job cannot be private: W_i is learned of
records, and so is what it makes of the model.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Change, Course, Facts, Optimiser, Parts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import DTYPES, Contribution, Kind, Part, Tensors, TensorSpec
from ..method import Method, Setting, specs_of_parameters
from ..models.functional import called_with, parameters_of


class FedALAOptions(Strict):
    """Options of FedALA."""

    layers: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """p, the upper layers that are mixed.

    1, the default of the authors' code, is the classifier.
    """
    eta: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """η, the learning rate of the weights."""
    start_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 11
    """Epochs for which the weights are learned the first time."""
    training_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    """Epochs of (3) after the weights; default: one less than the job's."""


class FedALA(Method):
    """A global model whose upper layers each silo mixes into its own by weights that it learns."""

    name = "fedala"
    version = 2  # 2: after an epoch of the weights, training takes one less than the job's
    options_model = FedALAOptions
    options: FedALAOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        named = {part: specs_of_parameters(module) for part, module in setting.sketch().items()}
        # (part, layer) → (part, parameter)
        layers: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for part, specs in named.items():
            for spec in specs:
                # Weight and bias of a layer have the same name before the last dot.
                layer = (part, spec.name.rpartition(".")[0])
                layers.setdefault(layer, []).append((part, spec.name))
        if self.options.layers > len(layers):
            raise LocalError(
                f"fedala: layers = {self.options.layers}, the model has {len(layers)}; lower it"
            )
        # ``layers`` keeps the model's order, so the upper layers are the last ones.
        upper = set(chain.from_iterable(list(layers.values())[-self.options.layers :]))
        self.upper: dict[str, list[TensorSpec]] = {}
        for part, specs in named.items():
            self.upper[part] = [spec for spec in specs if (part, spec.name) in upper]
        self.model = self.shared("model", Kind.WHOLE_MODEL, "extractor", "classifier")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model."""
        return (self.model,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged model."""
        return (self.model,)

    # The silo half. The part ``weights`` is W_i. ``extra`` has the upper layers of Θ_i and Θ, as
    # ``old`` and ``new``, from their delivery until they are mixed, and ``learned``: whether W_i
    # ever was.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and W_i, all ones."""
        ones: dict[str, Tensor] = {}
        for part, specs in self.upper.items():
            for spec in specs:
                key = _key(part, spec.name)
                # One weight per number of the upper layers; at 1, Eq. 1 gives Θ.
                ones[key] = torch.ones(spec.shape, dtype=DTYPES[spec.dtype])
        return {**self.setting.build(), "weights": nn.ParameterDict(ones)}

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """No weights learned."""
        return {"learned": torch.tensor(0)}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Eq. 1 with the weights as they are; both ends are kept in order to learn the weights.

        If no model came down, as in a job's first round, the state stays as it is.
        """
        if "model" not in delivered:
            return state
        taken, extra = super().deliver(state, delivered, facts), dict(state.extra)
        for part, specs in self.upper.items():
            for spec in specs:
                key = _key(part, spec.name)
                # Eq. 1 is computed again with the learned weights, so both ends are kept.
                extra[f"old/{key}"] = state.parts[part][spec.name]
                extra[f"new/{key}"] = taken.parts[part][spec.name]
        return SiloState(self._mixed(taken, extra), extra)

    @property
    def private_fault(self) -> str:
        """The weights are learned through the model's mixture, and change it before it trains."""
        return (
            "how much of the global model a silo takes is learned of its records without noise;"
            " choose fedper"
        )

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Learn the weights, mix the models, train the model.

        The weights are learned for ``start_epochs`` epochs the first time, and for 1 afterwards.
        """
        # Training reads no other part, so W_i is not handed to it.
        local = replace(self.stage("extractor", "classifier"), reads=())
        context = {key: value for key, value in state.extra.items() if key != "learned"}
        # Nothing was delivered, so there are no weights to learn.
        if not context:
            return (local,)
        local = replace(local, epochs=self.options.training_epochs or self.epochs_left(1))
        # Weights start at ones; the authors' code learns them to convergence the first time.
        epochs = 1 if bool(state.extra["learned"]) else self.options.start_epochs
        optimiser = Optimiser(self.options.eta, within=(0.0, 1.0))  # (2)
        weights = Stage(("weights",), epochs, self.mixture_loss, optimiser, context=context)
        return (weights, Change(self.mix), local)  # (3)

    def mixture_loss(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B] of Θ̂_i."""
        # Mixed inside the loss, so that it can be differentiated by W_i.
        mixed = self.mixture(parameters_of(parts["weights"]), context)
        features = called_with(parts["extractor"], mixed["extractor"], x)
        logits = called_with(parts["classifier"], mixed["classifier"], features)
        return self.setting.task.losses(logits, y)

    def mixture(self, weights: Tensors, context: Tensors) -> dict[str, dict[str, Tensor]]:
        """The upper layers of Θ̂_i by part.

        Lower layers are not in the result: Eq. 1 takes them from Θ unchanged.
        """
        mixed: dict[str, dict[str, Tensor]] = {}
        for part, specs in self.upper.items():
            mixed[part] = {}
            for spec in specs:
                key = _key(part, spec.name)
                old, new = context[f"old/{key}"], context[f"new/{key}"]
                mixed[part][spec.name] = old + (new - old) * weights[key]  # (1)
        return mixed

    def mix(self, state: SiloState, facts: Facts) -> SiloState:
        """Eq. 1 with the weights just learned.

        The state no longer holds the two ends, which are two more copies of the upper layers.
        """
        return SiloState(self._mixed(state, state.extra), {"learned": torch.tensor(1)})

    def _mixed(self, state: SiloState, context: Tensors) -> Mapping[str, Tensors]:
        mixed = self.mixture(state.parts["weights"], context)
        return {part: {**tensors, **mixed.get(part, {})} for part, tensors in state.parts.items()}

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model, weighted by samples."""
        model = self.flat(state, "extractor", "classifier")
        return {"model": Contribution(model, float(facts.samples))}  # (4)


def _key(part: str, parameter: str) -> str:
    """A parameter's name in W_i: torch allows no dot in it."""
    return f"{part}/{parameter}".replace(".", "/")
