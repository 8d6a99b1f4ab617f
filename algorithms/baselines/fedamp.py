"""FedAMP: silos whose models are near one another draw them still nearer.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID
data", AAAI 2021, arXiv:2007.03797, Algorithm 1, with A(d) = 1 − exp(−d/σ) of squared distances d.

Silo i has a model w_i of its own, and the coordinator a u_i for it.

    (1) ξ_ij = α A'(‖w_i − w_j‖²) = (α/σ) exp(−‖w_i − w_j‖²/σ),  j ≠ i;   ξ_ii = 1 − Σ_{j ≠ i} ξ_ij
    (2) u_i = Σ_j ξ_ij w_j
    (3) at silo i, E epochs:   w_i ← argmin_w F_i(w) + λ/(2α) ‖w − u_i‖²

Where this differs from the paper:
- argmin is E epochs of the job's optimiser, from the w_i of before.
- The paper asks for an α so small that ξ_ii is positive. Where the others of (1) add up to more
  than 1 they are scaled to 1, and ξ_ii is 0. They are near α/σ each at first, so choose α below
  σ / m for m silos.
- Distances are those of the last round in which both silos took part; a pair without one has ξ 0.
  A silo that was away has its last w_j in (2).
- HeurFedAMP, which takes cosines in (1), is left out; so is an α that changes with the rounds.
- α, σ and λ are tuned for each data set in the paper. An often-used code puts the distance in (3)
  in place of its square.
- ``sketch``, not from the paper: a count-sketch of the model crosses for (1) in its place, since
  all of it doubles the upload, and blind takes a time to rotate that grows with the square of its
  length. By how much distances are off is said in algorithms/exchange/count_sketch.py.
- Distances are over parameters; batch norm's running statistics stay at each silo.

A pull of λ/α lets a model move by its gradient times α/λ in a round, whatever the learning rate: it
slows training down where that is little. On the digits (eight silos, Dirichlet shares of 0.1, ten
rounds, two seeds) none of six settings was better than local training.

Wire list, the same in every round:

==========  ====  ==============================================  ==================================
part        way   tensors                                         exchange
==========  ====  ==============================================  ==================================
``model``   up    w_i                                             Mix
``moved``   up    w_i less the initial model [1, |w|]             Gram; of a sketch where asked for
``model``   down  the silo's u_i, once it has taken part          -
==========  ====  ==============================================  ==================================

The initial model cancels in distances, and floats have more bits for what is left. The coordinator
sees how far each silo's model went, and the distances between them; in the clear the models too. In
a blind job a silo gets no u_i that leans on few others (security rules 4 and 5), and its own
model stands for it. A silo's model in the end is the one it trained last. Under differential
privacy all is computed of what was noised.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.delivery import Combined, CoordinatorState, Delivery, Results, Row
from ..exchange.parts import DTYPES, Contribution, Gram, Kind, Mix, Part, TensorSpec
from ..method import Method, Setting, specs_of_parameters
from ..methods.common.losses import proximal
from ..methods.common.second_model import MODEL

NEVER = -1.0  # the squared distance of two silos that were never compared


class FedAMPOptions(Strict):
    """Options of FedAMP."""

    alpha: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.1
    """α, how much others weigh; and by how much less they pull, by λ/α."""
    sigma: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0
    """σ, the squared distance at which a model weighs a third of a near one."""
    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.01
    """λ, the strength of the pull; 0 is local training."""
    sketch: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 0
    """Numbers that stand for a model in (1); 0 is all of it, the paper's."""


class FedAMP(Method):
    """A model for each silo, drawn to those of silos near it."""

    name = "fedamp"
    version = 1
    options_model = FedAMPOptions
    options: FedAMPOptions
    addressed = ("model",)

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        modules = setting.sketch()
        # Parameters only: Eq. 3 pulls no running statistics.
        named: list[TensorSpec] = []
        for part in MODEL:
            own = specs_of_parameters(modules[part])
            named.extend(replace(spec, name=f"{part}.{spec.name}") for spec in own)
        self.model = Part("model", Kind.WHOLE_MODEL, Mix(), tuple(named))
        length = sum(spec.elements for spec in named)
        kind, gram = Kind.WHOLE_MODEL, Gram()
        spec = TensorSpec("moved", named[0].dtype, (1, length))
        if 0 < self.options.sketch < length:
            kind, gram = Kind.SKETCH, Gram(self.options.sketch, setting.seed)
            spec = TensorSpec("sketch", "float64", (1, length))
        self.compared = Part("moved", kind, gram, (spec,))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model, to be mixed and to be compared."""
        return (self.model, self.compared)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The silo's u_i; there is none before the first round."""
        return (self.model,) if round_ else ()

    # The silo half. ``extra`` holds u_i.

    def own(self, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The parameters as they cross, named ``part.parameter``."""
        found: dict[str, Tensor] = {}
        for spec in self.model.tensors:
            part, _, leaf = spec.name.partition(".")
            found[spec.name] = parts[part][leaf]
        return found

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """The initial model."""
        modules = self.setting.build()
        return self.own({part: module.state_dict() for part, module in modules.items()})

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The initial model in place of u_i."""
        return dict(self.initial)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take u_i; w_i stays, and stands for u_i where none came."""
        return SiloState(state.parts, dict(delivered.get("model", self.own(state.parts))))

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 3."""
        stage = self.stage(*MODEL)
        if not self.options.lam:
            return (stage,)
        # A penalty, since it depends on no record; u_i differs from silo to silo: context.
        pull = partial(proximal, self.options.lam / self.options.alpha)
        return (replace(stage, penalty=pull, context=state.extra),)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The model, and how far it is from the initial one [1, |w|]."""
        own, (spec,) = self.own(state.parts), self.compared.tensors
        ways = [(own[name].double() - first.double()) for name, first in self.initial.items()]
        vector = torch.cat([way.reshape(-1) for way in ways])[None].to(DTYPES[spec.dtype])
        return {"model": Contribution(own), "moved": Contribution({spec.name: vector})}

    # The coordinator half. ``apart`` [N, N] has the squared distances, ``NEVER`` where there is
    # none; ``gave`` [N] marks the silos that have taken part.

    def begin(self) -> CoordinatorState:
        """No distance is known."""
        n = len(self.setting.silos)
        apart = torch.full((n, n), NEVER, dtype=torch.float64)
        return {"apart": apart, "gave": torch.zeros(n, dtype=torch.int64)}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """The distances of the pairs of this cohort; older ones stay."""
        gram = results["moved"]["gram"][0]  # one vector per silo, so one group
        lengths = gram.diagonal()
        squared = (lengths[:, None] + lengths - 2 * gram).clamp(min=0)
        index = torch.tensor(self.numbers(cohort))
        apart, gave = state["apart"].clone(), state["gave"].clone()
        apart[index[:, None], index] = squared
        apart.fill_diagonal_(NEVER)
        gave[index] = 1
        return Combined({"apart": apart, "gave": gave})

    def weights(self, state: CoordinatorState, silo: str) -> dict[str, float]:
        """ξ_ij of one silo i by silo j, of all that are positive."""
        here = self.number(silo)
        squared, sigma = state["apart"][here], self.options.sigma
        xi = self.options.alpha / sigma * torch.exp(-squared / sigma)  # (1)
        xi = torch.where(squared == NEVER, 0.0, xi)
        others = xi.sum()
        xi = xi / others.clamp(min=1)
        xi[here] = (1 - others).clamp(min=0)
        found = zip(self.setting.silos, xi.tolist(), strict=True)
        return {silo: weight for silo, weight in found if weight > 0}

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """Eq. 2, for a silo that has taken part and has others near it."""
        weights = self.weights(state, silo)
        if not state["gave"][self.number(silo)] or not weights.keys() - {silo}:
            return ()
        return (Row("model", weights),)  # (2)
