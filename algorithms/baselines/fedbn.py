"""FedBN: FedAvg of all but the norm layers, which stay at each silo.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch
normalization", ICLR 2021, arXiv:2102.07623, Algorithm 1. With the layers l of the network:

    (1) at silo k, E epochs:             w_k ← SGD_k(w_k)
    (2) at the coordinator, cohort S_t:  w^(l) ← Σ_{k ∈ S_t} n_k w_k^(l) / Σ_{k ∈ S_t} n_k   for l
                                         no norm layer
    (3) at silo k:                       w_k^(l) ← w^(l) for l no norm layer;   w_k^(l) stays for l
                                         a norm layer

Where this differs from the paper:
- Its silos take all part in each round and count alike; here a cohort does, weighted by samples.
- Its norm is batch norm. The scales and shifts of group, layer and instance norm stay in the same
  way. With ``model.norm = "group"``, which has no running statistics, the method can be private.

Wire list: ``model`` (whole model without its norm layers, Sum weighted by samples) up and down in
every round. Of norm layers neither weight nor bias nor running statistics ever leave. A model
without any is refused: that were FedAvg. The model of a silo in the end is what was delivered last
with the norm layers that it trained last.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part, Sum, picked
from ..method import Method, Setting

MODEL = ("extractor", "classifier")
NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)


class FedBN(Method):
    """FedAvg of all but the norm layers."""

    name = "fedbn"
    version = 1
    sums_steps = True
    product = "delivered"

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        sketch = setting.sketch()
        # Layers are named with their part, as ``flat_specs`` names tensors.
        layers = [layer for part in MODEL for layer in sketch[part].named_modules(prefix=part)]
        norms = {name for name, layer in layers if isinstance(layer, NORMS)}
        # A tensor's name before the last dot is that of its layer.
        every = self.flat_specs(*MODEL)
        specs = tuple(spec for spec in every if spec.name.rpartition(".")[0] not in norms)
        # With ``model.lora`` norm layers stand still.
        if specs == every:
            raise LocalError(
                "fedbn: the job's model trains no norm layer that could stay at a silo, so it would"
                ' be FedAvg; choose model.norm = "batch" or "group" with a model that has it, leave'
                " out model.lora, or choose method fedavg"
            )
        self.model = Part("model", Kind.WHOLE_MODEL, Sum("mean"), specs)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The model without norm layers."""
        return (self.model,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged model without norm layers."""
        return (self.model,)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        return (self.stage(*MODEL),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The model without norm layers, weighted by samples.

        Norm layers upload nothing: neither weight and bias nor running statistics.
        """
        tensors = picked(self.model.tensors, self.flat(state, *MODEL))
        return {"model": Contribution(tensors, float(facts.samples))}  # (2)
