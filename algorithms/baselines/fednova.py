"""FedNova: FedAvg, whose silos count by the direction in which they went, not by how far.

Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous
federated optimization", NeurIPS 2020, arXiv:2007.07481, section 4.

Silo i takes τ_i steps, which differ between silos with their records. Its model moves by −η Σ_k
a_{i,k} g_k, with the coefficients a_i of methods/common/local_steps.py; p_i = n_i / n.

    (1) at silo i, τ_i steps from x:  y_i ← SGD_i(x)
    (2)                               d_i = (x − y_i) / ‖a_i‖₁
    (3) at the coordinator:           τ_eff = Σ_i p_i ‖a_i‖₁
    (4)                               x ← x − τ_eff Σ_i p_i d_i

The η of the paper's (4) is in d_i here, since all silos have the job's. Where all τ_i are equal,
this is FedAvg.

Where this differs from the paper:
- Silos differ in τ_i by their records alone, for the job's epochs are the same for all.
- Local solvers are SGD with or without momentum; the proximal term and other optimisers are left
  out, and others than SGD are refused.
- Server momentum, which the paper adds in one experiment, is that of
  methods/common/server_optimiser.py; this method does without.
- p_i is over the silos of a round, as in the paper's code; ``weights = "equal"`` replaces n_i by 1.
- ``training.clip`` cuts each g_k, whose sum then stands in (2).
- Batch norm's running statistics, where they cross, are averaged by p_i.

Wire list, the same in every round:

===========  ====  ================================================  ======================
part         way   tensors                                           exchange
===========  ====  ================================================  ======================
``direction``  up    64 d_i, and ``steps``: ‖a_i‖₁ / 64                Sum weighted by n_i
``moved``      down  x of Eq. 4                                        -
===========  ====  ================================================  ======================

64 is near what silos take in a round, so that values of one size cross and lose few bits in a blind
job; ``security.clip_exponent`` has to hold ‖a_i‖₁ / 64. The coordinator sees each silo's direction
and steps, from which its model follows, so no less than in FedAvg; in a blind job it sees the means
alone. In a private job all silos take equally many steps, whatever their records: this is FedAvg
then. The model of a silo in the end is the one delivered last.
"""

from functools import cached_property

import torch
from torch import Tensor

from ...files.documents import Strict
from ..course import Facts, SiloState
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import Contribution, Kind, Part, TensorSpec
from ..method import Setting, specs_of_parameters
from ..methods.common.local_steps import check_sgd, gradients_in
from ..methods.fedavg import FedAvg, FedAvgOptions

MODEL = ("extractor", "classifier")
UNIT = 64.0  # steps; a power of two, so that it rounds nothing


class FedNovaOptions(FedAvgOptions):
    """Options of FedNova."""


class FedNova(FedAvg):
    """FedAvg of directions, each divided by the silo's steps."""

    name = "fednova"
    version = 1
    sums_steps = False
    options_model = FedNovaOptions
    options: FedNovaOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        check_sgd(self.name, setting)
        modules = setting.sketch()
        # Buffers have no direction; their own values cross.
        self.parameters = [
            f"{part}.{spec.name}" for part in MODEL for spec in specs_of_parameters(modules[part])
        ]
        steps = TensorSpec("steps", "float32", (), 0.0)
        directions = (*self.model.tensors, steps)
        self.direction = Part("direction", Kind.WHOLE_MODEL, self.model.exchange, directions)
        self.moved = Part("moved", Kind.WHOLE_MODEL, self.model.exchange, self.model.tensors)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The direction of the whole model, and the steps."""
        return (self.direction,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The moved model."""
        return (self.moved,)

    # The silo half. ``extra`` holds x.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The initial x."""
        return self.initial

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the model, and remember it."""
        taken = super().deliver(state, delivered, facts)
        x = self.flat(taken, *MODEL)
        return SiloState(taken.parts, {name: x[name] for name in self.parameters})

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """d_i in the unit of the wire, with the steps."""
        made = super().contribute(state, facts)["model"]
        steps, tensors = gradients_in(self.setting, facts) / UNIT, dict(made.tensors)
        for name in self.parameters:
            tensors[name] = (state.extra[name] - tensors[name]) / steps  # (2)
        tensors["steps"] = torch.tensor(steps, dtype=torch.float32)
        return {"direction": Contribution(tensors, made.weight)}

    # The coordinator half.

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """The values of x with which all begin."""
        x: dict[str, Tensor] = {}
        for part, module in self.setting.build().items():
            named = module.named_parameters()
            x |= {f"{part}.{name}": value.detach().clone() for name, value in named}
        return x

    def begin(self) -> CoordinatorState:
        """The initial x."""
        return self.initial

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eqs. 3 and 4; buffers are averaged."""
        mean = results["direction"]
        moved = {spec.name: mean[spec.name] for spec in self.moved.tensors}
        for name in self.parameters:
            moved[name] = state[name] - mean["steps"] * mean[name]  # (4)
        return Combined({name: moved[name] for name in self.parameters}, {"moved": moved})
