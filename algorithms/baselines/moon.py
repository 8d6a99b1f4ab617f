"""MOON: FedAvg whose silos hold their features close to the delivered model's.

They hold them away from their own features of the round before.

Li, He, Song, "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257, Algorithm 1.

Silo i trains w_i, which starts as the delivered w^t; w_i^{t-1} is what it trained last. R_w(x) is
what the model w makes of a record below its output layer, and z = R_{w_i}(x), z_glob = R_{w^t}(x),
z_prev = R_{w_i^{t-1}}(x):

    (3) ℓ_con = -log [ exp(cos(z, z_glob)/τ) / (exp(cos(z, z_glob)/τ) + exp(cos(z, z_prev)/τ)) ]
    (4) at silo i, E epochs:     ℓ = ℓ_sup(w_i; (x, y)) + μ ℓ_con(w_i; w_i^{t-1}; w^t; x)
    (5) at the coordinator:      w^{t+1} ← Σ_{i in the cohort} (n_i / Σ n) w_i^t

Where this differs from the paper:
- R is the job's ``extractor``; the paper puts a projection head of two layers, 256 wide, below the
  output layer. Choose a model whose extractor ends in fully connected layers, as lenet5's does.
- A silo that trains for the first time has no w_i^{t-1}: w^t stands for it, and ℓ_con is then log 2
  whatever w_i is, so that its first round is FedAvg's. In the authors' code the initial models
  stand there.
- One model of before, as in the paper; the authors' code can hold more against z.
- Features that are all zero have a cosine of 0.
- The frozen models run in evaluation mode, with the running statistics of batch norm that the silo
  has at the time.
- Defaults: τ = 0.5 and μ = 1 are those of the authors' code; the paper tunes μ, 5 for CIFAR-10, 1
  for CIFAR-100 and Tiny-ImageNet. With μ = 0 this is FedAvg to the bit.

Wire list: ``model`` (whole model, Sum weighted by n_i) up and down in every round, as FedAvg; the
coordinator sees no more than FedAvg's. The two frozen extractors never leave. The model of a silo
in the end is the one delivered last. Under differential privacy the frozen extractors hold nothing
but what was delivered, or trained with noise.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Kind, Part, Tensors
from ..method import Method, Setting


class MOONOptions(Strict):
    """Options of MOON."""

    mu: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """μ of Eq. 4; 0 is FedAvg."""
    temperature: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.5
    """τ of Eq. 3."""


class MOON(Method):
    """FedAvg with a loss that compares features with the delivered and the previous model's."""

    name = "moon"
    version = 1
    options_model = MOONOptions
    product = "delivered"
    options: MOONOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.model = self.shared("model", Kind.WHOLE_MODEL, "extractor", "classifier")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model."""
        return (self.model,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged model."""
        return (self.model,)

    # The silo half. ``began`` in ``extra`` says whether this silo has taken part in a round.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and the frozen extractors ``delivered`` (w^t) and ``previous`` (w_i^{t-1})."""
        # Initial values do not matter here: ``deliver`` sets both before any training.
        frozen = {name: self.setting.build()["extractor"] for name in ("delivered", "previous")}
        return {**self.setting.build(), **frozen}

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """A mark that nothing was trained yet."""
        # A tensor, since states hold only tensors.
        return {"began": torch.tensor(False)}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """w_i ← w^t, and the frozen extractors.

        In a silo's first round both frozen extractors are that of w^t, so ℓ_con is log 2.
        """
        new = super().deliver(state, delivered, facts).parts
        own, came = state.parts["extractor"], new["extractor"]
        began = state.extra["began"]
        # ``where``, not ``if``: ``deliver`` may not read a value out of a tensor (method.py).
        previous = {name: torch.where(began, own[name], value) for name, value in came.items()}
        return SiloState(
            {**new, "delivered": came, "previous": previous}, {"began": torch.ones_like(began)}
        )

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        epochs, optimiser = self.setting.epochs, self.setting.optimiser
        # The frozen extractors are not trained, so the runner keeps them in evaluation mode.
        return (Stage(("extractor", "classifier"), epochs, self.objective, optimiser),)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """ℓ by sample [B]."""
        features = parts["extractor"](x)  # z [B, d]
        supervised = self.setting.task.losses(parts["classifier"](features), y)
        # At μ = 0 the two further forward passes would be wasted.
        if not self.options.mu:
            return supervised
        flat = features.flatten(1)
        # [B]
        near, far = (
            cosine_similarity(flat, parts[name](x).flatten(1)) for name in ("delivered", "previous")
        )
        contrast = torch.stack([near, far], dim=1) / self.options.temperature  # [B, 2]
        # −log softmax of ``near``: the delivered model is the positive pair.
        return supervised + self.options.mu * (contrast.logsumexp(1) - contrast[:, 0])  # (3), (4)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model, weighted by samples."""
        model = self.flat(state, "extractor", "classifier")
        return {"model": Contribution(model, float(facts.samples))}  # (5)
