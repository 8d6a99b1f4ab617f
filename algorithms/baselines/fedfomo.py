"""FedFomo: each silo weighs other silos' models by what they would do for its own loss.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model
optimization", ICLR 2021, arXiv:2012.08565, section 3.

Silo i has the model θ_i with which its last local training began, and θ_i' with which that ended.
It compares θ_i' and models θ_n' of others, M in all, by its own loss L_i:

    (1) w_n ← (L_i(θ_i) - L_i(θ_n')) / ‖θ_n' - θ_i‖
    (2) v_n ← max(w_n, 0) / Σ_m max(w_m, 0)
    (3) θ_i ← θ_i + Σ_n v_n (θ_n' - θ_i), which is then trained to θ_i'
    (4) at the coordinator: p_i ← p_i + w_i, the affinities of silo i
    (5) silo i gets, one by one, the model of the next highest p_in, or with probability ε_t of any
        silo at random; ε_t = max(0, ε - t δ)

What everybody sees: the coordinator every silo's whole model and, by w, who is of use to whom, in
every round; a silo whole models of M - 1 others a round, though not whose. So [security]
secure_aggregation = "required" refuses it: a model must be looked at as it is, by somebody else
than who trained it, and no sum will do.

Where this differs from the paper:
- L_i is the mean loss over the training records. The paper splits off a fifth of them for it; of
  records that a silo trained on its own model is better than it seems, so others weigh less here.
- θ_i' is always among the M, as in the authors' code; where no model has a lower loss than θ_i, (3)
  stays at θ_i.
- Distances are Euclidean ones of all parameters; the code's are sums of magnitudes by default. At
  no distance w is 0.
- The w_n of (4), negative ones too, are divided by the sum of their magnitudes, by which nobody
  adds more than 1; the code divides them by the magnitude of their sum, which may be near 0.
- Models are the last that each silo contributed; in the code those of the round before alone.
- Ties of p_in, as at first, are broken at random. Draws are from a stream of the job for each silo
  and round.
- Under ``model.buffers = "global"`` (3) mixes running statistics too; "local" ones stay, so that a
  silo looks at other models with its own.

Wire list (M - 1 others; fewer where there are not as many silos):

===========  ====  ====================================================================  ========
part         way   tensors                                                               exchange
===========  ====  ====================================================================  ========
``model``    up    θ_i'                                                                  Each
``weights``  up    w_n of (4) [M - 1], in the order in which the models came; 0 for      Each
                   none
``others``   down  θ_n' [M - 1, …], and ``known``: how many there are, the first ones    -
===========  ====  ====================================================================  ========

A silo's model in the end is the one it trained last. The coordinator keeps a model of each silo in
its state, up to 950 MB of them; a silo keeps M + 1 models. The job cannot be private: losses are of
records, and each silo's model crosses as it is.
"""

from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import (
    LARGEST_STATE,
    Combined,
    CoordinatorState,
    Delivery,
    Results,
    Value,
)
from ..exchange.parts import DTYPES, Contribution, Each, Kind, Part, TensorSpec
from ..method import Method, Setting, specs_of_parameters
from ..methods.common.second_model import MODEL, logits, names, taken, with_second_models
from ..numerics.streams import raw, stream, uniform

START = "start"  # the copy of the model that is θ_i


class FedFomoOptions(Strict):
    """Options of FedFomo; the defaults are those of the authors' first command for CIFAR-10."""

    models: Annotated[int, Field(strict=True, ge=2, le=64)] = 5
    """M, the models that a silo compares in a round, its own among them."""
    epsilon: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.3
    """ε, the probability at first that a model is any silo's."""
    epsilon_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.05
    """δ, by which it falls from round to round."""


class FedFomo(Method):
    """Models of others, weighed by each silo for itself."""

    name = "fedfomo"
    version = 1
    options_model = FedFomoOptions
    options: FedFomoOptions
    addressed = ("others",)

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # One of the M is the silo's own; a small job has fewer others than M − 1.
        count = min(self.options.models, len(setting.silos)) - 1
        self.others = tuple(f"other{k}" for k in range(1, count + 1))  # copies of the model
        self.models = (START, "", *self.others)  # θ_i, θ_i', θ_n'
        specs, sketch = self.flat_specs(*MODEL), setting.sketch()
        # ``combine`` keeps one model per silo, and states have a largest size.
        if (size := len(setting.silos) * sum(spec.nbytes for spec in specs)) > LARGEST_STATE:
            raise LocalError(
                f"fedfomo: the coordinator would keep {size:,} bytes of models of"
                f" {len(setting.silos)} silos, {LARGEST_STATE:,} are the most; name fewer silos, or"
                " choose a smaller model"
            )
        # Distances are over parameters, without running statistics.
        self.compared = [
            (part, spec.name) for part in MODEL for spec in specs_of_parameters(sketch[part])
        ]
        self.model = Part("model", Kind.WHOLE_MODEL, Each(), specs)
        # Divided by the sum of their magnitudes (4), so each is within −1 … 1.
        weights = TensorSpec("weights", "float64", (count,), -1.0, 1.0)
        self.weights = Part("weights", Kind.MEMBERSHIP, Each(), (weights,))
        stacked = tuple(replace(spec, shape=(count, *spec.shape)) for spec in specs)
        # The first ``known`` of the stacked models are models; the rest are zeros.
        known = TensorSpec("known", "int64", (), 0, count)
        self.received = Part("others", Kind.WHOLE_MODEL, Each(), (*stacked, known))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model, and the weights of the others' models."""
        return (self.model, self.weights)

    def down(self, round_: int) -> tuple[Part, ...]:
        """Models of others, once there are any."""
        return (self.received,) if round_ else ()

    # The silo half. Next to the model, θ_i', lie its copy θ_i and, in others, what came down;
    # ``extra`` has (4).

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model and its copies, all of the same initial values."""
        return with_second_models(self.setting, START, *self.others)

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros: nothing was compared yet."""
        return {"weights": torch.zeros(self.weights.tensors[0].shape, dtype=torch.float64)}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Put the others' models into their copies; θ_i, of weight 0, where there are fewer."""
        came = delivered.get("others", {})
        known = int(came.get("known", torch.tensor(0)))
        parts = dict(state.parts)
        for k, other in enumerate(self.others):
            for part, name, copy in zip(MODEL, names(other), names(START), strict=True):
                # A copy of θ_i is at distance 0, so ``mix`` gives it weight 0.
                values = state.parts[copy]
                if k < known:
                    values = {
                        spec.name: came[f"{part}.{spec.name}"][k] for spec in self.template[part]
                    }
                # The silo's own values for what does not cross, such as local running statistics.
                parts[name] = {**state.parts[part], **values}
        return SiloState(parts, state.extra)

    @property
    def private_fault(self) -> str:
        """The losses are surveyed, and every silo's model crosses alone."""
        return (
            "a silo weighs others' models by the losses of its records, without noise; choose"
            " fedavg"
        )

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Measure the losses, mix the models, train the model."""
        # Training reads no other part, so no other silo's model is handed to it.
        return (Survey(self.losses), Change(self.mix), replace(self.stage(*MODEL), reads=()))

    def losses(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums [1 + M] of the losses of θ_i, θ_i' and the others.

        They are in the order of ``models``.
        """
        made = [logits(parts, x, model) for model in self.models]
        return {"losses": torch.stack([self.setting.task.losses(each, y).sum() for each in made])}

    def mix(self, state: SiloState, facts: Facts) -> SiloState:
        """Eqs. 1 to 3.

        The weights of (4) [M - 1] go into ``extra``. The mixture is both the model and θ_i.
        """
        # Sums of losses, not means: the divisor would cancel in the shares.
        losses, start = facts.measured["losses"], self.vector(state, START)
        distances = torch.stack(
            [(self.vector(state, model) - start).norm() for model in self.models[1:]]
        )
        # A model at distance 0 is θ_i itself: its w is 0, and nothing divides by 0.
        apart = distances > 0
        # (1)
        w = torch.where(apart, (losses[0] - losses[1:]) / torch.where(apart, distances, 1.0), 0.0)
        useful = w.clamp(min=0)
        # If no model is better than θ_i, v is zero and θ_i stays (see the top of this file).
        v = useful / torch.where(useful.any(), useful.sum(), 1.0)  # (2)
        # (3): of θ_i, θ_i' and the others
        # θ_i has the share 1 − Σ v: 1 if v is zero, else 0.
        shares = torch.cat([(1 - v.sum()).clamp(min=0)[None], v])
        parts = dict(state.parts)
        for part in MODEL:
            held = [state.parts[_named(model, part)] for model in self.models]
            for spec in self.template[part]:
                # float64, so that the mixture is rounded only once.
                versions = torch.stack([own[spec.name].double() for own in held])  # [1 + M, …]
                mixed = torch.tensordot(shares, versions, 1).to(DTYPES[spec.dtype])
                parts[part] = {**parts[part], spec.name: mixed}
        # By magnitudes, so that no silo adds more than 1 to anybody's affinity.
        size = w.abs().sum()
        weights = w[1:] / torch.where(size > 0, size, 1.0)
        # Training starts from the mixture, and the next round compares with it as θ_i.
        return SiloState(parts | taken(parts, START), {"weights": weights})

    def vector(self, state: SiloState, model: str) -> Tensor:
        """The parameters [|θ|] of one of the silo's models, in float64."""
        tensors = (state.parts[_named(model, part)][name] for part, name in self.compared)
        return torch.cat([tensor.double().reshape(-1) for tensor in tensors])

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """θ_i', and the others' weights."""
        return {
            "model": Contribution(self.flat(state, *MODEL)),
            "weights": Contribution({"weights": state.extra["weights"]}),
        }

    # The coordinator half. ``affinity`` [N, N] is p, ``gave`` [N] marks the silos whose model there
    # is, and a tensor [N, …] for each of the model's has them.

    def begin(self) -> CoordinatorState:
        """No model, no affinity."""
        n = len(self.setting.silos)
        affinity, gave = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
        return {"affinity": affinity, "gave": gave}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 4, and the new models in place of the silos' last.

        The state has ``affinity`` [N, N] float64, ``gave`` [N] int64, and [N, …] for each tensor
        of the model.
        """
        index = torch.tensor(self.numbers(cohort))
        affinity, gave = state["affinity"].clone(), state["gave"].clone()
        # The same state and stream give the same choice, so these are the models that were sent.
        for silo, row in zip(cohort, results["weights"]["weights"], strict=True):
            sent = self.chosen(state, round_, silo)
            affinity[self.number(silo), sent] += row[: len(sent)]  # (4)
        gave[index] = 1
        models: dict[str, Tensor] = {}
        for name, uploaded in results["model"].items():
            if name in state:
                models[name] = state[name].clone()
            else:
                # Zeros until a silo uploads; ``gave`` tells them from models.
                models[name] = uploaded.new_zeros(len(gave), *uploaded.shape[1:])
            models[name][index] = uploaded
        return Combined({"affinity": affinity, "gave": gave, **models})

    def chosen(self, state: CoordinatorState, round_: int, silo: str) -> list[int]:
        """The silos whose models this one gets in a round (Eq. 5), as numbers in job order.

        They are at most M - 1 others, each once; none while no other silo has uploaded a model.
        """
        own = self.number(silo)
        # Only silos that have ever uploaded a model; a silo has its own already.
        there = [n for n in range(len(self.setting.silos)) if n != own and bool(state["gave"][n])]
        rng = stream(self.setting.seed, silo, round_, "fedfomo/others")
        # All draws come first, so that how many there are does not depend on the affinities.
        lots, draws = raw(rng, len(there)), uniform(rng, (len(self.others),), 0.0, 1.0)
        order = [there[i] for i in np.argsort(lots, kind="stable")]  # at random
        # ``sorted`` is stable, so the random order breaks ties of affinity.
        best = sorted(order, key=lambda n: -float(state["affinity"][own, n]))
        epsilon = self.options.epsilon - round_ * self.options.epsilon_decay

        # ε-greedy: with probability ε any other silo, otherwise the best that is left.
        found: list[int] = []
        for draw in draws[: len(there)]:
            ranking = order if draw < epsilon else best
            found.append(next(n for n in ranking if n not in found))
        return found

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The models of the chosen, zeros behind them.

        Each tensor is [M - 1, …]; ``known`` [] int64 is the number of models among them.
        """
        sent = self.chosen(state, round_, silo)
        if not sent:
            return ()
        padding = len(self.others) - len(sent)
        tensors: dict[str, Tensor] = {}
        for spec in self.model.tensors:
            models = state[spec.name]
            # A part has one shape for all silos, so missing models are zeros.
            tensors[spec.name] = torch.cat([models[sent], models.new_zeros(padding, *spec.shape)])
        return (Value("others", {**tensors, "known": torch.tensor(len(sent))}),)


def _named(model: str, part: str) -> str:
    """The silo's name for a part of one of its models."""
    return names(model)[MODEL.index(part)] if model else part
