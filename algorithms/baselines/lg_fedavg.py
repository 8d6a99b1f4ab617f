"""LG-FedAvg: shared last layers above private ones.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally:
federated learning with local and global representations", 2020, arXiv:2001.01523, Algorithm 1.

    (1) at silo m, E epochs:                (θ_m^l, θ_m^g) ← SGD_m(θ_m^l, θ^g)
    (2) at the coordinator, cohort S_t:     θ^g ← Σ_{m ∈ S_t} N_m θ_m^g / Σ_{m ∈ S_t} N_m

The local representation θ^l are the layers next to the data, the global model θ^g the last
``layers`` of the network, of which the classifier is the last.

Where this differs from the paper:
- Which layers are global is open there. ``layers`` = 1, the classifier alone, is the form in which
  later papers compare with it. The authors' code has the last 3 of 5 for MNIST (``layers = 3``);
  for CIFAR-10 its list of layers runs the other way round, so that the two convolutions are global,
  which is not offered here: FedPer shares lower layers.
- Silos start from one common initial model; the authors' code begins with the model that FedAvg has
  trained.
- (2) weighs by samples, as the paper has it; the authors' code weighs equally.
- The auxiliary losses on representations (self-supervision, adversarial fairness) and the ensemble
  for new silos are left out.
- With ``extractors`` silos have lower layers of different architectures, as those that FedSSA
  compares with.
- Layers count in the order in which the network defines them, a norm with the layer before it.
  Batch norm's running statistics stay at each silo, unless ``model.buffers = "global"`` and their
  layer crosses.

Wire list: ``layers`` (header rows for the classifier alone, else of the whole model's kind; Sum
weighted by samples) up and down in every round. Lower layers never leave; under differential
privacy they are noised with the rest, since the gradients of those that leave depend on them.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated

from pydantic import Field
from torch import nn

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part, Sum, picked
from ..method import Method, Setting
from ..methods.common.heterogeneous import Extractors, check_extractors, check_not_dense, dealt

MODEL = ("extractor", "classifier")


class LGFedAvgOptions(Strict):
    """Options of LG-FedAvg."""

    layers: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """Number of last layers that cross; 1 is the classifier alone."""
    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order; only the classifier crosses then."""


class LGFedAvg(Method):
    """Shared last layers above private ones."""

    name = "lg-fedavg"
    version = 1
    sums_steps = True
    options_model = LGFedAvgOptions
    options: LGFedAvgOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # ``layers_of`` puts the classifier last, so ``layers = 1`` uploads only it.
        own, layers = self.options.layers, layers_of(setting.sketch())
        if own >= len(layers):
            raise LocalError(
                f"lg-fedavg: layers = {own}, but the model has {len(layers)}, so nothing would stay"
                " at a silo; choose fewer, a model of more layers, or method fedavg"
            )
        # Different architectures have only the classifier in common.
        if own > 1 and self.options.extractors:
            raise LocalError(
                f"lg-fedavg: layers = {own}, but extractors that differ from silo to silo cannot"
                " cross; write layers = 1, or leave extractors out"
            )
        # Any model will do where all silos have the job's.
        if self.options.extractors:
            check_not_dense("lg-fedavg", setting)
            width = self.header_rows().shape[1]
            check_extractors("lg-fedavg", self.options.extractors, setting, width)
        # A tensor crosses with its layer, which it is named for.
        crossing = set(chain.from_iterable(layers[-own:]))
        specs = [
            spec for spec in self.flat_specs(*MODEL) if spec.name.rpartition(".")[0] in crossing
        ]
        # A classifier has one row per class; with further layers the part is a model.
        kind = Kind.HEADER_ROWS if own == 1 else Kind.WHOLE_MODEL
        self.layers = Part("layers", kind, Sum("mean"), tuple(specs))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The last layers."""
        return (self.layers,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged last layers."""
        return (self.layers,)

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own architecture."""
        return dealt(self.options.extractors, self.setting, silo)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train all layers together."""
        return (self.stage(*MODEL),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained last layers, weighted by samples."""
        # With several architectures the template fits the classifier alone.
        parts = MODEL if self.options.layers > 1 else ("classifier",)
        tensors = picked(self.layers.tensors, self.flat(state, *parts))
        return {"layers": Contribution(tensors, float(facts.samples))}  # (2)


def layers_of(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """The layers from first to last, each as names ``part.module`` of modules with parameters.

    A module whose parameters are vectors alone, such as a norm, belongs to the layer before it.
    """
    layers: list[list[str]] = []
    for part in MODEL:
        # Modules are named with their part, as ``flat_specs`` names tensors.
        for name, module in modules[part].named_modules(prefix=part):
            shapes = [parameter.ndim for parameter in module.parameters(recurse=False)]
            # A norm before any other layer has none to join, so it begins one.
            if shapes and (max(shapes) > 1 or not layers):
                layers.append([name])
            elif shapes:
                layers[-1].append(name)
    return layers
