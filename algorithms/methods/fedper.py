"""FedPer: a shared extractor below personal classifiers.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019,
arXiv:1912.00818, Algorithms 1 and 2.

    (1) at silo j:           (W_B, W_Pj) ← SGD_j(W_B, W_Pj; E epochs)
    (2) at the coordinator:  W_B ← Σ_j γ_j W_Bj,   γ_j = n_j / Σ_j n_j

The base layers W_B are the ``extractor``, the personalization layers W_P the ``classifier``.

Where this differs from the paper:
- the sums run over the round's cohort, the paper's over all silos;
- personalization layers start from one common initial value, the paper leaves their start open;
- batch norm's running statistics stay at each silo, unless ``model.buffers = "global"``.

Wire list: ``extractor`` (backbone, Sum weighted by samples) up and down in every round. The
classifier never leaves; under differential privacy it is noised with the extractor, whose gradients
pass through it.
"""

from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part
from ..method import Method, Setting


class FedPer(Method):
    """A shared extractor below personal classifiers."""

    name = "fedper"
    version = 1
    sums_steps = True

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The extractor."""
        return (self.extractor,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged extractor."""
        return (self.extractor,)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train both parts together."""
        return (self.stage("extractor", "classifier"),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained extractor, weighted by samples."""
        # (2)
        return {"extractor": Contribution(self.flat(state, "extractor"), float(facts.samples))}
