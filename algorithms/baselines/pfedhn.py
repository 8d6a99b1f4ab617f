"""pFedHN: a network at the coordinator makes each silo's model, of an embedding of the silo.

Shamsian, Navon, Fetaya, Chechik, "Personalized federated learning using hypernetworks", ICML 2021,
arXiv:2103.04628, Algorithm 1. h is the hypernetwork with parameters φ, v_i silo i's embedding, and
S the silos of a round.

    (1) at the coordinator:      θ_i = h(v_i; φ)
    (2) at silo i, E epochs:     θ̃_i ← SGD of L_i(θ), from θ_i;  Δθ_i = θ̃_i − θ_i
    (3) at the coordinator:      φ ← φ + α Σ_{i ∈ S} (∂θ_i/∂φ)ᵀ Δθ_i
    (4)                          v_i ← v_i + α (∂θ_i/∂v_i)ᵀ Δθ_i, for i ∈ S

So −Δθ_i stands for the gradient of L_i by θ_i, which the coordinator propagates back into h. h is a
linear layer, ``layers`` times ReLU and a linear layer, all ``hidden`` wide, and a linear layer that
has a number for each parameter of the model.

Where this differs from the paper:
- The paper's round has one silo. A round of more adds up the steps that each would have caused by
  itself, all of them from the φ with which the round began.
- (3) and (4) are one step of SGD with momentum and weight decay, and the gradient of φ and all v_i
  together is cut to a length, all as in the authors' code, whose defaults these are. So embeddings
  move in rounds without their silos, too.
- The last layer's biases begin as the job's initial model, or its file of weights, so norm layers
  begin near the identity; in the code they are drawn. All other values begin as drawn there.
- v_i has 1 + N/4 numbers for N silos, rounded down, as the code has it unless told.
- Running statistics stay at the silos.
- The paper's variant with a classifier of each silo's own, pFedHN-PC, is left out, and so are
  models of several sizes.

Wire list, the same in every round:

==========  ====  =======  ========
part        way   tensors  exchange
==========  ====  =======  ========
``change``  up    Δθ_i     Each
``model``   down  θ_i      -
==========  ====  =======  ========

The coordinator sees how each silo changed its model, and knows all models. (3) is a product of
Δθ_i with what depends on i, and (4) is each silo's own: no sum of the Δθ_i will do, so [security]
secure_aggregation = "required" refuses it. φ and v_i never leave the coordinator. A silo's model in
the end is the one delivered last. φ has about ``hidden`` numbers for each of the model's; the
coordinator keeps it and its momentum, up to 950 MB. In a private job Δθ_i is what noised steps add
up to.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.delivery import (
    LARGEST_STATE,
    Combined,
    CoordinatorState,
    Delivery,
    Results,
    Value,
)
from ..exchange.parts import DTYPES, Contribution, Each, Kind, Part, elements_of
from ..method import Method, Setting, specs_of_parameters
from ..methods.common.second_model import MODEL
from ..models.build import fill
from ..numerics.streams import stream, uniform

EMBEDDINGS = "embeddings"  # v_i [N, e], in job order
NETWORK = "network."  # begins the names of φ
VELOCITY = "velocity/"  # begins the names of the momentum of φ and v


class PFedHNOptions(Strict):
    """Options of pFedHN."""

    server_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 0.01
    """α, the learning rate of hypernetwork and embeddings."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of their steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1e-3
    """Weight decay of their steps."""
    clip: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 50.0
    """The greatest length of their gradient."""
    hidden: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 100
    """Width of the hypernetwork's layers."""
    layers: Annotated[int, Field(strict=True, ge=0, le=20)] = 3
    """Layers between its first and its last."""
    embedding: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    """Numbers of a silo's embedding; default: one more than a quarter of the silos."""


class HyperNetwork(nn.Module):
    """The network h, from embeddings [m, e] to models [m, |θ|]."""

    def __init__(self, embedding: int, hidden: int, layers: int, size: int) -> None:
        super().__init__()
        body: list[nn.Module] = [nn.Linear(embedding, hidden)]
        for _ in range(layers):
            body += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.body, self.last = nn.Sequential(*body), nn.Linear(hidden, size)

    def forward(self, embeddings: Tensor) -> Tensor:
        """θ_i, a row for each embedding."""
        made: Tensor = self.last(self.body(embeddings))
        return made


class PFedHN(Method):
    """Models made by a hypernetwork, which learns from how the silos change them."""

    name = "pfedhn"
    version = 1
    options_model = PFedHNOptions
    product = "delivered"
    addressed = ("model",)
    options: PFedHNOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Without running statistics: a variance that is made could be negative.
        for part, module in setting.sketch().items():
            self.template[part] = specs_of_parameters(module)
        self.specs = self.flat_specs(*MODEL)
        self.change = Part("change", Kind.WHOLE_MODEL, Each(), self.specs)
        self.made = Part("model", Kind.WHOLE_MODEL, Each(), self.specs)
        self.embedding = self.options.embedding or 1 + len(setting.silos) // 4
        self.network = self.sketched()
        self._check_size()

    def _check_size(self) -> None:
        numbers = elements_of(specs_of_parameters(self.network))
        numbers += len(self.setting.silos) * self.embedding
        # float32, and as much again for the momentum
        if (held := 2 * 4 * numbers) > LARGEST_STATE:
            raise LocalError(
                f"pfedhn: the coordinator would keep {held:,} bytes of a hypernetwork and its"
                f" momentum, {LARGEST_STATE:,} are the most; lower method.options.hidden, or"
                " choose a smaller model"
            )

    def up(self, round_: int) -> tuple[Part, ...]:
        """Δθ_i."""
        return (self.change,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """θ_i."""
        return (self.made,)

    # The silo half. ``extra`` holds θ_i.

    def initial(self) -> dict[str, Tensor]:
        """The job's initial model, by the names of the wire."""
        values: dict[str, Tensor] = {}
        for part, module in self.setting.build().items():
            own = module.state_dict()
            values |= {f"{part}.{spec.name}": own[spec.name] for spec in self.template[part]}
        return values

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The initial model in place of θ_i."""
        return self.initial()

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take θ_i, and remember it."""
        taken = super().deliver(state, delivered, facts)
        return replace(taken, extra=self.flat(taken, *MODEL))

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 2."""
        return (self.stage(*MODEL),)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """How training changed the model."""
        trained = self.flat(state, *MODEL)
        change = {name: value - state.extra[name] for name, value in trained.items()}
        return {"change": Contribution(change)}  # (2)

    # The coordinator half. Its state is φ, the v_i and the momentum of both.

    def sketched(self) -> HyperNetwork:
        """The network h without values."""
        own, size = self.options, elements_of(self.specs)
        with torch.device("meta"):
            return HyperNetwork(self.embedding, own.hidden, own.layers, size)

    def begin(self) -> CoordinatorState:
        """First values; every model is then near the job's initial one."""
        network, dtype = self.sketched(), torch.get_default_dtype()
        fill(network, self.setting.seed, "pfedhn")
        state = {f"{NETWORK}{name}": value for name, value in network.state_dict().items()}
        flat = [value.reshape(-1) for value in self.initial().values()]
        state[f"{NETWORK}last.bias"] = torch.cat(flat).to(dtype)
        rng = stream(self.setting.seed, "", 0, "init/pfedhn/embeddings")
        # Between ± √3 the variance is 1.
        drawn = uniform(rng, (len(self.setting.silos), self.embedding), -(3**0.5), 3**0.5)
        state[EMBEDDINGS] = torch.from_numpy(drawn).to(dtype)
        still = {f"{VELOCITY}{name}": torch.zeros_like(value) for name, value in state.items()}
        return state | still

    def models(self, state: CoordinatorState, silos: tuple[str, ...]) -> Tensor:
        """θ_i of these silos, flat: [m, |θ|]."""
        phi: dict[str, Tensor] = {}
        for name, value in state.items():
            if name.startswith(NETWORK):
                phi[name.removeprefix(NETWORK)] = value
        made: Tensor = functional_call(self.network, phi, (state[EMBEDDINGS][self.numbers(silos)],))
        return made  # (1)

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eqs. 3 and 4; LocalError for changes that would make the state NaN or infinite."""
        names = [name for name in state if not name.startswith(VELOCITY)]
        leaves = {name: state[name].detach().requires_grad_() for name in names}
        came = (results["change"][spec.name] for spec in self.specs)
        change = torch.cat([each.reshape(len(cohort), -1) for each in came], dim=1)
        with torch.enable_grad():
            models = self.models(leaves, cohort)
            # −Δθ_i stands for the gradient by θ_i.
            steepness = -(models * change.to(models.dtype)).sum()
            slopes = torch.autograd.grad(steepness, list(leaves.values()))

        # The authors' optimiser: all are cut together before the decay is added.
        own, after = self.options, dict[str, Tensor]()
        length = nn.utils.get_total_norm(slopes)
        if not length.isfinite():
            raise LocalError(
                f"pfedhn, round {round_ + 1}: silos changed their models by more than float32 can"
                " propagate; lower training.lr"
            )
        cut = (own.clip / length).clamp(max=1)
        for name, slope in zip(names, slopes, strict=True):
            step = cut * slope + own.weight_decay * state[name]
            velocity = own.momentum * state[f"{VELOCITY}{name}"] + step
            after[name] = state[name] - own.server_lr * velocity  # (3), (4)
            after[f"{VELOCITY}{name}"] = velocity
        return Combined(after)

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The silo's own model."""
        (flat,) = self.models(state, (silo,))
        pieces, model = flat.split([spec.elements for spec in self.specs]), dict[str, Tensor]()
        for spec, values in zip(self.specs, pieces, strict=True):
            model[spec.name] = values.reshape(spec.shape).to(DTYPES[spec.dtype])
        return (Value("model", model),)
